"""Several trainings one after another in one process: starting python -m train for each
costs more than they do.

Run as a module, it takes [[label, [options of python -m train], {changes of the model's
shape}], ...] as its argument.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
import traceback
import types
from pathlib import Path

from tests.forks import forked

MARK = "== "


def train_all(jobs: dict[str, list[str]], folder: Path, **shape: int) -> dict[str, str]:
    """What each job printed, or its traceback; runs lie in ``folder``/label. ``shape``
    are changes of the recipe's ``Shape``.
    """
    given = [
        [label, [*map(str, options), "--dump-folder", str(folder / label)], shape]
        for label, options in jobs.items()
    ]
    code, out, err = forked("tests.trainers", json.dumps(given))
    assert code == 0, out + err
    parts = out.split(MARK)[1:]
    return dict(part.split("\n", 1) for part in parts)


def losses(printed: str, what: str = "loss") -> dict[int, float]:
    """{step: loss} of what a job printed."""
    found = re.findall(rf"step (\d+)/\d+  {what} (\S+)", printed)
    return {int(step): float(value) for step, value in found}


def main() -> None:
    import torch

    from train.engine.launch import console, parse, standalone
    from train.engine.resolve import resolve
    from train.engine.titan import Trainer
    from train.runs.settings import claim

    standalone()
    console(rank=0)
    # torchtitan ends a training by sleeping for two seconds
    sys.modules[Trainer.__module__].time = types.SimpleNamespace(
        perf_counter=time.perf_counter, sleep=lambda seconds: None
    )
    # MARS clips: torchtitan's own way over all gradients is not taken
    torch.nn.utils.get_total_norm = torch.nn.utils.clip_grads_with_norm_ = None
    for label, options, shape in json.loads(sys.argv[1]):
        print(f"{MARK}{label}", flush=True)
        try:
            config = parse(options)
            model = config.model_spec.model
            model.shape = dataclasses.replace(model.shape, **shape)
            resolve(config, 1)
            claim(config)
            trainer = config.build()
            try:
                trainer.train()
            finally:
                trainer.close()
        except Exception:  # the others are still worth knowing
            print(traceback.format_exc(), flush=True)


if __name__ == "__main__":
    main()
