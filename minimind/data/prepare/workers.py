"""Processes of this host that share work, such as a plan to encode, and their progress."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from minimind.data.prepare.encode import Work, encode_unclaimed
from minimind.data.prepare.work_units import Plan, Unit
from minimind.data.shards.manifest import PLAN_NAME, TOKENIZER_NAME
from minimind.data.tokenizer.load import load_tokenizer
from minimind.errors import RunError
from minimind.runtime.environment import usable_cores

SIGNAL_GRACE = 1.0  # seconds
THREADS = 8  # tokenizing threads of a process; its reader keeps up with about as many


def encode_plan(
    work: Work, share: tuple[int, int] = (0, 1), processes: int | None = None, progress: bool = True
) -> None:
    """Encode a share of the units on all cores; raise the first error of any process.

    Several processes read the plan and the tokenizer from the directory.
    """
    part, parts = share
    units = [unit for unit in work.plan.units if unit.number % parts == part]
    left = [unit for unit in units if not work.done(unit)]
    cores = usable_cores()
    processes = min(processes or -(-cores // THREADS), max(1, len(left)))
    if multiprocessing.current_process().daemon:  # a daemon may not have children
        processes = 1
    work = replace(work, threads=max(1, cores // processes))
    if share == (0, 1):  # `merge` requires it next
        work = replace(work, overlap_task=lambda: work.tokenizer.exported)
    with progress_bar(units, left, progress) as bar, process_pool(processes, "tokenizes") as pool:
        if pool is not None:
            return _encode_in_processes(work, left, pool, bar)
        work = replace(work, report_bytes=bar.update)
        for waiting in (False, True):  # units that other commands have claimed come last
            left = [unit for unit in left if not encode_unclaimed(work, unit, waiting)]


def progress_bar(units: Sequence[Unit], left: Sequence[Unit], progress: bool) -> tqdm[Any]:
    """Bar over the bytes of `units`; those that are not `left` count as done. Terminals only."""
    total, remaining = (sum(unit.bytes for unit in group) for group in (units, left))
    silent = not (progress and sys.stderr.isatty())
    options = {"desc": "tokenizing", "unit": "B", "unit_scale": True, "disable": silent}
    return tqdm(total=total, initial=total - remaining, **options)


@contextmanager
def process_pool(processes: int, work: str) -> Iterator[ProcessPoolExecutor | None]:
    """Open a pool, to which work is given within `spawning`; None for a single process.

    None as well where the system has no semaphores (no /dev/shm). Raise RunError, which names the
    `work`, if a process is killed. No process outlives an exception.
    """
    context = multiprocessing.get_context("spawn")  # a forked child may inherit a held lock
    try:
        pool = ProcessPoolExecutor(processes, context, _end_with_parent) if processes > 1 else None
    except (OSError, NotImplementedError):
        pool = None
    if pool is None:
        yield None
        return
    others = multiprocessing.active_children()
    try:
        yield pool
    except BrokenProcessPool as error:
        # A signal to the process group ends the workers first; a run then ends by that signal.
        time.sleep(SIGNAL_GRACE)
        _stop_writing_to(pool)
        raise RunError(
            f"a process that {work} was killed, perhaps for lack of memory; free some and run the"
            " same command again"
        ) from error
    except BaseException:  # Ctrl-C, too: no worker may outlive the command
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()
        _stop_writing_to(pool)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _stop_writing_to(pool: Any) -> None:
    """Close the pipe of tasks, which has no reader left: Python 3.11.2 waits until it is read."""
    pool._call_queue._reader.close()


def _encode_in_processes(
    work: Work, left: list[Unit], pool: ProcessPoolExecutor, bar: tqdm[Any]
) -> None:
    settings = (work.directory, work.is_strict, work.threads)
    for waiting in (False, True):
        with spawning():
            futures = {pool.submit(_encode, settings, unit, waiting): unit for unit in left}
        work.overlap_task()
        for future in as_completed(futures):
            if future.result():
                left.remove(futures[future])
                bar.update(futures[future].bytes)


@contextmanager
def spawning() -> Iterator[None]:
    """Start processes that ignore Ctrl-C and do not import the main module.

    The main module may be a user's script without `if __name__ == "__main__":`.
    """
    main = sys.modules["__main__"]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _end_with_parent() -> None:
    """Exit as soon as the parent has ended, even by SIGKILL: another command may start then."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(RunError.status)

    threading.Thread(target=follow, daemon=True).start()


def _encode(settings: tuple[Path, bool, int], unit: Unit, waiting: bool) -> bool:
    return encode_unclaimed(load_work(*settings), unit, waiting)


@cache
def load_work(directory: Path, is_strict: bool, threads: int) -> Work:
    """Return the work of a plan and a tokenizer that another process wrote to the folder."""
    plan = Plan.from_json(json.loads((directory / PLAN_NAME).read_bytes()))
    return Work(directory, plan, load_tokenizer(directory / TOKENIZER_NAME), is_strict, threads)
