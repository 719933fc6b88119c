"""One optimizer step over all ranks, on whichever backend engine.py has built."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from minimind.config.deepspeed.resolve import Resolved
from minimind.engine.collective_clock import CommunicationClock
from minimind.engine.deepspeed_backend import Backend
from minimind.engine.loss_of_batch import (
    CompileClock,
    mean_routing,
    objective_of,
    positions_at_once,
    uncompiled,
)
from minimind.engine.phase_clock import PhaseClock
from minimind.engine.plain_backend import StepResult
from minimind.runtime.collectives import Ranks, lost_peers


class Engine(Ranks):
    """Takes optimizer steps over all ranks, on one of the backends."""

    def __init__(
        self, backend: Backend, resolved: Resolved, device: torch.device, parameters: int
    ) -> None:
        super().__init__(timedelta(seconds=resolved.run.dist_timeout))
        self.backend = backend
        self.parameters = parameters  # of the whole model; stage 3 leaves each rank a piece
        self.resolved = resolved
        self.device = device
        self.loss_chunk_size = positions_at_once(resolved.run)
        self.compiling = CompileClock(resolved.run)

    @property
    def model(self) -> Any:
        """The model inside the engine."""
        return self.backend.module

    def watched(self) -> CommunicationClock:
        """A clock by which collectives are timed from now on."""
        clock = CommunicationClock(self.device)
        self.backend.watch(clock)
        return clock

    def release(self) -> None:
        """Let go of what outlives the run in this process: a notebook goes on."""
        self.backend.release()

    def seed(self, step: int) -> None:
        """Reseed torch for one step, so that no random state needs to be in a checkpoint."""
        mixed = ((self.resolved.run.seed * 1_000_003 + step) * 4_099 + self.rank) % 2**63
        # Not torch.manual_seed, which goes through devices of every kind each time.
        torch.default_generator.manual_seed(mixed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(mixed)

    def step(
        self, micro_batches: Sequence[torch.Tensor], lr: float, clock: PhaseClock
    ) -> StepResult:
        """One optimizer step over this rank's micro-batches, each (B, T + 1) token ids.

        The learning rate is set first: at the last micro-batch DeepSpeed reduces, clips and
        updates. Rows are packed: no target is ignored, and every micro-batch on every rank has as
        many; only therefore is the mean over micro-batches and ranks the mean over tokens.
        """
        backend = self.backend
        used, skipped_before = backend.begin(lr), backend.skipped_steps
        norm, routings, sums, counts = None, [], [], []
        with lost_peers():
            for number, rows in enumerate(micro_batches, 1):
                is_last = number == len(micro_batches)
                with backend.micro_batch(is_last):
                    rows = rows.to(self.device, non_blocking=True)
                    clock.mark("data")
                    goal = objective_of(
                        backend.forward, rows[:, :-1], rows[:, 1:], self.loss_chunk_size
                    )
                    clock.mark("forward")
                    backend.backward(goal.trained)
                    clock.mark("backward")
                norm = backend.update(is_last)
                clock.mark("optimizer", is_last)
                routings.append(goal.routing)
                sums.append(goal.loss_sum.detach())
                counts.append(goal.tokens)
        skipped = backend.skipped_steps
        return StepResult(
            tuple(sums),
            tuple(counts),
            norm,
            used,
            skipped,
            skipped > skipped_before,
            mean_routing(routings),
        )

    @torch.no_grad()
    def loss_of(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(summed loss, target count) of rows (B, T + 1) without training on them."""
        self.backend.forward.eval()
        rows = rows.to(self.device)
        inputs = rows[:, :-1].clamp(min=0)  # what is ignored still needs real inputs
        # Of few rows, and of several shapes: a graph would not pay.
        with lost_peers(), uncompiled(self.model):
            goal = objective_of(self.backend.forward, inputs, rows[:, 1:], self.loss_chunk_size)
        return goal.loss_sum, goal.tokens
