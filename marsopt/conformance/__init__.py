"""Is this MARS? A port of the authors' optimizer beside recordings of their code.

    python -m marsopt.conformance package.module:Class --option mars_type=adamw

docs/conformance.md says how, also for ports to other frameworks.
"""

try:
    import numpy  # noqa: F401
    import safetensors  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"got no {error.name}, expected NumPy and safetensors, which only "
        "marsopt.conformance needs: pip install 'torch-marsopt[conformance]'"
    ) from error

from marsopt.conformance.candidate import Adapted
from marsopt.conformance.deviations import DEVIATIONS
from marsopt.conformance.probes import cases
from marsopt.conformance.recordings import AUTHORS, Case
from marsopt.conformance.verdict import Departure, Kind, Report, check, judge

__all__ = [
    "AUTHORS",
    "DEVIATIONS",
    "Adapted",
    "Case",
    "Departure",
    "Kind",
    "Report",
    "check",
    "judge",
    "cases",
]
