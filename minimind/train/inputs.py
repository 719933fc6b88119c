"""What a start reads, looked at before the slow imports: every path, and the first records."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from minimind.checkpoint.directory import MANIFEST, published_checkpoints
from minimind.checkpoint.retention import with_best
from minimind.config.deepspeed.document import read_deepspeed_json
from minimind.config.deepspeed.key_checks import Fault, key_faults, normalize_config
from minimind.config.deepspeed.resolve import require_none
from minimind.config.deepspeed.rules import precision_faults
from minimind.config.flags import DEFAULT_DATA
from minimind.config.names import no_run, not_there
from minimind.config.parse import config_file
from minimind.config.run_config import RunConfig
from minimind.data.shards.manifest import MANIFEST_NAME, PLAN_NAME
from minimind.data.text.documents import ReadOptions, Rejection
from minimind.data.text.formats import format_of, read_segment, segments_of
from minimind.data.text.inputs import find_files, require_once, require_records, val_paths, without
from minimind.errors import CheckpointError, UsageError
from minimind.runtime import disk
from minimind.runtime.file_kinds import form_of_folder
from minimind.runtime.installed import LAUNCH
from minimind.runtime.urls import is_url, require_path

LOOKED_AT = 1000  # files; the first record of more takes seconds on a network
LONGEST_TEXT = 2**22  # bytes of a file that is one record


def require_inputs(run: RunConfig) -> None:
    """Raise what the start would raise for a path that a flag names, or for a first record.

    Milliseconds, and no torch: the start itself reads everything else, and what URLs hold.
    """
    require_resume_path(run)
    faults: list[Fault] = []
    if run.deepspeed_config not in (None, "none"):
        path = run.deepspeed_config
        config = normalize_config(read_deepspeed_json(path, run.sources["deepspeed_config"]))
        faults += key_faults(config, path)
    if "auto" not in (run.device, run.dtype):
        faults += precision_faults(run, run.device)
    require_none(faults)
    if run.hugging_face is not None:
        config_file(run.hugging_face)
    if run.teacher is not None:
        _require_model("--teacher ", run.teacher)
    _require_init_from(run)
    if run.tokenizer is not None:
        from minimind.data.tokenizer.load import load_tokenizer

        load_tokenizer(run.tokenizer)
    # Each of the next raises where there is no file; what is there may be a pipe, to be read once.
    if (path := _missing(run.chat_template)) is not None:
        from minimind.data.prepare.chat_tokenizer import read_template

        read_template(path)
    if (path := _missing(run.skip_rows)) is not None:
        from minimind.data.rows.skip_rows import read_skip_rows

        read_skip_rows(Path(path), 0, 0, "")
    if run.sample_interval and run.sample_prompts is not None:
        from minimind.inference.prompts import read_prompts

        read_prompts(run.sample_prompts, "--sample_prompts", pipes=False)
    if run.eval_tasks is not None:
        from minimind.config.tasks import tasks_of

        tasks_of(run)
    _require_text(run)


def _missing(path: str | None) -> str | None:
    return path if path is not None and not disk.exists(Path(path).expanduser()) else None


def require_resume_path(run: RunConfig) -> None:
    """Raise CheckpointError if --resume names no directory, or one without a checkpoint."""
    if run.resume in ("auto", "none"):
        return
    path = with_best(Path(run.resume))
    if fault := not_there(path, "--resume ", "name a step_ directory") or no_run(path, "--resume "):
        raise CheckpointError(fault)
    if not disk.is_dir(path):
        raise CheckpointError(f"--resume {path}: is not a directory; name a step_ directory")
    if published_checkpoints(path):
        raise CheckpointError(
            f"--resume {path}: holds step_ directories; name one of them, or {path.parent}"
        )
    if not (published_checkpoints(path / "checkpoints") or disk.exists(path / MANIFEST)):
        form = form_of_folder(path)
        remedy = "holds no checkpoint; name a step_ directory"
        raise CheckpointError(f"--resume {path}: {form or remedy}")


def _require_init_from(run: RunConfig) -> None:
    """Raise CheckpointError if --init_from names nothing, unless the run goes on by itself.

    A model of the Hub is fetched: the processes of the run find it in the cache.
    """
    if run.init_from is None:
        return
    goes_on = run.resume != "none" and published_checkpoints(Path(run.out_dir) / "checkpoints")
    if goes_on or run.resume not in ("auto", "none"):
        return
    _require_model("--init_from ", run.init_from)


def _require_model(flag: str, place: str) -> None:
    from minimind.runtime.hub import local_model

    path = with_best(local_model(place))
    if fault := not_there(path, flag) or no_run(path, flag):
        raise CheckpointError(fault)


def _require_text(run: RunConfig) -> None:
    """Raise for a local path of the text without any, or with a bad first record."""
    given = run.data_path
    if run.source or run.stages:
        from minimind.data.prepare.mixed import parts_of, sources_of

        if sources := sources_of(run):
            given = tuple(path for source in sources for path in source.paths)
            local = [source for source in sources if not is_url(*source.paths)]
            for source in local:
                require_path(*source.paths)
            if run.task != "sft":
                parts_of(local)
                return
    paths = [path for path in given if not is_url(path)]
    if given == (DEFAULT_DATA,) and not disk.exists(Path(DEFAULT_DATA)):
        if run.dry_run:  # of the other flags
            return
        raise UsageError(
            f"no --data_path was given and {DEFAULT_DATA} is not here; give some text, for example:"
            f" {LAUNCH} --model tiny --data_path my_text.jsonl --out_dir out/mine"
        )
    for path in paths:
        require_path(path)
    # Finished ones are checked with their manifest.
    texts = [path for path in paths if not _is_prepared(Path(path).expanduser())]
    val_path = [path for path in val_paths(run.val_path, given) if not is_url(path)]
    held_out = find_files(val_path)
    files = [*without(find_files(texts), held_out), *held_out]
    require_once(files)
    reading = ReadOptions(run.text_field, run.max_document_bytes)
    if run.task == "sft":
        from minimind.data.chat.conversations import conversation_records

        require_records(files)
        reading = replace(reading, records=conversation_records(reading, set()))
    for file in files[:LOOKED_AT]:
        if format_of(file).is_one_text and disk.stat(file).st_size > LONGEST_TEXT:
            continue
        segment = segments_of(file, sys.maxsize)[0]
        first = next(read_segment(segment, reading), None)
        if isinstance(first, Rejection) and run.on_bad_data != "skip":
            from minimind.data.prepare.encode import refuse

            refuse(first)


def _is_prepared(folder: Path) -> bool:
    return disk.is_file(folder / PLAN_NAME) and disk.is_file(folder / MANIFEST_NAME)
