"""Encode the units of a plan as tasks of Ray, in an existing cluster or one started here.

A task is a plain function of a folder and the number of a unit, which it reads from plan.json. Ray
repeats it when its worker or node dies; the marker of a unit tells whether it is done.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from minimind.data.prepare.encode import Work, encode_unclaimed
from minimind.data.prepare.work_units import Plan, Unit
from minimind.data.prepare.workers import load_work, progress_bar
from minimind.data.shards.manifest import PLAN_NAME
from minimind.errors import DataError, RendezvousError, RunError, StorageError, UsageError
from minimind.runtime import disk
from minimind.runtime.environment import usable_cores
from minimind.runtime.installed import install_extra

LOCAL = "local"  # a Ray that is started for the command
ADDRESS = re.compile(r"auto|(ray://)?(\[[0-9a-fA-F:]+\]|[^\s/:\[\]]+):[0-9]{1,5}")
RETRIES = 3  # tries of a unit whose worker or node died
SEEN_WITHIN = 60.0  # seconds; network file systems cache names for up to a minute
OBJECT_STORE_BYTES = 2**27  # tasks return a bool; the default is 30 % of the memory
CONNECT_WITHIN = 10.0  # seconds
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
SHARED = "every node of the cluster must see the same text and the same --out; use a shared folder"


def encode_with_ray(work: Work, address: str, cores: int | None, progress: bool = True) -> None:
    """Encode all units as tasks of one core each; raise the first error of any task.

    With `LOCAL` as the address, a Ray with this number of `cores` runs meanwhile, else all of them.
    """
    left = [unit for unit in work.plan.units if not work.done(unit)]
    if not left:
        return
    ray = _imported()
    plan = sha256((work.directory / PLAN_NAME).read_bytes()).hexdigest()
    settings = (str(work.directory), work.is_strict, plan)
    with _connected(ray, address, cores), progress_bar(work.plan.units, left, progress) as bar:
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_encode)
        for waiting in (False, True):  # units that other commands have claimed come last
            units = {task.remote(*settings, unit.number, waiting): unit for unit in left}
            for reference in _as_completed(ray, list(units)):
                unit = units[reference]
                if _result(ray, reference, work.plan, unit):
                    _require_seen(work, unit)
                    left.remove(unit)
                    bar.update(unit.bytes)


def require_usable(address: str, share: tuple[int, int] | None, processes: int | None) -> None:
    """Raise UsageError if the address is invalid, or with --shard or --processes."""
    if address != LOCAL and not ADDRESS.fullmatch(address):
        raise UsageError(
            f"--ray {address}: is not an address of a Ray cluster; give auto, HOST:PORT or"
            " ray://HOST:PORT, or put --ray behind the paths to start a Ray on this host"
        )
    if share:
        raise UsageError(
            "--ray and --shard cannot be used together: both divide the work; remove one of them"
        )
    if processes and address != LOCAL:
        raise UsageError(
            f"--processes {processes}: --ray {address} uses the cores of its cluster; remove"
            " --processes"
        )


def _imported() -> Any:
    for name, value in QUIET.items():  # read at the import
        os.environ.setdefault(name, value)
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--ray needs Ray, which is not installed; run {install_extra('ray')}"
        ) from error
    return ray


@contextmanager
def _connected(ray: Any, address: str, cores: int | None) -> Iterator[None]:
    """Connect to a cluster, or start a Ray on this host and stop it at the end."""
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    terminate = signal.getsignal(signal.SIGTERM)
    folder = None
    if address == LOCAL:
        folder = tempfile.mkdtemp(prefix="ray-")  # Ray keeps its logs
        quiet |= {
            "num_cpus": cores or usable_cores(),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": folder,
        }
    try:
        _require_reachable(address)
        ray.init(address=address, **quiet)
        signal.signal(signal.SIGTERM, terminate)  # Ray replaces it
        yield
    except (ConnectionError, ImportError, RuntimeError, ValueError, TimeoutError) as error:
        if ray.is_initialized():
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise _unconnected(address, reason) from error
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _require_reachable(address: str) -> None:
    """Raise RendezvousError if nothing listens at HOST:PORT, for which Ray waits for a minute."""
    if address in ("auto", LOCAL):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_WITHIN).close()
    except (OSError, OverflowError) as error:
        raise _unconnected(address, str(error)) from error


def _unconnected(address: str, reason: str) -> RendezvousError:
    return RendezvousError(
        f"--ray {address}: no connection to Ray ({reason}); check the address, and that the"
        " cluster has the versions of Ray and Python of this environment"
    )


def _as_completed(ray: Any, pending: list[Any]) -> Iterator[Any]:
    while pending:
        done, pending = ray.wait(pending)
        yield from done


def _result(ray: Any, reference: Any, plan: Plan, unit: Unit) -> bool:
    """Return the result of a task, or raise its error as if it had run here."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, StorageError):
            for given in plan.inputs_of(unit):
                given.require_unchanged()  # changed for every node
        if "No module named 'minimind'" in str(cause):
            raise UsageError(
                "a node of the Ray cluster has no minimind; install this version on every node"
            ) from error
        raise cause from error
    except ray.exceptions.RayError as error:
        raise RunError(
            f"unit {unit.number} was lost {RETRIES + 1} times with the Ray worker that tokenized"
            f" it ({type(error).__name__}), perhaps for lack of memory; free some and run the same"
            " command again"
        ) from error


def _require_seen(work: Work, unit: Unit) -> None:
    """Raise StorageError unless the shards that a node has written are seen here."""
    if not _soon(lambda: work.done(unit) is not None):
        raise StorageError(f"{work.directory}: a node wrote unit {unit.number} elsewhere; {SHARED}")


def _soon(is_true: Callable[[], bool]) -> bool:
    """Whether the condition becomes true within `SEEN_WITHIN` seconds."""
    deadline = time.monotonic() + SEEN_WITHIN
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def _encode(directory: str, is_strict: bool, plan: str, number: int, waiting: bool) -> bool:
    """Encode a unit on a node; return False if another process has claimed it."""
    folder = Path(directory)
    _require_shared(folder, plan)
    work = load_work(folder, is_strict, threads=1)
    unit = work.plan.units[number]
    for given in work.plan.inputs_of(unit):
        try:
            given.require_unchanged()
        except DataError as error:
            raise _unshared(given.path) from error
    return encode_unclaimed(work, unit, waiting)


def _require_shared(folder: Path, plan: str) -> None:
    """Raise StorageError unless this node sees the plan that the command wrote."""

    def is_same() -> bool:
        try:
            return sha256((folder / PLAN_NAME).read_bytes()).hexdigest() == plan
        except FileNotFoundError:
            return False

    if not disk.is_dir(folder) or not _soon(is_same):
        raise _unshared(str(folder))


def _unshared(path: str) -> StorageError:
    return StorageError(f"{path}: Ray node {socket.gethostname()} does not see it; {SHARED}")
