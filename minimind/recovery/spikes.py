"""Decide which steps are spikes, by loss and gradient norm, and name their rows.

`SpikeGuard` observes the steps of a run with --spike_guard.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from minimind.checkpoint.resume import Resumed
from minimind.config.run_config import PATIENCE, RunConfig
from minimind.data.prepare.prepared import Prepared
from minimind.data.rows.batches import Batches
from minimind.engine.engine import Engine, StepResult
from minimind.report.run_logger import RunLogger
from minimind.runtime.checked_json import ClosedJson, Count, Real, validate
from minimind.runtime.device import device_kind, widened

MAD_TO_DEVIATION = 1.4826  # factor for a normal distribution
# Least deviations as shares of the median. The loss of a batch varies by some percent and a window
# may hold almost equal values; norms two or three times the median are common, and harmless.
LOSS_DEVIATION, NORM_DEVIATION = 0.02, 0.25


class Estimate:
    """The last values of a quantity, and the limit above which a value is far from them."""

    def __init__(
        self, factor: float, window: int, least: float, values: Iterable[float] = ()
    ) -> None:
        """`least` is the smallest deviation, as a share of the median."""
        self._factor, self._least = factor, least
        self.values = deque(values, maxlen=window)
        self.limit = self._compute()

    def add(self, value: float) -> None:
        """Add a value in place of the oldest."""
        self.values.append(value)
        self.limit = self._compute()

    def _compute(self) -> float:
        """Infinite until there are as many values as the window holds."""
        size = len(self.values)
        if size < (self.values.maxlen or 0):
            return math.inf
        values, middle = np.fromiter(self.values, np.float64, size), size // 2
        median = np.partition(values, middle)[middle]
        mad = np.partition(np.abs(values - median), middle)[middle]
        deviation = max(MAD_TO_DEVIATION * mad, self._least * median)
        return float(median + self._factor * deviation)


@dataclass(frozen=True)
class Observed:
    """Loss and gradient norm of a step over all ranks, and the norm limit of its update.

    `step` counts from 0, like the row order. Values that are not finite are None.
    """

    step: int
    loss: float | None
    norm: float | None
    norm_limit: float | None

    @property
    def is_skipped(self) -> bool:
        """Whether the update was skipped for its norm."""
        return self.norm is not None and self.norm > (self.norm_limit or math.inf)


class ObservedState(ClosedJson):
    """The last step in a checkpoint."""

    step: Count
    loss: Real | None
    norm: Real | None
    norm_limit: Real | None


Values = Annotated[list[Real], Field(max_length=10_000)]


class SpikeState(ClosedJson):
    """`spikes` of a checkpoint's manifest."""

    losses: Values
    norms: Values
    first: Count | None
    in_a_row: Count
    skipped: Count
    rollbacks: Count
    last: ObservedState | None


class SpikeDetector:
    """Observes steps in order, and counts what it decides."""

    def __init__(self, factor: float, window: int, state: dict[str, Any] | None = None) -> None:
        """Continue from `state`, a `SpikeState`, or begin."""
        state = state or {}
        self.losses = Estimate(factor, window, LOSS_DEVIATION, state.get("losses", ()))
        self.norms = Estimate(factor, window, NORM_DEVIATION, state.get("norms", ()))
        self.first: int | None = state.get("first")  # first of the spikes in a row
        self.in_a_row: int = state.get("in_a_row", 0)
        self.skipped: int = state.get("skipped", 0)  # updates since step 0
        self.rollbacks: int = state.get("rollbacks", 0)

    def observe(self, seen: Observed) -> bool:
        """Whether a step is a spike: loss or norm is above its limit, or not finite."""
        self.skipped += seen.is_skipped
        loss, norm = seen.loss, seen.norm
        if loss is None or norm is None or loss > self.losses.limit or seen.is_skipped:
            self.first = seen.step if self.first is None else self.first
            self.in_a_row += 1
            return True
        self.first, self.in_a_row = None, 0
        self.losses.add(loss)
        self.norms.add(norm)
        return False

    @property
    def must_go_back(self) -> bool:
        """Whether the spikes in a row are too many for skipping alone."""
        return self.in_a_row >= PATIENCE

    def state(self, last: Observed | None) -> dict[str, Any]:
        """Everything that later decisions depend on; `last` is a step not yet observed."""
        return {
            "losses": list(self.losses.values),
            "norms": list(self.norms.values),
            "first": self.first,
            "in_a_row": self.in_a_row,
            "skipped": self.skipped,
            "rollbacks": self.rollbacks,
            "last": last and asdict(last),
        }


SUSPECTS = 3  # rows named by an event
USUAL = 32  # rows before the spikes whose losses are the usual ones


class HeldStep:
    """A step whose loss is read when the next one has been queued, so that a GPU never waits."""

    def __init__(self, step: int, result: StepResult, norm_limit: float) -> None:
        self.step, self.result, self.norm_limit = step, result, norm_limit
        self._event: torch.Event | None = None
        norm = math.nan if result.grad_norm is None else result.grad_norm
        device = result.tokens.device
        if device_kind(device).pins:
            values = [result.loss_sum, result.tokens, torch.as_tensor(norm, device=device)]
            there = torch.stack([*map(widened, values)])
            self._values = torch.empty(3, dtype=there.dtype, pin_memory=True)
            self._values.copy_(there, non_blocking=True)
            self._event = torch.Event(device)
            self._event.record()
        else:
            numbers = float(result.loss_sum), float(result.tokens), float(norm)
            self._values = torch.tensor(numbers, dtype=torch.float64)

    def values(self) -> list[float]:
        """This rank's summed loss and targets, and the gradient norm."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


@dataclass
class SpikeGuard:
    """Observes every step, one step late.

    Every rank calls the same methods, since naming the rows of a spike is collective.
    """

    detector: SpikeDetector
    options: dict[str, Any]  # factor, window and max_rollbacks
    engine: Engine
    batches: Batches
    prepared: Prepared
    logger: RunLogger
    held: HeldStep | Observed | None = None  # the last step; Observed if it is of a checkpoint

    @classmethod
    def of(
        cls,
        run: RunConfig,
        engine: Engine,
        batches: Batches,
        prepared: Prepared,
        logger: RunLogger,
        resumed: Resumed,
    ) -> SpikeGuard:
        """The guard of a run that starts or resumes."""
        detector = SpikeDetector(run.guard["factor"], run.guard["window"])
        guard = cls(detector, run.guard, engine, batches, prepared, logger)
        return guard.restored(batches, resumed)

    def restored(
        self, batches: Batches, resumed: Resumed, rollbacks: int | None = None
    ) -> SpikeGuard:
        """The guard as of a checkpoint; raise CheckpointError if its state there is invalid.

        After an allowed change, of the data for example, the window starts empty: values before
        and after cannot be compared.
        """
        state = None if resumed.changed else resumed.manifest.get("spikes")
        if state is not None:
            validate(SpikeState, state, "spikes.")
        detector = SpikeDetector(self.options["factor"], self.options["window"], state)
        detector.rollbacks = detector.rollbacks if rollbacks is None else rollbacks
        last = Observed(**state["last"]) if state and state["last"] else None
        return replace(self, batches=batches, detector=detector, held=last)

    @property
    def norm_limit(self) -> float:
        """Gradient norm above which the next update is skipped."""
        return self.detector.norms.limit

    def own_sums(self) -> list[float]:
        """This rank's summed loss and targets of the held step, to be summed over ranks.

        The third number is the gradient norm of rank 0: ranks may differ in its last bits and must
        decide alike.
        """
        if not isinstance(self.held, HeldStep):
            return [0.0, 0.0, 0.0]
        loss_sum, targets, norm = self.held.values()
        return [loss_sum, targets, 0.0 if self.engine.rank else norm]

    def observe(self, sums: Sequence[float]) -> bool:
        """Observe the held step; whether the run must go back. `sums` is over all ranks."""
        if self.held is None:
            return False
        seen, limit = self._seen(sums), self.detector.losses.limit
        if self.detector.observe(seen):
            self._log_spike(seen, limit)
        return self.detector.must_go_back

    def hold(self, step: int, result: StepResult, norm_limit: float) -> None:
        """Hold a step for the next call of `observe`; `step` counts from 0."""
        self.held = HeldStep(step, result, norm_limit)

    def state(self) -> dict[str, Any]:
        """A `SpikeState` for a checkpoint (collective)."""
        seen = self.held and self._seen(self.engine.sum_over_ranks(self.own_sums()))
        return self.detector.state(seen)

    def _seen(self, sums: Sequence[float]) -> Observed:
        held = self.held
        if not isinstance(held, HeldStep):
            assert held is not None
            return held
        loss = sums[0] / max(sums[1], 1.0)
        return Observed(held.step, _finite(loss), _finite(sums[2]), _finite(held.norm_limit))

    def _log_spike(self, seen: Observed, loss_limit: float) -> None:
        """Log a spike with the rows whose own loss stands out (collective).

        The weights are to blame, and no row, where usual rows have such losses too.
        """
        highest = self.highest_rows()
        row_limit = self._row_limit() if highest else None
        outliers = [row for row in highest if row_limit is not None and row[0] > row_limit]
        rows = self._numbers_of(seen.step, outliers[:SUSPECTS])
        name = "spike_skipped" if seen.is_skipped else "spike"
        facts = {"loss": seen.loss, "grad_norm": seen.norm}
        limits = {"loss_limit": _finite(loss_limit), "norm_limit": seen.norm_limit}
        counts = {"in_a_row": self.detector.in_a_row, "skipped": self.detector.skipped}
        facts["row_loss"] = _finite(highest[0][0]) if highest else None
        limits["row_limit"] = row_limit and _finite(row_limit)
        self.logger.event(name, step=seen.step + 1, **facts, **limits, **counts, rows=rows)
        figures = f"loss {_text(seen.loss)}{_limit(limits['loss_limit'])}"
        figures += f", gradient norm {_text(seen.norm)}{_limit(seen.norm_limit)}"
        is_made = seen.norm is not None and not seen.is_skipped
        end = "update made" if is_made else "update skipped"
        if highest:
            what_row = f"{_text(facts['row_loss'])}{_limit(limits['row_limit'])}"
            end += (
                f"; highest loss {what_row} in row {rows[0]['row']}; `minimind data at` shows it"
                if rows
                else f"; no row stands out: the highest loss of a row is {what_row}"
            )
        self.logger.print(f"spike at step {seen.step + 1}: {figures}; {end}")

    def highest_rows(self) -> list[tuple[float, int]]:
        """Loss and position of rows of the held step, highest first, on every rank.

        Each rank looks at its micro-batch with the highest loss, with the weights of now; a loss
        that is not finite is infinite.
        """
        if not isinstance(self.held, HeldStep):  # the last step of a checkpoint
            return []
        engine, step = self.engine, self.held.step
        batches = self.batches.of(step)
        sums, counts = self.held.result.loss_sums, self.held.result.targets
        pairs = [(float(s), float(n)) for s, n in zip(sums, counts, strict=True)]
        # Ranks that share rows have to choose the same micro-batch.
        first_rank = engine.parallel.first_rank(engine.data_rank)
        group = engine.gather(pairs)[first_rank : first_rank + engine.parallel.group_size]
        means = []
        for shares in zip(*group, strict=True):
            loss_sum, targets = map(sum, zip(*shares, strict=True))
            means.append(loss_sum / max(targets, 1.0))
        number = max(
            range(len(means)), key=lambda n: means[n] if math.isfinite(means[n]) else math.inf
        )
        share = batches.order.share(engine.data_rank, engine.parallel.data_size)
        first = batches.order.positions(step).start + share.start
        begin = number * batches.micro_batch_rows
        # A forward pass may be collective, so that padding takes one too.
        losses = [self._loss_of(row) for row in self.batches.at(step)[number]]
        own = [*zip(losses, range(first + begin, first + len(share)), strict=False)]
        if not engine.parallel.is_first(engine.rank):  # the first one has the same rows
            own = []
        rows = [row for part in engine.gather(own) for row in part]
        return sorted(rows, key=lambda row: -row[0])

    def _loss_of(self, row: torch.Tensor) -> float:
        loss_sum, targets = map(float, self.engine.loss_of(row[None]))
        loss = loss_sum / max(targets, 1.0)
        return loss if math.isfinite(loss) else math.inf

    def _row_limit(self) -> float | None:
        """The loss from which a row stands out among the last ones before the spikes (collective).

        Decided as for steps, by the weights of now; None where there are no such rows.
        """
        engine, rows, step = self.engine, np.arange(0), self.detector.first or 0
        batches = self.batches.of(step)
        order = batches.order
        while step > order.origin.step and len(rows) < USUAL:
            step -= 1
            rows = np.concatenate([order.rows_for(step, 0, 1), rows])
        if not len(rows):
            return None
        # Every rank takes the same number of rows: a forward pass may be collective.
        size, rows = engine.parallel.data_size, rows[-USUAL:]
        places = np.resize(rows, -(-len(rows) // size) * size)[engine.data_rank :: size]
        read = self.prepared.train.read_rows(places, batches.row_tokens)
        parts = engine.gather([self._loss_of(row) for row in torch.from_numpy(read)])
        losses = [loss for part in parts for loss in part]
        if math.inf in losses:
            return math.inf
        return Estimate(self.options["factor"], len(losses), LOSS_DEVIATION, losses).limit

    def _numbers_of(self, step: int, rows: list[tuple[float, int]]) -> list[dict[str, Any]]:
        """Number and loss of the rows of `step` at these positions."""
        order = self.batches.of(step).order
        numbers, first = order.rows_for(step, 0, 1), order.positions(step).start
        return [{"row": int(numbers[at - first]), "loss": _finite(loss)} for loss, at in rows]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _limit(value: float | None) -> str:
    """` (limit 3.1)`; empty while the window fills."""
    return "" if value is None else f" (limit {value:.4g})"


def _text(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
