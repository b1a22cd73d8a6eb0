"""What a run shows: a bar on a terminal, lines in a log; all goes to TensorBoard and,
under the same names, to a file of JSON lines.
"""

import json
import logging
import math
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from marsopt.optim.statistics import Statistics
from train.data.tokenizers import NATS_PER_BYTE, loss_unit
from train.data.tokens import Meta
from train.engine.titan import (
    BaseLogger,
    LoggerContainer,
    MetricsProcessor,
    TensorBoardLogger,
)
from train.files import write
from train.runs.checkpoints import last_step
from train.runs.summary import PER_BYTE

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"  # in the folder of a run
# without tqdm's speed and ETA, which count the compiling of the first steps
BAR = "{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


@contextmanager
def _silent():
    """Keep back torchtitan's own line per step, which ours replaces."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.setLevel(level)


class Scalars(TensorBoardLogger):
    """TensorBoard's files of one run, all in ``folder``: what was written after step
    ``done`` by a call that was cut off is not shown.
    """

    def __init__(self, folder: Path, done: int) -> None:
        self.tag = None
        purge = done + 1 if done else None
        self.writer = SummaryWriter(str(folder), max_queue=1000, purge_step=purge)


class Lines(BaseLogger):
    """A JSON object in a line of ``path`` for each call of ``log``: "step", and numbers
    under TensorBoard's names, null where they are not finite. Lines after step ``done``
    are of a call that was cut off, and go.
    """

    def __init__(self, path: Path, done: int) -> None:
        if path.exists():
            before = path.read_bytes()
            rows = [row for row in before.splitlines() if _is_by(row, done)]
            kept = b"".join(row + b"\n" for row in rows)
            if kept != before:
                write(path, kept)
        self._file = path.open("a")  # noqa: SIM115  (until it is closed)

    def log(self, metrics: dict, step: int) -> None:
        row = {
            name: value if math.isfinite(value) else None
            for name, value in metrics.items()
        }
        with suppress(OSError):  # a full disk is told where the run saves or ends
            self._file.write(json.dumps({"step": step, **row}) + "\n")
            self._file.flush()  # whatever kills the run next

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


def _is_by(row: bytes, done: int) -> bool:
    """Whether a line is whole, and of step ``done`` or before."""
    try:
        return json.loads(row)["step"] <= done
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


class Progress(MetricsProcessor):
    """torchtitan's metrics, with loss, speed and remaining time on the console."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        total_steps: int = 0
        """Set from training.steps."""
        statistics_freq: int = 0
        """Steps between two looks at each parameter in TensorBoard: its gradient's
        norm and the clip; 0 = none.
        """

    def _build_metric_logger(self, *, config, dump_folder, **kwargs) -> BaseLogger:
        done = last_step(Path(dump_folder))
        if done >= config.total_steps:  # nothing will be logged
            return BaseLogger()
        others = replace(config, enable_tensorboard=False)
        kwargs |= dict(config=others, dump_folder=dump_folder)
        logger = super()._build_metric_logger(**kwargs)
        rank, folder = dist.get_rank(), Path(dump_folder) / config.save_tb_folder
        if not isinstance(logger, LoggerContainer):
            logger = LoggerContainer()
        if rank == 0:
            logger.add_logger(Lines(Path(dump_folder) / METRICS, done))
        if config.enable_tensorboard and (rank == 0 or config.save_for_all_ranks):
            each = folder / f"rank_{rank}" if config.save_for_all_ranks else folder
            logger.add_logger(Scalars(each, done))
        return logger

    def begin(self, meta: Meta) -> None:
        """Begin to log; called once, before the first step."""
        # torchtitan takes a device that it does not know for an A100
        self.has_quantization |= self.device_memory_monitor.device_name == "cpu"
        self._per_byte = meta.nats_per_byte("val")
        self._unit = loss_unit(meta.tokenizer)
        self._num_logs = 0
        self._warm: tuple[int, float] = (0, 0.0)
        """Step and time of the second log: steps before it compile."""
        self._bar: tqdm | None = None
        self._speaks = dist.get_rank() == 0

    def log(
        self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None
    ) -> None:
        dims, total = self.parallel_dims, self.config.total_steps
        tokens = self.ntokens_since_last_log * dims.dp_replicate * dims.dp_shard
        now = time.perf_counter()
        speed = tokens / (now - self.time_last_log)
        skipped = self.optimizers.mars.num_skipped
        metrics = {**(extra_metrics or {}), "optim/num_skipped": skipped}
        device = self.of_device(now - self.time_last_log)
        with _silent():
            super().log(step, global_avg_loss, global_max_loss, grad_norm, metrics)
        self._num_logs += 1
        if self._num_logs == 2:
            self._warm = (step, now)
        if not self._speaks:
            return
        line = f"loss {global_avg_loss:.5f}  grad norm {grad_norm:.3f}"
        line += f"  {speed:,.0f} tokens/s"
        line += device
        if skipped:
            line += f"  {skipped} skipped"
        if self._num_logs > 2:
            first, began = self._warm
            left = (now - began) / (step - first) * (total - step)
            line += f"  ETA {timedelta(seconds=round(left))}"
        if not sys.stderr.isatty():
            self._say(f"step {step}/{total}  {line}")
            return
        if self._bar is None:
            options = dict(unit="step", dynamic_ncols=True, bar_format=BAR)
            self._bar = tqdm(total=total, initial=step, **options)
        self._bar.set_postfix_str(line, refresh=False)
        self._bar.update(step - self._bar.n)
        log.info("step %d/%d  %s", step, total, line)

    def of_device(self, seconds: float) -> str:
        """Return the peak memory, and the share of the peak FLOPs, of a GPU."""
        if self.device_memory_monitor.device_name == "cpu":
            return ""
        memory = self.device_memory_monitor.get_peak_stats().max_reserved_gib
        shown = f"  {memory:.1f} GiB"
        if not self.has_quantization:
            speed = self.ntokens_since_last_log / seconds
            speed /= self.parallel_dims.non_data_parallel_size
            used = self.num_flops_per_token * speed / self.gpu_peak_flops
            shown += f"  MFU {used:.1%}"
        return shown

    def log_validation(self, loss, step, extra_metrics=None) -> None:
        metrics, line = (
            dict(extra_metrics or {}),
            f"validation loss {loss:.5f} {self._unit}",
        )
        if self._per_byte is not None:
            per_byte = loss * self._per_byte
            metrics[PER_BYTE] = per_byte
            if self._unit != NATS_PER_BYTE:  # else all but the same number
                line += f"  ({per_byte:.4f} {NATS_PER_BYTE})"
        with _silent():
            super().log_validation(loss, step, metrics)
        self._flush()
        if self._speaks:
            self._say(f"step {step}/{self.config.total_steps}  {line}")

    def log_statistics(self, step: int, found: Statistics) -> None:
        """Write the statistics of a step."""
        rows = torch.stack([found.grad_norm, found.clip]).tolist()  # one sync for both
        metrics = {"clip/global": float(found.global_clip)}
        for kind, row in zip(("grad_norm", "clip"), rows, strict=True):
            pairs = zip(found.names, row, strict=True)
            metrics |= {f"{kind}/{name}": value for name, value in pairs}
        self.logger.log(metrics, step)

    def _writers(self) -> list[TensorBoardLogger]:
        if not isinstance(self.logger, LoggerContainer):
            return []
        return [w for w in self.logger._loggers if isinstance(w, TensorBoardLogger)]

    def _flush(self) -> None:
        """Complete TensorBoard's file up to here, whatever kills the run next."""
        for logger in self._writers():
            logger.writer.flush()

    def _say(self, line: str) -> None:
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()
        log.info(line)

    def close(self) -> None:
        if getattr(self, "_bar", None) is not None:
            self._bar.close()
        super().close()
