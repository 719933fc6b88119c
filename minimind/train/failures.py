"""Steps without a finite loss or gradient, and memory that is not enough.

A backend skips by the gradient that all ranks have reduced. All ranks skip the same steps, so the
code for skipped steps may be collective. Out of memory names a micro-batch that fits.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minimind.architecture.shape import shape_of
from minimind.config.deepspeed.backend_choice import Setup
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.flags import ALONE
from minimind.config.run_config import RunConfig
from minimind.data.rows.order import Order
from minimind.engine.engine import StepResult, token_ids
from minimind.errors import MemoryFull, NumericError, which_memory
from minimind.report.run_logger import RunLogger
from minimind.runtime.collectives import Ranks
from minimind.runtime.device import CUDA, HOST, device_kind
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
            batch = token_ids(micro_batches[number]).tolist()
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


ALLOCATION = re.compile(r"tried to allocate ([0-9.]+ [A-Za-z]+)", re.IGNORECASE)


@contextmanager
def report_out_of_memory(setup: Setup, resolved: ResolvedConfig) -> Iterator[None]:
    """Convert a failed allocation inside the block into MemoryFull; other errors pass unchanged."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        where = which_memory(error)
        if not where:
            raise
        raise MemoryFull(_message(error, where, setup, resolved)) from error


def _message(error: BaseException, where: str, setup: Setup, resolved: ResolvedConfig) -> str:
    run, world_size = resolved.run, setup.launch.world_size
    allocation = ALLOCATION.search(str(error))
    tried = f" (tried to allocate {allocation[1]})" if allocation else ""
    micro_batch = (
        f"{run.micro_batch_rows(world_size)} rows (--batch_size {run.batch_size}"
        f"{', --split_batches' if run.split_batches else ''}) x {run.max_seq_len} tokens"
        f" (--max_seq_len {run.max_seq_len})"
    )
    if device_kind(setup.device).pins and where == "host":
        return (
            f"the host is out of memory{tried}, not the GPU; give --no-async_save, which saves"
            " without a copy of the training state in host memory, or start fewer processes here"
        )
    return f"the {where} is out of memory{tried} with a micro-batch of {micro_batch}; " + (
        remedy(run, resolved, world_size, setup.device, _capacity(setup))
    )


def _capacity(setup: Setup) -> int:
    """Memory of one process in bytes: that of its GPU, or its share of the host's."""
    kind = device_kind(setup.device)
    return kind.memory() // (setup.launch.local_world_size if kind is HOST else 1)


def remedy(
    run: RunConfig, resolved: ResolvedConfig, world_size: int, device: str, memory: int
) -> str:
    """Return the change that makes the step fit, by the estimate of `minimind plan`."""
    recompute = "" if run.gradient_checkpointing else ", or give --gradient_checkpointing"
    if run.hugging_face is not None or run.tensor_parallel > 1:
        why = " (`minimind plan` does not count models of transformers)" if run.hugging_face else ""
        change = "halve --batch_size and double --accumulation_steps"
        if run.global_batch_size is not None:  # --batch_size may be far above the micro-batch
            change = f"give --batch_size {max(1, run.micro_batch_rows(world_size) // 2)}"
        return f"{change}, which leaves the step as it is{recompute}{why}"
    from minimind.architecture import costs
    from minimind.architecture.plan import (
        GIB,
        batch_flags,
        fits,
        largest_step,
        layout_of,
        name_of,
        recommend,
    )

    shape, current = shape_of(run), layout_of(run, world_size, resolved.config, device)
    needed = costs.memory(shape, current)
    estimate = f"`minimind plan` counts {needed.total / GIB:.2f} GiB for it, of {memory / GIB:.2f}"
    if fits(needed, memory):
        free = "end other processes, or raise the limit on this one (ulimit -v, the container's)"
        if device == CUDA.name:
            free = "end other processes on this GPU (nvidia-smi lists them)"
            if "expandable_segments:True" not in os.environ.get("PYTORCH_ALLOC_CONF", ""):
                free += ", or set PYTORCH_ALLOC_CONF=expandable_segments:True against fragmentation"
        elif device_kind(device).shares_memory:
            free = "end other programs, whose memory the GPU shares"
        return f"{estimate}, which should fit: {free}{recompute}"
    if best := largest_step(shape, current, memory):
        return f"{estimate}; {' '.join(batch_flags(run, best).values())} fits{recompute}"
    if device not in ALONE and (best := recommend(shape, current, memory)):
        flags = " ".join(batch_flags(run, best).values())
        return f"{estimate}; {name_of(best)} with {flags} fits (docs/memory.md)"
    return f"{estimate}, and nothing fits; lower --dim, --n_layers or --max_seq_len"
