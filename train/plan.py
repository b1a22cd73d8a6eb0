"""python -m train.plan: who does what on a mesh, before any process is started."""

import argparse
import logging
import math
import sys
from datetime import timedelta
from pathlib import Path

if __name__ == "__main__":  # torch takes seconds to import
    print("loading torch and the forecast", file=sys.stderr, flush=True)

from train.engine.recipes import MODULE, make
from train.errors import UserError, check_least, command
from train.forecast import (
    Blocks,
    Forecast,
    Hardware,
    Job,
    MicroBatch,
    models,
    sweep,
    tables,
)
from train.gpt2 import tensor_sizes
from train.pictures import picture

PICTURES = (".png", ".pdf", ".svg")
MOST_RANKS = 2**13  # as many as are planned within ten seconds


def job_of(config_name: str, module: str = MODULE) -> Job:
    """Return the model and optimizer of a recipe of ``module``."""
    logging.disable(logging.WARNING)  # torchtitan's, about options that nobody set
    config = make(config_name, module)
    logging.disable(logging.NOTSET)
    if config.optimizer.param_groups:
        raise UserError(
            f"got {config_name} with optimizer.param_groups, expected a recipe without "
            "them: plan one of the rules in configs/"
        )
    shape, seq_len = config.model_spec.model.shape, config.training.seq_len
    sizes = tensor_sizes(shape)
    num_params = sum(math.prod(size) for size in sizes.values())
    blocks = Blocks.gpt2(
        shape.num_layers,
        shape.width,
        shape.vocab_size,
        scaled=shape.inverse_layer_scale,
    )
    return Job(
        shapes=sizes,
        mars_type=config.optimizer.mars_type,
        tokens=config.training.global_batch_size * seq_len,
        flops_per_token=shape.num_flops_per_token(num_params, seq_len),
        elementwise=config.optimizer.beside_the_rule(sizes),
        options=config.optimizer.rule_options(),
        micro_batch=MicroBatch(
            blocks,
            config.training.local_batch_size,
            seq_len,
            is_compiled=config.compile.enable and "loss" in config.compile.components,
        ),
    )


def duration(seconds: float) -> str:
    """Return "20 us", "4.9 ms", "30 s", or "0:18:44" from two minutes on."""
    if seconds >= 120:
        return str(timedelta(seconds=round(seconds)))
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    unit = next((unit for unit, size in units.items() if seconds >= size), "us")
    return f"{seconds / units[unit]:.3g} {unit}"


def draw(rows: list[tuple[int, Forecast]], title: str, path: Path) -> None:
    """Draw predicted times against ranks, each line with its name at its end."""
    from matplotlib import ticker

    labels = dict(title=title, xlabel="GPUs", ylabel="predicted time of a step")
    ranks = [n for n, _ in rows]
    lines = {
        "forward and\nbackward": ([f.training_seconds for _, f in rows], "o--", "0.5"),
        "optimizer": ([f.optimizer_seconds for _, f in rows], "s-", "black"),
    }
    with picture(path, (7.6, 4.2), **labels) as axes:
        for name, (seconds, look, color) in lines.items():
            axes.loglog(ranks, seconds, look, color=color)
            said = f"{name}\n{duration(seconds[-1])}"
            beside = dict(textcoords="offset points", xytext=(8, 0), va="center")
            axes.annotate(said, (ranks[-1], seconds[-1]), color=color, **beside)
        axes.set_xscale("log", base=2)
        axes.set_xlim(right=ranks[-1] * (ranks[-1] / ranks[0]) ** 0.2 * 1.5)
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda n, _: f"{n:,.0f}"))
        axes.set_xticks(ranks[::2], minor=False)
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda t, _: duration(t)))
        axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        "python -m train.plan",
        description="Plan the step of a recipe, or compare rules. Times are a model.",
    )
    add = parser.add_argument
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--config", help="a recipe, as python -m train --help lists")
    either.add_argument("--model", help=f"one of {', '.join(models.MODELS)}")
    # fmt: off
    add("--module", default=MODULE,
        help="Python module that holds the recipe (default: %(default)s)")
    add("--rules", nargs="+", action="extend", metavar="RULE",
        help="with --model: the rules to compare, such as adamw mars-adamw-exact "
        f"(default: {' '.join(models.RULES)})")
    add("--tokens", type=int,
        help="with --model: tokens of a step (default: its authors' batch)")
    add("--ranks", type=int, nargs="+", action="extend",
        help="numbers of GPUs (default: 8; with --model 1 8 64 512, times --replicas)")
    add("--replicas", type=int, default=1,
        help="copies of the model that share the GPUs, as HSDP (default: 1, FSDP)")
    add("--link-gbps", type=float, default=400,
        help="Gbit/s that each GPU sends (default: %(default)s)")
    add("--tflops", type=float, default=400,
        help="TFLOP/s of bf16 products on each GPU (default: %(default)s)")
    add("--memory-gbs", type=float, default=3000,
        help="GB/s of each GPU's memory (default: %(default)s)")
    add("--all", action="store_true", help="list every matrix and its owner")
    add("--sweep", action="store_true",
        help="a row for each of 1, 2, 4 ... 4096 GPUs, and a plot")
    add("--picture", type=Path, default=Path("sweep.png"),
        help="file for the plot of --sweep (default: %(default)s)")
    # fmt: on
    args = parser.parse_args()
    if args.picture.suffix not in PICTURES:
        raise UserError(f"got --picture {args.picture}, expected one of {PICTURES}")
    of_model = args.config is None
    if not of_model and (args.rules or args.tokens):
        raise UserError("got --rules or --tokens with --config, expected --model")
    if args.sweep and (args.ranks or args.all):
        raise UserError("got --ranks or --all with --sweep, expected neither")
    usual = [args.replicas * n for n in (1, 8, 64, 512)] if of_model else [8]
    ranks = args.ranks or usual
    for n in ranks:
        check_least(1, MOST_RANKS, replicas=args.replicas, ranks=n)
    check_least(1, tokens=args.tokens)
    rates = {k: getattr(args, k) for k in ("link_gbps", "tflops", "memory_gbs")}
    check_least(1e-3, **rates)
    options = dict(replicas=args.replicas, hardware=Hardware.of(**rates))
    what, given = args.model if of_model else args.config, (args.rules, args.tokens)
    try:
        jobs = models.jobs(what, *given) if of_model else [job_of(what, args.module)]
        if not args.sweep:
            print(tables.report(what, jobs, ranks, every=args.all, **options))
            return
        rows = sweep(tables.only(jobs), **options)
    except ValueError as error:  # names, or replicas that do not divide the ranks
        raise UserError(str(error)) from error
    title = tables.title(what, jobs[0], args.replicas)
    print(title, tables.sweep_table(rows), sep="\n")
    print(f"Times are a model. {tables.assumed(options['hardware'])}.")
    draw(rows, title.replace(", ", "\n", 1), args.picture)
    print(f"picture {args.picture}")


if __name__ == "__main__":
    command(main)
