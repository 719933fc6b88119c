"""`--dry_run`: what a run would be, as far as that is known without reading its text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from minimind.config.run_config import RunConfig
from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.loader.manifest import is_whole, read_manifest
from minimind.data.prepare.work_units import Options
from minimind.errors import DataError
from minimind.estimate.plan import plan_text
from minimind.architecture.select import Architecture
from minimind.train.build import prepared_folder, require_a_step, with_decided, with_tokenizer
from minimind.config.deepspeed.resolve import Resolved
from minimind.train.settings import deepspeed_table, flags_table
from minimind.config.deepspeed.backend_choice import Setup, engaged_by


def dry_run_text(setup: Setup, resolved: Resolved, model: Architecture) -> str:
    """What the run would be, and what it would cost; raises what a prepared folder's start would.

    Of such a folder the manifest is read and the sizes of its shards, none of its tokens.
    """
    run, tables = with_tokenizer(resolved.run), []
    if folder := prepared_folder(run):
        manifest = read_manifest(folder)
        _require_usable(folder, manifest, run.tokenizer)
        run = _with_manifest(run, folder, manifest)
        tables.append(_data_table(folder, manifest, run.max_seq_len + 1))
        tokens = manifest["splits"]["train"]["tokens"]
        rows = tokens // (run.max_seq_len + 1)  # of several sources perhaps a few fewer
        require_a_step(resolved.run, setup.launch.world_size, tokens, rows)
    tables.insert(0, f"flags:\n{flags_table(run)}")
    if resolved.config:
        tables.append(deepspeed_table(resolved))
    world_size = setup.launch.world_size
    costs = model.costs(run) or plan_text(run, world_size, resolved.config, device=setup.device)
    return "\n\n".join([*tables, *filter(None, [engaged_by(setup.launch)]), costs])


def _require_usable(folder: Path, manifest: dict[str, Any], tokenizer: str | None) -> None:
    """Nothing, or a DataError for a shard that is cut or missing, or another tokenizer."""
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            if not is_whole(folder, shard):
                raise DataError(
                    f"{folder / shard['name']}: is missing or cut; put it back, or prepare the"
                    " text again"
                )
    if tokenizer is not None and load_tokenizer(tokenizer).fingerprint != manifest["tokenizer"]:
        raise DataError(
            f"{tokenizer}: is not the tokenizer that {folder} was made with; leave out"
            " --tokenizer, or prepare the text again with it"
        )


def _with_manifest(run: RunConfig, folder: Path, manifest: dict[str, Any]) -> RunConfig:
    options = asdict(Options(**manifest["options"]))
    decided = {"vocab_size": manifest["vocab_size"], **options}
    return with_decided(run, f"--data_path {folder}", decided)


def _data_table(folder: Path, manifest: dict[str, Any], row_tokens: int) -> str:
    lines = [f"data: {folder}"]
    for split, found in manifest["splits"].items():
        tokens, documents = found["tokens"], found["documents"]
        rows = tokens // row_tokens
        lines.append(
            f"{split:<6} {tokens:>14,} tokens, {documents:,} documents, about {rows:,} rows of"
            f" {row_tokens}"
        )
    return "\n".join(lines)
