"""Statistics of the last step, from numbers that the step has left on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marsopt.functional.step import clip_factors
from marsopt.functional.step_types import Hyperparameters
from marsopt.rules.checks import Number


class Statistics(NamedTuple):
    """Numbers of one step, on the device of N parameters, in float64 (float32 on
    Apple's GPUs). ``dict(zip(s.names, s.grad_norm.tolist()))`` reads them, with a sync.
    """

    names: list[str]
    """Of the parameters that move, as groups have them; "group0.3" without names."""
    grad_norm: Tensor
    """(N,) norm of each parameter's gradient before any clip; 0 where it has none."""
    global_clip: Tensor
    """() factor of ``max_norm`` on every gradient; 1 = no clip."""
    clip: Tensor
    """(N,) factor of ``clip`` on the corrected gradient; of several matrices in one
    parameter the smallest.
    """


class LastStep(NamedTuple):
    """The numbers that a step leaves: nothing is computed from them unless asked."""

    params: Sequence[Tensor]  # (N), in the order of the stacks
    hypers: Sequence[Hyperparameters]  # of each group of stacks, as they are now
    sums: Tensor  # of ``assess``, complete
    ok: Sequence[Tensor]  # of each group of stacks: which tensors have moved

    def statistics(
        self, groups: Sequence[Mapping[str, Any]], max_norm: Number | None
    ) -> Statistics:
        """Return the statistics of the step.

        Args:
            groups: param groups, for names.
            max_norm: threshold of the global clip in this step.
        """
        hypers = [
            hyper._replace(t=hyper.t - ok.to(hyper.t.dtype))
            for hyper, ok in zip(self.hypers, self.ok, strict=True)
        ]
        sums, global_clip, clips = clip_factors(hypers, self.sums, max_norm)
        cuts = sums[:, 0].split([hyper.num_parts for hyper in hypers])
        pairs = [*zip(hypers, cuts, clips, strict=True)]
        squares = torch.cat([_joined(h, cut, torch.sum) for h, cut, _ in pairs])
        clip = torch.cat([_joined(h, factors, torch.amin) for h, _, factors in pairs])
        names = _names(groups)
        return Statistics(
            [names[p] for p in self.params], squares.sqrt(), global_clip, clip
        )


def _joined(
    hyper: Hyperparameters, values: Tensor, reduce: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Return one number for each of N tensors from the numbers of its parts (P,)."""
    if hyper.parts is None:
        return values
    cuts = zip(values.split(hyper.sizes), hyper.parts, strict=True)
    return torch.cat([reduce(cut.view(parts), 1) for cut, parts in cuts])


def _names(groups: Sequence[Mapping[str, Any]]) -> dict[Tensor, str]:
    return {
        p: name
        for number, group in enumerate(groups)
        for p, name in zip(
            group["params"],
            group.get("param_names")
            or [f"group{number}.{i}" for i in range(len(group["params"]))],
            strict=True,
        )
    }
