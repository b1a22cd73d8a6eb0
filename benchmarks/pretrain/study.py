"""All methods of a call: sweeps first, then the runs; kept in a file as they end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.pretrain.loop import Plan, Run
from benchmarks.pretrain.methods import Method
from train.errors import UserError
from train.files import write_json

# (method, plan) to a run; raises TooLong
Train = Callable[[Method, Plan], Run]


@dataclass(kw_only=True)
class Study:
    """What was asked for, and what of it is done.

    Args:
        plan: of the runs.
        sweep_plan: of the runs of a sweep.
        factors: of the rates that a sweep tries; none: no sweep.
        extensions: rates at most that a grid grows by, where its first or last is best.
        path: of the file; None keeps nothing.
        about: what else the file says.
        trials: of sweeps: method, lr, loss.
        runs: that ended.
    """

    plan: Plan
    sweep_plan: Plan
    factors: Sequence[float]
    extensions: int
    path: Path | None
    about: dict[str, Any] = field(default_factory=dict)
    trials: list[dict[str, Any]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def settings(self) -> dict[str, Any]:
        """Return what two calls agree on if one continues the other."""
        given = dict(plan=asdict(self.plan), sweep_plan=asdict(self.sweep_plan))
        return json.loads(json.dumps(given))

    def load(self) -> None:
        """Take what the file holds.

        Raises:
            UserError: it is of something else.
        """
        if self.path is None or not self.path.exists():
            return
        try:
            found = json.loads(self.path.read_bytes())
            same = all(found[name] == own for name, own in self.settings().items())
            runs = [Run(**values) for values in found["runs"]]
            trials = found["trials"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"got {self.path}, which is not of this command ({error}), expected a "
                "file that it made: name another"
            ) from error
        if not same:
            raise UserError(
                f"got {self.path}, which holds runs with other options, expected those "
                "of this call: name another file"
            )
        self.runs, self.trials = runs, trials

    def save(self) -> None:
        """Write the file."""
        if self.path is not None:
            runs = [asdict(run) for run in self.runs]
            done = dict(trials=self.trials, edges=self.edges, runs=runs)
            write_json(self.path, self.about | self.settings() | done)

    def tried(self, name: str) -> dict[float, float]:
        """Return {rate: loss} of a method's sweep so far."""
        return {
            t["lr"]: math.inf if t["loss"] is None else t["loss"]
            for t in self.trials
            if t["method"] == name
        }

    @property
    def edges(self) -> list[str]:
        """Return the methods whose best rate is the first or last of its grid."""
        names = dict.fromkeys(trial["method"] for trial in self.trials)
        return [n for n in names if self.optimum(n)[1] in ("first", "last")]

    def best(self, method: Method, train: Train) -> Method:
        """Return a method at the best rate of its sweep, which is run if it was not."""
        if not self.factors:
            return method
        factors = sorted(self.factors)
        for _ in range(self.extensions + 1):
            for factor in factors:
                self._try(method.scaled(factor), train)
            rate, where = self.optimum(method.name)
            if where == "inside":
                break
            if where == "first":
                factors.insert(0, factors[0] ** 2 / factors[1])
            else:
                factors.append(factors[-1] ** 2 / factors[-2])
        return replace(method, lr=rate)

    def _try(self, method: Method, train: Train) -> None:
        if any(math.isclose(method.lr, lr) for lr in self.tried(method.name)):
            return
        loss = train(method, self.sweep_plan).loss
        kept = loss if math.isfinite(loss) else None  # JSON has no other number
        self.trials.append(dict(method=method.name, lr=method.lr, loss=kept))
        self.save()

    def optimum(self, name: str) -> tuple[float, str]:
        """Return the best rate, and whether it is the "first" or "last" of its grid, or
        "inside"; ("none" without a sweep).
        """
        found = sorted(self.tried(name).items())
        if not found:
            return 0.0, "none"
        rates = [rate for rate, _ in found]
        rate = min(found, key=lambda pair: pair[1])[0]
        ends = {rates[0]: "first", rates[-1]: "last"}
        return rate, ends.get(rate, "inside")
