"""Compilation of DeepSpeed's ops under a lock that detects dead owners, with clear errors.

An op (FusedAdam, DeepSpeedCPUAdam) is compiled at its first use, by the process that creates the
file `lock` beside it. A process killed meanwhile leaves the file behind, and torch's `FileBaton`
then waits forever: every later start hangs silently.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from torch.utils.file_baton import FileBaton

from minimind.config.deepspeed.backend_choice import WITHOUT_ADAM, compilation_text, is_compiled
from minimind.errors import RunError, StorageError, UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import storing

MAX_WAIT = 900.0  # seconds; the slowest op takes a few minutes
POLL_INTERVAL = 3.0
RECHECK_DELAY = 0.5
ERROR = re.compile(r"error:|not found|No such file|not being", re.IGNORECASE)
REMEDY = "set TORCH_EXTENSIONS_DIR to a folder on a local disk that can be written"


class MonitoredBaton(FileBaton):
    """torch's lock file, with waiting only while its owner is alive.

    The ranks of a host arrive together. Each checks, removes and takes the file under flock, which
    ends with its holder; otherwise one could remove what another has just taken.
    """

    def try_acquire(self) -> bool | None:
        """Try to take the file, after removing a stale one."""
        lock = Path(self.lock_file_path)
        with storing(str(lock), REMEDY), open(f"{lock}.turn", "a") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if is_stale_lock(lock):
                lock.unlink(missing_ok=True)
            is_taken = super().try_acquire()
            if is_taken:
                lock.write_text(f"{socket.gethostname()} {os.getpid()}", encoding="utf-8")
        return is_taken

    def wait(self) -> None:
        """Wait until the file is gone; raise StorageError if its owner dies or after `MAX_WAIT`."""
        lock, start, is_announced = Path(self.lock_file_path), time.monotonic(), False
        while not self._is_gone_within(POLL_INTERVAL):
            if is_stale_lock(lock):
                raise StorageError(
                    f"{lock}: the process that compiled here died; run the same command again"
                )
            builder, waited = describe_builder(lock) or "nobody", time.monotonic() - start
            if waited > MAX_WAIT:
                raise StorageError(
                    f"{lock}: {builder} has been compiling for {waited / 60:.0f} minutes; end it,"
                    f" delete the file if nothing is being compiled, or {REMEDY}"
                )
            if not is_announced and os.environ.get("LOCAL_RANK", "0") == "0":  # once per host
                print(f"waiting for {builder} to compile {lock.parent.name} ({lock})", flush=True)
            is_announced = True

    def _is_gone_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not disk.exists(self.lock_file_path):
                return True
            time.sleep(self.wait_seconds)
        return False


def is_stale_lock(lock: Path) -> bool:
    """Whether the file exists and nobody compiles under it.

    Checked twice: while the owner opens or releases the file it is invisible for a moment.
    """
    states = []
    for pause in (RECHECK_DELAY, 0.0):
        try:
            states.append((disk.stat(lock).st_ino, disk.stat(lock).st_ctime_ns))
        except FileNotFoundError:
            return False
        if describe_builder(lock):
            return False
        time.sleep(pause)
    return states[0] == states[1]


def describe_builder(lock: Path) -> str | None:
    """Describe the process that compiles under `lock`; None if there is none or no lock.

    The owner keeps the file open while it compiles, and its `ninja` works in the lock's folder,
    possibly after the owner's death. This is visible on this host only. Processes that cannot be
    inspected count as alive: those of other users, and on other hosts or containers that wrote
    their name into the file.
    """
    try:
        owner = disk.stat(lock).st_uid
        host, _, pid = lock.read_text(encoding="utf-8").partition(" ")
    except FileNotFoundError:
        return None
    if host not in ("", socket.gethostname()):
        return f"process {pid} on {host}"
    if os.geteuid() not in (0, owner):
        return f"a process of user {owner}"
    # The recorded process first: on a large host scanning all takes seconds.
    for number in (*map(int, pid.split()), *psutil.pids()):
        with suppress(psutil.Error, OSError):  # the process has ended
            process = psutil.Process(number)
            if process.name() == "ninja":
                is_building = disk.same_file(process.cwd(), lock.parent)
            else:
                paths = (Path(file.path) for file in process.open_files())
                is_building = any(p.name == lock.name and disk.same_file(p, lock) for p in paths)
            if is_building:
                return f"process {number}"
    return None


@contextmanager
def monitored_builds(builder: Any, path: str) -> Iterator[None]:
    """Compile ops inside the block under a `MonitoredBaton`.

    `builder` is DeepSpeed's class of ops. An op required by the file at `path` that cannot be
    compiled raises UsageError with its cause.
    """
    from torch.utils import cpp_extension  # slow to import; DeepSpeed has imported it

    extension: Any = cpp_extension
    # Newer versions of torch (2.15) lock by flock, which ends with its process.
    original_baton = getattr(extension, "FileBaton", None)
    if original_baton:
        extension.FileBaton = MonitoredBaton
    original_load, failures = builder.jit_load, []

    def jit_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("LOCAL_RANK", "0") == "0" and not is_compiled(self.name):  # once per host
            print(compilation_text(self.name), flush=True)
        try:
            return original_load(self, *args, **kwargs)
        except Exception as error:  # recorded and raised again
            failures.append((self.name, error))
            raise

    builder.jit_load = jit_load
    try:
        yield
    except Exception as error:  # DeepSpeed raises it again as other types
        causes = list(chain_of(error))
        name, cause = next((one for one in failures if one[1] in causes), ("", error))
        if not name or isinstance(cause, RunError):
            raise
        problem = f"{path}: it needs DeepSpeed's {name}, which cannot be compiled here"
        remedy = WITHOUT_ADAM if "adam" in name else "install what is missing, or do without it"
        raise UsageError(f"{problem} ({cause_in(str(cause))}); {remedy}") from error
    finally:
        if original_baton:
            extension.FileBaton = original_baton
        builder.jit_load = original_load


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the exception and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def cause_in(output: str) -> str:
    """Return the first line that looks like an error, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    lines = lines or ["no reason given"]
    return next((line for line in lines if ERROR.search(line)), lines[-1])
