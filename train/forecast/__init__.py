"""What a sharded step will send, compute, hold and take, before any process is started.

Memory and messages are recorded: the step itself runs on tensors without memory, as one
rank among many that are not there. FLOPs are counted, activations are a formula, and
times are a model (docs/scaling.md). Nothing that trains imports this room.
"""

from train.forecast.activations import Blocks, MicroBatch
from train.forecast.models import Job
from train.forecast.step import Forecast, Hardware, forecast, sweep

__all__ = [
    "Blocks", "Forecast", "Hardware", "Job", "MicroBatch", "forecast", "sweep"
]  # fmt: skip
