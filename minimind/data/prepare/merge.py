"""Merge encoded work units into a folder of shards with a manifest."""

from __future__ import annotations

import base64
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minimind.data.prepare.encode import MAX_IGNORED, MAX_REMARKS, Work, refusal
from minimind.data.prepare.work_units import Plan, Source, Unit
from minimind.data.shards.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    PLAN_NAME,
    REJECTED_NAME,
    SPLITS,
    SUMS_NAME,
    TOKENIZER_NAME,
    index_name,
    read_manifest,
    seal,
    shards_of,
)
from minimind.data.text.documents import Rejection
from minimind.data.tokenizer.lossless import TextLoss, require_kept
from minimind.errors import DataError, UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import (
    canonical_json,
    fingerprint,
    sha256_of,
    sync_file,
    write_whole,
)
from minimind.runtime.urls import named

OF_MERGE = (REJECTED_NAME, PLAN_NAME, SUMS_NAME)  # beside shards and tokenizer


def merge(work: Work, max_bad_fraction: float, allow_lossy: bool) -> dict[str, Any]:
    """Write and return the manifest of the encoded units.

    Raise UsageError if units are missing, DataError for too many bad documents, no training text,
    or a tokenizer that loses text.
    """
    found = [work.done(unit) for unit in work.plan.units]
    markers = [marker for marker in found if marker is not None]
    if len(markers) < len(found):
        missing = [number for number, marker in enumerate(found) if marker is None]
        raise UsageError(
            f"{work.directory}: {len(missing)} of {len(found)} units are not done, the first is"
            f" {missing[0]}; run the --shard I/N that are missing (unit % N == I), then --merge"
        )
    manifest = _manifest(work, markers)
    sums = b"".join(base64.b64decode(shard.pop("sums")) for shard in shards_of(manifest))
    rejected, documents = manifest["rejected"]["count"], manifest["documents"]
    if rejected and work.is_strict:
        raise refusal(manifest["rejected"]["first"])
    require_few_rejected(
        manifest["rejected"], documents, input_bytes(manifest), max_bad_fraction, work.plan.sources
    )
    if not manifest["splits"]["train"]["documents"]:
        raise no_training_documents(work.plan.options.val_fraction, documents)
    for source in manifest["sources"]:
        if source["weight"] is not None and not source["tokens"]["train"]:
            raise DataError(
                f"source {source['name']}: has weight {source['weight']:g} and no training"
                " document; add documents, or leave it out"
            )
    require_kept(manifest["sources"], work.tokenizer, allow_lossy)
    if rejected:
        _join_rejected(work, markers)
    work.tokenizer.save(work.directory / TOKENIZER_NAME)
    write_whole(work.directory / SUMS_NAME, sums)
    kept = [path for path in disk.entries(work.directory) if path.name in OF_MERGE]
    kept += (work.directory / TOKENIZER_NAME / name for name in work.tokenizer.exported)
    manifest["files"] = {
        str(path.relative_to(work.directory)): sha256_of(path) for path in sorted(kept)
    }
    write_whole(work.directory / MANIFEST_NAME, canonical_json(seal(manifest)))
    return manifest


def clear(directory: Path) -> None:
    """Remove every file that the manifest does not name, such as markers and locks."""
    manifest = read_manifest(directory)
    shards = [shard for split in manifest["splits"].values() for shard in split["shards"]]
    named = {name for shard in shards for name in (shard["name"], index_name(shard))}
    named |= {Path(name).parts[0] for name in manifest["files"]} | {MANIFEST_NAME}
    for path in disk.entries(directory):
        if path.name in named:
            continue
        if disk.is_dir(path):
            shutil.rmtree(path)
        else:
            path.unlink()


def input_bytes(manifest: dict[str, Any]) -> int:
    """Bytes of all inputs of a folder, as they are on disk."""
    return sum(given["bytes"] for source in manifest["sources"] for given in source["inputs"])


def require_few_rejected(
    rejected: dict[str, Any],
    documents: int,
    input_bytes: int,
    max_bad_fraction: float,
    sources: Sequence[Source],
) -> None:
    """Raise DataError if more than `max_bad_fraction` of the text is lost.

    This is the share of bad documents where documents can be counted, and the share of bytes where
    the reader lost its place.
    """
    bad, lost = rejected["count"], rejected["bytes"]
    of_bytes = min(1.0, lost / max(1, input_bytes))
    share = of_bytes + (1 - of_bytes) * bad / max(1, bad + documents)
    if share > max_bad_fraction:
        first, *others = (path for source in sources for path in source.paths)
        where = f"{first} and {len(others)} more" if others else first
        besides = f", and {of_bytes:.2%} of the bytes are lost" if lost else ""
        raise DataError(
            f"{where}: {bad:,} of {bad + documents:,} documents are bad{besides}, more than"
            f" max_bad_fraction = {max_bad_fraction}; the first is {rejected['first']}; correct the"
            " text, or raise --max_bad_fraction"
        )


def no_training_documents(val_fraction: float, documents: int) -> DataError:
    """Return the error for a text without training documents."""
    reason, remedy = "all were bad", "correct the text, or add documents"
    if documents and val_fraction:
        reason = f"val_fraction = {val_fraction} holds out all documents"
        remedy = "lower --val_fraction or add documents"
    return DataError(f"no document is left to train on: {reason}; {remedy}")


def _manifest(work: Work, markers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    plan, tokenizer = work.plan, work.tokenizer
    units = list(zip(plan.units, markers, strict=True))
    shards = {
        split: [
            {**marker["shards"][split], "source": unit.source}
            for unit, marker in units
            if split in marker["shards"]
        ]
        for split in SPLITS
    }
    manifest = {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "dtype": work.dtype.name,
        "options": plan.options.to_json(),
        "documents": _count(markers, "documents"),
        "splits": {
            split: {
                "tokens": sum(shard["tokens"] for shard in shards[split]),
                "documents": sum(shard["documents"] for shard in shards[split]),
                "text_bytes": sum(marker["text_bytes"][split] for marker in markers),
                "shards": shards[split],
            }
            for split in SPLITS
        },
        "sources": [_source(plan, number, units) for number in range(len(plan.sources))],
        "rejected": {
            "count": sum(marker["rejected"] for marker in markers),
            "listed": sum(marker["listed"] for marker in markers),
            "bytes": sum(marker["lost_bytes"] for marker in markers),
            "first": _first_rejected(markers),
        },
    }
    if plan.held_out:
        manifest["held_out"] = [named(path) for path in plan.held_out]
    if ignored := sorted({key for marker in markers for key in marker["ignored"]}):
        manifest["ignored"] = ignored[:MAX_IGNORED]
    if remarks := [remark for marker in markers for remark in marker["remarks"]]:
        manifest["remarks"] = [f"{named(path)}{what}" for path, what in remarks[:MAX_REMARKS]]
    return {**manifest, "fingerprint": tokens_fingerprint(manifest)}


def _source(
    plan: Plan, number: int, units: Sequence[tuple[Unit, dict[str, Any]]]
) -> dict[str, Any]:
    """Return the manifest entry of one source: its inputs and the totals of its units."""
    markers = [marker for unit, marker in units if unit.source == number]
    inputs = (given for given in plan.inputs if given.source == number)
    losses = [TextLoss(**marker["text_loss"]) for marker in markers if marker["text_loss"]]
    loss = TextLoss()
    for one in losses:
        loss.add(one)
    return {
        **({"text_loss": asdict(loss)} if losses else {}),
        "name": plan.sources[number].name,
        "weight": plan.sources[number].weight,
        "inputs": [{"path": named(given.path), "bytes": given.bytes} for given in inputs],
        "documents": _count(markers, "documents"),
        "tokens": {
            split: sum(marker["shards"].get(split, {"tokens": 0})["tokens"] for marker in markers)
            for split in SPLITS
        },
        "text_bytes": sum(sum(marker["text_bytes"].values()) for marker in markers),
        "split_bytes": {
            split: sum(marker["text_bytes"][split] for marker in markers) for split in SPLITS
        },
        "rejected": sum(marker["rejected"] for marker in markers),
        "sha256": fingerprint([marker["sha256"] for marker in markers]),
    }


def tokens_fingerprint(manifest: dict[str, Any]) -> str:
    """Hash of the tokens of each split and the source weights; names do not count."""
    return fingerprint(
        {
            "tokenizer": manifest["tokenizer"],
            "weights": [source["weight"] for source in manifest["sources"]],
            "shards": {
                split: [[s["source"], s["tokens"], s["sha256"]] for s in content["shards"]]
                for split, content in manifest["splits"].items()
            },
        }
    )


def _count(markers: Sequence[dict[str, Any]], what: str) -> int:
    return sum(shard[what] for marker in markers for shard in marker["shards"].values())


def _with_lines_before(
    markers: Sequence[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], Counter[str]]]:
    """Yield each unit's marker and the number of lines of each file that is cut in earlier units.

    A unit counts lines from its own start in a file, so that it need not read earlier ones.
    """
    before: Counter[str] = Counter()
    for marker in markers:
        yield marker, before
        before.update(marker["lines"])


def _first_rejected(markers: Sequence[dict[str, Any]]) -> str:
    for marker, before in _with_lines_before(markers):
        if first := marker["first_rejected"]:
            path, line = Path(first["path"]), first["line"] + before[first["path"]]
            text = str(Rejection(**{**first, "path": path, "line": line}))
            return f"{named(str(path))}{text[len(str(path)) :]}"
    return ""


def _join_rejected(work: Work, markers: Sequence[dict[str, Any]]) -> None:
    path = work.directory / REJECTED_NAME
    with open(path, "wb") as file:
        for unit, (_, before) in zip(work.plan.units, _with_lines_before(markers), strict=True):
            own = work.path("rejected", unit.number)
            if not disk.exists(own):
                continue
            with open(own, "rb") as part:
                for line in part:
                    entry = json.loads(line)
                    entry["line"] += before[entry["file"]]
                    entry["file"] = named(entry["file"])
                    file.write(canonical_json(entry) + b"\n")
    sync_file(path)
