"""Prepared folders mixed at train time, each a source or a part of one.

They are read as one that `minimind prepare --source` wrote; no text is tokenized again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minimind.config.run_config import RunConfig
from minimind.data.prepare.merge import tokens_fingerprint
from minimind.data.prepare.prepared import Part, Prepared, missing_of, tokenizer_of_folder
from minimind.data.shards.block_sums import read_sums
from minimind.data.shards.manifest import (
    SPLITS,
    TOKENIZER_NAME,
    read_manifest,
    require_untouched,
    require_whole,
)
from minimind.data.shards.token_shards import TokenShards
from minimind.data.text.inputs import Source, join_sources, name_of, parse_source
from minimind.errors import UsageError
from minimind.runtime import disk
from minimind.runtime.urls import is_url


def sources_of(run: RunConfig) -> tuple[Source, ...]:
    """The sources of --source and of the file of --stages; raise UsageError for a mistake.

    Prepared folders, or with --task sft conversations. Without any the text is --data_path.
    """
    sources = [parse_source(text) for text in run.source or ()]
    if run.stages:
        from minimind.config.stages import read_stages

        of_file = read_stages(run.stages).sources
        sources += [
            Source(name_of(name, f"--stages {run.stages}"), (path,))
            for name, path in of_file.items()
        ]
        if sources and run.is_explicit("data_path"):
            raise UsageError(
                f"--stages {run.stages}: has sources, and data_path = {' '.join(run.data_path)}"
                f" ({run.sources['data_path']}) names other text; remove one of them"
            )
    names = [source.name for source in sources]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(
            f"source {twice} is given twice; give each source one path, which may be a folder"
        )
    return join_sources(sources)


def open_parts(parts: Sequence[Part], tokenizer_path: str | None = None) -> Prepared:
    """Open some parts as one text; raise DataError for a file that is missing or changed."""
    sums: dict[Path, np.ndarray] = {}
    for folder, manifest in {part.folder: part.manifest for part in parts}.items():
        require_untouched(folder, manifest)
        sums |= read_sums(folder, manifest)
    first, manifest = parts[0], joined_manifest(parts)
    tokenizer = tokenizer_of_folder(first.folder, manifest, tokenizer_path)
    train, val = (TokenShards(first.folder, split, manifest, sums) for split in SPLITS)
    return Prepared(first.folder, tokenizer, train, val, manifest, {}, tuple(parts))


def whole_parts_of(sources: Sequence[Source]) -> list[Part]:
    """See `parts_of`; raise DataError for a file that is missing or cut."""
    parts = parts_of(sources)
    for part in parts:
        require_whole(part.folder, (shard for split in SPLITS for shard in part.shards(split)))
    return parts


def parts_of(sources: Sequence[Source]) -> list[Part]:
    """The folders of some sources; of a folder of several the source of the same name.

    Raise UsageError for another folder, for folders that were prepared with other options, and for
    one text that is two sources.
    """
    parts = [Part.of(source) for source in sources]
    seen: dict[tuple[Path, int], str] = {}
    for part in parts:
        _require_alike(parts[0], part)
        name = seen.setdefault((part.folder, part.number), part.source.name)
        if name != part.source.name:
            raise UsageError(
                f"source {part.source.name}: {part.folder} is the text of source {name}, too;"
                " remove one of them"
            )
    return parts


def described_text(run: RunConfig) -> dict[str, Any] | None:
    """Vocabulary, shards and sources of the run's text as a manifest has them; opens no shard.

    None if the text is raw, or a part of it is at a URL or not here.
    """
    if run.task == "sft":
        return None
    if sources := sources_of(run):
        paths = [path for source in sources for path in source.paths]
        if any(is_url(path) or not disk.exists(Path(path).expanduser()) for path in paths):
            return None
        return joined_manifest(parts_of(sources))
    folder = Path(run.data_path[0]).expanduser()
    return read_manifest(folder) if not missing_of(folder) else None


def _require_alike(first: Part, other: Part) -> None:
    """Raise UsageError if two folders were prepared with another tokenizer or other options."""
    names = first.source.name, other.source.name
    if first.manifest["tokenizer"] != other.manifest["tokenizer"]:
        raise UsageError(
            f"source {names[1]}: {other.folder} has another tokenizer than {first.folder} of source"
            f" {names[0]}; prepare it again with --tokenizer {first.folder / TOKENIZER_NAME}"
        )
    ours, theirs = first.manifest["options"], other.manifest["options"]
    for option in ours:
        if ours[option] != theirs.get(option):
            raise UsageError(
                f"source {names[1]}: {other.folder} was prepared with {option} ="
                f" {theirs.get(option)}, and {first.folder} of source {names[0]} with"
                f" {ours[option]}; prepare one of them again with the --{option} of the other"
            )


def joined_manifest(parts: Sequence[Part]) -> dict[str, Any]:
    """The manifest of parts as one text; the names of its shards are their paths."""
    first = parts[0].manifest
    shards = {
        split: [
            {**shard, "name": str(part.folder / shard["name"]), "source": number}
            for number, part in enumerate(parts)
            for shard in part.shards(split)
        ]
        for split in SPLITS
    }
    manifest = {
        **{key: first[key] for key in ("format_version", "tokenizer", "vocab_size", "eos_id")},
        **{key: first[key] for key in ("dtype", "options")},
        "documents": sum(shard["documents"] for own in shards.values() for shard in own),
        "splits": {
            split: {
                **{key: sum(shard[key] for shard in own) for key in ("tokens", "documents")},
                "text_bytes": sum(part.entry["split_bytes"][split] for part in parts),
                "shards": own,
            }
            for split, own in shards.items()
        },
        "sources": [
            {**part.entry, "name": part.source.name, "weight": part.source.weight} for part in parts
        ],
        "rejected": {"count": 0, "listed": 0, "bytes": 0, "first": ""},  # each part has its own
    }
    return {**manifest, "fingerprint": tokens_fingerprint(manifest)}
