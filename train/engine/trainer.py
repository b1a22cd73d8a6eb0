"""torchtitan's trainer, but MARS clips; exact MARS's second pass; gamma's schedule."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from train.data.tokens import read_meta
from train.engine.ends import LossNotFinite, Vote
from train.engine.titan import Trainer, clipping_by
from train.engine.titan_data import HeldOut, TitanTokenizer, TokenLoader
from train.engine.titan_model import SummedLoss
from train.engine.titan_optim import MarsOptimizers, RateSchedule
from train.runs.settings import held_out_folder

NOT_FINITE = "Loss is not finite"  # as torchtitan begins to say it


class MarsTrainer(Trainer):
    """torchtitan's trainer. MARS clips: one pass and one all-reduce find every norm.
    Exact MARS adds one pass over the next batch before each step.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        optimizer: MarsOptimizers.Config = field(default_factory=MarsOptimizers.Config)
        lr_scheduler: RateSchedule.Config = field(default_factory=RateSchedule.Config)
        loss: SummedLoss.Config = field(default_factory=SummedLoss.Config)
        tokenizer: TitanTokenizer.Config = field(default_factory=TitanTokenizer.Config)
        dataloader: TokenLoader.Config = field(default_factory=TokenLoader.Config)
        validator: HeldOut.Config = field(default_factory=HeldOut.Config)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.metrics_processor.begin(read_meta(held_out_folder(config)))
        self.optimizers.mars.max_norm = config.training.max_norm
        self.told: Callable[[], bool] = lambda: False
        """Whether this process is to end: once some rank says so, the next step is the
        last, and has a checkpoint.
        """
        self._vote, self.began = Vote(), False
        self._last_finite = 0  # the last step whose loss was seen to be finite
        self._exact = config.optimizer.correction == "exact"
        if self._exact:
            self._ahead = replace(self.dataloader.batches)

    def should_continue_training(self) -> bool:
        return super().should_continue_training() and not self.checkpointer.ending

    def train_step(self, data_iterator) -> None:
        self._schedule_gamma()
        if self._exact:
            self._read_ahead()
        rate = self.optimizers.mars.param_groups[0]["lr"]
        # the norm that is logged is found in the step, after torchtitan asks for it
        with clipping_by(lambda *_, **__: self.optimizers.grad_norm):
            try:
                super().train_step(data_iterator)
            except RuntimeError as error:
                if NOT_FINITE in str(error):
                    raise self._loss_not_finite(rate) from error
                raise
        every = self.config.metrics.statistics_freq
        if every > 0 and self.step % every == 0:
            found = self.optimizers.mars.statistics()
            self.metrics_processor.log_statistics(self.step, found)
        if self.metrics_processor.should_log(self.step):
            self._last_finite = self.step
        if self._exact:
            self.optimizers.mars.update_last_grad()
        self.began = True
        # before the checkpoint: a run that resumes from it has this step's row
        if self.config.validator.enable and self.validator.should_validate(self.step):
            self.validator.validate(self.model_parts, self.step)
        self.checkpointer.ending = self._vote.take(self.told())

    def _loss_not_finite(self, rate: float) -> LossNotFinite:
        since = f"after step {self._last_finite}, " if self._last_finite else ""
        return LossNotFinite(
            f"got a loss that is not finite {since}at or before step {self.step}, at a "
            f"learning rate of {rate:.3g} (its peak is {self.config.optimizer.lr:g}), "
            "expected a finite loss",
            self._last_finite,
        )

    def _schedule_gamma(self) -> None:
        """Set gamma for this step."""
        kind = self.config.optimizer.gamma_decay
        moving = [g for g in self.optimizers.mars.param_groups if g["initial_lr"] > 0]
        if kind == "with_lr" and moving:  # one schedule for all of them
            self.optimizers.scale_gamma(moving[0]["lr"] / moving[0]["initial_lr"])
        elif kind == "last_quarter":
            total = self.config.lr_scheduler.total_steps or self.config.training.steps
            self.optimizers.scale_gamma(float(self.step <= 0.75 * total))

    def _read_ahead(self) -> None:
        """Give MARS the next global batch's gradient at the current parameters, which
        clips it by its own norm.

        It becomes h of the next step (mars.py of the authors: update_previous_grad). A
        copy of the loader's batches is one global batch ahead, so that the loader's
        state stays what training has consumed.
        """
        batches, ahead = self._ahead, self.config.training.global_batch_size
        batches.samples = self.dataloader.batches.samples + ahead
        tokens = torch.tensor(ahead * batches.seq_len, device=self.device)
        self.optimizers.zero_grad(set_to_none=True)
        seen = self.ntokens_seen
        for _ in range(self.gradient_accumulation_steps):
            inputs, labels = batches.next()
            self.forward_backward_step(
                input_dict={"input": inputs.to(self.device)},
                labels=labels.to(self.device),
                global_valid_tokens=tokens,
            )
        self.ntokens_seen = seen  # these tokens are counted when they are trained on
        self.optimizers.mars.update_previous_grad()
