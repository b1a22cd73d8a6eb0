"""A configuration made complete, and checked before processes meet."""

import logging
import math
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import torch

from marsopt import NewtonSchulz, mars
from marsopt.rules import checks
from train.data.batches import Batches
from train.data.tokens import open_tokens
from train.errors import UserError, counted
from train.runs.initial import check_initial
from train.runs.settings import held_out_folder

POSITIVE = (
    "training.steps", "training.local_batch_size", "training.gc_freq",
    "loss.num_summed", "validator.freq", "validator.most_samples", "metrics.log_freq",
    "comm.init_timeout_seconds", "comm.train_timeout_seconds",
    "parallelism.data_parallel_replicate_degree",
)  # fmt: skip
NOT_NEGATIVE = (
    "lr_scheduler.warmup_steps", "debug.seed", "comm.trace_buf_size",
    "metrics.statistics_freq",
)  # fmt: skip
MOST_LOCAL = 4096  # the largest local batch that an error proposes
LARGEST = 2**31 - 1  # of whole numbers: what the libraries below count with
# options that torchtitan has and this application does not use, with their one value
UNUSED = {
    "dataloader.dataset": "", "dataloader.split": "train", "dataloader.infinite": True,
    "validator.dataloader.dataset": "", "validator.dataloader.split": "val",
    "validator.dataloader.infinite": True, "validator.steps": 1,
    "lr_scheduler.decay_type": "linear",
    "loss.global_vocab_size": None, "optimizer.implementation": "fused",
    "optimizer.optimizer_factory_kwargs_by_name": {},
    "training.enable_cpu_offload": False, "comm.mode": "default",
    "checkpoint.enable": True, "checkpoint.folder": "checkpoint",
    "checkpoint.initial_load_in_hf": False,
    "checkpoint.initial_load_in_hf_quantized": False,
    "checkpoint.last_save_in_hf": False, "checkpoint.last_save_model_only": False,
    "checkpoint.export_dtype": "float32", "checkpoint.load_step": -1,
    "checkpoint.load_only": False, "checkpoint.exclude_from_loading": [],
    "checkpoint.create_seed_checkpoint": False, "metrics.save_tb_folder": "tb",
    "compile.enable_async_tensor_parallel": False, "override.imports": [],
    "debug.moe_force_load_balance": False, "parallelism.enable_fsdp_symm_mem": False,
    "parallelism.context_parallel_degree": 1, "parallelism.expert_parallel_degree": 1,
    "parallelism.pipeline_parallel_degree": 1, "parallelism.tensor_parallel_degree": 1,
}  # fmt: skip


# options that follow from others, and are filled in here
FOLLOW = {
    "dataloader.vocab_size", "dataloader.seed", "validator.dataloader.vocab_size",
    "validator.dataloader.seed", "validator.last_step", "metrics.total_steps",
}  # fmt: skip

log = logging.getLogger(__name__)


def resolve(config, world: int) -> None:
    """Fill in what follows from other fields, and check all that can be checked.

    Raises:
        UserError: every mistake that was found, each a message of its own.
    """
    found = [*_ranges(config), *_unused(config)]
    broken = {path.split(".")[0] for path, _ in found}
    messages = [message for _, message in found]
    for check, sections in (
        (_check_degrees, {"parallelism"}),
        (_check_batches, {"training"}),
        (_check_warmup, {"training", "lr_scheduler"}),
        (_check_decay, {"training", "lr_scheduler"}),
        (_check_rule, {"optimizer", "training"}),
        (_check_floor, {"lr_scheduler"}),
        (_check_data, {"training", "debug", "dataloader", "validator"}),
        (_fill_in, {"training"}),
    ):
        if broken & sections:  # it could not be understood
            continue
        try:
            check(config, world)
        except UserError as error:
            messages += error.args
    if messages:
        raise UserError(*messages)
    check_initial(config)


def _ranges(config) -> Iterator[tuple[str, str]]:
    """Yield (option, what is wrong) of single numbers."""
    block, inf = config.model_spec.model.shape.block_size, math.inf
    least, most = dict.fromkeys(POSITIVE, 1) | dict.fromkeys(NOT_NEGATIVE, 0), LARGEST
    for path, low, high, expected in (
        *((p, n, most, f"a number of {n} to {most - 1}") for p, n in least.items()),
        ("training.seq_len", 1, block + 1, f"1 to the model's block size {block}"),
        ("training.max_norm", math.ulp(0.0), inf, "a number above 0"),
    ):
        value = attrgetter(path)(config)
        if value is None or not low <= value < high:
            yield path, f"got {path}={value}, expected {expected}: change it"
    total = config.lr_scheduler.total_steps
    if total is not None and total < 1:  # 0 would count as unset
        yield (
            "lr_scheduler.total_steps",
            f"got lr_scheduler.total_steps={total}, expected 1 or more: leave it out "
            "for training.steps",
        )
    if not config.dump_folder.strip():
        yield (
            "dump_folder",
            "got an empty --dump-folder, expected a folder for the run: runs/NAME",
        )


def _unused(config) -> Iterator[tuple[str, str]]:
    """Yield (option, what is wrong) of options that have no effect here."""
    for path, usual in UNUSED.items():
        if (value := attrgetter(path)(config)) != usual:
            yield (
                path,
                f"got {path}={value}, expected {usual}: this application does not use "
                "another value; leave it out",
            )


def _check_degrees(config, world: int) -> None:
    p = config.parallelism
    replicas, shards = p.data_parallel_replicate_degree, p.data_parallel_shard_degree
    fits = world % replicas == 0 and shards in (-1, world // replicas)
    if not fits:
        ranks = counted(world, "rank")
        raise UserError(
            f"got parallelism.data_parallel_replicate_degree={replicas} and "
            f"data_parallel_shard_degree={shards} on {ranks}, expected a product of "
            f"{world}: change them (-1 shards over what is left), or start another "
            "number of processes"
        )


def _check_batches(config, world: int) -> None:
    t = config.training
    per_pass = t.local_batch_size * world
    if t.global_batch_size < 0:
        t.global_batch_size = per_pass
    if t.global_batch_size % per_pass or t.global_batch_size == 0:
        raise UserError(
            f"got training.global_batch_size={t.global_batch_size} with "
            f"{counted(world, 'rank')} of local_batch_size={t.local_batch_size}, "
            f"expected a multiple of {per_pass} (ranks x local batch x micro-steps): "
            + _what_divides(t.global_batch_size, world)
        )


def _what_divides(global_batch: int, world: int) -> str:
    each, rest = divmod(global_batch, world)
    fit = [str(n) for n in range(1, min(each, MOST_LOCAL) + 1) if each % n == 0]
    if rest or not fit:
        return f"start a number of processes that divides {global_batch}, or change it"
    return f"set --training.local-batch-size to one of {', '.join(fit)}"


def _schedule_steps(config) -> int:
    return config.lr_scheduler.total_steps or config.training.steps


def _check_warmup(config, world: int) -> None:
    rates, total = config.lr_scheduler, _schedule_steps(config)
    if rates.warmup_steps >= total:
        raise UserError(
            f"got lr_scheduler.warmup_steps={rates.warmup_steps}, expected less than "
            f"the schedule's {total} steps: shorten it by --lr-scheduler.warmup-steps"
        )


def _check_decay(config, world: int) -> None:
    rates, total = config.lr_scheduler, _schedule_steps(config)
    if rates.kind != "wsd":
        if rates.decay_ratio is not None:
            raise UserError(
                f"got lr_scheduler.decay_ratio={rates.decay_ratio} with "
                f"lr_scheduler.kind={rates.kind}, expected None: it belongs to wsd"
            )
        return
    ratio, longest = rates.decay_ratio, max(total - rates.warmup_steps, 1)
    finite = ratio is None or math.isfinite(ratio)
    if not (finite and 1 <= rates.decay_steps(total) <= longest):
        raise UserError(
            f"got lr_scheduler.decay_ratio={rates.decay_ratio}, expected at least one "
            f"of {total} steps and at most {longest / total:.4g} of them (what the "
            "warm-up leaves; None = a fifth): change the ratio or the warm-up"
        )


def _check_rule(config, world: int) -> None:
    opt, dtype = config.optimizer, config.training.dtype
    if opt.master_weight_bits is not None and dtype != "bfloat16":
        raise UserError(
            f"got optimizer.master_weight_bits={opt.master_weight_bits} with "
            f"training.dtype={dtype}, expected a model in bfloat16: give "
            "--training.dtype bfloat16, or leave the bits out"
        )
    try:
        checks.positive("lr", opt.lr)
        mars(**opt.rule_options())
        mars(weight_decay=opt.embedding_weight_decay)
        NewtonSchulz(dtype=getattr(torch, opt.ns_dtype))
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error


def _check_floor(config, world: int) -> None:
    share = config.lr_scheduler.min_lr_factor
    if not 0 <= share <= 1:
        raise UserError(
            f"got lr_scheduler.min_lr_factor={share}, expected a number from 0 to 1: "
            "the last learning rate as a share of the peak, such as 0.1"
        )


def _check_data(config, world: int) -> None:
    vocab_size, t = config.model_spec.model.shape.vocab_size, config.training
    held_out = config.validator.dataloader
    held_out.dataset_path = str(held_out_folder(config))
    tokenizers = []
    for loader in (config.dataloader, held_out):
        _set(loader, "vocab_size", vocab_size)
        _set(loader, "seed", config.debug.seed)
        folder = Path(loader.dataset_path)
        tokens, meta = open_tokens(folder, loader.split, vocab_size=vocab_size)
        sizes = dict(local_batch=1, seq_len=t.seq_len, vocab_size=vocab_size)
        batches = Batches(tokens, rank=0, world=1, **sizes)
        tokenizers.append(meta.tokenizer)
    if len(set(tokenizers)) > 1:
        raise UserError(
            f"got tokens by {tokenizers[1]} to validate on in {folder}, expected "
            f"{tokenizers[0]}, as in {config.dataloader.dataset_path}: prepare both "
            "with one tokenizer"
        )
    if config.tokenizer.name != tokenizers[0]:
        raise UserError(
            f"got tokens by {tokenizers[0]} in {config.dataloader.dataset_path} with "
            f"tokenizer.name={config.tokenizer.name}, expected those of one tokenizer: "
            f"give --tokenizer.name {tokenizers[0]}, or other data"
        )
    _check_samples(config, world, batches.num_windows)


def _check_samples(config, world: int, held_out: int) -> None:
    """Choose the samples of a validation, of so many windows, or check those given."""
    t, validator = config.training, config.validator
    per_pass, folder = t.local_batch_size * world, validator.dataloader.dataset_path
    if not validator.enable:
        return
    if validator.samples is None:
        most = min(validator.most_samples, held_out)
        # whole global batches where that can be: the same for any number of ranks
        whole = t.global_batch_size
        whole = whole if whole % per_pass == 0 < whole <= most else per_pass
        validator.samples = max(most // whole, 1) * whole
        if validator.samples < validator.most_samples:
            log.warning(
                "validating on %d samples, not the recipe's %d: %s holds out %d",
                *(validator.samples, validator.most_samples, folder, held_out),
            )
    samples = validator.samples
    if not (samples % per_pass == 0 < samples <= held_out):
        raise UserError(
            f"got validator.samples={samples} with {counted(world, 'rank')} of "
            f"local_batch_size={t.local_batch_size}, expected a multiple of {per_pass} "
            f"up to the {held_out} windows of {t.seq_len} tokens held out in {folder}"
        )


def _fill_in(config, world: int) -> None:
    for section, name in (
        (config.validator, "last_step"),
        (config.metrics, "total_steps"),
    ):
        _set(section, name, config.training.steps)


def _set(section, name: str, value: int) -> None:
    """Fill in a field that follows from others, and may not say anything else."""
    if (given := getattr(section, name)) not in (0, value):
        raise UserError(
            f"got {name}={given}, expected {value}, which follows from other options: "
            "leave it out"
        )
    setattr(section, name, value)
