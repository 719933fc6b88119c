"""A pretended CUDA device in a CPU build of torch, as a plugin of pytest.

    PRETENDED_CUDA=LIBRARY python -m pytest -p tools.pretended.device FILE

LIBRARY is cuda.cpp, compiled. torch keeps the hooks of CUDA that it finds when it is imported, so
the library comes first, and stays: the process has to be one of its own.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

_torch = find_spec("torch")
assert _torch
assert _torch.submodule_search_locations
for _name in ("libc10.so", "libtorch_cpu.so"):
    _path = os.path.join(_torch.submodule_search_locations[0], "lib", _name)
    ctypes.CDLL(_path, ctypes.RTLD_GLOBAL)
_LIBRARY = ctypes.CDLL(os.environ["PRETENDED_CUDA"])

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from minimind.runtime.device import CUDA
from tools.host_reads import needs_values, origin

aten = torch.ops.aten
NAME = "NVIDIA H100 80GB HBM3"
PROPERTIES = SimpleNamespace(name=NAME, major=9, minor=0, total_memory=80 * 2**30)
# What torch.cuda answers, which a CPU build lacks.
ANSWERS: dict[str, Any] = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_properties": PROPERTIES,
    "get_device_capability": (9, 0),
    "get_device_name": NAME,
    "is_bf16_supported": True,
    "max_memory_allocated": 2**30,
    "memory_reserved": 2**30,
    "_lazy_init": None,
    "manual_seed": None,
    "manual_seed_all": None,
    # Asked by Accelerate and DeepSpeed.
    "set_device": None,
    "empty_cache": None,
    "reset_peak_memory_stats": None,
    "memory_allocated": 2**30,
    "is_current_stream_capturing": False,
}
for _name, _answer in ANSWERS.items():
    setattr(torch.cuda, _name, lambda *_, answer=_answer, **__: answer)
for _name in ("range_push", "range_pop"):
    setattr(torch.cuda.nvtx, _name, lambda *_: None)
for _name in ("synchronize", "current_stream", "set_stream"):
    setattr(torch.cuda, _name, getattr(torch.accelerator, _name))
torch.cuda.Stream, torch.cuda.Event = torch.Stream, torch.Event
# Parameters that move stay the same objects, as on a GPU: they are tied.
torch.__future__.set_swap_module_params_on_conversion(True)
torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is a copy
FakeTensor.tolist = lambda self: self.cpu().tolist()  # torch's reads the elements one by one


class Fake(FakeTensorMode):
    """torch's mode, for several threads."""

    _of_thread = threading.local()

    @property
    def avoid_device_init(self) -> bool:
        """This build has no CUDA."""
        return True

    @property
    def in_kernel_invocation(self) -> bool:
        """Whether this thread is in a kernel, for which fake tensors are on "meta"."""
        return getattr(self._of_thread, "in_kernel", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, is_in: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride] (torch's attribute)
        self._of_thread.in_kernel = is_in


class Device(TorchDispatchMode):
    """The device, as a context: "cuda" tensors are fake, and CPU tensors have values.

    An operator on tensors of both raises. What the host reads is made by `values` from an empty
    tensor of that shape and dtype. `reads` counts, by origin, reads and other copies that are
    waited for; `on_cpu` operators that computed more than a scalar on the CPU; `draws` those that
    drew random numbers on the device.
    """

    def __init__(self, values: Callable[[Tensor], Tensor] = torch.zeros_like) -> None:
        super().__init__()
        self.values = values
        self._fake = Fake(allow_non_fake_inputs=True)
        self._lock = threading.RLock()  # FakeTensorMode is not made for several threads
        self._waits = ctypes.c_int64.in_dll(_LIBRARY, "pretended_waits")
        self.forget()

    def forget(self) -> None:
        """Count from now on."""
        self.reads: Counter[str] = Counter()
        self.on_cpu: Counter[str] = Counter()
        self.draws: Counter[str] = Counter()
        self._waits_before = self._waits.value

    @property
    def waits(self) -> int:
        """How often the host waited for an event, a stream or the whole device."""
        return self._waits.value - self._waits_before

    def use(self, device: torch.device) -> None:
        """In place of `Cuda.use`: a thread that does not call it finds no CUDA."""
        type(CUDA).use(CUDA, device)
        if _get_current_dispatch_mode() is None:
            self.__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        is_here = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        target = kwargs.get("device")
        if func is aten.record_stream.default:  # there is no memory to be kept
            return None
        if is_here and needs_values(func, args):
            self.reads[origin()] += 1  # and raises
        if func is aten._local_scalar_dense.default and is_here:
            self.reads[origin()] += 1
            return func(self._values_of(args[0]))
        if func is aten.allclose.default and is_here:
            self.reads[origin()] += 1
            return func(*(self._values_of(tensor) for tensor in args[:2]), **kwargs)
        if func is aten._to_copy.default and is_here and target == torch.device("cpu"):
            if not kwargs.get("non_blocking"):  # else torch pins the copy
                self.reads[origin()] += 1
            return func(self._values_of(args[0]), **kwargs)
        if func is aten._to_copy.default and not is_here and target and target.type == "cuda":
            self._count_copy(args[0], kwargs.get("non_blocking", False))
            sent = args[0]
            with self._lock, self._fake:
                args = (torch.empty_strided(sent.shape, sent.stride(), dtype=sent.dtype),)
        elif func is aten.copy_.default and is_here:
            to, source = args[:2]
            non_blocking = kwargs.get("non_blocking", args[2:] == (True,))
            if not isinstance(to, FakeTensor):
                self._count_copy(to, non_blocking)
                return func(to, self._values_of(source))
            if not isinstance(source, FakeTensor):
                self._count_copy(source, non_blocking)
        elif not is_here and (target is None or target.type != "cuda"):
            found = func(*args, **kwargs)
            if any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(found)):
                self.on_cpu[origin()] += 1
            return found
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws[origin()] += 1
        with self._lock, self._fake:
            found = func(*args, **kwargs)
            # Its weak references to tensors would keep parameters from being swapped.
            self._fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
            return found

    def _values_of(self, tensor: Tensor) -> Tensor:
        return self.values(torch.empty(tensor.shape, dtype=tensor.dtype))

    def _count_copy(self, on_host: Tensor, non_blocking: bool) -> None:
        """A copy between host and device is waited for, unless the host's memory is pinned."""
        if not (non_blocking and on_host.is_pinned()):
            self.reads[origin()] += 1
