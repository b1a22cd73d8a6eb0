"""python -m train.plan: who does what on a mesh, before any process is started."""

import argparse
import logging
import math
from pathlib import Path

from parallel import models, tables
from parallel.forecast import Forecast, Hardware, Job, sweep
from train.engine.launch import recipe
from train.errors import UserError, check_least, command
from train.gpt2 import tensor_sizes
from train.pictures import picture

PICTURES = (".png", ".pdf", ".svg")
MOST_RANKS = 2**16  # as many as are planned in seconds


def job_of(config_name: str) -> Job:
    """Return the model and optimizer of a recipe."""
    logging.disable(logging.WARNING)  # torchtitan's, about options that nobody set
    config = recipe(config_name)()
    logging.disable(logging.NOTSET)
    if config.optimizer.param_groups:
        raise UserError(
            f"got {config_name} with optimizer.param_groups, expected a recipe without "
            "them: plan one of the rules in configs/"
        )
    shape, seq_len = config.model_spec.model.shape, config.training.seq_len
    sizes = tensor_sizes(shape)
    num_params = sum(math.prod(size) for size in sizes.values())
    return Job(
        shapes=sizes,
        mars_type=config.optimizer.mars_type,
        tokens=config.training.global_batch_size * seq_len,
        flops_per_token=shape.num_flops_per_token(num_params, seq_len),
        elementwise=config.optimizer.beside_the_rule(sizes),
        options=config.optimizer.rule_options(),
    )


def draw(rows: list[tuple[int, Forecast]], title: str, path: Path) -> None:
    """Draw predicted times against ranks."""
    labels = dict(title=title, xlabel="ranks", ylabel="predicted time (ms)")
    times = ((n, 1e3 * f.training_seconds, 1e3 * f.optimizer_seconds) for n, f in rows)
    ranks, training, optimizer = zip(*times, strict=True)
    with picture(path, **labels) as axes:
        axes.loglog(ranks, training, "o--", color="0.5", label="forward and backward")
        axes.loglog(ranks, optimizer, "s-", color="black", label="optimizer step")
        axes.set_xscale("log", base=2)
        axes.legend(frameon=False)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        "python -m train.plan",
        description="Plan the step of a recipe, or compare rules. Times are a model.",
    )
    add = parser.add_argument
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--config", help="a recipe of configs/")
    either.add_argument("--model", help=", ".join(models.MODELS))
    add("--rules", nargs="+", help="of --model")
    add("--tokens", type=int, help="of a step of --model")
    add("--ranks", type=int, nargs="+", help="8; of a model 1 8 64 512 a replica")
    add("--replicas", type=int, default=1, help="HSDP replicas")
    add("--link-gbps", type=float, default=400, help="Gbit/s a rank")
    add("--tflops", type=float, default=400, help="bf16 matmul rate")
    add("--memory-gbs", type=float, default=3000, help="GB/s a rank")
    add("--all", action="store_true", help="list every matrix")
    add("--sweep", action="store_true", help="1 to 4096 ranks")
    add("--picture", type=Path, default=Path("sweep.png"))
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
        jobs = models.jobs(what, *given) if of_model else [job_of(what)]
        if not args.sweep:
            print(tables.report(what, jobs, ranks, every=args.all, **options))
            return
        rows = sweep(tables.only(jobs), **options)
    except ValueError as error:  # names, or replicas that do not divide the ranks
        raise UserError(str(error)) from error
    print(tables.title(what, jobs[0]), tables.sweep_table(rows), sep="\n")
    draw(rows, f"{what}, {args.replicas} replica(s)", args.picture)
    print(f"picture {args.picture}")


if __name__ == "__main__":
    command(main)
