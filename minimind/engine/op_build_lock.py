"""How torch compiles DeepSpeed's ops: under a lock that is minded, and with failures told.

An op (FusedAdam, DeepSpeedCPUAdam) is compiled when it is first used, by whoever can create a file
`lock` beside it. A process killed meanwhile leaves the file behind, and torch's `FileBaton` then
waits for its end without one: every later start stands still, in silence.
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

from torch.utils.file_baton import FileBaton

from minimind.errors import RunError, StorageError, UsageError
from minimind.runtime.durable_files import storing

PATIENCE = 900.0  # seconds; the slowest op takes a few minutes
LOOK_EVERY = 3.0
SECOND_LOOK = 0.5
PROCESSES = Path("/proc")
ERROR = re.compile(r"error:|not found|No such file|not being", re.IGNORECASE)
WITHOUT_ADAM = 'write "torch_adam": true in optimizer.params, for torch\'s needs no compiler'
REMEDY = "set TORCH_EXTENSIONS_DIR to a folder on a local disk that can be written"


class MindedBaton(FileBaton):
    """torch's lock file, but its end is only waited for while somebody builds under it.

    The ranks of a host come here together. Each looks, removes and takes the file under a lock of
    the system's, which ends with its holder: or one would remove what another has just taken.
    """

    def try_acquire(self) -> bool | None:
        """Whether the file is ours now; one that nobody builds under is removed first."""
        lock = Path(self.lock_file_path)
        with storing(str(lock), REMEDY), open(f"{lock}.turn", "a") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if is_abandoned(lock):
                lock.unlink(missing_ok=True)
            taken = super().try_acquire()
            if taken:
                lock.write_text(f"{socket.gethostname()} {os.getpid()}", encoding="utf-8")
        return taken

    def wait(self) -> None:
        """Until the file is gone; a StorageError when its owner is, or after `PATIENCE`."""
        lock, began, has_told = Path(self.lock_file_path), time.monotonic(), False
        while not self._is_gone_within(LOOK_EVERY):
            if is_abandoned(lock):
                raise StorageError(
                    f"{lock}: the process that was building here ended too early; run the same"
                    " command again"
                )
            builder, waited = builder_of(lock) or "nobody", time.monotonic() - began
            if waited > PATIENCE:
                raise StorageError(
                    f"{lock}: {builder} has been building for {waited / 60:.0f} minutes; end it,"
                    f" delete the file if nothing is being built, or {REMEDY}"
                )
            if not has_told and os.environ.get("LOCAL_RANK", "0") == "0":  # one voice for a host
                print(f"waiting for {builder} to compile {lock.parent.name} ({lock})", flush=True)
            has_told = True

    def _is_gone_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not os.path.exists(self.lock_file_path):
                return True
            time.sleep(self.wait_seconds)
        return False


def is_abandoned(lock: Path) -> bool:
    """Whether the file is there and nobody builds under it.

    Looked at twice: between the two calls that open it, and the two that give it up, its owner
    cannot be seen for a moment.
    """
    seen = []
    for pause in (SECOND_LOOK, 0.0):
        try:
            seen.append((lock.stat().st_ino, lock.stat().st_ctime_ns))
        except FileNotFoundError:
            return False
        if builder_of(lock):
            return False
        time.sleep(pause)
    return seen[0] == seen[1]


def builder_of(lock: Path) -> str | None:
    """Who builds under `lock`, in words; None when nobody does, or it is gone.

    Its owner has the file open while it builds, and the `ninja` that it started works in its
    folder, perhaps also after the owner's death. That is seen of this host alone. What cannot be
    seen counts as alive: other users' processes, a system without /proc, and another host or
    container (of several that share a home) that took the file here and wrote its name into it.
    Not told apart from a dead one is a file that some other program took on another host.
    """
    try:
        owner = lock.stat().st_uid
        host, _, pid = lock.read_text(encoding="utf-8").partition(" ")
    except FileNotFoundError:
        return None
    if host not in ("", socket.gethostname()):
        return f"process {pid} on {host}"
    if os.geteuid() not in (0, owner) or not (PROCESSES / "self").exists():
        return f"a process of user {owner}"
    # The likely one first: on a large host the others take seconds.
    everyone = (path.name for path in PROCESSES.glob("[0-9]*"))
    for process in (pid, *everyone) if pid else everyone:
        if _builds_under(lock, PROCESSES / process):
            return f"process {process}"
    return None


def _builds_under(lock: Path, process: Path) -> bool:
    with suppress(OSError):  # it has ended
        if (process / "comm").read_text() == "ninja\n":
            return os.path.samefile(process / "cwd", lock.parent)
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):  # it was closed
                if os.path.samefile(descriptor, lock):
                    return True
    return False


@contextmanager
def minded_builds(builder: Any, path: str) -> Iterator[None]:
    """What torch compiles inside, it compiles under a `MindedBaton`.

    `builder` is DeepSpeed's class of ops. Where one that the file at `path` asks for cannot be
    compiled, whatever DeepSpeed makes of it comes out as a UsageError; by itself it holds all that
    was printed, or no cause.
    """
    from torch.utils import cpp_extension  # slow to import, and DeepSpeed did so by now

    builds: Any = cpp_extension
    torchs, builds.FileBaton = builds.FileBaton, MindedBaton
    build, faults = builder.jit_load, []

    def noting(self: Any, *given: Any, **named: Any) -> Any:
        try:
            return build(self, *given, **named)
        except Exception as error:  # of whatever kind: it goes on, and is only remembered
            faults.append((self.name, error))
            raise

    builder.jit_load = noting
    try:
        yield
    except Exception as error:  # DeepSpeed has kinds of its own, and changes them on the way
        behind = list(chain_of(error))
        name, cause = next((one for one in faults if one[1] in behind), ("", error))
        if not name or isinstance(cause, RunError):
            raise
        told = f"{path}: it takes DeepSpeed's {name}, which cannot be compiled here"
        way_out = WITHOUT_ADAM if "adam" in name else "install what is missing, or do without it"
        raise UsageError(f"{told} ({cause_in(str(cause))}); {way_out}") from error
    finally:
        builds.FileBaton = torchs
        builder.jit_load = build


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, and those it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def cause_in(output: str) -> str:
    """The first line that looks like an error, else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    lines = lines or ["no reason is given"]
    return next((line for line in lines if ERROR.search(line)), lines[-1])
