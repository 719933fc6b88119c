"""Files of a run at a URL, in the layout of its out_dir.

    URL/mirror.json                       the run that it is of (mirror.py)
    URL/checkpoints/step_00000042/...     complete if it has a manifest.json, which is written last
    URL/config.yaml tokenizer/

The manifest is deleted, or renamed, before any other file of its checkpoint. The rest is the
protocol of directory.py: manifests, damage and `validation.json` are the same.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from minimind.checkpoint.directory import (
    MANIFEST,
    NAME,
    Rejected,
    checked_manifest,
    rejected,
    size_fault,
    step_directory,
    step_of,
)
from minimind.checkpoint.retention import VALIDATION
from minimind.errors import CheckpointError, DataError, StorageError
from minimind.runtime import disk
from minimind.runtime.checked_json import MAX_BYTES, parse_object, read_object
from minimind.runtime.download import REPLACED, RemoteObject, download, etag_of
from minimind.runtime.drafts import A_DRAFT, draft_of
from minimind.runtime.durable_files import storing, sync_directory, write_durably
from minimind.runtime.filesystem import (
    AWS,
    LOCAL,
    Progress,
    Truncated,
    open_filesystem,
    retrying,
    scheme_of,
)
from minimind.runtime.urls import masked

CHECKPOINTS = "checkpoints"
BLOCK = 2**23  # bytes of a request that reads
PART = 2**25  # bytes of a request of a large upload; S3 takes 10,000 of them
PART_ATTEMPTS = 5  # the library's attempts; without them the whole file is sent again
ABANDONED = f"abandoned-{MANIFEST}"
OF_SYSTEMS = (
    r"lost\+found|\.Trash-\d+|\.snapshot"
    r"|\.DS_Store|\.Trashes|\.Spotlight-V100|\.fseventsd"
    r"|Thumbs\.db|desktop\.ini|\$RECYCLE\.BIN|System Volume Information"
)
LEFT = re.compile(rf"{A_DRAFT.pattern}|{OF_SYSTEMS}")

T = TypeVar("T")


class RemoteRun:
    """The files of a run at `url`; each operation is tried again after errors that pass.

    Raise StorageError if the storage refuses or does not answer.
    """

    def __init__(self, url: str) -> None:
        self._filesystem, root = open_filesystem(url)
        self.url = url.rstrip("/")
        self.shown = masked(self.url)  # the URL in messages
        self._root = root.rstrip("/")
        self._scheme = scheme_of(self.url)
        if self._scheme is LOCAL:
            self._filesystem.auto_mkdir = True
        elif self._scheme is AWS:
            self._filesystem.retries = PART_ATTEMPTS

    @property
    def folder(self) -> Path | None:
        """The folder of a file:// URL."""
        return disk.resolve(self._root) if self._scheme is LOCAL else None

    def _try(self, name: str, work: Callable[[str], T], progress: Progress | None = None) -> T:
        """The result of `work` on the path of a file."""
        path = f"{self._root}/{name}"
        url = f"{self.url}/{name}".rstrip("/")
        with storing(masked(url), "give another --mirror"):
            return retrying(url, lambda: work(path), StorageError, progress)

    def names(self) -> list[str]:
        """Names at the URL, without what a killed start left and what systems put on each disk."""

        def names(path: str) -> list[str]:
            try:
                found = self._filesystem.ls(self._root, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            # S3 may have an object for the folder itself.
            found = [path for path in found if path.rstrip("/") != self._root]
            return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

        return [name for name in self._try("", names) if not LEFT.fullmatch(name)]

    def steps(self) -> dict[int, dict[str, int]]:
        """Sizes of the files of every checkpoint, complete or not, by step and name."""

        def find(path: str) -> dict[str, Any]:
            try:
                if self._scheme is not LOCAL:
                    return self._filesystem.find(path, detail=True)
                found = self._filesystem.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            inside: dict[str, Any] = {}
            for folder in found:  # `find` leaves out a folder that it cannot list
                with suppress(FileNotFoundError, NotADirectoryError):
                    files = self._filesystem.ls(folder["name"], detail=True)
                    inside |= {info["name"]: info for info in files}
            return inside

        steps: dict[int, dict[str, int]] = {}
        for path, info in self._try(CHECKPOINTS, find).items():
            folder, _, name = path.rpartition(f"{CHECKPOINTS}/")[2].partition("/")
            if NAME.fullmatch(folder) and name and info["type"] == "file":
                steps.setdefault(step_of(Path(folder)), {})[name] = info["size"]
        return steps

    def published(self) -> list[int]:
        """Steps of the complete checkpoints, highest first."""
        found = (step for step, names in self.steps().items() if MANIFEST in names)
        return sorted(found, reverse=True)

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if there is no such file, or a folder or a pipe.

        A file that is too large is read as far as shows a reader that it is.
        """

        def read(path: str) -> bytes | None:
            try:
                info = self._filesystem.info(path)
                if info["type"] != "file":
                    return None
                end = MAX_BYTES + 1 if info["size"] > MAX_BYTES else None
                return self._filesystem.cat_file(path, end=end)
            except FileNotFoundError:
                return None

        return self._try(name, read)

    def write(self, name: str, content: bytes) -> None:
        """Replace a small file and read it back; readers see the old or the new content."""

        def write(path: str) -> None:
            is_local = self._scheme is LOCAL
            draft = str(draft_of(Path(path))) if is_local else path
            self._filesystem.pipe_file(draft, content)
            if is_local:
                self._filesystem.mv(draft, path)

        self._try(name, write)
        if self.read(name) != content:
            raise StorageError(f"{self.shown}/{name}: does not read back as it was written")

    def remove(self, name: str) -> None:
        """Delete a file; one that is gone is fine."""

        def remove(path: str) -> None:
            with suppress(FileNotFoundError):
                self._filesystem.rm_file(path)

        self._try(name, remove)

    def put(self, local: Path, name: str, sha256: str | None = None) -> int:
        """Upload a file and verify it there, by its ETag or by reading it; return its bytes.

        With `sha256`, raise CheckpointError if the local file has another hash, or is unreadable.
        """
        try:
            own_sha256, etag, size = _hashes(local)
        except OSError as error:
            if sha256 is None:
                raise
            raise CheckpointError(f"{local}: cannot be read ({error.strerror or error})") from error
        if sha256 not in (None, own_sha256):
            raise CheckpointError(f"{local}: does not match its sha256")
        options, progress = {"chunksize": PART} if self._scheme is AWS else {}, Progress()

        def send(path: str) -> None:
            callback = progress.callback()
            try:
                self._filesystem.put_file(str(local), path, callback=callback, **options)
            except FileNotFoundError:  # also if the answer to the end of an upload was lost
                with suppress(FileNotFoundError):
                    info = self._filesystem.info(path)
                    if (info["size"], etag_of(info)) == (size, etag):
                        return
                raise

        self._try(name, send, progress)
        info = self._try(name, self._filesystem.info)
        if info["size"] != size or etag_of(info) != etag:
            # The ETag of an encrypted object, or of another storage, is something else.
            if info["size"] != size or self._sha256(name, size) != own_sha256:
                raise StorageError(f"{self.shown}/{name}: does not read back as it was written")
        return size

    def _sha256(self, name: str, size: int) -> str:
        digest = hashlib.sha256()
        for start in range(0, size, BLOCK):
            end = min(size, start + BLOCK)

            def read(path: str, start: int = start, end: int = end) -> bytes:
                content = self._filesystem.cat_file(path, start=start, end=end)
                if len(content) != end - start:
                    raise Truncated(f"{len(content):,} of {end - start:,} bytes arrived")
                return content

            digest.update(self._try(name, read))
        return digest.hexdigest()

    def upload(self, directory: Path, before_manifest: Callable[[], None]) -> int:
        """Upload a published checkpoint, its manifest last; return its bytes."""
        read, text = read_object(directory / MANIFEST)
        manifest, folder = checked_manifest(read, text, directory), folder_of(step_of(directory))
        # The step may have such files already, damaged or from before a rollback.
        for name in (MANIFEST, ABANDONED, VALIDATION):
            self.remove(f"{folder}/{name}")
        size = 0
        for entry in manifest["files"]:
            name = entry["name"]
            size += self.put(directory / name, f"{folder}/{name}", entry["sha256"])
        before_manifest()
        self.write(f"{folder}/{MANIFEST}", text)
        return size

    def manifest(self, step: int) -> tuple[dict[str, Any], bytes]:
        """The manifest of a checkpoint, and its text; CheckpointError if it is damaged or gone."""
        text = self.read(f"{folder_of(step)}/{MANIFEST}")
        if text is None:
            raise CheckpointError("is missing")
        return checked_manifest(parse_object(text), text, Path(folder_of(step))), text

    def fetch(self, step: int, into: Path) -> Rejected | None:
        """Fetch a checkpoint into the new folder `into`, and verify it; return its damage.

        Raise StorageError if a file of it is refused, or another one is uploaded in its place.
        """
        into.mkdir(parents=True)
        folder, there = folder_of(step), self.steps().get(step, {})
        try:
            manifest, text = self.manifest(step)
        except CheckpointError as error:
            return rejected(into, MANIFEST, error)
        write_durably(into / MANIFEST, text)
        for entry in manifest["files"]:
            name = entry["name"]
            if wrong := size_fault(there.get(name), entry):
                return Rejected(into, name, wrong)
            path, url = f"{self._root}/{folder}/{name}", f"{self.url}/{folder}/{name}"
            remote = RemoteObject(url, path, entry["bytes"], sha256=entry["sha256"])
            try:
                download(self._filesystem, remote, into / name)
            except DataError as error:
                if wrong := size_fault(self.steps().get(step, {}).get(name), entry):
                    return Rejected(into, name, wrong)
                if error.__cause__ is not None:  # the storage's, of a file that is there
                    raise StorageError(str(error)) from error
                if self.read(f"{folder}/{MANIFEST}") != text:
                    raise StorageError(f"{self.shown}/{folder}: {REPLACED}") from error
                return Rejected(into, name, str(error))
        if validation := self.read(f"{folder}/{VALIDATION}"):
            write_durably(into / VALIDATION, validation)
        sync_directory(into)
        return None

    def abandon(self, step: int) -> None:
        """Rename the manifest of a checkpoint: kept until the step is saved again, never used."""
        if content := self.read(f"{folder_of(step)}/{MANIFEST}"):
            self.write(f"{folder_of(step)}/{ABANDONED}", content)
            self.remove(f"{folder_of(step)}/{MANIFEST}")

    def delete(self, step: int) -> None:
        """Delete a checkpoint, its manifest first."""
        for name in sorted(self.steps().get(step, ()), key=lambda name: name != MANIFEST):
            self.remove(f"{folder_of(step)}/{name}")
        if self.folder:  # object storage has no folders
            with suppress(OSError):  # it has other files, or is gone
                (self.folder / folder_of(step)).rmdir()


def folder_of(step: int) -> str:
    """The folder of a checkpoint, from the URL."""
    return f"{CHECKPOINTS}/{step_directory(Path(), step).name}"


def _hashes(path: Path) -> tuple[str, str, int]:
    """SHA-256, the ETag that S3 gives to an upload in parts of PART bytes, and the size."""
    sha256, parts, size = hashlib.sha256(), [], 0
    whole = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while part := file.read(PART):
            sha256.update(part)
            whole.update(part)
            parts.append(hashlib.md5(part, usedforsecurity=False).digest())
            size += len(part)
    if size < 2 * PART:  # sent as one part
        return sha256.hexdigest(), whole.hexdigest(), size
    joined = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
    return sha256.hexdigest(), f"{joined}-{len(parts)}", size
