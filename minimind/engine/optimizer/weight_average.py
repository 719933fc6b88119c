"""Exponential moving average of the fp32 weights, sharded like them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from minimind.engine.optimizer.state import ZeroState
from minimind.runtime.collectives import lost_peers

_lerp_each: Any = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage] (not listed)


class HasState(Protocol):
    """A backend."""

    def state(self) -> ZeroState:
        """This rank's fp32 weights and moments."""
        ...


class WeightAverage:
    """average = decay x average + (1 - decay) x weights after every step; starts at the weights.

    After n steps the decay is at most (1 + n) / (10 + n), so that the random start is forgotten.
    """

    def __init__(self, backend: HasState, decay: float) -> None:
        self._backend, self._decay = backend, decay
        trained = [f.owner for f in backend.state().fragments if not f.is_frozen]
        self._owners = [*{id(owner): owner for owner in trained}.values()]
        self._values = [owner.detach().clone() for owner in self._owners]

    @property
    def values(self) -> Mapping[int, Tensor]:
        """The average by the id of the tensor it is the average of."""
        return {id(owner): v for owner, v in zip(self._owners, self._values, strict=True)}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights after `step`, counted from 0, into the average."""
        decay = min(self._decay, (1 + step) / (10 + step))
        _lerp_each(self._values, self._owners, 1 - decay)

    def state(self) -> ZeroState:
        """The backend's state with the average."""
        return replace(self._backend.state(), averages=self.values)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Let the model compute with the average inside the block (collective).

        An exception ends the run and leaves the average in force: swapping back would wait for
        ranks that are gone.
        """
        self._swap()
        yield
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        state = self._backend.state()
        with lost_peers():
            state.prepare()
        for owner, value in zip(self._owners, self._values, strict=True):
            weights = owner.detach().clone()
            owner.copy_(value)
            value.copy_(weights)
        with lost_peers():
            state.refresh()
