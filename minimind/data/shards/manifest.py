"""The manifest.json of a folder of shards, validated when read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, FailFast, Field

from minimind.errors import CheckpointError, DataError
from minimind.runtime import disk
from minimind.runtime.checked_json import CheckedJson, ClosedJson, Count, Positive, shown, validate
from minimind.runtime.durable_files import fingerprint, sha256_of

if TYPE_CHECKING:
    from minimind.data.text.documents import ReadOptions

# Files of a prepared folder.
MANIFEST_NAME = "manifest.json"
PLAN_NAME = "plan.json"
TOKENIZER_NAME = "tokenizer"
REJECTED_NAME = "rejected.jsonl"
SUMS_NAME = "sums.bin"
FORMAT_VERSION = 3  # increment when the same text would give other files, or manifests other keys
SPLITS = ("train", "val")
SMALL_BYTES = 2**26  # of all document ends, which a start hashes: tens of milliseconds
ITEM_BYTES = {"uint16": 2, "uint32": 4}


ListedName = Annotated[str, Field(pattern=r"^(tokenizer/)?[A-Za-z0-9_]+\.[a-z]+$")]


class Shard(CheckedJson):
    """A file of tokens, and its file of document ends."""

    name: Annotated[str, Field(pattern=r"^(train|val)-[0-9]{5,9}\.bin$")]
    tokens: Count
    documents: Count
    bytes: Count
    sha256: str
    index_sha256: str
    source: Count


class Split(CheckedJson):
    """Counts and shards of the training split or the held-out split."""

    tokens: Count
    documents: Count
    text_bytes: Count
    shards: Annotated[list[Shard], FailFast()]


class SplitCounts(CheckedJson):
    """One count per split."""

    train: Count
    val: Count


class SourceFile(CheckedJson):
    """A file of text."""

    path: str
    bytes: Count


class SourceLoss(ClosedJson):
    """What the tokenizer loses of a source; fields as in `TextLoss`."""

    bytes: Count
    tokens: Count
    token_bytes: Count
    lost: Count
    changed: Count
    example: str


class Source(CheckedJson):
    """A source of the mixture."""

    name: str
    documents: Count
    tokens: SplitCounts
    text_bytes: Count
    rejected: Count
    sha256: str
    inputs: Annotated[list[SourceFile], FailFast()]
    split_bytes: SplitCounts  # bytes of text
    weight: Positive | None = None
    text_loss: SourceLoss | None = None  # absent if nothing can be lost


class Options(ClosedJson):
    """The options that determine the documents, their splits and their tokens."""

    model_config = ConfigDict(frozen=True)

    text_field: str = "text"
    max_document_bytes: Count = 64 * 2**20
    val_fraction: Annotated[float, Field(ge=0, le=1)] = 0.01
    chat_template: str | None = None  # source of the template of conversations; None: text
    train_on: Literal["assistant", "last", "all"] | None = None  # which tokens are targets
    template_date: str | None = None  # the date for a template that asks for one
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the template

    def to_json(self) -> dict[str, Any]:
        """The options that apply, in the order in which messages name them."""
        return self.model_dump(exclude_none=True)

    @property
    def reading(self) -> ReadOptions:
        """How text is read; `Work.reading_of` also knows conversations."""
        from minimind.data.text.documents import ReadOptions

        return ReadOptions(self.text_field, self.max_document_bytes)


class Rejected(CheckedJson):
    """Documents that were left out."""

    count: Count
    listed: Count
    bytes: Count  # lost of the inputs besides, where documents cannot be counted
    first: str


class Splits(CheckedJson):
    """Both splits."""

    train: Split
    val: Split


class DatasetManifest(CheckedJson):
    """`manifest.json` of a folder of shards."""

    dtype: Literal["uint16", "uint32"]
    vocab_size: Count
    eos_id: Count
    documents: Count
    tokenizer: str
    fingerprint: str
    options: Options
    splits: Splits
    sources: Annotated[list[Source], FailFast()]
    rejected: Rejected
    files: Annotated[dict[ListedName, str], Field(max_length=100)]
    ignored: list[str] = Field(default_factory=list)  # keys beside the turns of conversations
    remarks: list[str] = Field(default_factory=list)  # on places where documents may be lost
    held_out: list[str] = Field(default_factory=list)  # inputs of --val_path


def index_name(shard: dict[str, Any]) -> str:
    """Name of the file with the document ends of a shard."""
    return str(Path(shard["name"]).with_suffix(".idx"))


def is_whole(directory: Path, shard: dict[str, Any]) -> bool:
    """Whether both files of a shard have their recorded sizes."""
    return not _cut_files(directory, shard)


def require_whole(directory: Path, shards: Iterable[dict[str, Any]]) -> None:
    """Raise DataError for a file of `shards` that is missing or cut."""
    for shard in shards:
        for path in _cut_files(directory, shard):
            raise DataError(f"{path}: is missing or cut; put it back, or prepare the text again")


def _cut_files(directory: Path, shard: dict[str, Any]) -> list[Path]:
    """The files of a shard that are missing or do not have their recorded size."""
    sizes = {shard["name"]: shard["bytes"], index_name(shard): 8 * shard["documents"]}
    paths = ((directory / name, size) for name, size in sizes.items())
    return [
        path for path, size in paths if not disk.is_file(path) or disk.stat(path).st_size != size
    ]


def how_skipped(rejected: dict[str, Any]) -> str:
    """Say that documents are skipped, what is lost besides, and which of them are listed where."""
    listed, lost = rejected["listed"], rejected["bytes"]
    besides = f", {lost:,} bytes lost" if lost else ""
    some = "" if listed == rejected["count"] else f"{listed:,} of them in "
    return f"skipped{besides} ({some}rejected.jsonl)"


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with the sha256 of its canonical form added."""
    return {**manifest, "sha256": fingerprint(manifest)}


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read a manifest; raise DataError if missing, invalid, modified or of another version."""
    path = directory / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_bytes())
        if not isinstance(manifest, dict):
            raise ValueError("it describes no shards")
        if (version := manifest.get("format_version")) != FORMAT_VERSION:
            raise ValueError(
                f"it has version {shown(version)}, this program reads version {FORMAT_VERSION}"
            )
        if seal({k: v for k, v in manifest.items() if k != "sha256"}) != manifest:
            raise ValueError("it does not match its own sha256")
        validate(DatasetManifest, manifest)
        _require_matching_shards(manifest)
    except (OSError, ValueError, RecursionError, CheckpointError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); delete the directory to build it again"
        ) from error
    return manifest


def changed(path: Path, what: str) -> DataError:
    """The error for a file that is not as the preparation wrote it."""
    folder = path.parent.parent if path.parent.name == TOKENIZER_NAME else path.parent
    return DataError(
        f"{path}: was changed after it was prepared: {what} that were written; restore it, or"
        f" delete {folder} to build it again"
    )


def require_untouched(directory: Path, manifest: dict[str, Any]) -> None:
    """Raise DataError if a file was modified after its manifest was written.

    Of shards only those with a newer time are hashed, so that a start does not read all of a large
    text; their blocks have sums. Document ends are hashed when they are read.
    """
    for name, digest in manifest["files"].items():
        if name == SUMS_NAME:  # hashed when it is read
            continue
        try:
            require_hash(directory / name, digest)
        except DataError as error:
            if not name.startswith(f"{TOKENIZER_NAME}/"):
                raise
            raise DataError(
                f"{directory / name}: is not the tokenizer of {directory}; restore that one, or"
                " prepare the text again"
            ) from error
    written = disk.stat(directory / MANIFEST_NAME).st_mtime_ns
    for shard in shards_of(manifest):
        path = directory / shard["name"]
        if disk.is_file(path) and disk.stat(path).st_mtime_ns > written:
            require_hash(path, shard["sha256"])


def require_document_ends(directory: Path, manifest: dict[str, Any]) -> None:
    """Raise DataError if document ends are damaged; large ones are only hashed when they are read.

    For the start of a run, which may read them late, or never.
    """
    shards = shards_of(manifest)
    if sum(8 * shard["documents"] for shard in shards) <= SMALL_BYTES:
        for shard in shards:
            require_hash(directory / index_name(shard), shard["index_sha256"])


def shards_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of all shards: training text, then held-out text."""
    return [shard for split in SPLITS for shard in manifest["splits"][split]["shards"]]


def require_hash(path: Path, digest: str) -> None:
    """Raise DataError for a file with another sha256."""
    try:
        is_same = sha256_of(path) == digest
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); put it back, or delete"
            f" {path.parent} to build it again"
        ) from error
    if not is_same:
        raise changed(path, "its bytes are not those")


def _require_matching_shards(manifest: dict[str, Any]) -> None:
    """Raise ValueError for a shard whose size or source does not fit the manifest."""
    for split in SPLITS:
        last = 0
        for shard in manifest["splits"][split]["shards"]:
            if shard["bytes"] != shard["tokens"] * ITEM_BYTES[manifest["dtype"]]:
                raise ValueError(f"shard {shard['name']} has {shard['bytes']} bytes")
            if not last <= shard["source"] < len(manifest["sources"]):
                raise ValueError(f"shard {shard['name']} is of source {shard['source']}")
            last = shard["source"]
