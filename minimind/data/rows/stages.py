"""The row order of a run in stages: still a pure function of the step.

A stage deals its rows to the sources by its own weights. Rows are numbered for each length apart,
and each source is read in passes over its rows of that length. A stage begins where the last stage
of its length stopped, perhaps in the middle of a pass.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from minimind.config.run_config import RunConfig
from minimind.config.stages import Stage, StagesFile
from minimind.data.rows.order import Mixture, Order, Origin, Ranges
from minimind.errors import DataError, TooFewRows, UsageError


@dataclass(frozen=True)
class StagedOrder(Order):
    """The orders of the stages, one after the other.

    Its own rows, and those left out, are of --max_seq_len; `rows_per_step` is of the first stage.

    Another file gives another order of the whole run: on a resume with --allow_change it is read
    from that step on.
    """

    parts: tuple[Order, ...] = ()
    stages: tuple[Stage, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        """Each part has been checked."""

    @property
    def rows_per_epoch(self) -> int:
        """Rows of the text, of --max_seq_len."""
        return self.n_rows

    def tokens_of(self, steps: range, row_tokens: int) -> int:
        """Targets of these steps, with as many in a row as the stage of each has."""
        tokens = 0
        for stage in self.stages:
            first, stop = max(steps.start, stage.steps.start), min(steps.stop, stage.steps.stop)
            tokens += max(0, stop - first) * stage.rows_per_step * stage.run.max_seq_len
        return tokens

    def number_at(self, step: int) -> int:
        """Number of the stage of a step, from 0; the last one after its end."""
        return min(bisect(self._ends, step), len(self.stages) - 1)

    @cached_property
    def _ends(self) -> list[int]:
        return [stage.steps.stop for stage in self.stages]

    def of(self, step: int) -> Order:
        """The order of the stage of a step."""
        return self.parts[self.number_at(step)]

    def positions(self, step: int) -> range:
        return self.of(step).positions(step)

    def place(self, step: int) -> tuple[int, int]:
        return self.of(step).place(step)

    def rows_for(self, step: int, data_rank: int, data_size: int, steps: int = 1) -> np.ndarray:
        """Row indices, of the length of each step's stage, as `Order.rows_for` has them."""
        rows = [
            self.of(one).rows_for(one, data_rank, data_size) for one in range(step, step + steps)
        ]
        return np.concatenate(rows)

    def reads_of(self, row: int, stop: int) -> list[tuple[int, int]]:
        """Undefined for the whole run, as stages number rows by length; ask one of its parts."""
        raise TypeError("the rows of stages may differ in length; ask one of `parts`")

    @property
    def stage_runs(self) -> dict[str, RunConfig]:
        return {stage.name: stage.run for stage in self.stages}

    def stage_of(self, step: int) -> dict[str, str]:
        return {"stage": self.stages[self.number_at(step)].name}

    def stages_json(self) -> dict[str, dict[str, Any]]:
        """What identifies the stages, by group of --allow_change."""
        weights = [list(mixture_of(part).weights) for part in self.parts]
        sizes = [[stage.rows_per_step, stage.run.max_seq_len] for stage in self.stages]
        return {
            "batch": {"stages": sizes},
            "data": {"stages": weights},
            "schedule": {"stages": [stage.steps.stop for stage in self.stages]},
        }


def mixture_of(part: Order) -> Mixture:
    """The mixture of the order of a stage."""
    assert part.mixture is not None
    return part.mixture


def orders_json(
    order: StagedOrder, data_size: int, accumulation_steps: int
) -> list[dict[str, Any]]:
    """The orders of the stages, as a run_start has them; see `orders_from_json`."""
    stages = []
    for stage, part in zip(order.stages, order.parts, strict=True):
        mixture, micro_batches = mixture_of(part), data_size * accumulation_steps
        names = ("sizes", "weights", "stage_rows", "epoch_rows", "begun")
        stages.append(
            {
                "name": stage.name,
                "rows": part.n_rows,
                "rows_per_step": part.rows_per_step,
                "row_tokens": stage.run.max_seq_len + 1,
                "micro_batch_rows": part.rows_per_step // micro_batches,
                "origin": part.start_json(),
                "mixture": {name: getattr(mixture, name) for name in names},
            }
        )
    return stages


def orders_from_json(stages: Sequence[dict[str, Any]], seed: int) -> list[Order]:
    """The orders that `orders_json` describes; ValueError if they are impossible."""
    orders = []
    for one in stages:
        start, mixed = one["origin"], one["mixture"]
        left_out = tuple((first, stop) for first, stop in start.get("left_out", ()))
        mixture = Mixture(
            tuple(mixed["sizes"]),
            tuple(mixed["weights"]),
            left_out,
            mixed["stage_rows"],
            mixed["epoch_rows"],
            start["epoch"],
            tuple(mixed["begun"]),
        )
        origin = Origin(start["step"], start["rows"], start["epoch"])
        orders.append(Order(one["rows"], one["rows_per_step"], seed, origin, mixture, left_out))
    return orders


def staged_order(
    file: StagesFile,
    stages: Sequence[Stage],
    names: Sequence[str],
    default_weights: tuple[float, ...] | None,
    sizes_of: Callable[[int], tuple[int, ...]],
    left_out_of: Callable[[int], Ranges],
    seed: int,
) -> StagedOrder:
    """Return the order of a run in stages over sources of these names.

    `sizes_of` and `left_out_of` have the rows of each source, and those left out, by row length in
    tokens. Raise UsageError for a source that the text does not have, or one that is read more
    often than `max_epochs` lets it.
    """
    file.require_sources(names)
    where = f"--stages {file.path}"
    parts: list[Order] = []
    begun: dict[int, Counter[int]] = {}  # reads of each source, by row length
    epochs = rows = 0
    for stage in stages:
        row_tokens = stage.run.max_seq_len + 1
        sizes, left_out = sizes_of(row_tokens), left_out_of(row_tokens)
        weights = default_weights or tuple(map(float, sizes))
        if stage.weights is not None:
            weights = tuple(stage.weights.get(name, 0.0) for name in names)
        before = begun.setdefault(row_tokens, Counter())
        counts = tuple(before[source] for source in range(len(names)))
        mixture = _mixed(sizes, weights, left_out, stage, names, where)
        mixture = replace(mixture, first_epoch=epochs, begun=counts)
        origin = Origin(stage.steps.start, rows, epochs)
        parts.append(Order(sum(sizes), stage.rows_per_step, seed, origin, mixture, left_out))
        before.update(dict(enumerate(mixture.reads)))
        epochs += mixture.whole_epochs + 1
        rows += mixture.stage_rows
    _require_caps(file, parts, names)
    first = parts[0]
    return StagedOrder(
        first.n_rows, first.rows_per_step, seed, parts=tuple(parts), stages=tuple(stages)
    )


def _mixed(
    sizes: tuple[int, ...],
    weights: tuple[float, ...],
    left_out: Ranges,
    stage: Stage,
    names: Sequence[str],
    where: str,
) -> Mixture:
    """The mixture of a stage alone; raise DataError or UsageError if a source has none to read."""
    row_tokens, where = stage.run.max_seq_len + 1, f"{where}: stage {stage.name}"
    read = [number for number, weight in enumerate(weights) if weight]
    per_step, stage_rows = stage.rows_per_step, stage.rows
    short = next((names[number] for number in read if not sizes[number]), None)
    if short or not read:
        raise DataError(
            f"{where}: {f'source {short}' if short else 'the text'} has no row of"
            f" {row_tokens} tokens; add text, leave it out, or change max_seq_len"
        )
    try:
        unread = (0,) * len(sizes)
        mixture = Mixture(
            sizes, weights, left_out, stage_rows=stage_rows, epoch_rows=stage_rows, begun=unread
        )
    except ValueError as error:
        raise DataError(
            f"{where}: {error} (of the sources {', '.join(names)}, counted from 0); leave fewer"
            " rows out"
        ) from error
    if (n_rows := sum(mixture.kept)) < per_step:
        raise TooFewRows(
            f"{where}: the text has {n_rows:,} rows of {row_tokens} tokens, fewer than the"
            f" {per_step:,} of one step; add text, or lower batch_size, --accumulation_steps or"
            " max_seq_len"
        )
    kept = sum(mixture.kept[number] for number in read) // per_step * per_step
    mixture = replace(mixture, epoch_rows=min(stage_rows, max(kept, per_step)))
    for number in read:
        if not mixture.reads[number]:
            raise UsageError(
                f"{where}: source {names[number]} has weight {weights[number]:g}, which rounds to"
                f" none of the {stage_rows:,} rows; raise it, or leave the source out"
            )
    return mixture


def epochs_of(parts: Sequence[Order], source: int) -> Fraction:
    """How often a source is read by these parts of a run, over its rows of each length."""
    mixtures = map(mixture_of, parts)
    return sum(
        (Fraction(one.reads[source], one.kept[source]) for one in mixtures if one.reads[source]),
        Fraction(0),
    )


def _require_caps(file: StagesFile, parts: Sequence[Order], names: Sequence[str]) -> None:
    """Raise UsageError for a source that is read more often than its cap."""
    for name, cap in file.max_epochs.items():
        needed = epochs_of(parts, names.index(name))
        if needed > Fraction(repr(cap)):
            raise UsageError(
                f"--stages {file.path}: source {name} is read {float(needed):.3g} times, more than"
                f" max_epochs = {cap:g}; lower its weights, shorten the stages that read it, or"
                " raise the cap"
            )


def stages_table(order: StagedOrder, names: Sequence[str]) -> list[dict[str, Any]]:
    """What each stage reads, for the log: steps, rows and tokens, also of each source."""
    table = []
    for stage, part in zip(order.stages, order.parts, strict=True):
        mixture, length = mixture_of(part), stage.run.max_seq_len
        sources = [
            {
                "name": name,
                "weight": mixture.weights[source],
                "tokens": mixture.reads[source] * length,
                "epochs": float(epochs_of([part], source)),
            }
            for source, name in enumerate(names)
            if mixture.reads[source]
        ]
        table.append({**stage.facts(), "sources": sources})
    return table
