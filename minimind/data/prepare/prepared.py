"""A folder of prepared text, open for reading: its tokenizer and the tokens of both splits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minimind.data.shards.block_sums import read_sums
from minimind.data.shards.conversation_shards import ConversationShards
from minimind.data.shards.manifest import (
    MANIFEST_NAME,
    PLAN_NAME,
    REJECTED_NAME,
    TOKENIZER_NAME,
    read_manifest,
    require_untouched,
)
from minimind.data.shards.token_shards import TokenShards
from minimind.data.tokenizer.load import Tokenizer, load_tokenizer
from minimind.data.tokenizer.lossless import MOST_LOST, TextLoss
from minimind.errors import DataError, UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import canonical_json
from minimind.runtime.urls import named

if TYPE_CHECKING:
    from minimind.data.text.inputs import Source

NEEDED = (MANIFEST_NAME, PLAN_NAME, TOKENIZER_NAME)
CONVERSATIONS = "chat_template"  # the option that a folder of conversations has


@dataclass(frozen=True)
class Part:
    """A prepared folder, and the number in it of the source that is read."""

    source: Source
    folder: Path
    manifest: dict[str, Any]
    number: int

    @classmethod
    def of(cls, source: Source) -> Part:
        (path,) = source.paths
        folder = disk.resolve(Path(path).expanduser())
        where = f"source {source.name}: {named(path)}"
        if missing := missing_of(folder):
            raise UsageError(
                f"{where} is not a folder of `minimind prepare` (it has no {missing[0]}); prepare"
                " the text, and give that folder"
            )
        manifest = read_manifest(folder)
        if CONVERSATIONS in manifest["options"]:
            raise UsageError(f"{where} holds conversations; give folders of text")
        names = [one["name"] for one in manifest["sources"]]
        if len(names) > 1 and source.name not in names:
            raise UsageError(
                f"{where} holds the sources {', '.join(names)}; name one of those, as in"
                f" {names[0]}={named(path)}"
            )
        return cls(source, folder, manifest, names.index(source.name) if len(names) > 1 else 0)

    def shards(self, split: str) -> list[dict[str, Any]]:
        every = self.manifest["splits"][split]["shards"]
        return [shard for shard in every if shard["source"] == self.number]

    @property
    def entry(self) -> dict[str, Any]:
        """The entry of the source in its manifest."""
        return self.manifest["sources"][self.number]


@dataclass(frozen=True)
class Prepared:
    """A tokenizer and the tokens of both splits, open for reading.

    Of several folders the manifest has the shards of all, by their paths.
    """

    directory: Path  # the folder of the first of several `parts`
    tokenizer: Tokenizer
    train: TokenShards
    val: TokenShards
    manifest: dict[str, Any]
    names: dict[str, str]  # names of inputs when they were prepared -> now
    parts: tuple[Part, ...] = ()  # folders that are mixed

    def __str__(self) -> str:
        if not self.parts:
            return named(str(self.directory))
        return " ".join(f"{part.source.name}={named(str(part.folder))}" for part in self.parts)

    def bytes_per_id(self, split: str) -> list[np.ndarray]:
        """Bytes of text that each id stands for, (vocabulary,), by source; see `mean_bytes`."""
        sizes, found = self.tokenizer.piece_bytes(), []
        is_text = ~np.isin(np.arange(len(sizes)), [*self.tokenizer.special_tokens().values()])
        for number, source in enumerate(self.manifest["sources"]):
            loss, mean = TextLoss(**source.get("text_loss", {})), self.mean_bytes(number, split)
            if mean is not None:
                found.append(np.full(len(sizes), mean))
            elif loss.share > MOST_LOST:  # only conversations may lose so much
                found.append(np.where(is_text, loss.bytes / max(1, loss.tokens), 0.0))
            else:
                found.append(sizes * (loss.bytes / loss.token_bytes) if loss.token_bytes else sizes)
        return found

    def mean_bytes(self, source: int, split: str) -> float | None:
        """Bytes of text per token of a split; None unless its tokenizer loses some of the text.

        What each token stands for is then less than the text, so the text is spread over them.
        """
        given = self.manifest["sources"][source]
        size = given["split_bytes"][split]
        is_lossy = TextLoss(**given.get("text_loss", {})).share > MOST_LOST
        if not size or not is_lossy or CONVERSATIONS in self.manifest["options"]:
            return None
        return size / max(1, given["tokens"][split])

    @property
    def first_rejected(self) -> str:
        """The first skipped document and the reason; "" if there is none."""
        return self._with_name(self.manifest["rejected"]["first"])

    @property
    def remarks(self) -> list[str]:
        """Sentences on places of the text where documents may be lost."""
        return [*map(self._with_name, self.manifest.get("remarks", ()))]

    def _with_name(self, place: str) -> str:
        """A place with the current name of its file."""
        before = next((name for name in self.names if place.startswith(f"{name}:")), "")
        return f"{named(self.names.get(before, ''))}{place[len(before) :]}"

    def text(self, start: int, length: int) -> str:
        """Text of `length` training tokens from `start` on; of conversations as `readable`."""
        if isinstance(self.train, ConversationShards):
            from minimind.data.chat.template import readable

            return readable(self.tokenizer, *self.train.with_targets(start, length))
        return self.tokenizer.decode(self.train.stretch(start, length).tolist())

    def list_rejected(self, out_dir: Path) -> None:
        """Write rejected.jsonl to `out_dir` if documents were skipped.

        Folders that are mixed have their own lists.
        """
        path = self.directory / REJECTED_NAME
        if not self.parts and disk.exists(path):
            with open(path, "rb") as lines, open(out_dir / REJECTED_NAME, "wb") as copy:
                for line in lines:
                    entry = json.loads(line)
                    name: str = entry["file"]
                    entry["file"] = named(self.names.get(name, name))
                    copy.write(canonical_json(entry) + b"\n")


def is_prepared(path: str | Path) -> bool:
    """Whether the folder holds shards and not text."""
    return not missing_of(path)


def missing_of(path: str | Path) -> list[str]:
    """Return the required files that a folder lacks."""
    return [name for name in NEEDED if not disk.exists(Path(path).expanduser() / name)]


def open_prepared(
    directory: Path,
    tokenizer_path: str | None = None,
    names: Sequence[str] = (),
    sources: Sequence[Source] = (),
) -> Prepared:
    """Open the shards of a folder; raise DataError if they changed or have another tokenizer.

    `names` are the current names of its inputs, in order, and `sources` have the current names and
    weights of its sources.
    """
    manifest = read_manifest(directory)
    require_untouched(directory, manifest)
    if sources:
        pairs = zip(manifest["sources"], sources, strict=True)
        current = [{**entry, "name": one.name, "weight": one.weight} for entry, one in pairs]
        manifest = {**manifest, "sources": current}
    tokenizer = tokenizer_of_folder(directory, manifest, tokenizer_path)
    if CONVERSATIONS in manifest["options"]:
        shards_class = partial(ConversationShards, eos_id=manifest["eos_id"])
    else:
        shards_class = TokenShards
    sums = read_sums(directory, manifest)
    train, val = (
        shards_class(directory, split, manifest=manifest, sums=sums) for split in ("train", "val")
    )
    before = [given["path"] for source in manifest["sources"] for given in source["inputs"]]
    renamed = dict(zip(before, names, strict=True)) if names else {}
    return Prepared(directory, tokenizer, train, val, manifest, renamed)


def tokenizer_of_folder(
    directory: Path, manifest: Mapping[str, Any], path: str | None
) -> Tokenizer:
    """Load the tokenizer of a folder.

    Raise DataError if it has changed, or if the --tokenizer at `path` is another one.
    """
    tokenizer = load_tokenizer(directory / TOKENIZER_NAME)
    if tokenizer.fingerprint != manifest["tokenizer"]:
        raise DataError(
            f"{tokenizer.path}: is not the tokenizer of {directory}; restore that one, or prepare"
            " the text again"
        )
    if path is not None and load_tokenizer(path).fingerprint != manifest["tokenizer"]:
        raise DataError(
            f"{path}: is not the tokenizer of {directory}; remove --tokenizer, or prepare the"
            " text again with it"
        )
    return tokenizer


def holds_conversations(directory: Path) -> bool:
    """Whether the shards of a folder are conversations and not text."""
    return CONVERSATIONS in read_manifest(directory)["options"]


def open_text(directory: Path, tokenizer_path: str | None = None) -> Prepared:
    """Open a folder of text to pretrain on; raise DataError for the conversations of a run."""
    prepared = open_prepared(directory, tokenizer_path)
    require_text(directory, prepared.manifest)
    return prepared


def require_text(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Raise DataError for a folder of conversations."""
    if CONVERSATIONS in manifest["options"]:
        raise DataError(
            f"{directory}: holds conversations, as --task sft prepares them; give text, or --task"
            " sft and the files of the conversations"
        )
