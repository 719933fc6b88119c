"""The manifest.json of a folder of shards, validated when read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from minimind.errors import DataError
from minimind.runtime.durable_files import fingerprint, sha256_of

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 2  # raise it when the same text would give other files
SPLITS = ("train", "val")
ITEM_BYTES = {"uint16": 2, "uint32": 4}
SHARD_NAME = re.compile(r"(train|val)-\d{5,9}\.bin")
OWN_FILE = re.compile(r"(tokenizer/)?[A-Za-z0-9_]+\.[a-z]+")
WHOLE: dict[str, type] = {"dtype": str, "vocab_size": int, "eos_id": int, "documents": int}
WHOLE |= {"tokenizer": str, "fingerprint": str, "options": dict, "splits": dict, "sources": list}
WHOLE |= {"rejected": dict, "files": dict}
SPLIT: dict[str, type] = {"tokens": int, "documents": int, "text_bytes": int, "shards": list}
SHARD: dict[str, type] = {"name": str, "tokens": int, "documents": int, "bytes": int}
SHARD |= {"sha256": str, "index_sha256": str, "source": int}
SOURCE: dict[str, type] = {"name": str, "documents": int, "tokens": dict, "text_bytes": int}
SOURCE |= {"rejected": int, "sha256": str, "inputs": list}
OPTIONS: dict[str, type] = {"text_field": str, "max_document_bytes": int, "val_fraction": float}


def index_name(shard: dict[str, Any]) -> str:
    """Name of the file with the document ends of a shard."""
    return str(Path(shard["name"]).with_suffix(".idx"))


def is_whole(directory: Path, shard: dict[str, Any]) -> bool:
    """Whether both files of a shard have their recorded sizes."""
    sizes = {shard["name"]: shard["bytes"], index_name(shard): 8 * shard["documents"]}
    paths = ((directory / name, size) for name, size in sizes.items())
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def where_listed(rejected: dict[str, Any]) -> str:
    """Name the list of rejected documents, and its extent if it is incomplete."""
    listed = rejected.get("listed", rejected["count"])  # earlier versions listed all
    some = "" if listed == rejected["count"] else f"{listed:,} of them in "
    return f"{some}rejected.jsonl"


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with the sha256 of its canonical form added."""
    return {**manifest, "sha256": fingerprint(manifest)}


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read and validate a manifest; raise DataError if it was modified."""
    path = directory / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_bytes())
        if not isinstance(manifest, dict):
            raise ValueError("it describes no shards")
        if (found := manifest.get("format_version")) != FORMAT_VERSION:
            raise ValueError(f"it is of version {found!r}, this version reads {FORMAT_VERSION}")
        if seal({k: v for k, v in manifest.items() if k != "sha256"}) != manifest:
            raise ValueError("it does not match its own sha256")
        _require_sound(manifest)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); delete the directory to build it again"
        ) from error
    return manifest


def require_untouched(directory: Path, manifest: dict[str, Any]) -> None:
    """Raise DataError if a shard was modified after its manifest was written.

    Only shards with a newer time are hashed, so that a start does not read all of a large text.
    """
    written = (directory / MANIFEST_NAME).stat().st_mtime_ns
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            path = directory / shard["name"]
            if not path.is_file() or path.stat().st_mtime_ns <= written:
                continue
            if sha256_of(path) != shard["sha256"]:
                raise DataError(
                    f"{path}: was changed after it was prepared; put back what it was, or delete"
                    f" {directory} to build it again"
                )


def _require(facts: Any, kinds: dict[str, type], where: str) -> None:
    if not isinstance(facts, dict):
        raise ValueError(f"{where} is no object")
    for name, kind in kinds.items():
        value = facts.get(name)
        if type(value) is not kind or (type(value) is int and value < 0):
            raise ValueError(f"{where}.{name} = {str(value)[:40]!r}")


def _require_sound(manifest: dict[str, Any]) -> None:
    """Raise ValueError for the first invalid value."""
    _require(manifest, WHOLE, "manifest")
    _require(manifest["options"], OPTIONS, "options")
    _require(manifest["rejected"], {"count": int, "first": str}, "rejected")
    if manifest["dtype"] not in ITEM_BYTES or len(manifest["options"]) != len(OPTIONS):
        raise ValueError(f"dtype = {manifest['dtype']!r}, options = {[*manifest['options']]}")
    for source in manifest["sources"]:
        _require(source, SOURCE, "source")
        _require(source["tokens"], dict.fromkeys(SPLITS, int), "source.tokens")
        if "split_bytes" in source:  # of text; the first folders of this version do not tell
            _require(source["split_bytes"], dict.fromkeys(SPLITS, int), "source.split_bytes")
        weight = source.get("weight")
        if not (weight is None or (type(weight) is float and 0 < weight < float("inf"))):
            raise ValueError(f"source.weight = {weight!r}")
        for given in source["inputs"]:
            _require(given, {"path": str, "bytes": int}, "input")
    for name, digest in manifest["files"].items():
        if not OWN_FILE.fullmatch(name) or type(digest) is not str:
            raise ValueError(f"files has {name[:40]!r}")
    for split in SPLITS:
        _require(manifest["splits"].get(split), SPLIT, split)
        _require_sound_shards(manifest, manifest["splits"][split]["shards"])


def _require_sound_shards(manifest: dict[str, Any], shards: list[Any]) -> None:
    last = 0
    for shard in shards:
        _require(shard, SHARD, "shard")
        size = shard["tokens"] * ITEM_BYTES[manifest["dtype"]]
        if not SHARD_NAME.fullmatch(shard["name"]) or shard["bytes"] != size:
            raise ValueError(f"shard {shard['name'][:40]!r} has {shard['bytes']} bytes")
        if not last <= shard["source"] < len(manifest["sources"]):
            raise ValueError(f"shard {shard['name']} is of source {shard['source']}")
        last = shard["source"]
