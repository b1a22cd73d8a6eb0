"""The one door to torchtitan 0.3.0: what the application uses of it."""
# ruff: noqa: E402, I001  (prepare() has to run before anything of torchtitan is imported)

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from train.titan_cpu import prepare

prepare()

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import (
    LoggerContainer,
    MetricsProcessor,
    TensorBoardLogger,
)
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import (
    TORCH_DTYPE_MAP,
    CompileConfig,
    ConfigManager,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed import utils as dist_utils
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

__all__ = [
    "TORCH_DTYPE_MAP",
    "BaseDataLoader",
    "BaseModel",
    "BaseTokenizer",
    "CheckpointManager",
    "CompileConfig",
    "ConfigManager",
    "CrossEntropyLoss",
    "DebugConfig",
    "LRSchedulersContainer",
    "LoggerContainer",
    "MetricsProcessor",
    "ModelSpec",
    "OptimizersContainer",
    "ParallelismConfig",
    "TensorBoardLogger",
    "Trainer",
    "TrainingConfig",
    "Validator",
    "clipping_by",
]


@contextmanager
def clipping_by(clip: Callable) -> Iterator[None]:
    """Within, ``Trainer.train_step`` calls ``clip`` where it would call torchtitan's
    ``clip_grad_norm_``: same arguments, and the norm to be logged as the result.

    torchtitan has no option for it; train_step looks its clip up by this name.
    """
    before = dist_utils.clip_grad_norm_
    dist_utils.clip_grad_norm_ = clip
    try:
        yield
    finally:
        dist_utils.clip_grad_norm_ = before
