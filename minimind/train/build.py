"""Prepare the text, row order and schedule of a run, and check that they fit together."""

from __future__ import annotations

import json
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimind.architecture.select import Architecture
from minimind.checkpoint.resume import Resumed
from minimind.checkpoint.validation import validate_data_order
from minimind.config.arguments import template_variables
from minimind.config.flags import DEFAULT_DATA, MOST_LEFT_OUT, VAL_LOSS
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule, budget_steps, plan_schedule
from minimind.data.prepare.prepared import Prepared, is_prepared, open_text
from minimind.data.rows.batches import Batches, StagedBatches
from minimind.data.rows.order import (
    Mixture,
    Order,
    Origin,
    Ranges,
    count_rows,
    joined,
    rows_in,
    rows_left_out,
    sizes_of_sources,
)
from minimind.data.shards.conversation_shards import ConversationShards
from minimind.data.shards.manifest import options_of, require_document_ends
from minimind.data.tokenizer.load import load_tokenizer, longest_document
from minimind.engine.build import Engine
from minimind.errors import CheckpointError, DataError, StorageError, TooFewRows, UsageError
from minimind.runtime import disk
from minimind.runtime.checked_json import ELSEWHERE
from minimind.runtime.terminal import phase
from minimind.runtime.urls import is_url, masked, masked_values, named

if TYPE_CHECKING:
    from minimind.data.text.inputs import Source

RAW_TEXT = "data"  # name of the source that raw text is


def prepared_folder(run: RunConfig) -> Path | None:
    """Return the prepared folder in --data_path; raise UsageError if it is not all of the text."""
    folders = [path for path in run.data_path if is_prepared(path)]
    if folders and len(run.data_path) > 1:
        raise UsageError(
            f"--data_path: {folders[0]} has prepared shards and must be the only path; mix several"
            " texts with `minimind prepare --source`"
        )
    if folders and run.val_path is not None:
        place = place_of(run) if is_mixed(run) else folders[0]  # not the mixture in the cache
        raise UsageError(
            f"val_path = {masked(run.val_path)} ({run.sources['val_path']}): {place} is"
            " prepared and has its held-out text; drop it, or give it to `minimind prepare`"
        )
    return Path(folders[0]).expanduser() if folders else None


def text_names(run: RunConfig) -> tuple[str, ...]:
    """The text as the user named it: --data_path, or the sources that are mixed as --data_path."""
    if not is_mixed(run):
        return tuple(map(named, run.data_path))
    from minimind.data.prepare.mixed import sources_of

    weights = ("" if one.weight is None else f":{one.weight:g}" for one in sources_of(run))
    pairs = zip(sources_of(run), weights, strict=True)
    return tuple(f"{one.name}={masked(*one.paths)}{weight}" for one, weight in pairs)


def place_of(run: RunConfig) -> str:
    """The flag and the names of the text, in messages and as a source of values."""
    flag = "--data_path"
    if is_mixed(run):
        flag = "--source" if run.source else f"--stages {run.stages}:"
    return f"{flag} {' '.join(text_names(run))}"


def is_mixed(run: RunConfig) -> bool:
    """Whether --data_path stands for the sources of a run."""
    return not run.is_explicit("data_path") and run.data_path != (DEFAULT_DATA,)


@phase("fetching the prepared folder")
def with_local_folder(run: RunConfig, cleanup: ExitStack) -> RunConfig:
    """Return the run with a local folder as its text.

    That is a copy, kept until `cleanup`, of a prepared folder at a URL, or a mixture of folders.
    """
    sources: Sequence[Source] = ()
    if run.source or run.stages:
        from minimind.data.prepare.mixed import sources_of

        sources = sources_of(run)
    paths = [path for source in sources for path in source.paths] or run.data_path
    if any(map(is_url, paths)):
        from minimind.data.prepare.remote import local_folder
        from minimind.runtime.object_cache import open_cache

        cache = cleanup.enter_context(open_cache(run.cache_dir, run.max_cache_gib))
        paths = [local_folder(path, cache) for path in paths]
    if sources:
        from minimind.data.prepare.mixed import mixed_folder

        local = [replace(one, paths=(path,)) for one, path in zip(sources, paths, strict=True)]
        paths = [str(mixed_folder(local, Path(run.cache_dir).expanduser()))]
    return replace(run, data_path=tuple(paths))


@phase("reading the text")
def prepare_data(run: RunConfig) -> Prepared:
    """Return the run's token shards: a prepared folder, or raw text prepared in the cache.

    Raise DataError for a file that is damaged, as far as that shows without reading all tokens.
    """
    prepared = _open_data(run)
    require_document_ends(prepared.directory, prepared.manifest)
    return prepared


def _open_data(run: RunConfig) -> Prepared:
    if folder := prepared_folder(run):
        return open_text(folder, run.tokenizer, run.allow_lossy_tokenizer)
    from minimind.data.prepare.prepare import PrepareRequest, prepare_for_run
    from minimind.data.prepare.work_units import Options
    from minimind.data.text.inputs import Source

    is_explicit = run.is_explicit("max_document_bytes")
    max_bytes = run.max_document_bytes if is_explicit else longest_document(run.tokenizer)
    val_fraction = float(run.val_fraction) if run.val_path is None else 0.0
    options = Options(run.text_field, max_bytes, val_fraction)
    if run.task == "sft":
        template = load_tokenizer(run.tokenizer or "").chat_template
        options = replace(
            options,
            chat_template=template,
            train_on=run.in_force("train_on"),
            template_date=run.template_date,
            chat_template_kwargs=template_variables(run.chat_template_kwargs) or None,
        )
    policy = (run.on_bad_data == "skip", run.max_bad_fraction, run.allow_lossy_tokenizer)
    with local_text_of(run) as (paths, val_path):
        sources = (Source(RAW_TEXT, paths),)
        request = PrepareRequest(sources, run.tokenizer, run.vocab_size, options, *policy)
        request = replace(request, val_path=val_path)
        return prepare_for_run(request, Path(run.cache_dir).expanduser())


@contextmanager
def local_text_of(run: RunConfig) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Paths of the run's text and of --val_path, with local copies of what URLs name meanwhile."""
    from minimind.data.text.inputs import AUTO, VALIDATION, val_paths

    val_path = val_paths(run.val_path, run.data_path)
    if not any(map(is_url, (*run.data_path, *val_path))):
        yield run.data_path, val_path
        return
    from minimind.data.prepare.remote import local_text
    from minimind.runtime.object_cache import open_cache

    with open_cache(run.cache_dir, run.max_cache_gib) as cache:
        elsewhere = (VALIDATION,) if run.val_path == AUTO else ()
        paths = local_text(run.data_path, cache, elsewhere)
        try:
            held_out = local_text(val_path, cache)
        except DataError as error:
            if run.val_path != AUTO:
                raise
            raise DataError(f"--val_path {AUTO}: {error}") from error
        yield paths, held_out


def with_prepared(run: RunConfig, prepared: Prepared) -> RunConfig:
    """Return the run with the values its data decides; raise UsageError if a flag differs."""
    place = place_of(run)
    by = f"--tokenizer {run.tokenizer}" if run.tokenizer else place
    run = with_derived_values(run, by, {"vocab_size": prepared.tokenizer.vocab_size})
    options = options_of(prepared.manifest)
    if not is_prepared(run.data_path[0]):
        run = with_derived_values(run, by, {"max_document_bytes": options["max_document_bytes"]})
        held_out = {"val_fraction": 0.0} if run.val_path is not None else {}
        return with_derived_values(run, f"--val_path {masked(run.val_path or '')}", held_out)
    return with_derived_values(run, place, options)


def with_tokenizer(run: RunConfig) -> RunConfig:
    """Return the run with the vocabulary size of --tokenizer; raise UsageError on conflict."""
    if run.tokenizer is None:
        return run
    vocab_size = load_tokenizer(run.tokenizer).vocab_size
    return with_derived_values(run, f"--tokenizer {run.tokenizer}", {"vocab_size": vocab_size})


def with_derived_values(
    run: RunConfig, by: str, values: Mapping[str, Any], over_presets: bool = True
) -> RunConfig:
    """Return the run with values derived from `by`; raise UsageError if an explicit one differs.

    over_presets=True lets `by` override the values of a preset; False counts those as explicit.
    """
    for name, value in values.items():
        current, source = getattr(run, name), run.sources[name]
        if current == value:
            continue
        if run.is_explicit(name) or not (over_presets or source == "default"):
            raise UsageError(
                f"{name} = {current} ({source}), but {by} has {value}; drop one of the two"
            )
        run = run.with_values(by, **{name: value})
    return run


def plan_data_and_schedule(
    run: RunConfig, prepared: Prepared, world_size: int, model: Architecture
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
    sizes = prepared.train.sizes(run.max_seq_len + 1)
    left_out = rows_left_out(run, sizes, prepared.manifest)
    if isinstance(prepared.train, ConversationShards):
        n_read = sum(sizes) - count_rows(left_out)
        _check_enough_answers(run, world_size, prepared.train, n_read)
    order = _plan_order(run, world_size, sizes, left_out, prepared.manifest)
    return order, plan_length(with_prepared(run, prepared), world_size, model, order)


def plan_folder(run: RunConfig, world_size: int, manifest: Mapping[str, Any]) -> Order | None:
    """Return the row order that the start plans, by the manifest of a prepared folder alone.

    None with --stages. Raise TooFewRows if there is too little text.
    """
    if run.stages:
        return None
    sizes = sizes_of_sources(run, manifest)
    left_out = rows_left_out(run, sizes, manifest)
    return _plan_order(run, world_size, sizes, left_out, manifest)


def _plan_order(
    run: RunConfig,
    world_size: int,
    sizes: tuple[int, ...],
    left_out: Ranges,
    manifest: Mapping[str, Any],
) -> Order:
    tokens, n_rows = manifest["splits"]["train"]["tokens"], sum(sizes)
    rows_per_step = _check_enough_rows(run, world_size, tokens, n_rows - count_rows(left_out))
    mixture = _plan_mixture(run, manifest["sources"], sizes, left_out)
    return Order(n_rows, rows_per_step, run.seed, mixture=mixture, left_out=left_out)


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
    sources: Sequence[Mapping[str, Any]],
    sizes: tuple[int, ...],
    left_out: Ranges = (),
) -> Mixture | None:
    """Return the mixture of the sources of a manifest, None without weights.

    `sizes` has their rows. Raise TooFewRows if a source has no row or gives none.
    """
    row_tokens, paths = run.max_seq_len + 1, " ".join(text_names(run))
    for size, source in zip(sizes, sources, strict=True):
        if not size and len(sizes) > 1:
            raise TooFewRows(
                f"{paths}: source {source['name']} has {source['tokens']['train']:,} training"
                f" tokens, fewer than a row of {row_tokens}; add text to it, leave it out, or lower"
                " --max_seq_len"
            )
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
    """As `plan_data_and_schedule`, of a run with --stages."""
    from minimind.config.stages import plan_stages
    from minimind.data.rows.stages import staged_order

    file, stages, schedule = plan_stages(
        run, world_size, run_budgets(with_prepared(run, prepared), 1, model)
    )
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


def _check_enough_rows(run: RunConfig, world_size: int, tokens: int, n_rows: int) -> int:
    """Return the rows of one step; raise TooFewRows if the text has fewer."""
    micro_batch, rows_per_step = run.micro_batch_rows(world_size), run.rows_per_step(world_size)
    if n_rows < rows_per_step:
        raise TooFewRows(
            f"{' '.join(text_names(run))}: {tokens:,} training tokens make {n_rows} rows"
            f" of {run.max_seq_len + 1}, fewer than the {rows_per_step} of one step"
            f" ({micro_batch} x {run.accumulation_steps} x"
            f" {run.parallel(world_size).data_size} processes); add text, or"
            " lower --batch_size, --accumulation_steps or --max_seq_len"
        )
    return rows_per_step


def _check_enough_answers(
    run: RunConfig, world_size: int, conversations: ConversationShards, n_rows: int
) -> None:
    """Raise DataError if conversations that do not fit a row leave fewer rows than a step has."""
    packing = conversations.packing(run.max_seq_len + 1)
    rows_per_step = run.rows_per_step(world_size)
    if n_rows >= rows_per_step or not packing.dropped:
        return
    dropped = "all" if packing.dropped == packing.conversations else f"{packing.dropped:,} of the"
    raise DataError(
        f"{' '.join(text_names(run))}: {dropped} {packing.conversations:,} conversations"
        f" are dropped, as no answer of theirs ends within a row of {run.max_seq_len + 1} tokens"
        f" (max_seq_len = {run.max_seq_len}, {run.sources['max_seq_len']}), and {n_rows} rows are"
        f" fewer than the {rows_per_step} of one step; raise --max_seq_len (the longest has"
        f" {conversations.longest:,} tokens)"
    )


def resume_order(order: Order, resumed: Resumed) -> Order:
    """Return the checkpoint's row order, or a new one from its step if batch or data changed."""
    saved, manifest = resumed.manifest["identity"], resumed.manifest
    if order.stages_json():  # a function of the step alone, whatever was read before
        return order
    if "stages" in saved["data"]:
        step = resumed.state.step
        return replace(order, origin=Origin(step, step * order.rows_per_step))
    validate_data_order(resumed.manifest)
    rows_per_step, seed = saved["batch"]["rows_per_step"], saved["seed"]["seed"]
    start, mixture = manifest["order"], manifest["mixture"]
    try:
        before = Order.from_json(manifest["rows"], rows_per_step, seed, start, mixture)
    except ValueError as error:
        raise CheckpointError(f"manifest.json: {error}; {ELSEWHERE}") from error
    changed = {(one.group, one.name) for one in resumed.changed}
    goes_on = {("batch", "rows_per_step"), ("data", "rows_left_out")}
    is_same_text = not any(
        one not in goes_on and (one[0] in ("data", "tokenizer", "seed") or one[1] == "max_seq_len")
        for one in changed
    )
    if is_same_text and (before.n_rows, before.mixture_json()) != (
        order.n_rows,
        order.mixture_json(),
    ):
        raise CheckpointError(
            f"manifest.json: has {before.n_rows:,} rows, and the same text makes {order.n_rows:,};"
            f" {ELSEWHERE}"
        )
    if is_same_text and not changed & goes_on:
        return before
    origin = before.origin_at(resumed.state.step, is_same_text, order.left_out)
    return replace(order, origin=origin)


def require_length(run: RunConfig, step: int, schedule: Schedule, order: Order) -> None:
    """Raise UsageError if the resumed step is past the run's end, or the end is undefined.

    After a change of batch size or text, steps differ in size and --epochs has no meaning.
    """
    if order.origin.step and (run.epochs is not None or run.max_steps is None):
        raise UsageError(
            f"the batch, the text or the rows left out were changed at step {order.origin.step}, so"
            " that --epochs and budgets no longer determine the number of steps; give --max_steps"
            " instead, counted from step 0"
        )
    if step > schedule.total_steps:
        raise UsageError(
            f"the checkpoint is of step {step}, and the run has {schedule.total_steps} steps"
            f" ({run.sources['max_steps']}); raise --max_steps or --epochs"
        )


def require_shared_folder(engine: Engine, out_dir: Path) -> None:
    """Raise the same StorageError on every rank if hosts see different folders as out_dir.

    Rank 0 creates a probe file that the others must see.
    """
    probe = out_dir / f".probe-{engine.from_rank_0(secrets.token_hex(8))}"
    problem = None
    if engine.rank == 0:
        try:
            probe.touch()
        except OSError as error:  # raised by all ranks below: the others would wait for rank 0
            problem = (
                f"out_dir {out_dir}: {error.strerror}; correct its permissions, or give another"
            )
    if problem := engine.from_rank_0(problem):
        raise StorageError(problem, cause_rank=0)
    views = engine.gather((socket.gethostname(), disk.exists(probe)))
    if engine.rank == 0:
        probe.unlink(missing_ok=True)
    if hosts := sorted({host for host, sees_probe in views if not sees_probe}):
        raise StorageError(
            f"out_dir {out_dir} is a different folder on {', '.join(hosts)} than on {views[0][0]};"
            " give one on a file system that all hosts share",
            cause_rank=0,
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
    )


def sidecar_files(prepared: Prepared, engine: Engine) -> dict[str, bytes]:
    """Small files beside the tensors: enough to generate text from a checkpoint alone."""
    config, model = engine.resolved.config, json.loads(engine.model.config.to_json_string())
    return {
        "ds_config.resolved.json": json.dumps(masked_values(config), indent=2).encode(),
        "config.json": json.dumps(masked_values(model), indent=2, sort_keys=True).encode() + b"\n",
        **prepared.tokenizer.files(),
    }
