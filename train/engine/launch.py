"""From the command line to a run: python -m train."""

import argparse
import logging
import math
import os
import re
import sys
import threading
import warnings
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path

from train.engine import recipes
from train.errors import UserError, tell
from train.files import check_folder, hold

# torchtitan says these on every machine without a GPU, or for every run of ours
NOISE = (
    "Peak flops undefined",
    "Error running lspci",
    "initial_load_model_only=True has no effect",
    "ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING]",
    "torch.distributed is already initialized",  # where ranks have met
)


def parse(argv: list[str]):
    """Return the configuration named by --config, of the recipes in --module, with the
    options after it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    parser.add_argument("--module", default=recipes.MODULE)
    args, rest = parser.parse_known_args(argv)
    for_help = bool({"-h", "--help"} & set(rest))
    if args.config is None and (not argv or for_help):
        print(recipes.listing(args.module))
        sys.exit(0 if argv else 2)
    recipes.recipe(args.config, args.module)  # or say which there are
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print("importing torch and torchtitan: seconds", file=sys.stderr, flush=True)
    import tyro

    from train.engine.options import check_known, listing
    from train.engine.titan import ConfigManager, custom_registry

    ConfigManager()  # which makes the registry complete
    try:
        config = recipes.make(args.config, args.module)
        if for_help and not any(word.startswith("activation-") for word in rest):
            print(listing(args.config, config))
            sys.exit(0)
        check_known(config, rest)
        prog = f"python -m train --config {args.config}"
        how = dict(prog=prog, registry=custom_registry)
        with redirect_stderr(StringIO()) as box:  # which tyro draws around its lines
            return tyro.cli(type(config), args=rest, default=config, **how)
    except SystemExit as ended:
        if not ended.code:
            raise
        words = re.sub("[╭╮╰╯│─]", " ", box.getvalue()).split()
        line, _, _ = " ".join(words).partition(" For full helptext")
        line, _, _ = line.partition(" ---")  # what follows is the option's own help
        told = line.partition("Error parsing ")[2].partition(": ")[2]  # by our checks
        why = f"got options that do not fit ({line}), expected valid ones: see --help"
        raise UserError(told if told.startswith("got ") else why) from None
    except (ValueError, AssertionError) as error:  # torchtitan's checks of its fields
        raise UserError(
            f"got options that torchtitan refuses ({error}), expected valid ones: see "
            "--help"
        ) from error


def announce(config, world: int) -> None:
    """Say what is about to happen."""
    from train.runs.checkpoints import last_step

    folder = Path(config.dump_folder)
    done, steps = last_step(folder), config.training.steps
    where = f"{folder} ({world} process{'es' if world > 1 else ''})"
    if done == 0:
        said = f"starting a new run in {where}: {steps} steps"
    elif done < steps:
        said = f"resuming the run in {where} after step {done} of {steps}"
    else:
        said = (
            f"the run in {where} is complete at step {done}: nothing to train. Start "
            "another with --dump-folder NEW (make train RUN=NEW)"
        )
    if done < steps and (config.compile.enable or config.optimizer.compile):
        said += "; the first step compiles, which takes half a minute or more"
    tell(said)


def standalone() -> tuple[int, int]:
    """Return this process's rank, and of how many: the only one, unless a launcher has
    said otherwise.
    """
    if "RANK" not in os.environ:
        alone = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        # port 0: torch takes one that is free
        os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}")
    except (KeyError, ValueError) as error:
        raise UserError(
            f"got RANK and WORLD_SIZE in the environment that do not fit ({error}), "
            "expected torchrun's: start with torchrun, or unset RANK"
        ) from error
    return rank, world


def console(rank: int) -> None:
    """Show rank 0's warnings, and nobody else's."""
    # a full disk is told once, where the run ends: not by logs and threads
    logging.raiseExceptions = False
    threading.excepthook = lambda failed: None
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.handlers.clear()
    handler: logging.Handler = logging.NullHandler()
    if rank == 0:
        handler = logging.StreamHandler(sys.stderr)
        handler.setLevel(logging.WARNING)
        handler.addFilter(_is_for_the_console)
    root.addHandler(handler)
    # torchtitan seeds DTensor's generator; our weights are drawn without it
    warnings.filterwarnings("ignore", message="DTensor (manual_seed|random operators)")
    # and, on a resume, asks its schedulers for their rate by the wrong name
    warnings.filterwarnings("ignore", message="To get the last learning rate")
    if rank > 0:
        warnings.simplefilter("ignore")  # rank 0 says it


def _is_for_the_console(record: logging.LogRecord) -> bool:
    """Tracebacks, which DCP logs too, stand in the files alone."""
    said = record.getMessage()
    return not (record.exc_info or "Traceback" in said or said.startswith(NOISE))


def log_to(path: Path) -> None:
    """Write everything that torchtitan logs to a file."""
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(line))
    logging.getLogger().addHandler(handler)


def main() -> None:
    """Run the command."""
    rank, world = standalone()
    console(rank)
    config = parse(sys.argv[1:])
    from train.engine.ends import Signals
    from train.engine.resolve import resolve

    signals = Signals()
    resolve(config, world)
    folder = Path(config.dump_folder)
    check_folder("--dump-folder", folder)
    folder.mkdir(parents=True, exist_ok=True)
    if world == 1:
        take_folder(config)
    train(config, signals)


def take_folder(config) -> None:
    """Make the run's folder this run's, or find that it is; say what will happen."""
    from train.runs.checkpoints import check_own
    from train.runs.settings import claim

    folder, rank = Path(config.dump_folder), int(os.environ["RANK"])
    if rank == 0:
        # until the process ends; ranks whose launcher was killed may still save
        hold(folder, "--dump-folder", patience=15)
    claim(config)
    check_own(folder, config.model_spec.model.shape)
    log_to(folder / f"rank{rank}.log")
    if rank == 0:
        announce(config, int(os.environ["WORLD_SIZE"]))


def title(config) -> str:
    """Say in a line what a configuration trains, and how."""
    from marsopt import REGISTRY
    from train.gpt2 import tensor_sizes

    opt, sizes = config.optimizer, tensor_sizes(config.model_spec.model.shape)
    count = sum(math.prod(size) for size in sizes.values())
    return (
        f"{config.model_spec.flavor}: GPT-2 of {count / 1e6:.3g}M parameters, "
        f"{config.training.steps:,} steps\n{opt.mars_type}, "
        f"{opt.correction if REGISTRY[opt.mars_type].is_mars else 'no'} correction, "
        f"peak learning rate {opt.lr:g}"
    )


def train(config, signals) -> None:
    """Train to the last step and show what came out; before it, end the process."""
    import torch.distributed as dist

    from train.engine.ends import end
    from train.engine.ranks import meet, together
    from train.runs.summary import summarize

    step, steps, began = 0, config.training.steps, False
    try:
        if int(os.environ["WORLD_SIZE"]) > 1:
            together(partial(take_folder, config), meet(config))
        trainer = config.build()
        try:
            signals.in_steps, trainer.told = True, lambda: signals.told is not None
            trainer.train()
            signals.in_steps = False
            trainer.close()
        except BaseException:
            trainer.metrics_processor.close()  # of the rest others may hold up the end
            raise
        finally:
            step, began = trainer.step, trainer.began
        if step == steps:
            first = dist.get_rank() == 0
            dist.destroy_process_group()
            if first:
                summarize(Path(config.dump_folder), title(config))
    except BaseException as error:
        end(error, signals.told, config, step, began)
    if step < steps:
        end(None, signals.told, config, step, began)
