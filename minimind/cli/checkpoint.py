"""`minimind checkpoint ACTION`: what each prints, and its exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from minimind.checkpoint.choose import Chosen, read_chosen
from minimind.checkpoint.tools import (
    as_json,
    as_table,
    list_checkpoints,
    place_of,
    prune,
    verify_checkpoints,
)
from minimind.errors import CheckpointError, UsageError
from minimind.runtime.durable_files import mebibytes, storing
from minimind.runtime.output_folder import NewFolder

MEND = "mend the path or its rights"

T = TypeVar("T")


def run_list(args: argparse.Namespace) -> int:
    """Print one line per checkpoint."""
    place = place_of(args.place, args.checkpoint)
    with storing(place, MEND):
        found = list_checkpoints(place, args.verify)
    if args.json:
        print(as_json(found))
    else:
        print(as_table(found) if found else f"{place}: no checkpoint yet")
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Print what is damaged and why; 4 if anything is."""
    place = place_of(args.place, args.checkpoint)
    damaged = 0
    with storing(place, MEND):
        for path, faults, remarks in verify_checkpoints(place):
            for fault in faults:
                print(f"{path}: {fault}")
            for remark in remarks:
                print(f"{path}: note: {remark}")
            if not faults:
                print(f"{path}: ok")
            damaged += bool(faults)
    return CheckpointError.status if damaged else 0


def run_diff(args: argparse.Namespace) -> int:
    """Print every difference; 1 if there is any, 0 if not."""
    if len(args.places) != 2:
        raise UsageError(f"diff takes two checkpoints, not {len(args.places)}")
    from minimind.checkpoint.compare import compare  # imports torch

    one, other = args.places

    def differences(a: Path, b: Path) -> tuple[Path, Path, list[str]]:
        return a, b, list(compare(a, b))

    a, b, lines = _read(one, lambda a: _read(other, lambda b: differences(a, b)))
    print(f"{a} -> {b}")
    for line in lines or ["equal: what the runs are, counters and every tensor"]:
        print(f"  {line}")
    return 1 if lines else 0


def run_consolidate(args: argparse.Namespace) -> int:
    """Write one checkpoint as whole tensors, and say what was written."""
    from minimind.interop.consolidate import OWN, consolidate, told  # imports torch

    place = place_of(args.place, args.checkpoint)
    out = NewFolder(args.out, args.force, OWN, "consolidate")
    out.require_free()  # before gigabytes are hashed

    def write(path: Path) -> str:
        done = consolidate(path, args.out, args.dtype, args.max_shard_size, args.force)
        if done.note:
            print(f"{args.out}: {done.note}", file=sys.stderr)
        return told(done, path, args.out, args.dtype)

    print(_read(place, write))
    return 0


def run_prune(args: argparse.Namespace) -> int:
    """Delete what is not kept, telling each."""
    place = place_of(args.place, args.checkpoint)
    done = "would delete" if args.dry_run else "deleted"
    count, total = 0, 0
    with storing(place, MEND):
        for path, size, reason in prune(place, args.keep, args.dry_run):
            if reason:
                print(f"{path} stays, but {reason}")
                continue
            print(f"{done} {path} ({mebibytes(size)})")
            count, total = count + 1, total + size
    print(f"{done} {count} directories, {mebibytes(total)}" if count else "nothing to delete")
    return 0


def _read(place: str, use: Callable[[Path], T]) -> T:
    """`use` of a run's newest valid checkpoint, or the one named; those passed over on stderr."""

    def told(chosen: Chosen) -> T:
        for bad in chosen.rejected:
            print(f"{bad.path} is passed over: {bad.file} {bad.reason}", file=sys.stderr)
        return use(chosen.path)

    return read_chosen(place, told)


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": run_list,
    "verify": run_verify,
    "diff": run_diff,
    "consolidate": run_consolidate,
    "prune": run_prune,
}
