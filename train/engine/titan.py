"""The one door to torchtitan 0.3.0: what the application uses of it."""
# ruff: noqa: E402, F401, I001  (prepare() runs first; what is imported is passed on)

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from train.engine.titan_cpu import prepare

prepare()

from torchtitan.components.checkpointer import MODEL, TRAIN_STATE, CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import BaseLogger, LoggerContainer
from torchtitan.components.metrics import MetricsProcessor, TensorBoardLogger
from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig
from torchtitan.config import TrainingConfig
from torchtitan.config.manager import custom_registry
from torchtitan.distributed import utils as dist_utils
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from marsopt.interop.torchtitan import MarsOptimizersContainer


@contextmanager
def clipping_by(clip: Callable) -> Iterator[None]:
    """Let ``Trainer.train_step`` call ``clip`` where it would call torchtitan's
    ``clip_grad_norm_``: same arguments, and the norm to be logged as the result.

    torchtitan has no option for it; train_step looks its clip up by this name.
    """
    before = dist_utils.clip_grad_norm_
    dist_utils.clip_grad_norm_ = clip
    try:
        yield
    finally:
        dist_utils.clip_grad_norm_ = before
