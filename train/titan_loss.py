"""Cross entropy as torchtitan builds it, and the sum that the MARS scripts descend."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from train.titan import CrossEntropyLoss


class SummedLoss(CrossEntropyLoss):
    """Mean cross entropy over the global batch, whose gradient may be scaled.

    The MARS scripts do not divide by their number of micro-steps: DDP averages over
    GPUs, the loop adds up, so that what the global clip sees is the mean gradient times
    the micro-steps of *their* GPUs. Here that number belongs to the recipe, not to how
    it is executed: the gradient is the same for any number of processes and any local
    batch size. Losses shown and validated stay means.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        num_summed: int = 1
        """Micro-steps whose mean gradients are added up before the clip; 1 = the mean.
        """

    def __init__(self, config: Config, **kwargs) -> None:
        super().__init__(config, **kwargs)
        self._num_summed = config.num_summed

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens=None, **kwargs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().__call__(pred, labels, global_valid_tokens, **kwargs)
        if loss.requires_grad and self._num_summed != 1:
            loss.register_hook(lambda grad: grad * self._num_summed)
        return loss, metrics
