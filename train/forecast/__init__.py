"""The bytes that a sharded step keeps and sends, and the FLOPs of owners, before any
process is started. Nothing that trains imports this room.
"""

from train.forecast.models import Job
from train.forecast.step import Forecast, forecast

__all__ = ["Forecast", "Job", "forecast"]
