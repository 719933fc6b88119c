"""What the processes of a run use between two step lines; no collective and no wait."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil
import torch

from minimind.runtime.device import device_kind
from minimind.runtime.environment import usable_cores
from minimind.runtime.heartbeat import registered_workers


class Usage:
    """CPU time of the ranks of this host; memory and GPU of this rank."""

    def __init__(self, device: torch.device) -> None:
        """Begin to count. The other ranks are registered by now, or left out."""
        self._device = device
        self._own = psutil.Process()
        pids = {self._own.pid, *(worker.pid for worker in registered_workers())}
        self._ranks: list[psutil.Process] = []
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                self._ranks.append(psutil.Process(pid))
        device_kind(device).busy_percent(device)  # the driver's library opens before the steps
        self._last = (time.perf_counter(), self._cpu_seconds())

    def since_last(self) -> dict[str, float]:
        """Fields of a step event. What the device does not tell is left out."""
        (began, used), self._last = self._last, (time.perf_counter(), self._cpu_seconds())
        share = (self._last[1] - used) / max(1e-9, self._last[0] - began) / usable_cores()
        kind = device_kind(self._device)
        reserved, busy = kind.reserved_memory(self._device), kind.busy_percent(self._device)
        return {
            "cpu_percent": max(0.0, 100 * share),
            "host_memory_gib": self._own.memory_info().rss / 2**30,
            **({} if reserved is None else {"gpu_memory_gib": reserved / 2**30}),
            **({} if busy is None else {"gpu_percent": busy}),
        }

    def _cpu_seconds(self) -> float:
        """Of the ranks, in ticks of 10 ms, and of their children that have ended."""
        seconds = 0.0
        for rank in self._ranks:
            with suppress(psutil.NoSuchProcess):  # the run is about to end
                seconds += sum(rank.cpu_times()[:4])
        return seconds
