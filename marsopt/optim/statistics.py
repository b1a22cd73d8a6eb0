"""Statistics of the last step, from numbers that the step has left on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marsopt.optim.binding import BoundFormula
from marsopt.rules.checks import Number
from marsopt.step.decide import clip_factors


class Statistics(NamedTuple):
    """Numbers of one step, on the device of N parameters, in float64 (float32 on
    Apple's GPUs). ``dict(zip(s.names, s.grad_norm.tolist()))`` reads them, with a sync.
    """

    names: list[str]
    """Of the parameters that move, as groups have them; "group0.3" without names."""
    grad_norm: Tensor
    """(N,) norm of each parameter's gradient before any clip; 0 for a missing gradient.
    """
    global_clip: Tensor
    """() factor of ``max_norm`` on every gradient; 1 = no clip."""
    clip: Tensor
    """(N,) factor of ``clip`` on the corrected gradient; of several matrices in one
    parameter the smallest.
    """


class LastStep(NamedTuple):
    """The numbers that a step leaves: nothing is computed from them unless asked."""

    groups: Sequence[BoundFormula]  # with the numbers of groups as they are now
    sums: Tensor  # complete, as ``Outcome`` has them
    ok: Sequence[Tensor]  # which tensors were updated, by formula

    def statistics(
        self, groups: Sequence[Mapping[str, Any]], max_norm: Number | None
    ) -> Statistics:
        """Return the statistics of the step.

        Args:
            groups: param groups, for names.
            max_norm: threshold of the global clip in this step.
        """
        inputs = [
            group.inputs._replace(t=group.inputs.t - ok.to(group.inputs.t.dtype))
            for group, ok in zip(self.groups, self.ok, strict=True)
        ]
        sums, global_clip, clips = clip_factors(inputs, self.sums, max_norm)
        nums = [num for group in self.groups for num in group.num_norms]
        squares = [part.sum() for part in sums[:, 0].split(nums)]
        clip = [part.amin() for part in torch.cat(clips).split(nums)]
        names = names_of(groups)
        return Statistics(
            [names[m.p] for group in self.groups for m in group.members],
            torch.stack(squares).sqrt(),
            global_clip,
            torch.stack(clip),
        )


def names_of(groups: Sequence[Mapping[str, Any]]) -> dict[Tensor, str]:
    """Return the names of parameters, as groups have them; "group0.3" without names."""
    return {
        p: names[i] if i < len(names) else f"group{number}.{i}"
        for number, group in enumerate(groups)
        for names in [group.get("param_names", ())]
        for i, p in enumerate(group["params"])
    }
