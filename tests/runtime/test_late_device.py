"""The late device itself: what it holds back, and what it computes once it is waited for."""

from __future__ import annotations

import pytest
import torch

from tools.late_device import DEVICE, LATE, Event, Stream, late_device


@pytest.mark.parametrize("holds", [True, False])
def test_what_is_computed_is_what_a_cpu_computes(holds: bool):
    def losses(device: torch.device) -> list[float]:
        torch.manual_seed(0)
        layers = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 4), torch.nn.SiLU()
        model = torch.nn.Sequential(*layers, torch.nn.Linear(4, 7)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        found = []
        for step in range(5):
            rows = (torch.arange(10) * step % 7).to(device)
            loss = torch.nn.functional.cross_entropy(model(rows), rows)
            loss.backward()
            found += [loss.detach(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)]
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(found).tolist()

    on_cpu = losses(torch.device("cpu"))
    with late_device(holds):
        assert losses(DEVICE) == on_cpu


def test_a_copy_has_what_its_source_has_when_the_stream_reaches_it():
    with late_device():
        source = torch.ones(3)
        copy = source.to(DEVICE, non_blocking=True)
        source.fill_(2)
        assert copy.tolist() == [2, 2, 2]
        waited = source.to(DEVICE)
        source.fill_(3)
        assert waited.tolist() == [2, 2, 2]


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_destination_has_its_old_values_before_the_wait(is_waited_for: bool):
    with late_device():
        there = torch.zeros(2).copy_(torch.ones(2).to(DEVICE), non_blocking=True)
        arrived = Event(DEVICE)
        arrived.record()
        if is_waited_for:
            arrived.synchronize()
        assert there.tolist() == [float(is_waited_for)] * 2


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_stream_waits_for_another_by_an_event_and_the_host_does_not(is_waited_for: bool):
    with late_device():
        beside, arrived = Stream(DEVICE), Event(DEVICE, enable_timing=True)
        LATE.set_stream(beside)
        values = torch.ones(2).to(DEVICE, non_blocking=True)
        arrived.record()
        LATE.set_stream(LATE.main)
        if is_waited_for:
            LATE.main.wait_event(arrived)
        doubled = values * 2
        assert not beside.is_done()
        assert doubled.tolist() == [2.0 * is_waited_for] * 2
        assert beside.is_done() == is_waited_for


def test_a_stream_that_is_not_held_works_by_itself():
    with late_device(holds=False):
        there = torch.zeros(2).copy_(torch.ones(2).to(DEVICE), non_blocking=True)
        with LATE.main._changed:
            assert LATE.main._changed.wait_for(LATE.is_done, 60)
        assert there.tolist() == [1, 1]


def test_an_event_that_was_not_reached_has_no_time():
    with late_device():
        start, end = Event(DEVICE, enable_timing=True), Event(DEVICE, enable_timing=True)
        start.record()
        torch.ones(2).to(DEVICE, non_blocking=True).add_(1)
        end.record()
        with pytest.raises(RuntimeError, match="device not ready"):
            start.elapsed_time(end)
        end.synchronize()
        assert start.elapsed_time(end) == 2.0


def test_an_error_on_the_device_is_raised_by_the_waits_after_it():
    with late_device():
        row = torch.tensor([9]).to(DEVICE)
        found = torch.nn.functional.embedding(row, torch.ones(3, 2).to(DEVICE))
        for _ in range(2):
            with pytest.raises(IndexError):
                found.tolist()
