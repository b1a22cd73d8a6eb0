"""python -m train.plan: who does what on a mesh, before any process is started."""

import argparse
import logging
import math
from pathlib import Path

from parallel import forecast
from parallel.forecast import Forecast, Hardware, Job
from parallel.planner import Machine
from train.engine.launch import recipe
from train.errors import UserError, check_least, command
from train.gpt2 import num_flops_per_token, tensor_sizes
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
        flops_per_token=num_flops_per_token(shape, num_params, seq_len),
        elementwise=config.optimizer.beside_the_rule(sizes),
    )


def draw(rows: list[tuple[int, Forecast]], title: str, path: Path) -> None:
    """Draw predicted times against ranks."""
    labels = dict(title=title, xlabel="ranks", ylabel="predicted time (ms)")
    ranks = [n for n, _ in rows]
    training = [f.training_seconds * 1e3 for _, f in rows]
    optimizer = [f.optimizer_seconds * 1e3 for _, f in rows]
    with picture(path, **labels) as axes:
        axes.loglog(ranks, training, "o--", color="0.5", label="forward and backward")
        axes.loglog(ranks, optimizer, "s-", color="black", label="optimizer step")
        axes.set_xscale("log", base=2)
        axes.legend(frameon=False)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        "python -m train.plan",
        description="Plan the sharded optimizer step of a recipe. A model, not a "
        "measurement.",
    )
    add = parser.add_argument
    add("--config", required=True, help="a recipe of configs/")
    add("--ranks", type=int, default=8)
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
    check_least(1, MOST_RANKS, ranks=args.ranks, replicas=args.replicas)
    rates = dict(link_gbps=args.link_gbps, tflops=args.tflops)
    check_least(1e-3, **rates, memory_gbs=args.memory_gbs)
    flops = args.tflops * 1e12
    machine = Machine(link=args.link_gbps / 8 * 1e9, flops=flops, flops_fp32=flops / 8)
    hardware = Hardware(machine=machine, memory=args.memory_gbs * 1e9)
    job = job_of(args.config)
    print(
        f"{args.config}: {job.num_params:,} parameters, {job.mars_type}, "
        f"{len(job.matrices())} matrices for Newton-Schulz"
    )
    if args.sweep:
        rows = forecast.sweep(job, hardware, args.replicas)
        print(forecast.sweep_table(rows))
        draw(rows, f"{args.config}, {args.replicas} replica(s)", args.picture)
        print(f"picture {args.picture}")
        return
    try:
        sizes = dict(replicas=args.replicas, hardware=hardware)
        found = forecast.forecast(job, args.ranks, **sizes)
    except ValueError as error:  # replicas that do not divide the ranks
        raise UserError(str(error)) from error
    print(forecast.table(job, found, args.all))


if __name__ == "__main__":
    command(main)
