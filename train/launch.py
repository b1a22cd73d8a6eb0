"""From the command line to a run: python -m train."""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from pathlib import Path

from train.errors import UserError

# torchtitan says these on every machine without a GPU, or for every run
NOISE = (
    "Peak flops undefined",
    "Error running lspci",
    "initial_load_model_only=True has no effect",
)


def parse(argv: list[str]):
    """The configuration named by --config with the options after it.

    Raises:
        UserError: no or an unknown name. Unknown options and values of the wrong type
            end in tyro's own message (exit 2).
    """
    import configs
    from train.titan import ConfigManager

    if not argv or {"-h", "--help"} & set(argv) and "--config" not in " ".join(argv):
        print(
            "usage: python -m train --config NAME [--section.option VALUE ...]\n\n"
            f"recipes:\n{_described(configs)}\n\n"
            "python -m train --config NAME --help lists the options of a recipe."
        )
        sys.exit(0 if argv else 2)
    name, rest = None, []
    args = iter(argv)
    for arg in args:
        if arg == "--config":
            name = next(args, None)
        elif arg.startswith("--config="):
            name = arg.removeprefix("--config=")
        else:
            rest.append(arg)
    if name not in configs.__all__:
        raise UserError(
            f"got --config {name}, expected one of {configs.__all__}: name a function "
            "of configs/__init__.py"
        )
    try:
        return ConfigManager().parse_args(
            ["--module", "configs", "--config", name, *rest]
        )
    except (
        ValueError,
        AssertionError,
    ) as error:  # torchtitan's checks of single fields
        raise UserError(
            f"got options that torchtitan refuses ({error}), expected valid ones: see "
            "--help"
        ) from error


def _described(configs) -> str:
    """One line for each recipe: its name and what its docstring begins with."""
    return "\n".join(
        f"  {name:24}{getattr(configs, name).__doc__.splitlines()[0]}"
        for name in configs.__all__
    )


def announce(config, world: int) -> None:
    """Say what is about to happen."""
    from train.run import last_step

    folder = Path(config.dump_folder)
    done, steps = last_step(folder), config.training.steps
    where = f"{folder} ({world} process{'es' if world > 1 else ''})"
    if done == 0:
        print(f"starting a new run in {where}: {steps} steps", flush=True)
    elif done < steps:
        print(f"continuing the run in {where} after step {done} of {steps}", flush=True)
    else:
        print(
            f"the run in {where} is complete at step {done}: nothing to train. Start "
            "another with --dump-folder NEW "
            "(make train RUN=NEW)",
            flush=True,
        )


def standalone() -> None:
    """Without torchrun, be the only process."""
    if "RANK" in os.environ:
        return
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def console(rank: int) -> None:
    """Warnings of rank 0 come to the console."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.handlers.clear()
    handler: logging.Handler = logging.NullHandler()
    if rank == 0:
        handler = logging.StreamHandler(sys.stderr)
        handler.setLevel(logging.WARNING)
        handler.addFilter(lambda record: not record.getMessage().startswith(NOISE))
    root.addHandler(handler)
    # torchtitan seeds DTensor's generator; our weights are drawn without it
    warnings.filterwarnings("ignore", message="DTensor manual_seed")
    # and, on a resume, asks its schedulers for their rate by the wrong name
    warnings.filterwarnings("ignore", message="To get the last learning rate")
    if rank > 0:
        warnings.simplefilter("ignore")  # rank 0 says it


def log_to(path: Path) -> None:
    """Everything that torchtitan logs goes to a file."""
    handler = logging.FileHandler(path)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.getLogger().addHandler(handler)


def main() -> None:
    """The command."""
    standalone()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    console(rank)
    config = parse(sys.argv[1:])
    from train.resolve import resolve
    from train.settings import claim

    resolve(config, world)
    claim(config)
    folder = Path(config.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    log_to(folder / f"rank{rank}.log")
    if rank == 0:
        announce(config, world)

    import torch.distributed as dist

    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank == 0:
        from train.report import report

        report(
            folder, title=f"{config.model_spec.flavor}: {config.optimizer.mars_type}"
        )
