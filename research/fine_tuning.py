"""Studies of fine-tuning: a GPT-2 that was pretrained on code learns prose, whole or by
LoRA.

    python -m research.compare fine_tuning --module research.fine_tuning \
        --store research/study/fine_tuning.jsonl

So do fine_tuning_adamw, whose weights AdamW pretrained, and fine_tuning_lora. The first
run pretrains, and keeps the weights in runs/pretrained for all others.
research/study.md ("Fine-tuning: predictions") has the questions.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from research.compare import plain
from research.compare.search import Axis
from research.compare.study import Method, Run, Study
from research.studies import (
    ELEMENTWISE,
    SEEDS,
    SMALL,
    SMALL_MOONLIGHT_LR,
    Recipe,
)
from train.errors import UserError, check_least
from train.files import write_json
from train.gpt2 import GPT2

__all__ = ["fine_tuning", "fine_tuning_adamw", "fine_tuning_lora"]

# by the rule that pretrains, each at the best point of small
PRETRAINING: dict[str, Recipe] = {
    "moonlight": dict(rule="moonlight", lr=SMALL_MOONLIGHT_LR),
    "adamw": ELEMENTWISE | dict(rule="adamw", lr=0.01032, beta1=0.8778),
}
STEPS, RANK = 240, 8
FACTOR, TRIALS = 3.0, 6  # between a search's first learning rates; most of them
LAYERS = ("attn_in", "attn_out", "mlp_in", "mlp_out")
SCALE = 2.0  # of LoRA's product: alpha over the rank

ADAMW: Recipe = dict(rule="torch-adamw", beta1=0.9, beta2=0.999, weight_decay=0.01)


class LoRA(nn.Module):
    """A linear layer, frozen by its owner, and SCALE lora_B lora_A beside it (arXiv
    2106.09685).

    Args:
        layer: whose weight is (out, in).
        rank: of the product; lora_A (rank, in) is Gaussian, lora_B (out, rank) zero.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        out, width = layer.weight.shape
        self.layer = layer
        self.lora_A = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.lora_B = nn.Parameter(torch.zeros(out, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out) of (..., in)."""
        return self.layer(x) + SCALE * F.linear(F.linear(x, self.lora_A), self.lora_B)


@dataclass(frozen=True, kw_only=True)
class Setting(plain.Setting):
    """How every method fine-tunes the same pretrained weights on ``data``.

    Args:
        source: folder of the text of pretraining, as ``data``.
        source_steps: of pretraining, from seed 0.
        source_rule: of pretraining, in PRETRAINING.
        rank: of LoRA on the matrices of all blocks, the rest frozen; None = everything
            is trained.
        weights: folder that keeps the pretrained weights.
    """

    source: str
    source_steps: int
    source_rule: str = "moonlight"
    rank: int | None = None
    weights: str = "runs/pretrained"

    @property
    def pretraining(self) -> plain.Setting:
        """Return how the weights are pretrained."""
        shared = {f.name: getattr(self, f.name) for f in fields(plain.Setting)}
        return plain.Setting(**shared | dict(data=self.source, steps=self.source_steps))

    def check(self, recipes: Any) -> None:
        """Check the setting, that of pretraining, and that all methods can be built.

        Raises:
            UserError: as ``plain.Setting.check``; a rank below 1; an unknown rule.
        """
        check_least(1, rank=self.rank)
        if self.source_rule not in PRETRAINING:
            raise UserError(
                f"got source_rule={self.source_rule!r}, expected one of "
                f"{', '.join(PRETRAINING)}: choose one"
            )
        self.pretraining.check({"pretraining": PRETRAINING[self.source_rule]})
        super().check(recipes)

    def identity(self) -> dict[str, Any]:
        """Return what two calls must agree on, by name."""
        own = super().identity()
        for name in ("source", "source_steps", "source_rule", "weights"):
            own.pop(name)
        recipe = PRETRAINING[self.source_rule]
        return own | dict(pretraining=self.pretraining.identity() | recipe)

    def command(self, run: Run, folder: Path) -> tuple[str, list[str]]:
        """Return the module and the arguments that train a run."""
        return __name__, plain.arguments(self, run, folder)

    def model(self, seed: int) -> GPT2:
        """Return the pretrained model, with LoRA's layers of this seed if it has some.

        The weights are pretrained first where no earlier run has kept them.
        """
        model = super().model(seed)
        model.load_state_dict(self._pretrained())
        if self.rank is not None:
            model.requires_grad_(False)
            torch.manual_seed(seed)
            for block in model.layers.values():
                for name in LAYERS:
                    setattr(block, name, LoRA(getattr(block, name), self.rank))
        return model

    def _pretrained(self) -> dict[str, Tensor]:
        setting, recipe = self.pretraining, PRETRAINING[self.source_rule]
        known = json.dumps([setting.identity(), recipe], sort_keys=True)
        name = hashlib.sha256(known.encode()).hexdigest()[:12]
        path = Path(self.weights) / f"{name}.pt"
        if not path.exists():
            training = plain.Training(setting, recipe, 0, setting.texts())
            for _ in range(setting.steps):
                training.gradient()
                training.update()
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}")  # two runs may do this at once
            torch.save(training.task.model.state_dict(), draft)
            draft.replace(path)
        found: dict[str, Tensor] = torch.load(path, weights_only=True)
        return found


def study(title: str, lr: float, **changes: Any) -> Study:
    """Return what ``for_model`` builds beside AdamW, their learning rates searched
    around one guess, and the loss before.
    """
    axes = (Axis("lr", lr / FACTOR, lr * FACTOR, factor=FACTOR, start=lr),)
    methods = {
        "AdamW": Method(ADAMW, axes, SEEDS),
        "for_model": Method(dict(rule="moonlight"), axes, SEEDS),
        "as pretrained": Method(ADAMW | dict(lr=0.0), num_seeds=1),
    }
    small = asdict(SMALL) | dict(data="data/prose", steps=STEPS, points=2)
    small |= dict(source=SMALL.data, source_steps=SMALL.steps) | changes
    return Study(title=title, setting=Setting(**small), methods=methods, trials=TRIALS)


def fine_tuning() -> Study:
    """Every parameter is trained; beside, by AdamW at for_model's numbers."""
    made = study("0.1M parameters, code to prose, full", 5e-3)
    numbers = ADAMW | dict(beta2=0.95, weight_decay=0.1)
    more = replace(made.methods["AdamW"], recipe=numbers)
    return replace(made, methods={**made.methods, "AdamW, for_model's numbers": more})


def fine_tuning_adamw() -> Study:
    """The same of weights that AdamW pretrained."""
    title = "0.1M parameters, code to prose, full, pretrained by AdamW"
    return study(title, 5e-3, source_rule="adamw")


def fine_tuning_lora() -> Study:
    """LoRA alone is trained."""
    title = f"0.1M parameters, code to prose, LoRA of rank {RANK}"
    return study(title, 1.5e-2, rank=RANK)


def main() -> None:
    """Fine-tune as the arguments say."""
    values, recipe, seed = map(json.loads, sys.argv[1:4])
    found = plain.train(Setting(**values), recipe, seed)
    found.pop("flops")  # of a model whose parameters are all trained
    write_json(Path(sys.argv[4]), found)


if __name__ == "__main__":
    main()
