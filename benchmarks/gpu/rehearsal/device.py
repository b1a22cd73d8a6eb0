"""A GPU that is not there: within ``h100()`` torch, inductor and Triton are told that
one H100 is present, so that whatever runs over fake CUDA tensors takes a GPU's path.
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

CAPABILITY = (9, 0)
NUM_PROCESSORS = 132  # by which inductor splits reductions
# NVIDIA H100 SXM5, as torch.cuda.get_device_properties gives it
H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=NUM_PROCESSORS,
    total_memory=80 * 2**30,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=227 * 1024,
    shared_memory_per_multiprocessor=228 * 1024,
    L2_cache_size=50 * 2**20,
    is_integrated=0,
    is_multi_gpu_board=0,
    gcnArchName="",
    uuid="0",
)

GUARD = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
struct Nothing final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  // a backward pass looks up streams by the index of their device, and its events wait
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, getDevice());
  }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Nothing)

// autograd asks which accelerator there is, for the stream of what it sums; torch has
// taken its default answers, an object without fields, while it was imported
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
const auto* placed =
    new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;
}
"""


@functools.cache
def _allow_fakes() -> None:
    """Let a torch without CUDA take fake CUDA tensors: in-place copies ask for a device
    guard, which FakeTensorMode replaces only where a build has one, and backward passes
    for an accelerator with streams. It holds until the process ends.
    """
    if torch.backends.cuda.is_built():
        return
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        compiler = [os.environ.get("CXX", "g++"), "-std=c++20", "-shared", "-fPIC"]
        places = [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
        made = [str(source), "-o", str(library)]
        subprocess.run([*compiler, *made, *places], check=True)
        ctypes.CDLL(str(library))


class Event:
    """An event that is never over: who waits for it would wait for the GPU."""

    def __init__(self, *args, **kwargs) -> None: ...

    def record(self, stream=None) -> None: ...

    def wait(self, stream=None) -> None: ...

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise RuntimeError("the host waits for an event of the GPU")


class NoGuard:
    """A change of the current device, where there is one alone."""

    def __init__(self, *args) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *args) -> None: ...


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
    """Return what inductor asks of Triton's driver."""
    from triton.backends.compiler import GPUTarget

    found = dict(
        max_shared_mem=H100.shared_memory_per_block_optin,
        multiprocessor_count=NUM_PROCESSORS,
        warpSize=32,
    )
    return types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_device_capability=lambda *args: CAPABILITY,
        utils=types.SimpleNamespace(get_device_properties=lambda device: found),
        is_active=lambda: True,
    )


def _answers() -> dict[str, object]:
    """Return what torch.cuda says, by name."""
    return dict(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _lazy_init=lambda: None,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda *args: None,
        synchronize=lambda *args: None,
        get_device_properties=lambda *args: H100,
        get_device_capability=lambda *args: CAPABILITY,
        get_device_name=lambda *args: H100.name,
        is_bf16_supported=lambda *args, **kwargs: True,
        is_current_stream_capturing=lambda: False,
        get_rng_state=lambda *args: torch.zeros(16, dtype=torch.uint8),
        set_rng_state=lambda *args: None,
        _exchange_device=lambda *args: 0,
        _maybe_exchange_device=lambda *args: 0,
        Event=Event,
    )


@contextlib.contextmanager
def h100(*, triton: bool = True) -> Iterator[None]:
    """Let torch answer as if one H100 were there.

    Args:
        triton: whether Triton is here, and told too; without it nothing can be
            compiled, but eager code runs over fake CUDA tensors.
    """
    from torch._dynamo import device_interface
    from torch._inductor.constant_folding import ConstantFolder
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses import fake_tensor
    from torch.utils import _triton

    _allow_fakes()
    answers, cuda = _answers(), device_interface.CudaInterface
    of_interface = {k: v for k, v in answers.items() if k in vars(cuda)}
    del of_interface["is_available"]
    of_interface["get_raw_stream"] = lambda device: 0
    workers = device_interface.caching_worker_device_properties
    fakes = fake_tensor.FakeTensorMode
    never = property(lambda self: True)
    patches = [
        *(mock.patch.object(torch.cuda, k, v) for k, v in answers.items()),
        *(
            mock.patch.object(cuda, k, v if k == "Event" else staticmethod(v))
            for k, v in of_interface.items()
        ),
        mock.patch.dict(workers, {"cuda": [H100]}),
        mock.patch.dict(device_interface.caching_worker_current_devices, {"cuda": 0}),
        # it would make a context, and fake tensors stay fake
        mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None),
        mock.patch.object(fakes, "avoid_device_init", never),
        # dynamo asks for the current stream where an accelerator is there
        mock.patch.object(torch.accelerator, "is_available", lambda: False),
    ]
    for folder, name in (
        (UniformValueConstantFolder, "__init__"),
        (ConstantFolder, "run"),
    ):
        patches.append(mock.patch.object(folder, name, _on_host(getattr(folder, name))))
    if triton:
        from triton.runtime.driver import driver

        patches += [
            mock.patch.object(driver, name, _driver())
            for name in ("_active", "_default")
        ]
        patches.append(
            mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None)
        )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        # what they said before holds for the machine as it is
        for cached in vars(_triton).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
                stack.callback(cached.cache_clear)
        yield
