"""A GPU that is not there: within ``h100()`` torch, inductor and Triton are told that
one H100 is present, so that compiled steps over fake CUDA tensors take a GPU's path.
Nothing is launched and no driver is asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import subprocess
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

WARP = 32
# NVIDIA H100 SXM5, as torch.cuda.get_device_properties gives it
H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,  # by which inductor splits reductions
    total_memory=80 * 2**30,
    warp_size=WARP,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=227 * 1024,
    shared_memory_per_multiprocessor=228 * 1024,
    L2_cache_size=50 * 2**20,
)
CAPABILITY = (H100.major, H100.minor)

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(
    CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""


@functools.cache
def _allow_fakes() -> None:
    """Let a torch without CUDA take fake CUDA tensors, whose in-place copies ask for a
    device guard. It holds until the process ends.
    """
    if torch.backends.cuda.is_built():
        return
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        compiler = [os.environ.get("CXX", "g++"), "-std=c++20", "-shared", "-fPIC"]
        places = [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10"]
        command = [*compiler, str(source), "-o", str(library), *places]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library))


class _OnHost(TorchDispatchMode):
    """Makes on the CPU what inductor's constant folding makes on the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def host(value):
            on_gpu = isinstance(value, torch.device) and value.type == "cuda"
            return torch.device("cpu") if on_gpu else value

        args, kwargs = pytree.tree_map(host, (args, kwargs or {}))
        return func(*args, **kwargs)


def _on_host(method):
    @functools.wraps(method)
    def call(*args, **kwargs):
        with _OnHost():
            return method(*args, **kwargs)

    return call


def _driver() -> types.SimpleNamespace:
    """Return a stand-in for Triton's driver, which inductor asks for the target."""
    from triton.backends.compiler import GPUTarget

    return types.SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, WARP))


def _answers() -> dict[str, object]:
    """Return what torch.cuda says, by name."""
    return dict(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda *args: None,
        get_device_properties=lambda *args: H100,
        get_device_capability=lambda *args: CAPABILITY,
        get_device_name=lambda *args: H100.name,
        is_bf16_supported=lambda *args, **kwargs: True,
        is_current_stream_capturing=lambda: False,
        get_rng_state=lambda *args: torch.zeros(16, dtype=torch.uint8),
        set_rng_state=lambda *args: None,
        _exchange_device=lambda *args: 0,
        _maybe_exchange_device=lambda *args: 0,
        _DeviceGuard=lambda *args: contextlib.nullcontext(),
    )


@contextlib.contextmanager
def h100() -> Iterator[None]:
    """Let torch and Triton answer as if one H100 were there."""
    from torch._dynamo import device_interface
    from torch._inductor.constant_folding import ConstantFolder
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses import fake_tensor
    from torch.utils import _triton
    from triton.runtime.driver import driver

    _allow_fakes()
    answers, cuda = _answers(), device_interface.CudaInterface
    of_interface = {k: v for k, v in answers.items() if k in vars(cuda)}
    del of_interface["is_available"]
    of_interface["get_raw_stream"] = lambda device: 0
    never = property(lambda self: True)
    patches = [
        *((torch.cuda, name, answer) for name, answer in answers.items()),
        *((cuda, name, staticmethod(answer)) for name, answer in of_interface.items()),
        # it would make a context, and fake tensors stay fake
        (fake_tensor, "init_gpu_context", lambda device: None),
        (fake_tensor.FakeTensorMode, "avoid_device_init", never),
        # Dynamo asks for the current stream where an accelerator is there
        (torch.accelerator, "is_available", lambda: False),
        (
            UniformValueConstantFolder,
            "__init__",
            _on_host(UniformValueConstantFolder.__init__),
        ),
        (ConstantFolder, "run", _on_host(ConstantFolder.run)),
        (driver, "_active", _driver()),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        workers = device_interface.caching_worker_device_properties
        stack.enter_context(mock.patch.dict(workers, {"cuda": [H100]}))
        current = device_interface.caching_worker_current_devices
        stack.enter_context(mock.patch.dict(current, {"cuda": 0}))
        # what they said before holds for the machine as it is
        for cached in vars(_triton).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
                stack.callback(cached.cache_clear)
        yield
