"""Trajectories that the authors' own code computed, and a walk of the class along one;
tests/conformance/recordings.json says how they were made.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from marsopt import MARS
from tests.conformance import recordings

TABLE = recordings.table()
SHAPES = {name: tuple(shape) for name, shape in TABLE["shapes"].items()}
MATRIX_TYPES = {
    "mars-m": "mars-m",
    "mars-m-efficient": "mars-m",
    "moonlight": "moonlight",
}

# The whole recordings (8 steps, every step kept) where they lie beside the checkout.
WHOLE = Path(__file__).parents[2] / "shared" / "golden"


def tensors(arrays):
    return {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}


def read_copied(case):
    entry = dict(TABLE["cases"][case])
    entry["init"] = tensors(recordings.stacked(entry["init"]))
    for key in ("grad", "prev"):
        if key in entry:
            entry[key] = [tensors(row) for row in recordings.steps(entry[key])]
    params = recordings.steps(f"param/{case}")
    entry["param"] = {t: tensors(row) for t, row in enumerate(params)}
    return entry


def read_whole(case):
    if not WHOLE.exists():
        pytest.skip("the whole recordings are not beside this checkout")
    entry = dict(json.loads((WHOLE / "official.json").read_text())[case])
    with np.load(WHOLE / "official.npz") as z:

        def row(*key):
            at = "/".join(map(str, (case, *key)))
            return {n: torch.from_numpy(z[f"{at}/{n}"]) for n in SHAPES}

        steps = range(entry["steps"])
        entry["init"] = row("init")
        entry["grad"] = [row("grad", t) for t in steps]
        entry["param"] = {t: row("param", t) for t in steps}
        exact = entry.get("exact", False)
        entry["prev"] = [row("prev", t) for t in steps] if exact else None
    return entry


def read(case, source):
    """A recording, "copied" or "whole", with its tolerance and rates."""
    entry = {"copied": read_copied, "whole": read_whole}[source](case)
    in_bf16 = entry.get("ns") == "bf16"
    entry["ns_dtype"] = torch.bfloat16 if in_bf16 else torch.float64
    entry["atol"] = 2e-2 if in_bf16 else 1e-6
    schedule = entry.get("lr_sched", [1.0] * entry["steps"])
    entry["lrs"] = [entry["kw"]["lr"] * factor for factor in schedule]
    return entry


def check(golden, t, params):
    if t in golden["param"]:
        for name, want in golden["param"][t].items():
            torch.testing.assert_close(
                params[name].detach().cpu(),
                want,
                rtol=0,
                atol=golden["atol"],
                msg=lambda m, n=name: f"{n} at step {t}: {m}",
            )


def walk(golden, device="cpu", compile=False):
    """The class along a recording, checked after every step that was kept."""
    params = {n: torch.nn.Parameter(x.to(device)) for n, x in golden["init"].items()}
    kw = dict(golden["kw"], ns_dtype=golden["ns_dtype"], compile=compile)
    if golden["kind"] == "MARS":
        optimizer = MARS(params.items(), **kw)
    else:
        kw["weight_decay"] = kw.pop("wd")
        embedding = dict(mars_type="adamw", betas=(0.9, 0.95), epsilon_hat=True)
        optimizer = MARS(
            [
                {"params": [params[n] for n in SHAPES if n != "emb"]},
                {"params": [params["emb"]], **embedding},
            ],
            mars_type=MATRIX_TYPES[golden["kind"]],
            clip=None if golden["kind"] == "mars-m-efficient" else 1.0,
            **kw,
        )
    for t, lr in enumerate(golden["lrs"]):
        for group in optimizer.param_groups:
            group["lr"] = lr
        if golden.get("exact"):
            for n, p in params.items():
                p.grad = golden["prev"][t][n].clone().to(device)
            optimizer.update_previous_grad()
        for n, p in params.items():
            p.grad = golden["grad"][t][n].clone().to(device)
        optimizer.step()
        if golden.get("exact"):
            optimizer.update_last_grad()
        check(golden, t, params)
