"""The processes of this host that encode a plan together, and their progress."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from tqdm import tqdm

import minimind.errors as errors
from minimind.config.run_config import PROJECT
from minimind.data.prepare.encode import Work, encode_share
from minimind.data.prepare.work_units import Unit

THREADS = 8  # tokenizing threads of a process; its reader keeps up with about as many
POLL_INTERVAL = 0.5  # seconds


def encode_plan(
    work: Work,
    share: tuple[int, int] = (0, 1),
    processes: int | None = None,
    progress: bool = True,
    inherited: Sequence[int] = (),
) -> None:
    """Encode a share of the units on all cores; raise the error of the first process to fail.

    The directory has the plan and the tokenizer, for the other processes to read; locks that they
    must keep, should this one be killed, are `inherited`.
    """
    cores = len(os.sched_getaffinity(0))
    units = [unit for unit in work.plan.units if unit.number % share[1] == share[0]]
    processes = processes or min(-(-cores // THREADS), max(1, len(units)))
    threads = max(1, cores // processes)
    done = sum(unit.bytes for unit in units if work.done(unit))
    left = sum(unit.bytes for unit in units) - done
    with ExitStack() as stack:
        command = [sys.executable, "-m", "minimind.data.prepare.encode", str(work.directory)]
        command += ["--share", f"{share[0]}/{share[1]}", "--threads", str(threads)]
        command += ["--strict"] if work.is_strict else []
        helpers = [stack.enter_context(_started(command, inherited)) for _ in range(processes - 1)]
        silent = not (progress and sys.stderr.isatty())
        options = {"desc": "tokenizing", "unit": "B", "unit_scale": True, "disable": silent}
        bar = tqdm(total=done + left, initial=done, **options)
        look = _Look(work, units, helpers, stack.enter_context(bar))
        own = replace(work, threads=threads, report_bytes=look.report_bytes)
        if share == (0, 1):  # which `merge` requires next
            own = replace(own, overlap_task=lambda: work.tokenizer.exported)
        encode_share(own, share)
        for helper in helpers:
            helper.wait()
        look.look()


@contextmanager
def _started(command: list[str], inherited: Sequence[int]) -> Iterator[subprocess.Popen[str]]:
    """Start a helper process that ends with the block; only the block handles Ctrl-C."""
    package = [str(PROJECT), os.environ.get("PYTHONPATH", "")]  # for any working directory
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, package))}
    # Helpers inherit the blocked SIGINT, so only this process handles Ctrl-C.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environ, pass_fds=tuple(inherited)
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with process:
        try:
            yield process
        finally:
            process.kill()


class _Look:
    """Updates the progress bar for all processes, and stops the work if one has failed."""

    def __init__(
        self, work: Work, units: list[Unit], helpers: list[subprocess.Popen[str]], bar: tqdm[Any]
    ) -> None:
        self.work = work
        self.helpers = helpers
        self.bar = bar
        self._left = units
        self._own = 0  # bytes of the current unit of this process
        self._done = 0
        self._last = 0.0

    def report_bytes(self, size: int) -> None:
        """Add `size` bytes done by this process."""
        self._own += size
        if time.monotonic() - self._last >= POLL_INTERVAL:
            self.look()

    def look(self) -> None:
        """Update from the files of all processes."""
        self._last = time.monotonic()
        finished = [unit for unit in self._left if self.work.done(unit)]
        self._left = [unit for unit in self._left if unit not in finished]
        self._done += sum(unit.bytes for unit in finished)
        self.bar.n = min(self._done + self._own, self.bar.total)
        self.bar.refresh()
        for helper in self.helpers:
            if helper.poll():
                _raise(helper.stdout.read() if helper.stdout else "", helper.returncode)


def _raise(message: str, status: int) -> None:
    """Raise the error that a helper reported."""
    try:
        kind, message = json.loads(message)
    except ValueError:
        how = f"status {status}" if status > 0 else f"signal {-status}, perhaps for lack of memory"
        raise errors.RunError(
            f"a process that tokenises ended with {how}; run the same command again, perhaps with"
            " --processes 1"
        ) from None
    raise getattr(errors, kind)(message)
