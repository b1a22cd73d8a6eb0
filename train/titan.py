"""The one door to torchtitan 0.3.0: what the application uses of it."""
# ruff: noqa: E402, I001  (prepare() has to run before anything of torchtitan is imported)

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
from torchtitan.distributed.utils import clip_grad_norm_
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
    "clip_grad_norm_",
]
