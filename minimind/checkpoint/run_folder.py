"""The folder a run writes to: claimed by one run at a time, and what lies in it for a reader."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import IO

import yaml

from minimind.config.deepspeed.incompatible import ignored_flags
from minimind.config.deepspeed.resolve import Resolved
from minimind.config.model_flags import SHAPE
from minimind.errors import LockedError, StorageError
from minimind.runtime.durable_files import require_regular, storing, write_whole

ONCE = (
    "config",
    "resume",
    "allow_change",
    "stop_at_step",
    "max_minutes",
    "local_rank",
    "dry_run",
    "verbose",
)  # asked of one start, not of the run
END = "...\n"  # how YAML ends a document that is a bare value


def claim(out_dir: Path) -> IO[bytes]:
    """The open lock file; held until it is closed or its process dies.

    A LockedError names the holder. flock, not a pid file: a killed run leaves nothing to clear.
    """
    with storing(f"out_dir {out_dir}", "give an --out_dir that can be written"):
        out_dir.mkdir(parents=True, exist_ok=True)
        lock = open(out_dir / ".lock", "ab+", buffering=0)
        try:
            require_regular(out_dir / "metrics.jsonl")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().decode(errors="replace").strip() or "another run"
            lock.close()
            raise LockedError(
                f"out_dir {out_dir} is in use by {holder}; wait for it, or give another --out_dir"
            ) from error
        except OSError:
            lock.close()
            raise
    return lock


def require_writable(out_dir: Path) -> None:
    """Nothing, or a StorageError for a folder that cannot be made, or written to."""
    require_folder(out_dir, "out_dir")
    with storing(f"out_dir {out_dir}", "move it away, or give another --out_dir"):
        require_regular(out_dir / "metrics.jsonl")


def require_folder(folder: Path, name: str) -> None:
    """Raise a StorageError for a folder, named by `name`, that cannot be made or written."""
    parent = folder
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise StorageError(f"{name} {folder}: {parent} is no folder; give another")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StorageError(
            f"{name} {folder}: {parent} cannot be written; mend its rights, or give another"
        )


def require_output(place: Path, name: str) -> None:
    """Raise a StorageError for a folder, or the file of a `..._file`, that cannot be written."""
    is_file = name.endswith("_file")
    if is_file and place.is_dir():
        raise StorageError(f"{name} {place}: is a folder; name a file")
    require_folder(place.parent if is_file else place, name)


def write_reference(out_dir: Path, resolved: Resolved) -> None:
    """`config.yaml`, with which `--config` repeats the run, and `ds_config.resolved.json`."""
    flags = asdict(resolved.run)
    # What DeepSpeed's scheduler or optimizer passes over, the copy must not ask for.
    left_out = {*ONCE, *(name for _, _, name in ignored_flags(resolved.config))}
    if resolved.run.hugging_face is not None:  # what its config.json decides, no flag may
        left_out |= {*SHAPE} - {"max_seq_len", "vocab_size"}
    sources = flags.pop("sources")
    lines = ["# The flags of this run; --config reads them back. Behind each: where it came from."]
    for name, value in flags.items():
        if name == "deepspeed_config":  # what the launcher said must be said again
            stand_in = str(out_dir / "ds_config.resolved.json")
            value = (value or stand_in) if resolved.backend == "deepspeed" else "none"
        if value is None or name in left_out:
            continue
        value = list(value) if isinstance(value, tuple) else value
        text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True)
        lines.append(f"{name}: {text.removesuffix(END).strip()}  # {sources[name]}")
    write_whole(out_dir / "config.yaml", ("\n".join(lines) + "\n").encode())
    write_whole(out_dir / "ds_config.resolved.json", json.dumps(resolved.config, indent=2).encode())
