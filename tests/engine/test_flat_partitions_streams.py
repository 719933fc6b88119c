"""Flat partitions without DeepSpeed: waits on a device that is late on purpose, and the check.

Each wait is right, and the result is wrong without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from minimind.engine.flat_partitions import FlatPartitions
from tools.late_device import DEVICE, LATE, Event, LateTensor, Stream, late_device

# Three weights: the first rank of two has the first and a part of the second.
SIZES, PARTITION = (6, 4, 6), 8
GRADIENTS = [torch.arange(1.0, size + 1) * 10**index for index, size in enumerate(SIZES)]
EXPECTED = torch.cat(GRADIENTS)[:PARTITION].tolist()


class Work:
    """A reduction that runs on the stream of the collectives, as NCCL's do."""

    def __init__(self, tensor: torch.Tensor, stream: Stream) -> None:
        self._event, self._tensor = Event(), tensor  # which lives until it was waited for
        self._event.record(stream)

    def wait(self) -> None:
        LATE.current_stream().wait_event(self._event)
        del self._tensor


class Collectives:
    """Collectives of rank 0 of two ranks with equal gradients."""

    def __init__(self) -> None:
        self._stream = Stream()

    def get_world_size(self, group: Any) -> int:
        return 2

    def get_rank(self, group: Any) -> int:
        return 0

    def all_reduce(self, tensor: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        queued = Event()
        queued.record()
        self._stream.wait_event(queued)
        with self._stream:
            tensor.mul_(2.0)
        work = Work(tensor, self._stream)
        return work if async_op else work.wait()


dist: Any = None  # as in DeepSpeed's module


def get_norm_dtype() -> torch.dtype:
    return torch.float64


class Zero(SimpleNamespace):
    """What flat partitions ask of DeepSpeed's wrapper."""

    def __init__(
        self, stage: int, overlaps: bool, bucket: int, device: torch.device = DEVICE
    ) -> None:
        params = [nn.Parameter(torch.zeros(size).to(device)) for size in SIZES]
        super().__init__(
            **{"dp_process_group": None, "bit16_groups": [params], "partition_size": [PARTITION]},
            **{"params_in_partition": [params[:2]], "round_robin_bit16_groups": [params]},
            **{"round_robin_bit16_offsets": [[0, 6, 10]], "partition_gradients": stage == 2},
            **{"overlap_comm": overlaps, "reduce_bucket_size": bucket, "_grad_acc_hooks": []},
            **{"gradient_average": True, "sequence_parallel_size": 1, "dtype": torch.float32},
            gradient_accumulation_steps=1,
            **{"device": device, "averaged_gradients": {}, "model_parallel_world_size": 1},
            **{"single_partition_of_fp32_groups": [torch.zeros(0)], "compute_grad_norm": True},
            is_gradient_accumulation_boundary=lambda: True,
            _backward_hook_state=SimpleNamespace(reset_for_new_step=None),
            _model_parallel_all_reduce=lambda tensor, op: None,
            create_gradient_handling_hooks=lambda: None,
        )


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with late_device(holds=True):
        monkeypatch.setitem(globals(), "dist", Collectives())
        yield


def backward(zero: Zero, of: dict[int, Stream], reuses: bool) -> None:
    """Give every weight its gradient, the last weight first, on its stream, and call its hooks.

    reuses: other streams have done their work, and take memory for more.
    """
    for index in reversed(range(len(SIZES))):
        p, main = zero.bit16_groups[0][index], LATE.current_stream()
        stream = of.get(index, main)
        with stream:
            p.grad = GRADIENTS[index].to(DEVICE, non_blocking=True) * 1.0
            for hook in (p._post_accumulate_grad_hooks or {}).values():
                hook(p)
            if reuses and stream is not main:
                other = [torch.full((size,), -1.0, device=DEVICE) for size in SIZES]
                stream.synchronize()
                del other
    for stream in of.values():  # as autograd does at the end of the backward pass
        ended = Event()
        ended.record(stream)
        LATE.current_stream().wait_event(ended)


def partition(zero: Zero, of: dict[int, Stream], reuses: bool = False) -> list[float]:
    """The gradients that DeepSpeed's `step` is given."""
    flat = FlatPartitions(zero)
    backward(zero, of, reuses)
    flat._end_backward()
    return zero.averaged_gradients[0].flat_partition.tolist()


LAYOUTS = [
    (1, False, 100),
    (1, True, 5),
    (2, False, 5),
    (2, True, 5),
    (2, True, 10),
    (2, True, 100),
]


@pytest.mark.parametrize(("stage", "overlaps", "bucket"), LAYOUTS)
@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize("others", [(), (1,), (0, 2), (0, 1, 2)], ids=str)
def test_gradients_of_any_stream_arrive(
    late: None, stage: int, overlaps: bool, bucket: int, others: tuple[int, ...], reuses: bool
):
    of = dict.fromkeys(others, Stream())
    assert partition(Zero(stage, overlaps, bucket), of, reuses) == EXPECTED


@pytest.mark.parametrize("bucket", [5, 10, 100])
def test_an_asynchronous_reduction_is_waited_for_before_the_copy_out_of_its_bucket(
    late: None, bucket: int, monkeypatch: pytest.MonkeyPatch
):
    assert partition(Zero(2, True, bucket), {}) == EXPECTED
    monkeypatch.setattr(Work, "wait", lambda work: None)  # planted
    assert partition(Zero(2, True, bucket), {}) != EXPECTED


def test_a_gradient_of_another_stream_is_waited_for(late: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Stream, "wait_stream", lambda stream, other: None)  # planted
    assert partition(Zero(2, True, 5), {1: Stream()}) != EXPECTED


def test_memory_of_a_gradient_of_another_stream_is_kept(
    late: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(LateTensor, "record_stream", lambda tensor, stream: None)  # planted
    side = Stream()
    assert partition(Zero(2, True, 10), {1: side, 0: side}, reuses=True) != EXPECTED


class Sums:
    """Those of the first of `ranks` with the same gradients; a larger sum is in another order."""

    ReduceOp = SimpleNamespace(MAX="max")

    def __init__(self, ranks: int, error: float) -> None:
        self._ranks, self._error = ranks, error

    def get_world_size(self, group: Any) -> int:
        return self._ranks

    def get_rank(self, group: Any) -> int:
        return 0

    def all_reduce(
        self, tensor: torch.Tensor, group: Any, op: str = "", async_op: bool = False
    ) -> None:
        if not op:
            tensor.mul_(self._ranks)
            if tensor.numel() > max(SIZES):  # a bucket
                tensor.mul_(1.0 + self._error)


EPS = torch.finfo(torch.float32).eps
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("ranks", "error", "value", "has_fallen_back"),
    [
        *((ranks, 0.0, value, False) for ranks in (2, 3, 8) for value in (1.0, 0.0, NAN, INF)),
        *((ranks, EPS, 1.0, ranks == 2) for ranks in (2, 3, 8)),
        *((ranks, 100 * EPS, value, True) for ranks in (2, 3, 8) for value in (1.0, NAN, INF)),
    ],
)
def test_sums_in_another_order_pass_among_more_than_two_ranks(
    ranks: int, error: float, value: float, has_fallen_back: bool, monkeypatch: pytest.MonkeyPatch
):
    """Also with a gradient that is not finite, which is in the same place."""
    monkeypatch.setitem(globals(), "dist", Sums(ranks, error))
    zero = Zero(2, False, 100, torch.device("cpu"))
    flat = FlatPartitions(zero, checked=1)
    given = [gradient.clone() for gradient in GRADIENTS]
    given[1][1] = value
    for p, gradient in zip(zero.bit16_groups[0], given, strict=True):
        p.grad = gradient.clone()
        for hook in p._post_accumulate_grad_hooks.values():
            hook(p)
    flat._end_backward()
    assert bool(flat.fault) == has_fallen_back
    expected = torch.cat(given)[:PARTITION]
    found = zero.averaged_gradients[0].flat_partition
    exact = 0.0 if has_fallen_back else error
    assert torch.allclose(found, expected, rtol=4 * exact, atol=0.0, equal_nan=True)
