"""python -m train.plan: memory, traffic and FLOPs of rules on a mesh, without ranks."""

import argparse
import logging
import sys

if __name__ == "__main__":  # torch takes seconds to import
    print("loading torch and the forecast", file=sys.stderr, flush=True)

import torch

from train.engine.recipes import MODULE, make
from train.errors import UserError, check_least, command, counted
from train.forecast import Job, forecast, models
from train.gpt2 import tensor_sizes

MOST_RANKS = 2**13  # planned within ten seconds
MEGA, GIGA, TERA = 1e6, 2**30, 1e12

HEAD = (
    f"{'':24} {'bytes of a':>10} {'GiB a GPU':>18} {'MB a GPU sends':>16} "
    f"{'TFLOP an owner':>16}\n{'rule':20} {'GPUs':>4} {'parameter':>10} "
    f"{'parameters':>10} {'state':>7} {'mean':>8} {'most':>7} {'mean':>8} {'most':>7}"
)
LEGEND = """\
Bytes of a parameter are its weight and state. All is of the fullest GPU, in float32 but
for --master-weight-bits and --state-dtype. Gradients take as much as parameters.
Left out: activations, what FSDP gathers and sends, and what the step holds meanwhile.
MB and TFLOP are those of matrices: Newton-Schulz or SOAP with their owners."""


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
    sizes = tensor_sizes(config.model_spec.model.shape)
    return Job(
        shapes=sizes,
        mars_type=config.optimizer.mars_type,
        elementwise=config.optimizer.beside_the_rule(sizes),
        options=config.optimizer.rule_options(),
    )


def row(job: Job, num_ranks: int, replicas: int) -> str:
    """Return a line of the table."""
    found = forecast(job, num_ranks, replicas=replicas)
    mean, most = sum(found.flops) / len(found.flops), max(found.flops)
    num_bytes = (found.parameters + found.state) * num_ranks / replicas
    return (
        f"{job.rule:20} {num_ranks:4} {num_bytes / job.num_params:10.2f}"
        f" {found.parameters / GIGA:10.2f}"
        f" {found.state / GIGA:7.2f} {found.sent / MEGA:8.1f}"
        f" {found.most_sent / MEGA:7.1f} {mean / TERA:8.3f} {most / TERA:7.3f}"
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        "python -m train.plan",
        description="Print the memory, traffic and FLOPs of an optimizer's step.",
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
    add("--ranks", type=int, nargs="+", action="extend",
        help="numbers of GPUs (default: 1 8 64 512, times --replicas)")
    add("--replicas", type=int, default=1,
        help="copies of the model that share the GPUs, as HSDP (default: 1, FSDP)")
    add("--master-weight-bits", type=int, choices=[32, 24],
        help="with --model: bfloat16 parameters, with bits below them in the state")
    add("--state-dtype", choices=["float32", "bfloat16", "int8"],
        help="with --model: dtype of averages (default: float32)")
    # fmt: on
    args = parser.parse_args()
    given = vars(args)
    for name in ("rules", "master_weight_bits", "state_dtype"):
        if args.config is not None and given[name] is not None:
            option = name.replace("_", "-")
            raise UserError(f"got --{option} with --config, expected --model")
    formats = dict(master_weight_bits=args.master_weight_bits)
    if args.state_dtype is not None:
        formats["state_dtype"] = getattr(torch, args.state_dtype)
        formats["stochastic_rounding"] = args.state_dtype == "bfloat16"
    ranks = args.ranks or [args.replicas * n for n in (1, 8, 64, 512)]
    for n in ranks:
        check_least(1, MOST_RANKS, replicas=args.replicas, ranks=n)
    try:
        if args.config is None:
            jobs = models.jobs(args.model, args.rules or models.RULES, **formats)
        else:
            jobs = [job_of(args.config, args.module)]
        rows = [row(job, n, args.replicas) for job in jobs for n in ranks]
    except ValueError as error:  # names, or replicas that do not divide the ranks
        raise UserError(str(error)) from error
    shared = f", {args.replicas} replicas of HSDP" if args.replicas > 1 else ""
    name, num = args.model or args.config, counted(jobs[0].num_params, "parameter")
    print(f"{name}: {num}{shared}", HEAD, *rows, LEGEND, sep="\n")


if __name__ == "__main__":
    command(main)
