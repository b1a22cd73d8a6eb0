"""Makes torchtitan 0.3.0 run where there is no accelerator, Triton or torch 2.14.

torchtitan reads the device once, when ``torchtitan.tools.utils`` is imported, and many
modules copy what it found.
"""

import importlib.util
import os
import resource
import sys
import types
from unittest import mock

import torch
import torch._utils
import torch.distributed


class _CpuDevice(types.ModuleType):
    """torch.cpu, and the calls that torchtitan makes of torch.cuda beyond it."""

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0  # torch.cpu's is "cpu", and barrier(device_ids=...) wants a number

    def get_device_name(self, device=None) -> str:
        return "cpu"

    def get_device_properties(self, device=None) -> types.SimpleNamespace:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return types.SimpleNamespace(name="cpu", total_memory=memory)

    def reset_peak_memory_stats(self, device=None) -> None: ...

    def empty_cache(self) -> None: ...

    def memory_stats(self, device=None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found = dict.fromkeys(("num_alloc_retries", "num_ooms"), 0)
        return found | {f"{of}_bytes.all.peak": peak for of in ("active", "reserved")}


class _NeedsTriton(types.ModuleType):
    """Mixture-of-experts kernels that torchtitan imports for every model."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args, **kwargs):
            raise RuntimeError(f"{self.__name__}.{name} needs triton: install it")

        return missing


def prepare() -> None:
    """Prepare this process for torchtitan; a second call changes nothing."""
    if importlib.util.find_spec("triton") is None:
        for name in (
            "torchtitan.models.moe.kernels",
            "torchtitan.distributed.minimal_async_ep.kernels",
        ):
            sys.modules.setdefault(name, _NeedsTriton(name))
    if not hasattr(torch.distributed, "set_timeout"):  # public from torch 2.14
        from torch.distributed.distributed_c10d import _set_pg_timeout

        torch.distributed.set_timeout = _set_pg_timeout
    if torch._utils._get_available_device_type() is None:
        device = _CpuDevice("torchtitan_cpu_device")
        told = {
            "_get_available_device_type": lambda: "cpu",
            "_get_device_module": lambda _: device,
        }
        with mock.patch.multiple(torch._utils, **told):
            import torchtitan.tools.utils  # noqa: F401
