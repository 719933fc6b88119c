"""What a run is built from, each part a function of the configuration and the parts before it."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from minimind.checkpoint.resume import Resumed
from minimind.checkpoint.validation import require_course
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule, plan_schedule
from minimind.config.training_flags import DEFAULT_DATA
from minimind.data.loader.batches import Batches, held_out_rows
from minimind.data.loader.row_order import Mixture, Order, Origin
from minimind.data.prepare.prepare import (
    Asked,
    Prepared,
    is_prepared,
    open_prepared,
    prepare_for_run,
)
from minimind.data.prepare.work_units import Options
from minimind.data.text.sources import Source
from minimind.data.tokenizer.load import load_tokenizer, longest_document
from minimind.engine.build import Engine
from minimind.errors import CheckpointError, DataError, StorageError, UsageError
from minimind.runtime.checked_json import ELSEWHERE
from minimind.runtime.terminal import phase
from minimind.train.evaluate import HeldOutRows


def require_default_data(run: RunConfig) -> None:
    """Nothing, or a UsageError with an example when no data was named and none is there."""
    if run.data_path == (DEFAULT_DATA,) and not Path(DEFAULT_DATA).exists():
        raise UsageError(
            f"no --data_path was given and {DEFAULT_DATA} is not here; give some text, for example:"
            " bash run_accelerate.sh --model tiny --data_path my_text.jsonl --out_dir out/mine"
        )


def require_resume_path(run: RunConfig) -> None:
    """Nothing, or a CheckpointError, told before anything is written, for a path not there."""
    if run.resume not in ("auto", "none") and not Path(run.resume).is_dir():
        raise CheckpointError(f"--resume {run.resume}: no such directory; name a step_ directory")


def prepared_folder(run: RunConfig) -> Path | None:
    """The folder of shards that is given as data, if one is; a UsageError if not alone."""
    folders = [path for path in run.data_path if is_prepared(path)]
    if folders and len(run.data_path) > 1:
        raise UsageError(
            f"--data_path: {folders[0]} holds prepared shards and must be given alone; mix several"
            " texts with `minimind prepare --source`"
        )
    return Path(folders[0]).expanduser() if folders else None


@phase("reading the text")
def prepare_data(run: RunConfig) -> Prepared:
    """The run's text as token shards: a prepared folder, or raw text by way of the cache."""
    if folder := prepared_folder(run):
        return open_prepared(folder, run.tokenizer)
    is_told = run.is_explicit("max_document_bytes")
    most = run.max_document_bytes if is_told else longest_document(run.tokenizer)
    asked = Asked(
        (Source("data", run.data_path),),
        run.tokenizer,
        run.vocab_size,
        Options(run.text_field, most, float(run.val_fraction)),
        run.on_bad_data == "skip",
        run.max_bad_fraction,
    )
    return prepare_for_run(asked, Path(run.cache_dir).expanduser())


def with_prepared(run: RunConfig, prepared: Prepared) -> RunConfig:
    """The run with what its data decides; a UsageError where a flag says otherwise."""
    by = f"--tokenizer {run.tokenizer}" if run.tokenizer else f"--data_path {prepared.directory}"
    run = with_derived_values(run, by, {"vocab_size": prepared.tokenizer.vocab_size})
    options = asdict(Options(**prepared.manifest["options"]))
    if not is_prepared(run.data_path[0]):
        return with_derived_values(run, by, {"max_document_bytes": options["max_document_bytes"]})
    return with_derived_values(run, f"--data_path {prepared.directory}", options)


def with_tokenizer(run: RunConfig) -> RunConfig:
    """The run with the vocabulary of a tokenizer that was given; a UsageError if a flag differs."""
    if run.tokenizer is None:
        return run
    vocab_size = load_tokenizer(run.tokenizer).vocab_size
    return with_derived_values(run, f"--tokenizer {run.tokenizer}", {"vocab_size": vocab_size})


def with_derived_values(
    run: RunConfig, by: str, values: Mapping[str, Any], over_presets: bool = True
) -> RunConfig:
    """The run with what `by` decides; a UsageError where somebody asked for something else.

    A preset is no more than a default, unless it is said that it counts (`over_presets`).
    """
    for name, value in values.items():
        given = getattr(run, name)
        is_asked = run.is_explicit(name) or not (over_presets or run.sources[name] == "default")
        if given == value:
            continue
        if is_asked:
            raise UsageError(
                f"{name} = {given} ({run.sources[name]}), but {by} has {value}; drop one of the two"
            )
        run = run.with_values(by, **{name: value})
    return run


def plan(run: RunConfig, prepared: Prepared, world_size: int) -> tuple[Order, Schedule]:
    """Which rows each step reads and how many steps there are; a DataError for too little text."""
    n_rows = prepared.train.rows(run.max_seq_len + 1)
    require_rows_of_each(run, prepared)
    rows_per_step = check_enough_rows(run, world_size, len(prepared.train), n_rows)
    order = Order(n_rows, rows_per_step, run.seed, mixture=mixture_of(run, prepared))
    return order, plan_schedule(run, order.steps_per_epoch)


def check_enough_rows(run: RunConfig, world_size: int, tokens: int, n_rows: int) -> int:
    """The rows of one step; a DataError where there are fewer."""
    micro_batch = run.micro_batch_rows(world_size)
    rows_per_step = micro_batch * run.accumulation_steps * world_size
    if n_rows < rows_per_step:
        raise DataError(
            f"{' '.join(run.data_path)}: {tokens:,} training tokens make {n_rows} rows"
            f" of {run.max_seq_len + 1}, fewer than the {rows_per_step} of one step"
            f" ({micro_batch} x {run.accumulation_steps} x {world_size} processes); add text, or"
            " lower --batch_size, --accumulation_steps or --max_seq_len"
        )
    return rows_per_step


def require_rows_of_each(run: RunConfig, prepared: Prepared) -> None:
    """Nothing, or a DataError that names a source of several that has not even one row."""
    sizes = prepared.train.sizes(run.max_seq_len + 1)
    for size, source in zip(sizes, prepared.manifest["sources"], strict=True):
        if not size and len(sizes) > 1:
            raise DataError(
                f"{' '.join(run.data_path)}: source {source['name']} has"
                f" {source['tokens']['train']:,} training tokens, fewer than a row of"
                f" {run.max_seq_len + 1}; add text to it, leave it out, or lower --max_seq_len"
            )


def mixture_of(run: RunConfig, prepared: Prepared) -> Mixture | None:
    """The sources by weight, or None where each row is read once; a DataError if one is never."""
    weights = prepared.train.weights
    if weights is None:
        return None
    sizes = prepared.train.sizes(run.max_seq_len + 1)
    try:
        return Mixture(sizes, weights)
    except ValueError as error:
        names = ", ".join(source["name"] for source in prepared.manifest["sources"])
        raise DataError(
            f"{' '.join(run.data_path)}: {error} (of the sources {names}, counted from 0, in rows"
            f" of {run.max_seq_len + 1} tokens); change its weight, or leave that source out"
        ) from error


def resume_order(order: Order, resumed: Resumed) -> Order:
    """The order of the checkpoint, taken over where it stands when the batch or text is another."""
    require_course(resumed.manifest)
    saved = resumed.manifest["identity"]
    origin = Origin(**resumed.manifest["order"])
    n_rows, batch, seed = resumed.manifest["rows"], saved["batch"], saved["seed"]["seed"]
    mixed = resumed.manifest["mixture"]
    try:
        mixture = mixed and Mixture(tuple(mixed["sizes"]), tuple(mixed["weights"]))
        before = Order(n_rows, batch["rows_per_step"], seed, origin, mixture)
    except ValueError as error:
        raise CheckpointError(f"manifest.json: {error}; {ELSEWHERE}") from error
    changed = {one.name for one in resumed.changed if one.group == "batch"}
    groups = {one.group for one in resumed.changed}
    is_same_text = not groups & {"data", "tokenizer", "seed"} and "max_seq_len" not in changed
    if is_same_text and (n_rows, mixture) != (order.n_rows, order.mixture):
        raise CheckpointError(
            f"manifest.json: has {n_rows:,} rows, and the same text makes {order.n_rows:,};"
            f" {ELSEWHERE}"
        )
    if is_same_text and "rows_per_step" not in changed:
        return before
    return replace(order, origin=before.origin_at(resumed.state.step, is_same_text))


def require_length(run: RunConfig, step: int, schedule: Schedule, order: Order) -> None:
    """Nothing, or a UsageError for a run that is resumed beyond its end, or whose end is unknown.

    Epochs are counted in steps of one size; after another batch or text they no longer are.
    """
    if order.origin.step and (run.epochs is not None or run.max_steps is None):
        raise UsageError(
            f"the batch or the text was changed at step {order.origin.step}, so that --epochs no"
            " longer says how many steps there are; give --max_steps instead, counted from step 0"
        )
    if step > schedule.total_steps:
        raise UsageError(
            f"the checkpoint is of step {step}, and the run has {schedule.total_steps} steps"
            f" ({run.sources['max_steps']}); raise --max_steps or --epochs"
        )


def require_same_files(engine: Engine, out_dir: Path, prepared: Prepared) -> None:
    """Nothing, or the same error on every rank where hosts see another out_dir or other text.

    Rank 0 leaves a file that all the others have to find. A StorageError or DataError names hosts.
    """
    mark = out_dir / f".probe-{engine.gather(secrets.token_hex(8))[0]}"
    problem = None
    if engine.rank == 0:
        try:
            mark.touch()
        except OSError as error:  # told by all: the others would wait for rank 0
            problem = f"out_dir {out_dir}: {error.strerror}; mend its rights, or give another"
    if problem := engine.gather(problem)[0]:
        raise StorageError(problem, cause_rank=0)
    text = prepared.manifest["fingerprint"], prepared.tokenizer.fingerprint
    found = engine.gather((socket.gethostname(), mark.exists(), text))
    if engine.rank == 0:
        mark.unlink(missing_ok=True)
    blind = sorted({host for host, sees, _ in found if not sees})
    if blind:
        raise StorageError(
            f"out_dir {out_dir} is another folder on {', '.join(blind)} than on {found[0][0]};"
            " give one on a file system that all hosts share",
            cause_rank=0,
        )
    strangers = sorted({host for host, _, theirs in found if theirs != found[0][2]})
    if strangers:
        raise DataError(
            f"--data_path or --tokenizer is other text on {', '.join(strangers)} than on"
            f" {found[0][0]}; give all hosts the same files",
            cause_rank=0,
        )


def batches_of(run: RunConfig, prepared: Prepared, order: Order, engine: Engine) -> Batches:
    """This rank's micro-batches by step."""
    return Batches(
        prepared.train,
        order,
        run.max_seq_len + 1,
        run.micro_batch_rows(engine.world_size),
        engine.rank,
        engine.world_size,
        engine.device,
        run.num_workers,
    )


def held_out_of(run: RunConfig, prepared: Prepared) -> HeldOutRows:
    """The rows every validation reads."""
    row_tokens = run.max_seq_len + 1
    rows = held_out_rows(prepared.val, run.eval_rows, row_tokens)
    names = tuple(source["name"] for source in prepared.manifest["sources"])
    piece_bytes = prepared.tokenizer.piece_bytes()
    return HeldOutRows(prepared.val, rows, row_tokens, piece_bytes, names, prepared.train.weights)
