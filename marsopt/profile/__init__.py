"""What a compiled step costs: graphs, breaks, recompiles, kernels, bytes, seconds."""

from marsopt.profile.compile_log import Break, Graph, Kernel, Recompile
from marsopt.profile.profiler import profile
from marsopt.profile.report import Report

__all__ = ["Break", "Graph", "Kernel", "Recompile", "Report", "profile"]
