"""`minimind checkpoint ACTION`: print the result, return the exit status."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from minimind.checkpoint.directory import Chosen, read_chosen
from minimind.checkpoint.tools import Listing, list_checkpoints, place_of, prune, verify_checkpoints
from minimind.errors import CheckpointError, UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import mebibytes, storing
from minimind.runtime.output_folder import NewFolder
from minimind.runtime.terminal import aligned

COLUMNS = ("checkpoint", "tokens", "saved", "files", "size", "saved by", "dtype", "state", "kept")
SIDES = "<><>><"  # numbers to the right
REMEDY = "correct the path"

T = TypeVar("T")


def run_list(args: argparse.Namespace) -> int:
    """Print one line per checkpoint."""
    place = place_of(args.place, args.checkpoint)
    with storing(place, REMEDY):
        checkpoints = list_checkpoints(place, args.verify, _tell)
    if args.json:
        print(json.dumps([asdict(listing) for listing in checkpoints], indent=1))
    else:
        rows = [COLUMNS, *map(_row, checkpoints)]
        print(aligned(rows, SIDES) if checkpoints else f"{place}: no checkpoint yet")
    return 0


def _tell(damage: str) -> None:
    print(f"note: {damage}", file=sys.stderr)


def _row(listing: Listing) -> tuple[str, ...]:
    stage = "" if listing.zero_stage is None else f" x ZeRO-{listing.zero_stage}"
    return (
        listing.name,
        "" if listing.tokens is None else f"{listing.tokens:,}",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(listing.saved)),
        str(listing.files),
        mebibytes(listing.bytes),
        "" if listing.world_size is None else f"{listing.world_size}{stage}",
        listing.dtype or "",
        listing.state,
        listing.kept,
    )


def run_verify(args: argparse.Namespace) -> int:
    """Print all damage; return 4 if there is any."""
    place = place_of(args.place, args.checkpoint)
    is_damaged = False
    with storing(place, REMEDY):
        for path, faults, remarks in verify_checkpoints(place):
            for line in (*faults, *(f"note: {remark}" for remark in remarks)):
                print(f"{path}: {line}")
            if not faults:
                print(f"{path}: ok")
            is_damaged |= bool(faults)
    return CheckpointError.status if is_damaged else 0


def run_diff(args: argparse.Namespace) -> int:
    """Print every difference between two checkpoints; return 1 if there is any."""
    if len(args.places) != 2:
        raise UsageError(f"diff takes two checkpoints, not {len(args.places)}; name two")
    from minimind.checkpoint.reader import compare  # imports torch

    first, second = args.places
    a, b, lines = _read(first, lambda a: _read(second, lambda b: (a, b, list(compare(a, b)))))
    print(f"{a} -> {b}")
    for line in lines or ["equal: what the runs are, counters and every tensor"]:
        print(f"  {line}")
    return 1 if lines else 0


def run_consolidate(args: argparse.Namespace) -> int:
    """Write one checkpoint as whole tensors and print a summary."""
    return _write_whole([place_of(args.place, args.checkpoint)], args)


def run_average(args: argparse.Namespace) -> int:
    """Write the mean of the weights of several checkpoints and print a summary."""
    if len(args.places) < 2:
        raise UsageError("average takes two checkpoints or more, not 1; name another")
    return _write_whole(args.places, args)


def _write_whole(places: Sequence[str], args: argparse.Namespace) -> int:
    from minimind.interop.consolidate import OWN, consolidate
    from minimind.interop.write_folder import is_ours

    # This comes before files are hashed.
    NewFolder(args.out, args.force, OWN, args.action, is_ours).require_free()

    def write(paths: Sequence[Path]) -> str:
        if len(repeated := {disk.resolve(path) for path in paths}) < len(paths):
            raise UsageError(
                f"of {len(paths)} checkpoints {len(repeated)} differ; name each once, as a step_"
                " directory where they are of one run"
            )
        written = consolidate(
            paths, args.out, args.dtype, args.max_shard_size, args.force, args.weights
        )
        if written.note:
            print(f"{args.out}: {written.note}", file=sys.stderr)
        how = f", the mean of {len(paths)} checkpoints" if len(paths) > 1 else ""
        return written.summary(f"in {args.dtype}{how}", paths[-1], args.out)

    print(_read_all(places, write))
    return 0


def run_prune(args: argparse.Namespace) -> int:
    """Delete old checkpoints and print each."""
    place = place_of(args.place, args.checkpoint)
    done = "would delete" if args.dry_run else "deleted"
    count, total = 0, 0
    named = {"keep_last": args.keep, "keep_every": args.keep_every, "keep_best": args.keep_best}
    given = {name: number for name, number in named.items() if number is not None}
    with storing(place, REMEDY):
        for pruned in prune(place, given, args.dry_run, _tell):
            if pruned.stays:
                print(f"{pruned.path} stays, but {pruned.stays}")
                continue
            damage = f", which is damaged: {pruned.damage}" if pruned.damage else ""
            print(f"{done} {pruned.path} ({mebibytes(pruned.bytes)}){damage}")
            count, total = count + 1, total + pruned.bytes
    print(f"{done} {count} directories, {mebibytes(total)}" if count else "nothing to delete")
    return 0


def _read(place: str, use: Callable[[Path], T]) -> T:
    """`use` of a run's newest valid checkpoint or of the named one; rejected ones go to stderr."""

    def use_path(chosen: Chosen) -> T:
        for bad in chosen.rejected:
            print(f"skipped checkpoint {bad.path}: {bad.file} {bad.reason}", file=sys.stderr)
        return use(chosen.path)

    return read_chosen(place, use_path)


def _read_all(places: Sequence[str], use: Callable[[list[Path]], T]) -> T:
    """`use` of one checkpoint per place, all of them locked."""
    if not places:
        return use([])
    first, *others = places
    return _read(first, lambda path: _read_all(others, lambda paths: use([path, *paths])))


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": run_list,
    "verify": run_verify,
    "diff": run_diff,
    "consolidate": run_consolidate,
    "average": run_average,
    "prune": run_prune,
}
