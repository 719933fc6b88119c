"""Rows of a step, steps of a document, and documents of high losses, from the log of a run.

Steps are numbered as in the log: step 1 is the first, and reads what the row order has at 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import FailFast, Field

from minimind.checkpoint.validation import Mixture, OrderOrigin, validate_order
from minimind.config.run_config import ParallelLayout
from minimind.config.stages import MOST_STAGES
from minimind.data.prepare.prepared import missing_of, open_prepared
from minimind.data.prepare.remote import local_folder
from minimind.data.rows.order import MOST_SOURCES, Order
from minimind.data.text.inputs import Source
from minimind.errors import CheckpointError, DataError, UsageError
from minimind.recovery.documents import Documents
from minimind.report.history import Run, Start, number, read_runs
from minimind.runtime.checked_json import CheckedJson, Count, Integer, Size, validate
from minimind.runtime.object_cache import ObjectCache
from minimind.runtime.urls import is_url


class LoggedMixture(CheckedJson):
    """`mixture` of a stage; fields as in `StageMixture`."""

    sizes: Annotated[list[Count], FailFast()]
    weights: Annotated[list[Annotated[float, Field(ge=0)]], FailFast()]
    stage_rows: Size
    epoch_rows: Size
    begun: Annotated[list[Count], FailFast()]


class LoggedStage(CheckedJson):
    """A stage of `order` of a run_start: its order, from its first step on."""

    rows: Size
    rows_per_step: Size
    row_tokens: Size
    micro_batch_rows: Size
    origin: OrderOrigin
    mixture: LoggedMixture


class LoggedOrder(CheckedJson):
    """`order` of a run_start."""

    rows: Size
    rows_per_step: Size
    row_tokens: Size
    seed: Integer
    origin: OrderOrigin
    mixture: Mixture | None
    stages: Annotated[list[LoggedStage], Field([], max_length=MOST_STAGES), FailFast()]


class LoggedSource(CheckedJson):
    """A prepared folder that was mixed with others."""

    name: str
    weight: float | None
    directory: str
    url: str


class LoggedData(CheckedJson):
    """`data` of a run_start: the prepared folders, and inputs that have another name since."""

    directory: str
    fingerprint: str
    url: str = ""  # URL of a folder that was fetched
    renamed: dict[str, str]
    sources: Annotated[list[LoggedSource], Field([], max_length=MOST_SOURCES), FailFast()]


class LoggedStart(CheckedJson):
    """The part of a run_start that determines the rows of its steps."""

    step: Count
    world_size: Size
    micro_batch_rows: Size
    tensor_parallel: Size = 1
    sequence_parallel: Size = 1
    order: LoggedOrder
    data: LoggedData


@dataclass(frozen=True)
class Stretch:
    """Steps of one start that no later resume replaced."""

    steps: range
    order: Order
    row_tokens: int
    parallel: ParallelLayout
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
    position: int  # position in the global row order
    row: int
    first_token: int  # number among the training tokens
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class RunLog:
    """The stretches of a run, in order."""

    run: Run
    stretches: list[Stretch]

    def at(self, step: int) -> Stretch:
        """The stretch with a step; UsageError if there is none."""
        for stretch in reversed(self.stretches):
            if step in stretch.steps:
                return stretch
        steps = [stretch.steps for stretch in self.stretches if stretch.steps]
        if not steps:
            raise UsageError(f"step {step}: {self.run.run_dir} has taken no step; train it first")
        first, last = min(one.start for one in steps), max(one.stop for one in steps) - 1
        raise UsageError(
            f"step {step}: {self.run.run_dir} has steps {first} to {last}; give one of them"
        )

    def texts(self, steps: range | None = None) -> list[list[Stretch]]:
        """The stretches (in `steps`) of each text that was read."""
        found: dict[str, list[Stretch]] = {}
        for stretch in self.stretches:
            own = stretch.steps
            if own and (steps is None or (own.start < steps.stop and steps.start < own.stop)):
                found.setdefault(stretch.data["fingerprint"], []).append(stretch)
        return list(found.values())


def read_run(run_dir: Path) -> RunLog:
    """Read the log of a run; UsageError if it has no start."""
    (run,) = read_runs([run_dir])
    starts = [start for start in run.starts if not start.is_implied]
    if not starts:
        raise UsageError(f"{run_dir}/metrics.jsonl: has no run_start; give the --out_dir of a run")
    stretches = [one for start in starts for one in _stretches(start, run_dir)]
    newest = {one.data["fingerprint"]: one.data for one in stretches}  # folders may have moved
    return RunLog(run, [replace(one, data=newest[one.data["fingerprint"]]) for one in stretches])


def _last_step(start: Start) -> float:
    """The last step that counts, as far as it is logged."""
    if start.cutoff < np.inf:  # its checkpoint is there
        return start.cutoff
    ends = [start.end or {}, *start.events]
    known = [number(event.get("step"), 0.0) for event in ends]
    return max([*known, start.last_step, number(start.facts.get("step"), 0.0)])


def _stretches(start: Start, run_dir: Path) -> list[Stretch]:
    """The stretch of a start, or those of its stages."""
    facts = start.facts
    try:
        validate(LoggedStart, facts)
        logged = facts["order"]
        validate_order(logged["rows"], logged["origin"])
        for stage in logged.get("stages", ()):
            validate_order(stage["rows"], stage["origin"])
        if logged.get("stages"):
            from minimind.data.rows.stages import orders_from_json

            orders = orders_from_json(logged["stages"], logged["seed"])
        else:
            names = "rows", "rows_per_step", "seed", "origin", "mixture"
            orders = [Order.from_json(*(logged[name] for name in names))]
    except (CheckpointError, ValueError) as error:
        raise UsageError(
            f"{run_dir}/metrics.jsonl: a run_start {error}; restore the file"
        ) from error
    steps = range(facts["step"] + 1, int(_last_step(start)) + 1)
    groups = (facts.get(name, 1) for name in ("tensor_parallel", "sequence_parallel"))
    layout, stretches = ParallelLayout(facts["world_size"], *groups), []
    ends = [*(order.origin.step for order in orders[1:]), steps.stop]
    for order, end, one in zip(orders, ends, logged.get("stages") or [facts | logged], strict=True):
        own = steps
        if len(orders) > 1:
            own = range(max(steps.start, order.origin.step + 1), min(steps.stop, end + 1))
        sizes = one["row_tokens"], layout, one["micro_batch_rows"]
        stretches.append(Stretch(own, order, *sizes, facts["data"]))
    return stretches


def documents_of(
    stretch: Stretch, directory: str | Path | None = None, cache: ObjectCache | None = None
) -> Documents:
    """Open the text of a stretch, in another folder if one is given.

    With a cache it may be a URL, and a fetched folder that is gone is fetched again. Raise
    DataError if the folder is gone or holds other text.
    """
    data: Mapping[str, Any] = stretch.data
    if directory:
        data = {"directory": directory, "url": directory}
    mixed = data.get("sources", ())
    folders = []
    for one in mixed or [data]:
        folder, url = Path(one["directory"]), str(one.get("url", ""))
        if cache is not None and is_url(url) and (directory or missing_of(folder)):
            folder = Path(local_folder(url, cache))
        if missing := missing_of(folder):
            way = "" if mixed else ", or give --data_path with a folder of the same text"
            raise DataError(
                f"{directory or folder}: has no {missing[0]}, and the run was trained on this"
                f" folder; restore it{way}"
            )
        folders.append(folder)
    if mixed:
        from minimind.data.prepare.mixed import open_parts, parts_of

        pairs = zip(mixed, folders, strict=True)
        sources = [Source(one["name"], (str(folder),), one["weight"]) for one, folder in pairs]
        prepared = open_parts(parts_of(sources))
    else:
        prepared = open_prepared(folders[0])
    if prepared.manifest["fingerprint"] != stretch.data["fingerprint"]:
        raise DataError(
            f"{prepared}: holds other text than the run was trained on; restore it, or give"
            " --data_path with a folder of the same text"
        )
    return Documents.of(replace(prepared, names=stretch.data["renamed"]), cache)


def rows_at(stretch: Stretch, documents: Documents, step: int, rank: int | None) -> list[Row]:
    """The rows of a step in the global order; of one rank if it is given.

    A row that several ranks read is listed with the first of them.
    """
    order, parallel = stretch.order, stretch.parallel
    if rank is not None and rank >= parallel.world_size:
        last = parallel.world_size - 1
        raise UsageError(f"--rank {rank}: step {step} had ranks 0 to {last}; give one of them")
    rows = order.rows_for(step - 1, 0, 1)
    shards = documents.prepared.train
    firsts, stops = (
        of(rows, stretch.row_tokens).tolist() for of in (shards.row_starts, shards.row_stops)
    )
    before = order.positions(step - 1).start
    found = []
    for at, (row, first, stop) in enumerate(zip(rows.tolist(), firsts, stops, strict=True)):
        data_rank = order.data_rank_of(at, parallel.data_size)
        if rank is not None and data_rank != parallel.data_rank(rank):
            continue
        parts = tuple(_parts(documents, first, stop))
        within = at - order.share(data_rank, parallel.data_size).start
        micro_batch = within // stretch.micro_batch_rows
        of_rank = parallel.first_rank(data_rank) if rank is None else rank
        found.append(Row(of_rank, micro_batch, before + at, row, first, parts))
    return found


def _parts(documents: Documents, start: int, stop: int) -> list[Part]:
    parts = []
    for document in documents.over(start, stop):
        first, last = documents.tokens(document)
        parts.append(Part(max(first, start) - start, min(last, stop) - start, document))
    return parts


def steps_reading(log: RunLog, documents: Documents, document: int) -> list[tuple[int, int, int]]:
    """(step, rank, row) of every read of a document, in order; only of its text."""
    reads = []
    shards, (start, stop) = documents.prepared.train, documents.tokens(document)
    fingerprint = documents.prepared.manifest["fingerprint"]
    stretches = [stretch for stretch in log.stretches if stretch.data["fingerprint"] == fingerprint]
    last = max((stretch.steps.stop for stretch in stretches), default=0) - 1
    for order in dict.fromkeys(stretch.order for stretch in stretches):  # a resume keeps it
        matching = [stretch for stretch in stretches if stretch.order == order and stretch.steps]
        if not matching:
            continue
        for row in shards.rows_over(start, stop, matching[0].row_tokens):
            for at, row_position in order.reads_of(row, last):
                for stretch in (stretch for stretch in matching if at + 1 in stretch.steps):
                    data_rank = order.data_rank_of(row_position, stretch.parallel.data_size)
                    reads.append((at + 1, stretch.parallel.first_rank(data_rank), row))
    return sorted(reads)


WINDOW = 100  # logged steps of the running median


@dataclass(frozen=True)
class Suspect:
    """A document, its steps with a high loss, and its logged steps.

    `score` is the number of standard deviations by which `high` is above its expectation, where
    documents and losses have nothing to do with each other.
    """

    document: int
    high: int
    logged: int
    score: float


def suspects(
    log: RunLog, documents: Documents, steps: range
) -> tuple[list[Suspect], list[int], int]:
    """Documents by how much more often than expected their loss is above the running median.

    Also returns the logged steps with such a loss, and the number of all logged steps in `steps`.
    The median is that of the last `WINDOW` logged steps. Raise UsageError if none is logged.
    """
    logged, high = _high_losses(log, steps)
    if not logged:
        raise UsageError(
            f"--steps {steps.start}:{steps.stop - 1}: {log.run.run_dir} logged no loss of these"
            " steps; give others"
        )
    counts: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    for step in logged:
        rows = rows_at(log.at(step), documents, step, None)
        counts[step in high].update({part.document for row in rows for part in row.parts})
    share = len(high) / len(logged)
    suspects = []
    for document, times in counts[True].items():
        all_times = times + counts[False][document]
        spread = (all_times * share * (1 - share)) ** 0.5
        score = (times - all_times * share) / spread if spread else 0.0
        suspects.append(Suspect(document, times, all_times, score))
    return sorted(suspects, key=lambda s: (-s.score, s.document)), sorted(high), len(logged)


def _high_losses(log: RunLog, steps: range) -> tuple[list[int], set[int]]:
    """Logged steps in `steps`, and those of them with a loss above its running median."""
    losses = log.run.column("loss")
    logged, high = [], set()
    for at, (step, loss) in enumerate(zip(log.run.column("step"), losses, strict=True)):
        if int(step) not in steps:
            continue
        logged.append(int(step))
        before = losses[max(0, at - WINDOW) : at]
        before = before[np.isfinite(before)]
        if len(before) and not loss <= np.median(before):
            high.add(int(step))
    return logged, high
