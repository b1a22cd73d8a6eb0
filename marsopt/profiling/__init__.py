"""The cost of a compiled step: graphs, breaks, recompiles, kernels, bytes, seconds.

``marsopt.profile(...)`` is the function, from ``profiler.py``, and ``python -m
marsopt.profile`` the command, from ``command.py``; the types that the function returns
are here (``from marsopt.profiling import Report``).
"""

from marsopt.profiling.compile_log import Break, Graph, Kernel, Recompile
from marsopt.profiling.table import Report

__all__ = ["Break", "Graph", "Kernel", "Recompile", "Report"]
