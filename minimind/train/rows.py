"""The rows of a run, and its schedule: planned, resumed, and read in batches."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from minimind.architecture.select import Architecture
from minimind.config.flags import MOST_LEFT_OUT, VAL_LOSS
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule, budget_steps, plan_schedule
from minimind.data.prepare.prepared import Prepared
from minimind.data.rows.batches import Batches, StagedBatches
from minimind.data.rows.order import Mixture, Order, Ranges, count_rows, joined, rows_in
from minimind.data.rows.skip_rows import rows_left_out
from minimind.data.shards.conversation_shards import ConversationShards
from minimind.engine.build import Engine
from minimind.errors import DataError, TooFewRows, UsageError
from minimind.train.text import Text


def plan_rows(
    run: RunConfig, text: Text, prepared: Prepared, world_size: int, model: Architecture
) -> tuple[Order, Schedule]:
    """Return the row order and the schedule; raise DataError if there is too little text.

    Raise UsageError for --keep_best without a row that is held out.
    """
    compares = run.keep_best and run.keep_best_by == VAL_LOSS
    if compares and not prepared.val.rows(run.max_seq_len + 1):
        raise UsageError(
            f"keep_best = {run.keep_best} ({run.sources['keep_best']}) has no validation to"
            " compare, since no row of the text is held out, and so would keep every checkpoint;"
            " hold out more of the text, or give --keep_best 0"
        )
    if run.stages:
        return _plan_stages(run, prepared, world_size, model)
    manifest, sizes = prepared.manifest, prepared.train.sizes(run.max_seq_len + 1)
    left_out = rows_left_out(run, sizes, manifest)
    n_rows = sum(sizes) - count_rows(left_out)
    if isinstance(prepared.train, ConversationShards):
        _check_enough_answers(run, text, world_size, prepared.train, n_rows)
    tokens = manifest["splits"]["train"]["tokens"]
    rows_per_step = _check_enough_rows(run, text, world_size, tokens, n_rows)
    mixture = _plan_mixture(run, text, manifest["sources"], sizes, left_out)
    order = Order(sum(sizes), rows_per_step, run.seed, mixture=mixture, left_out=left_out)
    return order, plan_length(run, world_size, model, order)


def plan_length(
    run: RunConfig, world_size: int, model: Architecture, order: Order | None
) -> Schedule:
    """Return the schedule of a run without --stages; without `order` as if its text had no end.

    Raise UsageError if its limits, warm-up and decay do not fit.
    """
    tokens_per_step = run.rows_per_step(world_size) * run.max_seq_len
    steps_per_epoch = order.steps_per_epoch if order else sys.maxsize
    return plan_schedule(run, steps_per_epoch, run_budgets(run, tokens_per_step, model))


def _plan_mixture(
    run: RunConfig,
    text: Text,
    sources: Sequence[Mapping[str, Any]],
    sizes: tuple[int, ...],
    left_out: Ranges,
) -> Mixture | None:
    """Return the mixture of the sources of a manifest, None without weights.

    `sizes` has their rows. Raise TooFewRows if a source has no row or gives none.
    """
    row_tokens, paths = run.max_seq_len + 1, " ".join(text.names)
    for size, source in zip(sizes, sources, strict=True):
        if not size and len(sizes) > 1:
            name, tokens = source["name"], source["tokens"]["train"]
            fault = f"has {tokens:,} training tokens, fewer than a row of {row_tokens}"
            change = ", leave it out, or lower --max_seq_len"
            if run.task == "sft":
                fault = "has no conversation to train on"
                change = ", or leave it out"
                if tokens:
                    fault += f" whose first answer ends within a row of {row_tokens}"
                    change = ", leave it out, or raise --max_seq_len"
            raise TooFewRows(f"{paths}: source {name} {fault}; add text to it{change}")
    weights = [source["weight"] for source in sources]
    try:
        return None if None in weights else Mixture(sizes, tuple(weights), left_out)
    except ValueError as error:
        names = ", ".join(source["name"] for source in sources)
        raise TooFewRows(
            f"{paths}: {error} (of the sources {names}, counted from 0, in rows of {row_tokens}"
            " tokens); change its weight, or leave that source out"
        ) from error


def _plan_stages(
    run: RunConfig, prepared: Prepared, world_size: int, model: Architecture
) -> tuple[Order, Schedule]:
    """Return what `plan_rows` returns, for a run with --stages."""
    from minimind.config.stages import plan_stages
    from minimind.data.rows.stages import staged_order

    file, stages, schedule = plan_stages(run, world_size, run_budgets(run, 1, model))
    shards = prepared.train
    sizes = shards.sizes(run.max_seq_len + 1)
    left_out = rows_left_out(run, sizes, prepared.manifest)

    @cache
    def left_out_of(row_tokens: int) -> Ranges:
        """The rows of this length with any token of those left out."""
        if row_tokens == run.max_seq_len + 1 or not left_out:
            return left_out
        rows = rows_in(left_out)
        of = (shards.row_starts, shards.row_stops)
        spans = zip(*(ends(rows, run.max_seq_len + 1).tolist() for ends in of), strict=True)
        found = (shards.rows_over(start, stop, row_tokens) for start, stop in spans)
        ranges = joined((one.start, one.stop) for one in found if one)
        if (count := count_rows(ranges)) > MOST_LEFT_OUT:
            raise UsageError(
                f"--skip_rows {run.skip_rows}: leaves out {count:,} rows of {row_tokens} tokens of"
                f" a stage, more than {MOST_LEFT_OUT:,}; take their documents out of the text"
                " instead"
            )
        return ranges

    names = [source["name"] for source in prepared.manifest["sources"]]
    order = staged_order(file, stages, names, shards.weights, shards.sizes, left_out_of, run.seed)
    return replace(order, n_rows=sum(sizes), left_out=left_out), schedule


def run_budgets(run: RunConfig, tokens_per_step: int, model: Architecture) -> dict[str, int]:
    """Return the steps within --max_tokens, --max_flops and --tokens_per_param, where given."""
    if run.max_tokens is run.max_flops is run.tokens_per_param is None:
        return {}
    return budget_steps(run, tokens_per_step, model.parameters(run), model.flops_per_token(run))


def _check_enough_rows(
    run: RunConfig, text: Text, world_size: int, tokens: int, n_rows: int
) -> int:
    """Return the rows of one step; raise TooFewRows if the text has fewer."""
    micro_batch, rows_per_step = run.micro_batch_rows(world_size), run.rows_per_step(world_size)
    processes = run.parallel(world_size).data_size
    if n_rows < rows_per_step:
        fitting = n_rows // (run.accumulation_steps * processes)
        fitting *= processes if run.split_batches else 1
        lower = "lower --batch_size, --accumulation_steps or --max_seq_len"
        remedy = f"give --batch_size {fitting}" if fitting else lower
        if run.global_batch_size is not None:
            remedy = "lower --global_batch_size or --max_seq_len"
        raise TooFewRows(
            f"{' '.join(text.names)}: {tokens:,} training tokens make {n_rows:,} rows"
            f" of {run.max_seq_len + 1}, fewer than the {rows_per_step:,} of one step"
            f" ({micro_batch:,} x {run.micro_batches(world_size)} x {processes} processes);"
            f" {remedy}, or"
            " add text"
        )
    return rows_per_step


def _check_enough_answers(
    run: RunConfig, text: Text, world_size: int, conversations: ConversationShards, n_rows: int
) -> None:
    """Raise DataError if conversations that do not fit a row leave fewer rows than a step has."""
    packing = conversations.packing(run.max_seq_len + 1)
    rows_per_step = run.rows_per_step(world_size)
    if n_rows >= rows_per_step or not packing.dropped:
        return
    dropped = "all" if packing.dropped == packing.conversations else f"{packing.dropped:,} of the"
    raise DataError(
        f"{' '.join(text.names)}: {dropped} {packing.conversations:,} conversations"
        f" are dropped, as no answer of theirs ends within a row of {run.max_seq_len + 1} tokens"
        f" (max_seq_len = {run.max_seq_len}, {run.sources['max_seq_len']}), and {n_rows} rows are"
        f" fewer than the {rows_per_step} of one step; raise --max_seq_len (the longest has"
        f" {conversations.longest:,} tokens)"
    )


def build_batches(run: RunConfig, engine: Engine, prepared: Prepared, order: Order) -> Batches:
    """Return this rank's micro-batches in an order."""
    if run.stages:
        from minimind.data.rows.stages import StagedOrder

        assert isinstance(order, StagedOrder)
        parts = [*zip(order.stages, order.parts, strict=True)]
        return StagedBatches(
            prepared.train,
            order,
            lambda number: _batches_of(parts[number][0].run, engine, prepared, parts[number][1]),
        )
    return _batches_of(run, engine, prepared, order)


def _batches_of(run: RunConfig, engine: Engine, prepared: Prepared, order: Order) -> Batches:
    return Batches(
        prepared.train,
        order,
        run.max_seq_len + 1,
        run.micro_batch_rows(engine.world_size),
        engine.data_rank,
        engine.parallel.data_size,
        engine.device,
        run.num_workers,
        engine.distillation and engine.distillation.rows,
    )
