"""`mirror.json`: which run a URL is of, and which start of it writes there.

A URL without it has to be empty: what is there is not the run's to replace. The run has its id in a
file of that name in out_dir. Of two starts of one run, as after a machine was thought to be gone,
the later one writes; the earlier one finds out before it completes or deletes a checkpoint.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Set
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from minimind.checkpoint.directory import differences, published_checkpoints
from minimind.errors import CheckpointError, LockedError, StorageError, UsageError
from minimind.mirror.remote_run import OWNER, PROBE, RemoteRun
from minimind.runtime.checked_json import (
    CheckedJson,
    Unreadable,
    parse_object,
    read_object,
    validate,
)
from minimind.runtime.durable_files import canonical_json, storing, write_whole
from minimind.runtime.locks import lock_for_reading
from minimind.runtime.terminal import shorten_line

OF_AN_OUT_DIR = (".lock", "metrics.jsonl")  # both, since people copy one of them to a mirror
REMEDY = "give each run a --mirror of its own"


class Own(CheckedJson):
    """`mirror.json` in an out_dir."""

    run: Annotated[str, Field(min_length=1)]


class Claim(Own):
    """`mirror.json` at a URL."""

    identity: dict[str, dict[str, Any]]


def require_no_mirror(out_dir: Path) -> None:
    """Raise LockedError if out_dir is the mirror of a run, which would then be refused there."""
    try:
        found, _ = read_object(out_dir / OWNER)
    except CheckpointError:  # reported where it is used
        return
    if "identity" in found:
        raise LockedError(
            f"--out_dir {out_dir} is the --mirror of a run; give another --out_dir, or delete"
            f" {OWNER} in a copy"
        )


def require_mirror(url: str | None, out_dir: Path, resume: str) -> None:
    """Raise StorageError unless a small file can be written, read and deleted at the URL.

    Raise UsageError if the URL is out_dir or in it, and LockedError, before anything is written,
    if it is neither empty nor a mirror that may be this run's.
    """
    if url is None:
        return
    remote, token = RemoteRun(url), secrets.token_hex(8)
    probe = f"{PROBE}{token}"
    if remote.folder and remote.folder.is_relative_to(out_dir.resolve()):
        raise UsageError(
            f"--mirror {remote.shown} is in --out_dir {out_dir}, whose loss it is for; give another"
            " folder"
        )
    try:
        _claims(remote, out_dir, resume)
        remote.write(probe, token.encode())
        remote.delete(probe)
    except StorageError as error:  # of the URL as it was given
        raise StorageError(f"--mirror {str(error).replace(f'/{probe}', '')}") from error


class Owner:
    """The right of this start to write to a mirror."""

    def __init__(self, remote: RemoteRun, content: bytes) -> None:
        self._remote, self._content = remote, content

    def require(self) -> None:
        """Raise LockedError if another start has taken the mirror over, or trains in it."""
        _require_no_out_dir(self._remote)
        if self._remote.read(OWNER) != self._content:
            raise LockedError(f"{self._remote.shown}: another start writes there now; {REMEDY}")


def claim(
    remote: RemoteRun, out_dir: Path, resume: str, identity: dict[str, Any], allowed: Set[str]
) -> Owner:
    """Make this start the one that writes to the mirror; raise LockedError if it is another run's.

    An out_dir that is new, with `--resume auto`, takes over the run of the mirror if all that
    identifies a run (but the `allowed` groups) is the same.
    """
    url, (own, there) = remote.shown, _claims(remote, out_dir, resume)
    if there and there["run"] != own:
        changed = differences(there["identity"], identity)
        if refused := [str(one) for one in changed if one.group not in allowed]:
            text = shorten_line("; ".join(refused[:3]))
            raise LockedError(f"--mirror {url} is that of another run ({text}); {REMEDY}")
    run = own or (there["run"] if there else secrets.token_hex(8))
    with storing(str(out_dir / OWNER), "free some space, or correct the path of --out_dir"):
        write_whole(out_dir / OWNER, json.dumps({"run": run}).encode())
    facts = {"run": run, "start": secrets.token_hex(8), "identity": identity}
    content = json.dumps(facts, indent=1).encode()
    remote.write(OWNER, content)
    return Owner(remote, content)


def _claims(
    remote: RemoteRun, out_dir: Path, resume: str
) -> tuple[str | None, dict[str, Any] | None]:
    """The id of the run in out_dir, if it has one, and `mirror.json` at the URL, if that is empty.

    Raise LockedError if the URL has something else, or the mirror of another run than out_dir's.
    """
    url, own = remote.shown, _read_own(out_dir / OWNER)
    _require_no_out_dir(remote)
    names, content = remote.names(), remote.read(OWNER)
    if content is None:
        if names:
            raise LockedError(
                f"--mirror {url} holds {names[0]!r} and is not the mirror of this run; give an"
                " empty place"
            )
        return own, None
    there = _parsed(remote, content)
    if there["run"] != own:
        if own or resume != "auto" or published_checkpoints(out_dir / "checkpoints"):
            raise LockedError(f"--mirror {url} is that of another run than {out_dir}; {REMEDY}")
    return own, there


def _require_no_out_dir(remote: RemoteRun) -> None:
    """Raise LockedError if a run trains, or has trained, in the folder of a file:// URL."""
    if remote.folder is None:
        return
    paths = [remote.folder / name for name in OF_AN_OUT_DIR]
    try:
        lock = lock_for_reading(paths[0])
    except FileNotFoundError:  # locked
        raise LockedError(
            f"--mirror {remote.shown} is in use by a run as its --out_dir; {REMEDY}"
        ) from None
    if lock:
        lock.close()
    if all(path.exists() for path in paths):
        raise LockedError(f"--mirror {remote.shown} is the --out_dir of a run; {REMEDY}")


def _read_own(path: Path) -> str | None:
    """The id of the run in out_dir; None if it has none, or the file is damaged."""
    try:
        found, _ = read_object(path)
        validate(Own, found)
    except Unreadable as error:
        raise StorageError(f"{path}: {error}; correct its permissions") from error
    except CheckpointError:
        return None
    return found["run"]


def _parsed(remote: RemoteRun, content: bytes) -> dict[str, Any]:
    place = f"{remote.shown}/{OWNER}"
    try:
        found = parse_object(content)
        validate(Own, found)
        if "identity" not in found:
            raise LockedError(f"{place}: is that of an --out_dir; {REMEDY}")
        validate(Claim, found)
        canonical_json(found)
    except (CheckpointError, UnicodeEncodeError) as error:
        raise StorageError(f"{place}: is not what a run writes ({error}); {REMEDY}") from error
    return found
