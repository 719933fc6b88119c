"""How long collectives are under way: spans by hand, DDP's hook, and a wrapped backend."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from minimind.engine.clocks import COLLECTIVES, CommunicationClock

CPU = torch.device("cpu")


class FixedClock:
    """A clock whose moments are given."""

    def __init__(self, moments: list[float]) -> None:
        self.moments = iter(moments)

    def __call__(self) -> float:
        return next(self.moments)


def test_time_in_which_several_are_under_way_counts_once(monkeypatch):
    clock = CommunicationClock(CPU)
    # [1, 3], [2, 4] overlap; [6, 6.5] is apart; seconds in, milliseconds out
    monkeypatch.setattr(time, "perf_counter", FixedClock([3.0, 4.0, 6.5]))
    for started in (1.0, 2.0, 6.0):
        clock.add(started)
    assert clock.take() == pytest.approx(3500.0)
    assert clock.take() == 0.0


class Backend:
    """In the place of DeepSpeed's: one collective that blocks, one that is waited for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def all_reduce(self, tensor: Any, group: Any = None) -> None:
        self.calls.append((tensor, group))
        time.sleep(0.002)

    def broadcast(self, tensor: Any) -> Any:
        outer = self

        class Work:
            def wait(self) -> str:
                outer.calls.append(tensor)
                time.sleep(0.002)
                return "waited"

            def is_completed(self) -> bool:
                return True

        return Work()


def test_a_backends_collectives_are_timed_from_the_call_to_the_end_of_the_wait():
    clock, backend = CommunicationClock(CPU), Backend()
    clock.watch_deepspeed(backend)
    assert backend.all_reduce("gradient", group="all") is None
    assert backend.calls == [("gradient", "all")]
    assert 1.9 < clock.take() < 1000
    work = backend.broadcast("weights")
    assert work.is_completed()
    assert clock.take() == 0.0  # not through yet
    assert work.wait() == "waited"
    assert clock.take() > 1.9
    assert not hasattr(backend, "all_gather")  # what it lacks it does not get


def test_a_backend_is_left_as_it_was_found():
    backend = Backend()
    vars(backend)["broadcast"] = own = backend.broadcast  # somebody else watches it too
    clock = CommunicationClock(CPU)
    clock.watch_deepspeed(backend)
    assert "all_reduce" in vars(backend)
    clock.release()
    assert vars(backend) == {"calls": [], "broadcast": own}
    clock.release()  # once more, or without anything watched, is nothing
    CommunicationClock(CPU).release()
    backend.all_reduce("gradient")
    assert clock.take() == 0.0


def test_the_names_are_those_of_deepspeeds_backend():
    from deepspeed.comm.torch import TorchBackend  # noqa: TID251 (its names are what is tested)

    assert [name for name in COLLECTIVES if not hasattr(TorchBackend, name)] == []


def test_ddp_with_the_hook_has_the_gradients_of_ddp_without(group):
    found = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(4, 4), gradient_as_bucket_view=True)
        clock = CommunicationClock(CPU)
        if is_watched:
            clock.watch_ddp(model)
        model(torch.ones(2, 4)).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert (clock.take() > 0) is is_watched
    for plain, watched in zip(*found, strict=True):
        assert torch.equal(plain, watched)
