"""`minimind checkpoint ACTION`: what each prints, and its exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from minimind.checkpoint_tools import (
    as_json,
    as_table,
    list_checkpoints,
    place_of,
    prune,
    verify_checkpoints,
)
from minimind.errors import CheckpointError, UsageError
from minimind.files import mebibytes, storing
from minimind.new_folder import NewFolder
from minimind.train.checkpoint import choose

MEND = "mend the path or its rights"


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
                print(f"{path}: DAMAGED: {fault}")
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
    from minimind.compare import compare  # imports torch

    paths = [_chosen(place) for place in args.places]
    print(f"{paths[0]} -> {paths[1]}")
    is_equal = True
    for line in compare(*paths):
        print(f"  {line}")
        is_equal = False
    if is_equal:
        print("  equal: what the runs are, counters and every tensor")
    return 0 if is_equal else 1


def run_consolidate(args: argparse.Namespace) -> int:
    """Write one checkpoint as whole tensors, and say what was written."""
    from minimind.consolidate import OWN, consolidate, told  # imports torch

    place = place_of(args.place, args.checkpoint)
    out = NewFolder(args.out, args.force, OWN, "consolidate")
    out.require_free()  # before gigabytes are hashed
    path = _chosen(place)
    done = consolidate(path, args.out, args.dtype, args.max_shard_size, args.force)
    print(told(done, path, args.out, args.dtype))
    if done.note:
        print(f"{args.out}: {done.note}", file=sys.stderr)
    return 0


def run_prune(args: argparse.Namespace) -> int:
    """Delete what is not kept, telling each."""
    place = place_of(args.place, args.checkpoint)
    done = "would delete" if args.dry_run else "deleted"
    count, total = 0, 0
    with storing(place, MEND):
        for path, size, fault in prune(place, args.keep, args.dry_run):
            if fault:
                print(f"{path} stays, but is damaged and not counted: {fault}")
                continue
            print(f"{done} {path} ({mebibytes(size)})")
            count, total = count + 1, total + size
    print(f"{done} {count} directories, {mebibytes(total)}" if count else "nothing to delete")
    return 0


def _chosen(place: str) -> Path:
    """The newest valid checkpoint of a run, or the one named; those passed over on stderr."""
    with storing(place, MEND):
        path, rejected = choose(place)
    for bad in rejected:
        print(f"{bad.path} is passed over: {bad.file} {bad.reason}", file=sys.stderr)
    return path


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": run_list,
    "verify": run_verify,
    "diff": run_diff,
    "consolidate": run_consolidate,
    "prune": run_prune,
}
