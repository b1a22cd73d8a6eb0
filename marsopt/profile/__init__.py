"""What a compiled step costs: graphs, breaks, recompiles, kernels, bytes, seconds.

``marsopt.profile(...)`` is the function, from ``profiler.py``. This package has what it
returns (``from marsopt.profile import Report``) and ``python -m marsopt.profile``.
"""

from marsopt.profile.compile_log import Break, Graph, Kernel, Recompile
from marsopt.profile.table import Report

__all__ = ["Break", "Graph", "Kernel", "Recompile", "Report"]
