"""A comparison's table and pictures, printed and saved."""

import math
from pathlib import Path

from train.compare import plots
from train.compare.results import Entry, Row, Spread, as_json, entries, rows
from train.compare.study import Study
from train.errors import UserError
from train.files import write_json

HEAD = (
    "| optimizer | lr | trials | best loss | final loss | tokens to target | s/step "
    "| s/step ratio | time to target | loss at equal time |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def _spread(value: Spread) -> str:
    if len(value.values) == 1:
        return f"{value.mean:.3f}"
    return f"{value.mean:.3f} ± {value.deviation:.3f}"


def _cell(value: float | None, form: str = "{:.2f}x") -> str:
    if value is None:
        return "not measured"
    return form.format(value) if math.isfinite(value) else "not reached"


def _seeds(found: list[Entry]) -> str:
    seeds = sorted({len(e.curves) for e in found})
    return f"{' or '.join(map(str, seeds))} seed{'' if seeds == [1] else 's'}"


def _trials(e: Entry) -> str:
    """Say how many trials there were, and along which axes the best lies inside."""
    if num_untried := len(e.found.wanted):
        return f"{e.num_trials} (unfinished: {num_untried} to try)"
    inside = [axis for axis, is_inside in e.found.inside.items() if is_inside]
    edges = [axis for axis in e.found.inside if axis not in inside]
    said = [f"inside {', '.join(inside)}"] if inside else []
    said += [f"at the edge of {', '.join(edges)}"] if edges else []
    return f"{e.num_trials} ({'; '.join(said)})" if said else str(e.num_trials)


def _line(e: Entry, row: Row) -> str:
    low, high = row.tokens_ratio_range
    tokens = _cell(row.tokens_ratio)
    if len(e.curves) > 1:
        tokens += f" ({low:.2f} to {high:.2f})".replace("inf", "never")
    cells = [e.name, f"{e.lr:g}", _trials(e), _spread(e.best), _spread(e.final), tokens]
    cells += [_cell(e.seconds_per_step, "{:.3f}"), _cell(row.seconds_per_step_ratio)]
    cells += [_cell(row.seconds_ratio), _cell(row.loss_at_time, "{:.3f}")]
    return f"| {' | '.join(cells)} |"


def markdown(
    found: list[Entry], table: list[Row], study: Study, missing: list[str]
) -> str:
    """Return the table, and how to read it."""
    worst = found[-1]
    lines = [
        f"{study.steps} steps of {study.tokens_per_step:,} tokens "
        f"({study.steps * study.tokens_per_step:,} a run), "
        f"{_seeds(found)} of the best trial (mean ± standard deviation), "
        "validation loss in nats per token on "
        f"{study.validation_samples} held-out sequences.",
        "",
        HEAD,
        *map(_line, found, table),
        "",
        f"Target: {worst.final.mean:.3f}, the worst final loss, that of "
        f"{worst.name}; ratios to target are of what it took, on the mean "
        "curve, with the range over seeds. The rate falls over the whole run, so that "
        "a point within a run is not what a run of that length would end with. Trials "
        "are runs of seed 0, by whose final loss rate and options were chosen; "
        "inside: worse on both sides.",
        "Seconds per step: medians of a separate measurement, recipes taking turns on "
        f"{study.threads} thread{'s' if study.threads > 1 else ''}; equal time is when "
        "the fastest has finished.",
    ]
    for e in found:
        if e.num_diverged:
            lines.append(f"{e.name}: {e.num_diverged} more seeds diverged.")
    if missing:
        lines.append(f"Not here: {', '.join(missing)} (no finished, converged run).")
    return "\n".join(lines) + "\n"


def draw_pictures(found: list[Entry], study: Study, folder: Path) -> list[str]:
    """Draw what there is to draw; return the names of the files."""
    millions, title = study.tokens_per_step / 1e6, f"{study.length}, {_seeds(found)}"
    names = ["loss_by_tokens.png"]
    path = folder / names[0]
    plots.by(lambda e: millions, "tokens (millions)", found, title, path)
    if timed := [e for e in found if e.seconds_per_step is not None]:
        names.append("loss_by_time.png")
        path, xlabel = folder / names[-1], "training time (s)"
        plots.by(lambda e: e.seconds_per_step, xlabel, timed, title, path)
    for axis in plots.sweeps(found):
        names.append(f"loss_by_{'rate' if axis == 'lr' else axis}.png")
        plots.by_value(axis, found, f"{study.length}, seed 0", folder / names[-1])
    return names


def report(study: Study, folder: Path) -> None:
    """Print and save table.md, results.json and the pictures."""
    found = entries(study, folder)
    if not found:
        raise UserError(
            f"got no finished run in {folder}, expected one: leave out --only to train"
        )
    table = rows(found, study.steps)
    names = {e.recipe.name for e in found}
    text = markdown(found, table, study, [n for n in study.recipes if n not in names])
    (folder / "table.md").write_text(text)
    write_json(folder / "results.json", as_json(found, table, study))
    pictures = draw_pictures(found, study, folder)
    print(
        f"\n{text}\n"
        f"{'table':12} {folder}: table.md\n"
        f"{'numbers':12} {folder}: results.json\n"
        f"{'pictures':12} {folder}: {', '.join(pictures)}\n"
        f"{'TensorBoard':12} tensorboard --logdir {folder / 'runs'}",
        flush=True,
    )
