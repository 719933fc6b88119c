"""Observes the steps of a run for --spike_guard, and names the documents of spikes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from minimind.checkpoint.resume import Resumed
from minimind.config.run_config import RunConfig
from minimind.data.loader.batches import Batches
from minimind.data.prepare.prepare import Prepared, missing_of
from minimind.engine.build import Engine
from minimind.engine.plain_backend import StepResult
from minimind.errors import DataError
from minimind.provenance.documents import Documents, Place, place_json
from minimind.provenance.step_rows import Stretch, rows_at
from minimind.recovery.spike_detector import Observed, SpikeDetector, SpikeState
from minimind.runtime.checked_json import validate
from minimind.telemetry.progress import RunLogger

SUSPECTS = 3  # rows named by an event
MOST_BYTES = 2**28  # of a file up to a document that is looked for: a second


class HeldStep:
    """A step whose loss is read when the next one has been queued, so that a GPU never waits."""

    def __init__(self, step: int, result: StepResult, norm_limit: float) -> None:
        self.step, self.result, self.norm_limit = step, result, norm_limit
        self._event: torch.cuda.Event | None = None
        norm = math.nan if result.grad_norm is None else result.grad_norm
        if result.tokens.device.type == "cuda":
            device = result.tokens.device
            values = [result.loss_sum, result.tokens, torch.as_tensor(norm, device=device)]
            self._values = torch.empty(3, dtype=torch.float64, pin_memory=True)
            self._values.copy_(torch.stack([v.double() for v in values]), non_blocking=True)
            self._event = torch.cuda.Event()
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
    """Observes every step, one step late; without a detector it does nothing.

    Every rank calls the same methods, since naming the rows of a spike is collective.
    """

    detector: SpikeDetector | None
    options: dict[str, Any]  # factor, window and max_rollbacks; empty: off
    engine: Engine
    batches: Batches
    prepared: Prepared
    row_tokens: int
    micro_batch_rows: int
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
        rows = run.micro_batch_rows(engine.world_size)
        guard = cls(None, run.guard, engine, batches, prepared, run.max_seq_len + 1, rows, logger)
        return guard.restored(batches, resumed)

    def restored(
        self, batches: Batches, resumed: Resumed, rollbacks: int | None = None
    ) -> SpikeGuard:
        """The guard as of a checkpoint; raise CheckpointError if its state there is invalid.

        After an allowed change, of the data for example, the window starts empty: values before
        and after cannot be compared.
        """
        if not self.options:
            return replace(self, batches=batches)
        state = None if resumed.changed else resumed.manifest.get("spikes")
        if state is not None:
            validate(SpikeState, state, "spikes.")
        detector = SpikeDetector(self.options["factor"], self.options["window"], state)
        detector.rollbacks = detector.rollbacks if rollbacks is None else rollbacks
        held = Observed(**state["last"]) if state and state["last"] else None
        return replace(self, batches=batches, detector=detector, held=held)

    @property
    def norm_limit(self) -> float:
        """Gradient norm above which the next update is skipped."""
        return self.detector.norms.limit if self.detector else math.inf

    def own_sums(self) -> list[float]:
        """This rank's summed loss and targets of the held step, to be summed over ranks.

        Last its norm, of rank 0 alone: where every rank computes the norm, the last bits may
        differ, and all have to decide alike.
        """
        if self.detector is None:
            return []
        if not isinstance(self.held, HeldStep):
            return [0.0, 0.0, 0.0]
        loss_sum, targets, norm = self.held.values()
        return [loss_sum, targets, 0.0 if self.engine.rank else norm]

    def observe(self, sums: Sequence[float]) -> bool:
        """Observe the held step; whether the run must go back. `sums` is over all ranks."""
        if self.detector is None or self.held is None:
            return False
        seen, limit = self._seen(sums), self.detector.losses.limit
        if self.detector.observe(seen):
            self._log_spike(seen, limit)
        return self.detector.must_go_back

    def hold(self, step: int, result: StepResult, norm_limit: float) -> None:
        """Hold a step for the next call of `observe`; `step` counts from 0."""
        if self.detector:
            self.held = HeldStep(step, result, norm_limit)

    def state(self) -> dict[str, Any]:
        """Fields of a checkpoint's manifest (collective)."""
        if self.detector is None:
            return {}
        seen = self.held and self._seen(self.engine.sum_over_ranks(self.own_sums()))
        return {"spikes": self.detector.state(seen)}

    def _seen(self, sums: Sequence[float]) -> Observed:
        held = self.held
        if not isinstance(held, HeldStep):
            assert held is not None
            return held
        loss = sums[0] / max(sums[1], 1.0)
        return Observed(held.step, _finite(loss), _finite(sums[2]), _finite(held.norm_limit))

    def _log_spike(self, seen: Observed, loss_limit: float) -> None:
        """Log a spike with the rows of the highest loss (collective)."""
        assert self.detector is not None
        rows = self.highest_rows()
        name = "spike_skipped" if seen.is_skipped else "spike"
        facts = {"loss": seen.loss, "grad_norm": seen.norm}
        limits = {"loss_limit": _finite(loss_limit), "norm_limit": seen.norm_limit}
        counts = {"in_a_row": self.detector.in_a_row, "skipped": self.detector.skipped}
        self.logger.event(name, step=seen.step + 1, **facts, **limits, **counts, rows=rows)
        what = f"loss {_text(seen.loss)}{_limit(limits['loss_limit'])}"
        what += f", gradient norm {_text(seen.norm)}{_limit(seen.norm_limit)}"
        is_made = seen.norm is not None and not seen.is_skipped
        end = "update made" if is_made else "update skipped"
        self.logger.print(f"spike at step {seen.step + 1}: {what}; {end}{_where(rows)}")

    def highest_rows(self) -> list[dict[str, Any]]:
        """Rows with the highest loss of the held step, highest first, with their documents.

        Each rank looks at its micro-batch with the highest loss, with the weights of now.
        """
        if not isinstance(self.held, HeldStep):  # the last step of a checkpoint
            return []
        engine, order, step = self.engine, self.batches.order, self.held.step
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
        before = engine.data_rank * len(means) * self.micro_batch_rows  # rows of other ranks
        first = order.positions(step).start + before
        own = []
        for at, row in enumerate(self.batches.at(step)[number], number * self.micro_batch_rows):
            loss_sum, targets = engine.loss_of(row[None])
            own.append((_finite(float(loss_sum) / max(float(targets), 1.0)), first + at))
        if not engine.parallel.is_first(engine.rank):  # the first one has the same rows
            own = []
        rows = [row for part in engine.gather(own) for row in part]
        rows.sort(key=lambda row: -(math.inf if row[0] is None else row[0]))
        if engine.rank:
            return []
        return self._described(step, rows[:SUSPECTS])

    def _described(self, step: int, rows: list[tuple[float | None, int]]) -> list[dict[str, Any]]:
        """Row number, loss and documents of some positions."""
        order, sizes = self.batches.order, (self.engine.parallel, self.micro_batch_rows)
        if missing_of(self.prepared.directory):  # prepared by an earlier version
            return [{"row": None, "loss": loss, "documents": []} for loss, _ in rows]
        stretch = Stretch(range(step + 1, step + 2), order, self.row_tokens, *sizes, {})
        by_position = {
            row.position: row for row in rows_at(stretch, self._documents, step + 1, None)
        }
        places = self._places({part.document for _, at in rows for part in by_position[at].parts})
        found = []
        for loss, at in rows:
            parts = by_position[at].parts
            documents = [
                {"document": part.document, **place_json(places.get(part.document))}
                for part in parts
            ]
            found.append({"row": by_position[at].row, "loss": loss, "documents": documents})
        return found

    def _places(self, documents: set[int]) -> dict[int, Place]:
        """Where documents are in the text, if that is soon found: the other ranks wait.

        `minimind data at` finds the others, and says which text is gone or changed.
        """
        units = self._documents.plan.units
        near = {
            one
            for number, numbers in self._documents.numbers.items()
            for one in documents
            if one in numbers and max(part.stop for part in units[number].segments) <= MOST_BYTES
        }
        try:
            return self._documents.places(near)
        except (OSError, DataError):
            return {}

    @cached_property
    def _documents(self) -> Documents:
        return Documents.of(self.prepared)


def _where(rows: list[dict[str, Any]]) -> str:
    """`; highest loss 14.2 in row 17 (a.jsonl:512)`: the first row and its documents."""
    if not rows:
        return ""
    first = rows[0]
    places = [f"{one['file']}:{one['line']}" for one in first["documents"] if one["file"]]
    named = f" ({', '.join(places[:3])})" if places else ""
    return f"; highest loss {_text(first['loss'])} in row {first['row']}{named}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _limit(value: float | None) -> str:
    """` (limit 3.1)`; empty while the window fills."""
    return "" if value is None else f" (limit {value:.4g})"


def _text(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
