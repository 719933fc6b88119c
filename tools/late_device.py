"""A device that is late on purpose: what it is asked for is done by threads, in CPU memory.

A tensor on it has the type `lazy`, which no code of torch uses here and whose backward passes run
in the calling thread. Its memory is there at once, the values come when its stream reaches the
operation. A held stream does nothing until somebody waits for it, so that a wait that is missing
shows by what was in memory before, in every run. A stream that is not held works by itself.

`late_device` puts it below minimind/runtime/device.py, of which nothing is replaced.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from minimind.runtime.device import KINDS, Accelerator
from tools.host_reads import origin

COPY_SECONDS = 0.002  # of a copy between host and device on a stream that is not held
PATIENCE = 60.0  # seconds until a wait counts as a deadlock
NAME = "lazy"
DEVICE = torch.device(NAME, 0)
aten: Any = torch.ops.aten


def nothing() -> None: ...


class Stream:
    """A queue and its thread. An operation takes 1 ms of the stream's own clock."""

    def __init__(self, device: torch.device | None = None) -> None:
        assert device in (None, DEVICE)
        self.is_held = LATE.holds
        self.clock = 0.0  # ms
        self._queue: list[Callable[[], None]] = []
        self._done = self._wanted = 0  # operations
        self._is_over = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="late stream", daemon=True)
        self._thread.start()
        LATE.streams.append(self)

    def put(self, work: Callable[[], None]) -> int:
        """Queue an operation and return its place."""
        with self._changed:
            self._queue.append(work)
            self._changed.notify_all()
            return len(self._queue)

    def wait(self, place: int) -> None:
        """Wait until what is queued up to `place` is done."""
        with self._changed:
            self._wanted = max(self._wanted, place)
            self._changed.notify_all()
            ended = self._changed.wait_for(lambda: self._error or self._done >= place, PATIENCE)
            if self._error:
                raise self._error
            assert ended, "a deadlock of streams"

    def synchronize(self) -> None:
        self.wait(len(self._queue))

    def wait_event(self, event: Event) -> None:
        """Let what is queued from now on wait for the event; the host does not."""

        def wait() -> None:
            event.synchronize()
            self.clock = max(self.clock, event.reached or 0.0)

        self.put(wait)

    def wait_stream(self, other: Stream) -> None:
        """Let what is queued from now on wait for what is queued on the other."""
        event = Event()
        event.record(other)
        self.wait_event(event)

    def __enter__(self) -> None:
        self._before = LATE.current_stream()
        LATE.set_stream(self)

    def __exit__(self, *_: Any) -> None:
        LATE.set_stream(self._before)

    def is_done(self) -> bool:
        return self._done == len(self._queue)

    def close(self) -> None:
        """End the thread, with whatever is left."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join(PATIENCE)

    def _may_go_on(self) -> bool:
        last = self._wanted if self.is_held else len(self._queue)
        return self._is_over or self._done < last

    def _work(self) -> None:
        LATE.own.stream = self
        while True:
            with self._changed:
                self._changed.wait_for(self._may_go_on)
                if self._is_over:
                    return
                work = self._queue[self._done]
            try:
                work()
            except BaseException as error:  # raised by every later wait, as on a GPU
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            self._queue[self._done] = nothing  # drops what it has kept alive
            with self._changed:
                self._done += 1
                self._changed.notify_all()


class Event:
    """Has a time once its stream has reached it; asked earlier, it raises as CUDA does."""

    def __init__(self, device: Any = None, enable_timing: bool = False) -> None:
        assert torch.device(device or DEVICE).type == NAME
        self.reached: float | None = None
        self._stream: Stream | None = None
        self._place = 0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = recorded = stream or LATE.current_stream()

        def reach() -> None:
            self.reached = recorded.clock

        self._place = recorded.put(reach)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.wait(self._place)

    def elapsed_time(self, end: Event) -> float:
        if self.reached is None or end.reached is None:
            raise RuntimeError("device not ready")
        return end.reached - self.reached


class Block:
    """Memory of a tensor and its views, reused on its stream as soon as none of them is left."""

    def __init__(self, size: int) -> None:
        self._stream = LATE.current_stream()
        free = LATE.free[self._stream, size]
        self.memory = free.pop() if free else torch.full((size,), LATE.fresh, dtype=torch.uint8)
        self.readers: set[Stream] = set()  # other streams that it was recorded for

    def __del__(self) -> None:
        free, memory = LATE.free[self._stream, len(self.memory)], self.memory
        readers = [stream for stream in self.readers if not stream.is_done()]
        if readers:
            (reader,) = readers
            reader.put(lambda: free.append(memory))
        else:
            free.append(memory)


class LateTensor(torch.Tensor):
    """A tensor of the device: shape and memory at once, values later."""

    held: torch.Tensor
    block: Block
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor, block: Block) -> LateTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined] (not declared)
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held, made.block = held, block
        return made

    @classmethod
    def like(cls, wanted: torch.Tensor) -> LateTensor:
        """A new tensor with shape, strides and dtype of another."""
        last = sum((n - 1) * s for n, s in zip(wanted.shape, wanted.stride(), strict=True))
        elements = 0 if 0 in wanted.shape else last + 1
        block = Block(elements * wanted.dtype.itemsize)
        flat = block.memory.view(wanted.dtype)
        return cls(flat.as_strided(wanted.shape, wanted.stride()), block)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override] (of this device)
        self.block.readers.add(stream)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return dispatch(func, args, dict(kwargs or {}))


def held(value: Any) -> Any:
    return value.held if isinstance(value, LateTensor) else value


def on_meta(value: Any) -> Any:
    """A tensor without values, of the same shape and strides."""
    if not isinstance(value, torch.Tensor):
        return value
    value = held(value)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Do now what needs no values (a view), and queue the rest on the current stream."""
    stream = LATE.current_stream()
    inputs, options = tree_map(held, (args, {**kwargs, "device": torch.device("cpu")}))
    if "device" not in kwargs:
        options.pop("device")
    returned = [one.alias_info for one in func._schema.returns]
    if any(alias and not alias.is_write for alias in returned):
        (block,) = {one.block for one in tree_leaves(args) if isinstance(one, LateTensor)}
        return tree_map(lambda view: LateTensor(view, block), func(*inputs, **options))
    to_host = func is aten._to_copy.default and kwargs.get("device", DEVICE).type == "cpu"
    if func is aten._local_scalar_dense.default or to_host:
        found: list[Any] = []
        stream.put(lambda: found.append(func(*inputs, **options)))
        LATE.read(stream, args[0])
        return found[0]
    if all(alias and alias.is_write for alias in returned):  # also if it returns nothing
        outputs = args[0] if returned else None
        written: list[Any] = []
    else:
        assert not any(returned), func
        described = {**options, "device": torch.device("meta")} if "device" in kwargs else options
        shapes = func(*tree_map(on_meta, args), **tree_map(on_meta, described))
        outputs = tree_map(
            lambda one: LateTensor.like(one) if isinstance(one, torch.Tensor) else one, shapes
        )
        written = tree_map(held, tree_leaves(outputs))
    crosses = func is aten.copy_.default and not all(
        isinstance(one, LateTensor) for one in args[:2]
    )

    def work() -> None:
        if crosses and not stream.is_held:
            time.sleep(COPY_SECONDS)
        results = func(*inputs, **options)
        for place, values in zip(written, tree_leaves(results) if written else [], strict=True):
            if isinstance(place, torch.Tensor):
                place.copy_(values)
        stream.clock += 1.0

    stream.put(work)
    if crosses and not any(args[2:]) and not kwargs.get("non_blocking"):
        LATE.read(stream, args[1])
    return outputs


class Late:
    """State of the device: its streams, its free memory, and the current stream of each thread.

    `reads` has, by origin, whether a read of the host would have found another value if it did not
    wait; those of values that were there already are left out.
    """

    main: Stream  # of every thread that has set no other

    def __init__(self) -> None:
        self.reset(holds=True, fresh=0)

    def reset(self, holds: bool, fresh: int) -> None:
        self.holds = holds  # new streams
        self.fresh = fresh  # each byte of memory that was never used
        self.reads: defaultdict[str, bool] = defaultdict(bool)
        self.streams: list[Stream] = []
        self.free: defaultdict[tuple[Stream, int], list[torch.Tensor]] = defaultdict(list)
        self.own = threading.local()

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return getattr(self.own, "stream", self.main)

    def set_stream(self, stream: Stream) -> None:
        self.own.stream = stream

    def synchronize(self, device: torch.device | None = None) -> None:
        for stream in self.streams:
            stream.synchronize()

    def read(self, stream: Stream, source: torch.Tensor) -> None:
        """Wait for what the host reads of `source`, or for a copy of it that is not queued."""
        if not isinstance(source, LateTensor) or not stream.is_held:
            stream.synchronize()
            return
        before, is_late = (
            source.held.clone(),
            len(stream._queue) - stream._done > 1,
        )  # than this read
        stream.synchronize()
        if is_late:
            self.reads[origin()] |= not torch.equal(before, source.held)

    def is_done(self) -> bool:
        return all(stream.is_done() for stream in self.streams)

    def seconds(self) -> float:
        """The time of a host that has computed nothing itself: that of what it has waited for."""
        return self.main.clock / 1e3


LATE = Late()


def empty(size: Any, *given: Any, dtype: torch.dtype | None = None, **options: Any) -> LateTensor:
    return LateTensor.like(torch.empty(size, dtype=dtype, device="meta"))


def empty_strided(size: Any, stride: Any, dtype: Any = None, **options: Any) -> LateTensor:
    return LateTensor.like(torch.empty_strided(size, stride, dtype=dtype, device="meta"))


def arange(*given: Any, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    return torch.arange(*given, dtype=dtype).to(DEVICE)


def copy_from(source: torch.Tensor, to: LateTensor, non_blocking: bool = False) -> LateTensor:
    """For torch.tensor, which reaches the kernels of a device without __torch_dispatch__."""
    return dispatch(aten.copy_.default, (to, source, non_blocking), {})


def empty_or_pinned(
    allocate: Callable[..., torch.Tensor], *size: Any, pin_memory: bool = False, **options: Any
) -> torch.Tensor:
    """All host memory counts as pinned here; what is asked for as such is zero at first."""
    return torch.zeros(*size, **options) if pin_memory else allocate(*size, **options)


def unpinned(tensor: torch.Tensor, *device: Any) -> torch.Tensor:
    return tensor.clone()


def current_accelerator(check_available: bool = False) -> torch.device | None:
    """The device, but for torch's own check of graphs that are being captured on it."""
    return None if check_available else DEVICE


@contextmanager
def late_device(holds: bool = True, fresh: int = 0) -> Iterator[Late]:
    """The device as torch's accelerator; `holds`: its streams do nothing until waited for."""
    LATE.reset(holds, fresh)
    LATE.main = Stream()
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("empty.memory_format", empty, "Lazy")
    kernels.impl("empty_strided", empty_strided, "Lazy")
    kernels.impl("_copy_from", copy_from, "Lazy")
    kernels.impl("silu_backward", aten.silu_backward.default, "Lazy")  # else of several operations
    for overload in ("arange", "arange.start", "arange.start_step"):
        kernels.impl(overload, arange, "Lazy")
    module = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        manual_seed=lambda seed: None,
        get_device_name=lambda device: "late",
        max_memory_allocated=lambda device: 0,
        memory_reserved=lambda device: 0,
        current_device=lambda: 0,
        get_device_properties=lambda *number: SimpleNamespace(total_memory=2**34),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, NAME, Accelerator(NAME))
        patch.setitem(dist.Backend.default_device_backend_map, NAME, "gloo")
        patch.setattr(torch, NAME, module, raising=False)
        patch.setattr(torch, "Stream", Stream)
        patch.setattr(torch, "Event", Event)
        patch.setattr(torch, "empty", partial(empty_or_pinned, torch.empty))
        patch.setattr(torch.Tensor, "pin_memory", unpinned)
        for name in ("current_stream", "set_stream", "synchronize"):
            patch.setattr(torch.accelerator, name, getattr(LATE, name))
        patch.setattr(torch.accelerator, "set_device_index", lambda device: None)
        patch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
        fused = import_module("torch.optim.optimizer")
        patch.setattr(fused, "_get_fused_kernels_supported_devices", lambda: [NAME])
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)  # weights that are one stay one
        try:
            yield LATE
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
            for stream in LATE.streams:
                stream.close()
            kernels._destroy()
