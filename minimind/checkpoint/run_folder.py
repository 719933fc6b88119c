"""The out_dir of a run: its lock, checks, and the configuration files for readers."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import yaml

from minimind.checkpoint.directory import MANIFEST, OWNER, published_checkpoints
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.deepspeed.rules import ignored_flags, output_paths
from minimind.config.flags import FLAGS, SHAPE
from minimind.config.origin import Rank
from minimind.config.run_config import RunConfig
from minimind.config.run_record import HEAD, REST, with_sum
from minimind.errors import CURES, LockedError, StorageError, UsageError
from minimind.runtime import disk
from minimind.runtime.console import CONSOLE
from minimind.runtime.console import HEAD as HEAD_OF_CONSOLE
from minimind.runtime.drafts import remove_left
from minimind.runtime.durable_files import require_regular, storing, why_unwritable, write_whole
from minimind.runtime.urls import masked_values

START_FLAGS = (
    "config",
    "resume",
    "allow_change",
    "stop_at_step",
    "max_minutes",
    "local_rank",
    "dry_run",
    "verbose",
)  # flags of a single start
EVENT = re.compile(rb'\{"event": ?"\w+", ?"time": ?\d')  # how metrics.jsonl begins
METRICS = "metrics.jsonl"
REPLACED = {"config.yaml", "ds_config.resolved.json", "tokenizer", "rejected.jsonl", "report.html"}
END = "...\n"  # YAML's end of a document that is a scalar


def lock_out_dir(out_dir: Path, flag: str = "--out_dir") -> IO[bytes]:
    """Lock out_dir and return the open lock file; raise LockedError naming the holder.

    flock rather than a PID file: it ends with the process.
    """
    name = flag.removeprefix("--")
    with storing(f"{name} {out_dir}", f"give a {flag} that can be written"):
        out_dir.mkdir(parents=True, exist_ok=True)
        lock = open(out_dir / ".lock", "ab+", buffering=0)
        try:
            require_regular(out_dir / METRICS)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            remove_left(out_dir)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().decode(errors="replace").strip() or "another run"
            lock.close()
            raise LockedError(
                f"{name} {out_dir} is in use by {holder}; wait for it, or give another {flag}"
            ) from error
        except OSError:
            lock.close()
            raise
    return lock


def lock_before_imports(run: RunConfig, rank: int) -> IO[bytes] | None:
    """Lock an out_dir that exists, on rank 0; None in a dry run, and where the start locks it.

    The folder of a --mirror is not touched before the mirror was looked at.
    """
    out_dir = Path(run.out_dir)
    is_mirrored = run.mirror is not None or disk.is_file(out_dir / OWNER)
    if rank or run.dry_run or is_mirrored or not disk.exists(out_dir):
        return None
    return lock_out_dir(out_dir)


def require_out_dir(run: RunConfig) -> None:
    """Raise what a start in its out_dir would; --dry_run need not be able to write there."""
    require = require_own if run.dry_run else require_writable
    require(Path(run.out_dir), tokenizer_kept(run), run.config)


def require_writable(
    out_dir: Path, tokenizer: str | None = None, config: str | None = None
) -> None:
    """Raise StorageError if out_dir cannot be created or written, else as `require_own`."""
    require_folder(out_dir, "out_dir")
    require_own(out_dir, tokenizer, config)


def require_own(out_dir: Path, tokenizer: str | None = None, config: str | None = None) -> None:
    """Raise UsageError if out_dir is no run's and has what a run would replace or append to.

    A `tokenizer` that the run reads there is none of it. The file of --config `config` there proves
    no run, as people copy a run's to edit it, unless a start has left its empty log beside it.
    """
    own, what = out_dir / "config.yaml", f"out_dir {out_dir}"
    with storing(what, "move it away, or give another --out_dir"):
        for name in (METRICS, CONSOLE, *sorted(REPLACED - {"tokenizer"})):
            require_regular(out_dir / name)
        if disk.is_symlink(out_dir / "tokenizer"):
            raise UsageError(
                f"--out_dir {out_dir} holds 'tokenizer', which is a link, and a run would overwrite"
                " the files in its target; remove it, or give another"
            )
        names = {p.name for p in disk.entries(out_dir)} if _is_there(out_dir, what) else set()
        at_risk = names & REPLACED
        if (metrics := _beginning(out_dir / METRICS)) and not EVENT.match(metrics):
            at_risk.add(METRICS)
        if CONSOLE in names and not _is_console(out_dir / CONSOLE):
            at_risk.add(CONSOLE)
        if not at_risk or EVENT.match(metrics):
            return
        is_given = config is not None and disk.same_file(own, config)
        was_started = not is_given or (METRICS in names and METRICS not in at_risk)
        if was_started and _beginning(own).startswith(HEAD.encode()):
            return
        saved = published_checkpoints(out_dir / "checkpoints")
        if any(disk.is_file(path / MANIFEST) for path in saved):
            return
    if is_in(out_dir, tokenizer):
        at_risk.discard("tokenizer")
    for name in sorted(at_risk):
        appends = name in (METRICS, CONSOLE)
        harm = "which a run would append to" if appends else "which a run would replace"
        remedy = "move it away, or give another"
        if is_given and name == "config.yaml":
            remedy = "it is the file of --config: keep it elsewhere, or give another --out_dir"
        raise UsageError(
            f"--out_dir {out_dir} is not the folder of a run, and holds {name!r}, {harm}; {remedy}"
        )


def is_in(out_dir: Path, tokenizer: str | None) -> bool:
    """Whether a run in out_dir reads its `tokenizer` there."""
    if not tokenizer:
        return False
    path = disk.resolve(os.path.expanduser(tokenizer))
    return path.is_relative_to(disk.resolve(out_dir / "tokenizer"))


def tokenizer_kept(run: RunConfig) -> str | None:
    """Return the tokenizer of a run if it is read from out_dir and stays as it is; else None.

    Fine-tuning rewrites it: it adds a template and special tokens.
    """
    is_kept = run.task == "pretrain" and is_in(Path(run.out_dir), run.tokenizer)
    return run.tokenizer if is_kept else None


def _is_console(path: Path) -> bool:
    """Whether a console.log is that of runs, or what standard output is sent to."""
    with suppress(OSError):  # standard output is closed
        if os.path.samestat(disk.stat(path), os.fstat(1)):
            return True
    return not (text := _beginning(path)) or text.startswith(HEAD_OF_CONSOLE.encode())


def _beginning(path: Path) -> bytes:
    """The first bytes of a regular file; none if there is no such file."""
    try:
        with open(path, "rb") as file:
            return file.read(100)
    except FileNotFoundError:
        return b""


def require_folder(folder: Path, name: str) -> None:
    """Raise StorageError if the folder of setting `name` cannot be created or written."""
    parent = folder
    while not _is_there(parent, f"{name} {folder}"):
        parent = parent.parent
    if not disk.is_dir(parent):
        raise StorageError(f"{name} {folder}: {parent} is not a folder; give another")
    try:  # permissions alone say nothing of a read-only disk or of /proc
        with TemporaryFile(dir=parent):
            pass
    except OSError as error:
        cure = CURES.get(error.errno or 0, "correct its permissions")
        remedy = "give another" if error.errno == errno.ENOENT else f"{cure}, or give another"
        raise StorageError(
            f"{name} {folder}: {parent} cannot be written ({why_unwritable(error)}); {remedy}"
        ) from error


def _is_there(path: Path, what: str) -> bool:
    """Whether there is such a file, folder or link; raise StorageError if there cannot be one."""
    try:
        disk.stat(path, follow=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # ValueError: a NUL
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"{what}: {reason}; give another") from error
    return True


def require_outputs(resolved: ResolvedConfig) -> None:
    """Raise StorageError if a folder or file that a DeepSpeed JSON names cannot be written."""
    for key, path in output_paths(resolved.config).items():
        output, name, is_file = Path(path), f"{resolved.path}: {key}", key.endswith("_file")
        if is_file and _is_there(output, f"{name} {output}"):
            mode = disk.mode_of(output)
            if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):  # /dev/null is a device
                raise StorageError(f"{name} {output}: is a folder, a pipe or a link; name a file")
            if not os.access(output, os.W_OK):
                raise StorageError(f"{name} {output}: cannot be written; correct its permissions")
        else:
            require_folder(output.parent if is_file else output, name)


def recorded_flags(run: RunConfig) -> dict[str, Any]:
    """Every flag and its value, for records and tables, without signatures of URLs.

    A signed URL gives access to whoever reads it.
    """
    return {name: masked_values(getattr(run, name)) for name in FLAGS}


def write_reference(out_dir: Path, resolved: ResolvedConfig) -> None:
    """Write `config.yaml`, which repeats the run with `--config`, and `ds_config.resolved.json`."""
    flags, sources = recorded_flags(resolved.run), resolved.run.sources
    # Flags that DeepSpeed's scheduler or the optimizer ignores are refused, so they are left out.
    left_out = {*START_FLAGS, *resolved.run.unread_flags}
    left_out |= {name for _, name in ignored_flags(resolved.config)}
    if resolved.run.hugging_face is not None:  # decided by its config.json
        left_out |= {*SHAPE} - {"max_seq_len", "vocab_size"}
    left_out |= {name for name, source in sources.items() if source.rank is Rank.TASK}
    if resolved.run.global_batch_size is not None:
        left_out.add("accumulation_steps")  # follows from the number of processes
    if (resolved.run.source or resolved.run.stages) and not resolved.run.is_explicit("data_path"):
        left_out.add("data_path")  # the sources are the text
    given, rest = [HEAD], [REST]
    for name, value in flags.items():
        if name == "deepspeed_config":  # perhaps given by the launcher
            stand_in = str(out_dir / "ds_config.resolved.json")
            value = (value or stand_in) if resolved.backend == "deepspeed" else "none"
        if value is None or name in left_out:
            continue
        value = list(value) if isinstance(value, tuple) else value
        text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True)
        lines = given if sources[name].rank > Rank.RULE else rest
        lines.append(f"{name}: {text.removesuffix(END).strip()}  # {sources[name]}")
    write_whole(out_dir / "config.yaml", with_sum("\n".join([*given, *rest]) + "\n"))
    write_whole(
        out_dir / "ds_config.resolved.json",
        json.dumps(masked_values(resolved.config), indent=2).encode(),
    )
