"""Plays cases of parts of the GPU rehearsal, some with a mutant of the code that its
checks guard: a module that tests/test_rehearsal*.py run in a process of its own.

    python -m tests.mutants --json FILE PART:CASE[=MUTANT,...] ...
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
from dataclasses import replace
from pathlib import Path
from unittest import mock


def patched(target, name, function):
    return lambda: mock.patch.object(target, name, function)


# ---- lowered -------------------------------------------------------------------------


def of_lowered():
    import torch
    import triton

    from benchmarks.gpu.rehearsal import lowered
    from marsopt.functional import step
    from marsopt.optim.layout import Layout

    def row_dims(shape, first):
        return tuple(range(first, len(shape)))

    gather, compile = Layout.gather, triton.compile

    def flags_where_any_is_missing(layout):
        groups, live = gather(layout)
        has = all(p.grad is not None for p in layout.params)
        return groups, None if has else live

    def with_few_registers(source, *, target, options):
        return compile(source, target=target, options={**options, "maxnreg": 32})

    def after_12_bytes(p):
        buffer = torch.empty(p.numel() + 3, dtype=p.dtype, device=p.device)
        return buffer[3:].view_as(p)

    @contextlib.contextmanager
    def sum_at_once():
        """Of two layers, whose widths divide no power of two either."""
        few = {"gpt2-xl": (2, lowered.MODELS["gpt2-xl"][1])}
        with (
            mock.patch.dict(lowered.MODELS, few),
            mock.patch.object(step, "row_dims", row_dims),
        ):
            yield

    @contextlib.contextmanager
    def unfit():
        lowered.compiled_for_h100.cache_clear()
        with (
            mock.patch.object(triton, "compile", with_few_registers),
            mock.patch.object(lowered, "gradient_of", after_12_bytes),
        ):
            yield
        lowered.compiled_for_h100.cache_clear()

    return lowered.play, {
        "read_always": patched(step, "where_or_unread", torch.where),
        "sum_at_once": sum_at_once,
        "none_if_all": patched(Layout, "gather", flags_where_any_is_missing),
        "unfit": unfit,
    }


# ---- interpreted ---------------------------------------------------------------------


def of_interpreted():
    from benchmarks.gpu.rehearsal import interpreted, interpreter

    # isort: split
    import torch

    from marsopt.functional import step
    from marsopt.optim import compiled

    def where(ok, new, old):
        return new

    in_place, statistics = compiled.in_place, step.statistics

    def but_for_m(function):
        def moved(old, *rest):
            new, more = function(old, *rest)
            return new._replace(buffers={**new.buffers, "m": old.buffers["m"]}), more

        return in_place(moved)

    def zeros_for_nans(products, live):
        sums = statistics(products, live)
        return torch.where(sums == sums, sums, 0.0)

    kinds = {
        "read_always": "normal",
        "written_always": "skipped",
        "forgotten": "normal",
        "blind": "skipped",
        "cut_off": "normal",
    }
    mutants = {
        "read_always": patched(step, "where_or_unread", torch.where),
        "written_always": patched(step, "where_or_unread", where),
        "forgotten": patched(compiled, "in_place", but_for_m),
        "blind": patched(step, "statistics", zeros_for_nans),
        # to bfloat16, as Triton's own interpreter rounds
        "cut_off": patched(interpreter, "rounding", lambda cast: cast),
    }

    def play(name, mutant=None):
        """With a mutant: one small step, beside eager ones without it. "few": all
        steps of a stack of matrices and one of vectors.
        """
        if mutant is None:
            return interpreted.play(name)
        if mutant == "few":
            shapes = (48, 40), (48, 40), (40,), (40,)
            case = replace(interpreted.CASES[name], shapes=shapes)
            return interpreted.beside(case, interpreted.eager(case))
        case = replace(
            interpreted.CASES[name],
            shapes=((24, 20), (24, 20), (33, 20)),
            steps=(kinds[mutant],),
        )
        reference = interpreted.eager(case)
        with mutants[mutant]():
            return interpreted.beside(case, reference)

    return play, None


# ---- host ----------------------------------------------------------------------------


def of_host():
    import torch

    from benchmarks.gpu.rehearsal import host
    from marsopt.optim.layout import Layout

    count, gather = Layout.count, Layout.gather

    def asks(layout, decision, skipped):
        decision.finite.item()
        count(layout, decision, skipped)

    def synchronizes(layout, decision, skipped):
        torch.cuda.synchronize()
        count(layout, decision, skipped)

    def selects(layout, decision, skipped):
        decision.finite[None].nonzero()
        count(layout, decision, skipped)

    def scales(layout, decision, skipped):
        skipped.mul_(torch.ones((), dtype=torch.int64))  # a number of the host
        count(layout, decision, skipped)

    def sends(layout):
        groups, live = gather(layout)
        flags = torch.tensor([True] * len(live))
        return groups, flags.to(live.device, non_blocking=True)

    counts = (asks, synchronizes, selects, scales)
    mutants = {mutant.__name__: patched(Layout, "count", mutant) for mutant in counts}
    return host.play, mutants | {"sends": patched(Layout, "gather", sends)}


# ---- ranks ---------------------------------------------------------------------------


def of_ranks():
    import torch
    import torch.distributed as dist

    from benchmarks.gpu.rehearsal import ranks
    from marsopt.parallel import MeshCollectives

    add, forecast_of = MeshCollectives.sum, ranks.forecast_of

    def adds_twice(collectives, sums, leaves, alike=None):
        sums = add(collectives, sums, leaves, alike)
        dist.all_reduce(sums.clone(), group=collectives.mesh.get_group(0))
        return sums

    def sends(collectives, sums, leaves, alike=None):
        sums = add(collectives, sums, leaves, alike)
        return sums * torch.tensor(1.0).to(sums.device)

    def as_it_is(case):
        """The forecast runs the same code: without the defect."""
        with mock.patch.object(MeshCollectives, "sum", add):
            return forecast_of(case)

    def mutant(function):
        @contextlib.contextmanager
        def change():
            with (
                mock.patch.object(ranks, "forecast_of", as_it_is),
                mock.patch.object(MeshCollectives, "sum", function),
            ):
                yield

        return change

    return ranks.play, {f.__name__: mutant(f) for f in (adds_twice, sends)}


PARTS = dict(
    lowered=of_lowered,
    interpreted=of_interpreted,
    host=of_host,
    ranks=of_ranks,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    cases = [case.split(":", 1) for case in args.cases]
    parts = {part: PARTS[part]() for part in dict.fromkeys(part for part, _ in cases)}
    from benchmarks.gpu.rehearsal.rehearse import quiet  # once Triton may be there

    gc.freeze()  # as in tests/conftest.py
    rows = {}
    for part, text in cases:
        play, mutants = parts[part]
        name, _, mutant = text.partition("=")
        with quiet():
            if not mutant:
                rows[text] = play(name)
            elif mutants is None:
                rows[text] = play(name, mutant)
            else:
                with contextlib.ExitStack() as stack:
                    for each in mutant.split(","):
                        stack.enter_context(mutants[each]())
                    rows[text] = play(name)
    args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
