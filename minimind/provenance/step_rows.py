"""Rows of a step, and steps of a document, from the log of a run.

Steps are numbered as in the log: step 1 is the first, and reads what the row order has at 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minimind.checkpoint.validation import Mixture as LoggedMixture
from minimind.checkpoint.validation import OrderOrigin
from minimind.data.loader.row_order import Mixture, Order, Origin
from minimind.data.prepare.prepare import Prepared, open_prepared
from minimind.errors import CheckpointError, DataError, UsageError
from minimind.provenance.documents import Documents
from minimind.report.records import Start, read_starts
from minimind.runtime.checked_json import CheckedJson, Count, Integer, Size, validate

WINDOW = 100  # logged steps of the running median


class LoggedOrder(CheckedJson):
    """`order` of a run_start."""

    rows: Size
    rows_per_step: Size
    row_tokens: Size
    seed: Integer
    origin: OrderOrigin
    mixture: LoggedMixture | None


class LoggedData(CheckedJson):
    """`data` of a run_start: the prepared folder, and inputs that have another name since."""

    directory: str
    fingerprint: str
    renamed: dict[str, str]


class LoggedStart(CheckedJson):
    """The part of a run_start that determines the rows of its steps."""

    step: Count
    total_steps: Count
    world_size: Size
    micro_batch_rows: Size
    order: LoggedOrder
    data: LoggedData


def logged_order(order: Order, row_tokens: int, prepared: Prepared) -> dict[str, Any]:
    """Fields of a run_start from which `read_run` knows the rows of its steps."""
    return {
        "order": {
            **{"rows": order.n_rows, "rows_per_step": order.rows_per_step, "seed": order.seed},
            **{"row_tokens": row_tokens, "origin": asdict(order.origin)},
            "mixture": order.mixture and asdict(order.mixture),
        },
        "data": {
            "directory": str(prepared.directory.absolute()),
            "fingerprint": prepared.manifest["fingerprint"],
            "renamed": {old: new for old, new in prepared.names.items() if old != new},
        },
    }


@dataclass(frozen=True)
class Stretch:
    """The steps of one start of a run that count: its own, up to a later resume."""

    steps: range
    order: Order
    row_tokens: int
    world_size: int
    micro_batch_rows: int
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """Tokens `start` to `stop` of a row, which belong to one document."""

    start: int
    stop: int
    document: int


@dataclass(frozen=True)
class Row:
    """A row of a step: who read it, its number, and its documents."""

    rank: int
    micro_batch: int
    position: int  # in the global row order
    row: int
    first_token: int  # of the training tokens
    parts: tuple[Part, ...]


def read_run(run_dir: Path) -> list[Stretch]:
    """The stretches of a run; UsageError if its log lacks them."""
    starts, _ = read_starts(run_dir)
    found = [_stretch(start, run_dir) for start in starts if not start.is_implied]
    if not found:
        raise UsageError(f"{run_dir}/metrics.jsonl: has no run_start; give the --out_dir of a run")
    return found


def _stretch(start: Start, run_dir: Path) -> Stretch:
    facts = start.facts
    try:
        validate(LoggedStart, facts)
        logged, mixed = facts["order"], facts["order"]["mixture"]
        mixture = mixed and Mixture(tuple(mixed["sizes"]), tuple(mixed["weights"]))
        origin, seed = Origin(**logged["origin"]), logged["seed"]
        order = Order(logged["rows"], logged["rows_per_step"], seed, origin, mixture)
    except (CheckpointError, ValueError) as error:
        raise UsageError(
            f"{run_dir}/metrics.jsonl: a run_start {error}; it was written by an earlier version,"
            " which did not log the row order"
        ) from error
    last = min(start.cutoff, facts["total_steps"])
    steps = range(facts["step"] + 1, int(last) + 1)
    sizes = facts["world_size"], facts["micro_batch_rows"]
    return Stretch(steps, order, logged["row_tokens"], *sizes, facts["data"])


def stretch_of(stretches: list[Stretch], step: int) -> Stretch:
    """The stretch with a step; UsageError if the run has no such step."""
    for stretch in reversed(stretches):
        if step in stretch.steps:
            return stretch
    last = max(stretch.steps.stop - 1 for stretch in stretches)
    raise UsageError(f"--step {step}: the run has steps 1 to {last}; give one of them")


def documents_of(stretch: Stretch) -> Documents:
    """Open the text of a stretch; DataError if the folder is gone or has changed."""
    directory = Path(stretch.data["directory"])
    prepared = open_prepared(directory)
    if prepared.manifest["fingerprint"] != stretch.data["fingerprint"]:
        raise DataError(
            f"{directory}: holds other text than the run was trained on; prepare that text again"
        )
    prepared.names.update(stretch.data["renamed"])
    return Documents.of(prepared)


def rows_at(stretch: Stretch, documents: Documents, step: int, rank: int | None) -> list[Row]:
    """The rows of a step in the global order; of one rank if it is given."""
    order, world = stretch.order, stretch.world_size
    if rank is not None and rank >= world:
        raise UsageError(f"--rank {rank}: step {step} had ranks 0 to {world - 1}; give one of them")
    share = order.rows_per_step // world
    rows = order.rows_for(step - 1, 0, 1)
    firsts = documents.prepared.train.row_starts(rows, stretch.row_tokens).tolist()
    before = order.positions(step - 1).start
    found = []
    for at, (row, first) in enumerate(zip(rows.tolist(), firsts, strict=True)):
        of_rank, within = divmod(at, share)
        if rank not in (None, of_rank):
            continue
        parts = tuple(_parts(documents, first, first + stretch.row_tokens))
        micro_batch = within // stretch.micro_batch_rows
        found.append(Row(of_rank, micro_batch, before + at, row, first, parts))
    return found


def _parts(documents: Documents, start: int, stop: int) -> list[Part]:
    found = []
    for number in documents.over(start, stop):
        first, last = documents.tokens(number)
        found.append(Part(max(first, start) - start, min(last, stop) - start, number))
    return found


def steps_reading(
    stretches: list[Stretch], documents: Documents, number: int
) -> list[tuple[int, int, int]]:
    """(step, rank, row) of every read of a document, in order; only of its text."""
    found = []
    start, stop = documents.tokens(number)
    for stretch in stretches:
        if stretch.data["fingerprint"] != documents.prepared.manifest["fingerprint"]:
            continue
        share = stretch.order.rows_per_step // stretch.world_size
        for row in documents.prepared.train.rows_over(start, stop, stretch.row_tokens):
            reads = stretch.order.reads_of(row, stretch.steps.stop - 1)
            found += [
                (at + 1, place // share, row) for at, place in reads if at + 1 in stretch.steps
            ]
    return sorted(found)


@dataclass(frozen=True)
class Suspect:
    """A document, and its steps: those above the running median of the loss, and all logged."""

    document: int
    above: int
    logged: int


def suspects(
    run_dir: Path, stretches: list[Stretch], documents: Documents, steps: range
) -> tuple[list[Suspect], list[int], int]:
    """Documents by how often they are in logged steps with a loss above its running median.

    Also returns these steps, and the number of all logged steps in `steps`. The median is that of
    the last `WINDOW` logged steps.
    """
    logged, high = _high_losses(run_dir, steps)
    fingerprint = documents.prepared.manifest["fingerprint"]
    counts: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    for step in logged:
        stretch = stretch_of(stretches, step)
        if stretch.data["fingerprint"] != fingerprint:
            continue
        rows = rows_at(stretch, documents, step, None)
        counts[step in high].update({part.document for row in rows for part in row.parts})
    above, rest = counts[True], counts[False]
    found = [Suspect(number, times, times + rest[number]) for number, times in above.items()]
    return sorted(found, key=lambda s: (-s.above, s.logged, s.document)), sorted(high), len(logged)


def _high_losses(run_dir: Path, steps: range) -> tuple[list[int], set[int]]:
    """Logged steps in `steps`, and those of them with a loss above its running median."""
    starts, _ = read_starts(run_dir)
    all_steps = np.concatenate([s.column("step")[s.is_kept] for s in starts])
    losses = np.concatenate([s.column("loss")[s.is_kept] for s in starts])
    logged, high = [], set()
    for at, (step, loss) in enumerate(zip(all_steps.tolist(), losses.tolist(), strict=True)):
        if int(step) not in steps:
            continue
        logged.append(int(step))
        before = losses[max(0, at - WINDOW) : at]
        if len(before) and not loss <= np.nanmedian(before):
            high.add(int(step))
    return logged, high
