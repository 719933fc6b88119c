"""`mirror.json`: which run a URL is of, and which start of it writes there.

The run has the same file in out_dir. Of two starts of one run, as after a machine was thought to be
gone, the later one writes; the earlier one finds out before it completes or deletes a checkpoint.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Set
from pathlib import Path
from typing import Any

from minimind.checkpoint.directory import differences, published_checkpoints
from minimind.errors import LockedError, StorageError, UsageError
from minimind.mirror.remote_run import RemoteRun
from minimind.runtime.durable_files import storing, write_whole

OWNER = "mirror.json"
REMEDY = "give each run a --mirror of its own"


def require_mirror(url: str | None, out_dir: Path) -> None:
    """Raise StorageError unless a small file can be written, read and deleted at the URL.

    Raise UsageError if the URL is out_dir or in it.
    """
    if url is None:
        return
    remote, token = RemoteRun(url), secrets.token_hex(8)
    probe = f".probe-{token}"
    if remote.folder and remote.folder.is_relative_to(out_dir.resolve()):
        raise UsageError(
            f"--mirror {remote.shown} is in --out_dir {out_dir}, whose loss it is for; give another"
            " folder"
        )
    try:
        remote.write(probe, token.encode())
        remote.delete(probe)
    except StorageError as error:  # of the URL as it was given
        raise StorageError(f"--mirror {str(error).replace(f'/{probe}', '')}") from error


class Owner:
    """The right of this start to write to a mirror."""

    def __init__(self, remote: RemoteRun, content: bytes) -> None:
        self._remote, self._content = remote, content

    def require(self) -> None:
        """Raise LockedError if another start has taken the mirror over."""
        if self._remote.read(OWNER) != self._content:
            raise LockedError(f"{self._remote.shown}: another start writes there now; {REMEDY}")


def claim(
    remote: RemoteRun, out_dir: Path, resume: str, identity: dict[str, Any], allowed: Set[str]
) -> Owner:
    """Make this start the one that writes to the mirror; raise LockedError if it is another run's.

    An out_dir that is new, with `--resume auto`, takes over the run of the mirror if all that
    identifies a run (but the `allowed` groups) is the same.
    """
    url, own, there = remote.shown, _read_own(out_dir / OWNER), _parse(remote)
    if there and there["run"] != own:
        if own or resume != "auto" or published_checkpoints(out_dir / "checkpoints"):
            raise LockedError(f"--mirror {url} is that of another run than {out_dir}; {REMEDY}")
        changed = differences(there["identity"], identity)
        if refused := [str(one) for one in changed if one.group not in allowed]:
            text = "; ".join(refused[:3])
            raise LockedError(f"--mirror {url} is that of another run ({text}); {REMEDY}")
    run = own or (there["run"] if there else secrets.token_hex(8))
    with storing(str(out_dir / OWNER), "free some space, or correct the path of --out_dir"):
        write_whole(out_dir / OWNER, json.dumps({"run": run}).encode())
    facts = {"run": run, "start": secrets.token_hex(8), "identity": identity}
    content = json.dumps(facts, indent=1).encode()
    remote.write(OWNER, content)
    return Owner(remote, content)


def _read_own(path: Path) -> str | None:
    """The id of the run in out_dir; None if it has none, or the file is damaged."""
    try:
        return str(json.loads(path.read_bytes())["run"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _parse(remote: RemoteRun) -> dict[str, Any] | None:
    content = remote.read(OWNER)
    if content is None:
        return None
    try:
        found = json.loads(content)
        if isinstance(found["run"], str) and isinstance(found["identity"], dict):
            return found
    except (ValueError, KeyError, TypeError):
        pass
    raise StorageError(
        f"{remote.shown}/{OWNER}: is not what a run writes; give another --mirror, or delete it if"
        " no other run uses the URL"
    )
