"""A setting whose runs take no time: their loss is a bowl over the recipe's numbers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from train.compare.search import Axis
from train.compare.study import Method, Run, Study

AXES = (Axis("lr", 1e-3, 1.6e-2), Axis("beta1", 0.6, 0.98, decay=True))
BEST = (4e-3, 0.9)


@dataclass(frozen=True, kw_only=True)
class Quick:
    """Recipes have "base", added to the loss; "fails" while a file is there; "waits",
    seconds.
    """

    steps: int = 30
    noise: float = 0.01
    keeps: ClassVar[bool] = False

    def check(self, recipes: Mapping[str, Mapping[str, Any]]) -> None:
        assert all("lr" in recipe for recipe in recipes.values())

    def identity(self) -> dict[str, Any]:
        return asdict(self)

    def command(self, run: Run, folder: Path) -> tuple[str, list[str]]:
        given = json.dumps([dict(run.recipe), run.seed, self.noise, self.steps])
        return "tests.quick_setting", [given, str(folder / "found.json")]

    def found(self, folder: Path) -> dict[str, Any] | None:
        path = folder / "found.json"
        return json.loads(path.read_text()) if path.exists() else None

    def stepper(self, recipe: Mapping[str, Any]) -> Callable[[], None]:
        return lambda: time.sleep(1e-3 * recipe["slow"])


def curve(recipe, seed, noise, steps):
    loss = recipe["base"] + noise * ((7 * seed) % 5 - 2)
    for axis, at in zip(AXES, BEST, strict=True):
        if axis.name in recipe:
            loss += 0.1 * (axis.place(recipe[axis.name]) - axis.place(at)) ** 2
    points = [steps * (i + 1) // 10 for i in range(10)]
    return [[step, loss + 1 - step / steps] for step in points]


def study(**changes: Any) -> Study:
    """Two methods, the second one better by 0.1; and one without a search."""
    methods = {
        "control": Method(dict(base=3.0, slow=1), AXES, num_seeds=3),
        "better": Method(dict(base=2.9, slow=2), AXES, num_seeds=3),
        "fixed": Method(dict(base=3.1, slow=1, lr=4e-3), num_seeds=2),
    }
    own = dict(methods=methods, trials=9, num_draws=5, setting=Quick())
    return Study(title="quick", **own | changes)


__all__ = ["study"]

if __name__ == "__main__":
    recipe, seed, noise, steps = json.loads(sys.argv[1])
    if Path(recipe.get("fails", "nowhere")).exists():
        sys.exit("there is something in the way")
    time.sleep(recipe.get("waits", 0.0))
    found = dict(curve=curve(recipe, seed, noise, steps), seconds=0.01)
    Path(sys.argv[2]).write_text(json.dumps(found))
