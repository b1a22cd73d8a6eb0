"""What a run shows: a bar on a terminal, steady lines in a log; everything also goes to
TensorBoard.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from tqdm import tqdm

from train.titan import LoggerContainer, MetricsProcessor, TensorBoardLogger
from train.tokens import Meta


@contextmanager
def _silent():
    """torchtitan's own line per step is replaced by ours."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.setLevel(level)


class Progress(MetricsProcessor):
    """torchtitan's metrics, with loss, speed and remaining time on the console."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        total_steps: int = 0
        """Set from training.steps."""

    def begin(self, meta: Meta) -> None:
        """Called once, before the first step."""
        self._per_byte = meta.nats_per_byte("val")
        self._started: tuple[int, float] | None = None
        self._bar: tqdm | None = None
        self._speaks = dist.get_rank() == 0

    def log(
        self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None
    ) -> None:
        tokens = (
            self.ntokens_since_last_log
            * self.parallel_dims.dp_replicate
            * self.parallel_dims.dp_shard
        )
        now = time.perf_counter()
        speed = tokens / (now - self.time_last_log)
        skipped = self.optimizers.mars.num_skipped
        with _silent():
            super().log(
                step,
                global_avg_loss,
                global_max_loss,
                grad_norm,
                {**(extra_metrics or {}), "optim/num_skipped": skipped},
            )
        if self._started is None:
            self._started = (step, now)
        first, began = self._started
        left = (
            (now - began) / (step - first) * (self.config.total_steps - step)
            if step > first
            else None
        )
        line = (
            f"loss {global_avg_loss:.5f}  grad norm {grad_norm:.3f}  "
            f"{speed:,.0f} tokens/s"
        )
        if skipped:
            line += f"  {skipped} skipped"
        if not self._speaks:
            return
        if sys.stderr.isatty():
            if self._bar is None:
                self._bar = tqdm(
                    total=self.config.total_steps,
                    initial=step,
                    unit="step",
                    dynamic_ncols=True,
                )
            self._bar.set_postfix_str(line, refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            eta = "" if left is None else f"  ETA {timedelta(seconds=round(left))}"
            self._say(f"step {step}/{self.config.total_steps}  {line}{eta}")

    def log_validation(self, loss, step, extra_metrics=None) -> None:
        metrics, line = dict(extra_metrics or {}), f"validation loss {loss:.5f}"
        if self._per_byte is not None:
            per_byte = loss * self._per_byte
            metrics["validation_metrics/nats_per_byte"] = per_byte
            line += f"  ({per_byte:.4f} nats/byte)"
        with _silent():
            super().log_validation(loss, step, metrics)
        self._flush()
        if self._speaks:
            self._say(f"step {step}/{self.config.total_steps}  {line}")

    def _flush(self) -> None:
        """TensorBoard's file is complete up to here, whatever kills the run next."""
        if isinstance(self.logger, LoggerContainer):
            for logger in self.logger._loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.writer.flush()

    def _say(self, line: str) -> None:
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        if getattr(self, "_bar", None) is not None:
            self._bar.close()
        super().close()
