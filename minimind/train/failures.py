"""Steps without a finite loss or gradient.

A backend skips by the gradient that all ranks have reduced. All ranks skip the same steps, so the
code for skipped steps may be collective.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minimind.config.run_config import RunConfig
from minimind.data.rows.order import Order
from minimind.engine.engine import StepResult, token_ids
from minimind.errors import NumericError
from minimind.report.run_logger import RunLogger
from minimind.runtime.collectives import Ranks
from minimind.runtime.durable_files import storing

ROWS_FILE = "nonfinite_rows.jsonl"
MAX_ROWS = 64  # dumped per rank and step: if the weights are not finite, every row is affected
MAX_PENDING = 64  # steps whose flags stay on the device


@dataclass(frozen=True)
class NonfiniteRows:
    """Rows of micro-batches with a loss that is not finite, from the first rank that reads them."""

    rows: list[dict[str, Any]]
    rows_left_out: int


@dataclass
class SkippedSteps:
    """Checks every step; writes the rows of skipped ones to `out_dir`/nonfinite_rows.jsonl.

    In float16 consecutive skips are counted, since the last resume: there a skip is how the loss
    scaler finds its scale. Elsewhere all skips of the run are counted.
    """

    run: RunConfig
    ranks: Ranks
    order: Order
    batches_at: Callable[[int], Sequence[torch.Tensor]]  # this rank's micro-batches, by step
    decode: Callable[[list[int]], str]
    logger: RunLogger
    consecutive: int = 0
    pending: list[tuple[int, StepResult]] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """File of the dumped rows."""
        return Path(self.run.out_dir) / ROWS_FILE

    def check(self, step: int, result: StepResult, is_due: bool = True) -> None:
        """Log a skipped step and dump its rows; raise NumericError on every rank if too many.

        Flags that are on a device are read together, if `is_due` or MAX_PENDING steps wait.
        """
        if not isinstance(result.is_skipped, torch.Tensor):
            return self._check(step, result, result.is_skipped)
        self.pending.append((step, result))
        if is_due or len(self.pending) == MAX_PENDING:
            pending, self.pending = self.pending, []
            flags = torch.stack([torch.as_tensor(result.is_skipped) for _, result in pending])
            for (number, result), is_skipped in zip(pending, flags.tolist(), strict=True):
                self._check(number, result, is_skipped)

    def _check(self, step: int, result: StepResult, is_skipped: bool) -> None:
        self.consecutive = self.consecutive + 1 if is_skipped else 0
        if not is_skipped:
            return
        losses = torch.stack(result.loss_sums).isfinite().tolist()
        numbers = [number for number, is_finite in enumerate(losses) if not is_finite]
        bad = {rank: own for rank, own in enumerate(self.ranks.gather(numbers)) if own}
        by_rank = self.ranks.gather(self._rows_of_group(step, bad))
        reason = "loss" if bad else "gradient"
        if self.ranks.rank == 0:
            with storing(str(self.path), "correct the path of --out_dir"):
                with open(self.path, "a", encoding="utf-8") as file:
                    for line in self._lines(step, reason, by_rank):
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.logger.event("step_skipped", step=step, reason=reason, ranks=list(bad))
        is_fp16 = self.run.dtype == "float16"
        count = self.consecutive if is_fp16 else int(result.skipped_so_far)
        cause = "the gradient is not finite, though every loss is"
        if bad:
            ranks = (f"rank {rank} (micro-batch {_join(numbers)})" for rank, numbers in bad.items())
            cause = f"the loss is not finite on {', '.join(ranks)}"
        message = f"step {step} is skipped: {cause}; {count} {'in a row' if is_fp16 else 'in all'}"
        limit = self.run.max_skipped
        if count <= limit:
            return self.logger.print(f"{message}, {limit} are allowed (--max_skipped)")
        scale = "a lower fp16.initial_scale_power, " if is_fp16 else ""
        raise NumericError(
            f"{message}, more than max_skipped = {limit} ({self.run.sources['max_skipped']}); look"
            f" at the rows in {self.path} and take bad text out of the data, or go back to the last"
            f" checkpoint with {scale}a lower --learning_rate or --grad_clip (and --allow_change"
            " lr), or with a higher --max_skipped",
            cause_rank=min(bad, default=0),
        )

    def _rows_of_group(self, step: int, bad: Mapping[int, list[int]]) -> NonfiniteRows:
        """Rows of this rank's group whose loss is not finite on any of its ranks."""
        order, parallel = self.order.of(step - 1), self.run.parallel(self.ranks.world_size)
        data_rank, data_size = parallel.data_rank(self.ranks.rank), parallel.data_size
        of_group = {n for rank in bad if parallel.data_rank(rank) == data_rank for n in bad[rank]}
        if not (of_group and parallel.is_first(self.ranks.rank)):
            return NonfiniteRows([], 0)
        first = order.positions(step - 1).start + order.share(data_rank, data_size).start
        indices = order.rows_for(step - 1, data_rank, data_size).tolist()
        rows, micro_batches = [], self.batches_at(step - 1)
        for number in sorted(of_group):
            batch = token_ids(micro_batches[number][:, : self.run.max_seq_len + 1]).tolist()
            places = range(number * len(batch), len(indices))  # those after it are padding
            for at, tokens in zip(places, batch, strict=False):
                place = {"micro_batch": number, "position": first + at, "row": indices[at]}
                rows.append({**place, "loss": None, "tokens": tokens})
        return NonfiniteRows(rows[:MAX_ROWS], len(rows[MAX_ROWS:]))

    def _lines(
        self, step: int, reason: str, by_rank: list[NonfiniteRows]
    ) -> Iterator[dict[str, Any]]:
        positions = self.order.positions(step - 1)
        if reason == "gradient":  # after the reduction its rank is unknown
            yield {"step": step, "reason": reason, "positions": [positions.start, positions.stop]}
        for rank, own in enumerate(by_rank):
            for row in own.rows:
                text = self.decode(row["tokens"])
                yield {"step": step, "reason": reason, "rank": rank, **row, "text": text}
            if own.rows_left_out:
                yield {"step": step, "rank": rank, "rows_left_out": own.rows_left_out}


def _join(numbers: list[int]) -> str:
    text = ", ".join(map(str, numbers[:4]))
    return f"{text} and {len(numbers) - 4} more" if len(numbers) > 4 else text
