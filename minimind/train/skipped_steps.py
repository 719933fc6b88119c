"""Steps that were skipped because a loss or gradient was no number: told, dumped, and limited.

The backends skip, by the gradient that all ranks have reduced together. So all of them skip the
same step, and what stands here behind "if skipped" may be collective.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minimind.config.run_config import RunConfig
from minimind.data.loader.row_order import Order
from minimind.engine.plain_backend import StepResult
from minimind.errors import NumericError
from minimind.runtime.collectives import Ranks
from minimind.runtime.durable_files import storing
from minimind.telemetry.progress import RunLogger

ROWS_FILE = "nonfinite_rows.jsonl"
# Dumped of one rank and step: where the weights themselves are at fault, every row seems to be.
MOST_ROWS = 64
MOST_UNREAD = 64  # steps, whose losses are kept until they are looked at


@dataclass(frozen=True)
class NonfiniteRows:
    """One rank's micro-batches whose loss was not finite, and their rows as they were read."""

    micro_batches: list[int]
    rows: list[dict[str, Any]]
    rows_left_out: int


@dataclass
class SkippedSteps:
    """Looks at every step; of those that were skipped `out_dir`/nonfinite_rows.jsonl has the rows.

    Only float16 counts in a row, and from 0 after a resume: there a skipped step is how the loss
    scaler finds its scale, elsewhere it is a fault.
    """

    run: RunConfig
    ranks: Ranks
    order: Order
    batches_at: Callable[[int], Sequence[torch.Tensor]]  # this rank's micro-batches, by step
    text_of: Callable[[list[int]], str]
    logger: RunLogger
    in_a_row: int = 0
    unread: list[tuple[int, StepResult]] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """Where the rows are dumped."""
        return Path(self.run.out_dir) / ROWS_FILE

    def look(self, step: int, result: StepResult, is_due: bool = True) -> None:
        """Nothing for a step that was taken; one that was skipped is told, its rows dumped.

        A NumericError on every rank once there are more than `max_skipped`. Where only the device
        knows of it, steps are looked at together, when `is_due` or they are many.
        """
        if not isinstance(result.is_skipped, torch.Tensor):
            return self._look_at(step, result, result.is_skipped)
        self.unread.append((step, result))
        if is_due or len(self.unread) == MOST_UNREAD:
            unread, self.unread = self.unread, []
            flags = torch.stack([torch.as_tensor(one.is_skipped) for _, one in unread])
            for (number, one), is_skipped in zip(unread, flags.tolist(), strict=True):
                self._look_at(number, one, is_skipped)

    def _look_at(self, step: int, result: StepResult, is_skipped: bool) -> None:
        self.in_a_row = self.in_a_row + 1 if is_skipped else 0
        if not is_skipped:
            return
        found = self.ranks.gather(self._at_fault(step, result.loss_sums))
        at_fault = {rank: own.micro_batches for rank, own in enumerate(found) if own.micro_batches}
        reason = "loss" if at_fault else "gradient"
        if self.ranks.rank == 0:
            with storing(str(self.path), "free some space, or mend the path of --out_dir"):
                with open(self.path, "a", encoding="utf-8") as file:
                    for line in self._lines(step, reason, found):
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.logger.event("step_skipped", step=step, reason=reason, ranks=list(at_fault))
        told = f"step {step} is skipped: {_told(at_fault)}"
        in_fp16 = self.run.dtype == "float16"
        count = self.in_a_row if in_fp16 else int(result.skipped_so_far)
        told += f"; {count} {'in a row' if in_fp16 else 'in all'}"
        if count > self.run.max_skipped:
            raise NumericError(f"{told}, {self._way_out()}", cause_rank=min(at_fault, default=0))
        self.logger.print(f"{told}, {self.run.max_skipped} are allowed (--max_skipped)")

    def _at_fault(self, step: int, losses: Sequence[torch.Tensor]) -> NonfiniteRows:
        order, rank, world_size = self.order, self.ranks.rank, self.ranks.world_size
        first = order.positions(step - 1).start + order.rows_per_step // world_size * rank
        indices = order.rows_for(step - 1, rank, world_size).tolist()
        bad = [number for number, loss in enumerate(losses) if not math.isfinite(float(loss))]
        rows, micro_batches = [], self.batches_at(step - 1) if bad else []
        for number in bad:
            batch = micro_batches[number].tolist()
            for at, tokens in enumerate(batch, number * len(batch)):
                place = {"micro_batch": number, "position": first + at, "row": indices[at]}
                rows.append({**place, "loss": None, "tokens": tokens})
        return NonfiniteRows(bad, rows[:MOST_ROWS], len(rows[MOST_ROWS:]))

    def _lines(self, step: int, reason: str, found: list[NonfiniteRows]) -> Iterator[dict[str, Any]]:
        positions = self.order.positions(step - 1)
        if reason == "gradient":  # of which nobody can tell after its reduction whose it was
            yield {"step": step, "reason": reason, "positions": [positions.start, positions.stop]}
        for rank, own in enumerate(found):
            for row in own.rows:
                text = self.text_of(row["tokens"])
                yield {"step": step, "reason": reason, "rank": rank, **row, "text": text}
            if own.rows_left_out:
                yield {"step": step, "rank": rank, "rows_left_out": own.rows_left_out}

    def _way_out(self) -> str:
        run = self.run
        scale = "a lower fp16.initial_scale_power, " if run.dtype == "float16" else ""
        return (
            f"more than max_skipped = {run.max_skipped} ({run.sources['max_skipped']}); look at the"
            f" rows in {self.path} and take bad text out of the data, or go back to the last"
            f" checkpoint with {scale}a lower --learning_rate or --grad_clip (and --allow_change"
            " lr), or with a higher --max_skipped"
        )


def _told(at_fault: dict[int, list[int]]) -> str:
    """Which ranks and micro-batches, counted from 0, had a loss that was not finite."""
    numbers = (f"rank {rank} (micro-batch {_listed(bad)})" for rank, bad in at_fault.items())
    if at_fault:
        return f"the loss is not finite on {', '.join(numbers)}"
    return "the gradient is not finite, though every loss is"


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return f"{shown} and {len(numbers) - 4} more" if len(numbers) > 4 else shown
