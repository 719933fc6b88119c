"""`minimind checkpoint ACTION`: print the result, return the exit status."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from minimind.checkpoint.directory import Chosen, read_chosen
from minimind.checkpoint.tools import Listing, list_checkpoints, prune, verify_checkpoints
from minimind.cli.command import PLACES, Group, OfPlace, OfPlaces, Output, argument, size_in_bytes
from minimind.cli.model import OfWeights
from minimind.config.names import no_run
from minimind.errors import CheckpointError, UsageError
from minimind.report.formats import skipped
from minimind.runtime import disk
from minimind.runtime.durable_files import mebibytes, storing
from minimind.runtime.terminal import aligned

COLUMNS = ("checkpoint", "tokens", "saved", "files", "size", "saved by", "dtype", "state", "kept")
SIDES = "<><>><"  # numbers to the right
REMEDY = "correct the path"

T = TypeVar("T")


@dataclass(kw_only=True)
class List(OfPlace):
    """List checkpoints, newest first, and why each is kept; unfinished ones come last."""

    example = "minimind checkpoint list out"
    verify: bool = argument(False)
    """also verify the hash of every file"""
    json: bool = argument(False)
    """print a JSON list"""

    def execute(self) -> None:
        place = _named(self)
        with storing(place, REMEDY):
            checkpoints = list_checkpoints(place, self.verify, _tell)
        if self.json:
            print(json.dumps([asdict(listing) for listing in checkpoints], indent=1))
        else:
            rows = [COLUMNS, *map(_row, checkpoints)]
            print(aligned(rows, SIDES) if checkpoints else f"{place}: no checkpoint yet")


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


@dataclass(kw_only=True)
class Verify(OfPlace):
    """Verify the hash and the content of every file; the status is 4 for any damage."""

    example = "minimind checkpoint verify out"

    def execute(self) -> int:
        place = _named(self)
        is_damaged = False
        with storing(place, REMEDY):
            for path, faults, remarks in verify_checkpoints(place):
                for line in (*faults, *(f"note: {remark}" for remark in remarks)):
                    print(f"{path}: {line}")
                if not faults:
                    print(f"{path}: ok")
                is_damaged |= bool(faults)
        return CheckpointError.status if is_damaged else 0


@dataclass(kw_only=True)
class Diff(OfPlaces):
    """Compare two checkpoints; the status is 0 if they are equal, else 1."""

    example = "minimind checkpoint diff out/a out/b"
    place: Any = argument((), **PLACES)
    """two out_dirs or step_ directories"""

    def execute(self) -> int:
        if len(self.checkpoint) != 2:
            raise UsageError(f"diff takes two checkpoints, not {len(self.checkpoint)}; name two")
        _require_runs(self.checkpoint, self.typed)
        from minimind.checkpoint.reader import compare  # imports torch

        first, second = self.checkpoint
        a, b, lines = _read(first, lambda a: _read(second, lambda b: (a, b, list(compare(a, b)))))
        print(f"{a} -> {b}")
        for line in lines or ["equal: the identity of the run, the counters and every tensor"]:
            print(f"  {line}")
        return 1 if lines else 0


@dataclass(kw_only=True)
class Whole(OfWeights, Output):
    """A command that writes whole tensors."""

    author: ClassVar[str]
    dtype: str = argument("float32", choices=("float32", "bfloat16"))
    """dtype of the tensors"""
    max_shard_size: int = argument("2GB", parse=size_in_bytes)
    """maximum size of a file; a bare number counts GiB"""

    def write(self, places: Sequence[str]) -> None:
        """Write the mean of the weights of the checkpoints, and print a summary."""
        from minimind.interop.export import consolidate, output

        output(self.out, self.force, self.author).require_free()  # before files are hashed

        def write(paths: Sequence[Path]) -> str:
            if len(repeated := {disk.resolve(path) for path in paths}) < len(paths):
                raise UsageError(
                    f"a checkpoint is named twice ({len(paths)} names, {len(repeated)} different);"
                    " name each once, and those of one run as step_ directories"
                )
            written = consolidate(
                paths, self.out, self.dtype, self.max_shard_size, self.force, self.weights
            )
            if written.note:
                print(f"{self.out}: {written.note}", file=sys.stderr)
            how = f", the mean of {len(paths)} checkpoints" if len(paths) > 1 else ""
            return written.summary(f"in {self.dtype}{how}", paths[-1], self.out)

        print(_read_all(places, write))


@dataclass(kw_only=True)
class Consolidate(Whole, OfPlace):
    """Merge the shards into safetensors files, after verifying their hashes."""

    example = "minimind checkpoint consolidate out --out out/whole"
    author = "consolidate"

    def execute(self) -> None:
        self.write([_named(self)])


@dataclass(kw_only=True)
class Average(Whole, OfPlaces):
    """Write the mean of the weights of several checkpoints as safetensors files."""

    example = "minimind checkpoint average out/a out/b --out out/mean"
    author = "average"
    place: Any = argument((), **PLACES)
    """out_dirs or step_ directories, two or more"""

    def execute(self) -> None:
        if len(self.checkpoint) < 2:
            raise UsageError("average takes two checkpoints or more, not 1; name another")
        _require_runs(self.checkpoint, self.typed)
        self.write(self.checkpoint)


@dataclass(kw_only=True)
class Prune(OfPlace):
    """Delete older checkpoints and leftovers; the status is 8 while the run is active."""

    example = "minimind checkpoint prune out --keep_last 2 --dry_run"
    keep_last: int | None = argument(None, ge=1)
    """number of newest valid checkpoints to keep (default: as in the run)"""
    keep_every: int | None = argument(None, ge=0)
    """also keep multiples of this step; 0: none (default: as in the run)"""
    keep_best: int | None = argument(None, ge=0)
    """also keep this many by validation loss; 0: none (default: as in the run)"""
    dry_run: bool = argument(False)
    """only print what would be deleted"""

    def execute(self) -> None:
        place = _named(self)
        done = "would delete" if self.dry_run else "deleted"
        count, total = 0, 0
        rules = {name: getattr(self, name) for name in ("keep_last", "keep_every", "keep_best")}
        given = {name: number for name, number in rules.items() if number is not None}
        with storing(place, REMEDY):
            for pruned in prune(place, given, self.dry_run, _tell):
                if pruned.stays:
                    print(f"{pruned.path} stays, but {pruned.stays}")
                    continue
                damage = f", which is damaged: {pruned.damage}" if pruned.damage else ""
                print(f"{done} {pruned.path} ({mebibytes(pruned.bytes)}){damage}")
                count, total = count + 1, total + pruned.bytes
        print(f"{done} {count} directories, {mebibytes(total)}" if count else "nothing to delete")


def _named(command: OfPlace) -> str:
    """The place of a command; CheckpointError if it is not there, or is of no run."""
    _require_runs([command.checkpoint], command.typed)
    return command.checkpoint


def _require_runs(places: Sequence[str], flag: str) -> None:
    for place in places:
        if fault := no_run(place, flag):
            raise CheckpointError(fault)


def _read(place: str, use: Callable[[Path], T]) -> T:
    """`use` of a run's newest valid checkpoint or of the named one; rejected ones go to stderr."""

    def use_path(chosen: Chosen) -> T:
        for bad in chosen.rejected:
            print(skipped(bad.path, bad.file, bad.reason), file=sys.stderr)
        return use(chosen.path)

    return read_chosen(place, use_path)


def _read_all(places: Sequence[str], use: Callable[[list[Path]], T]) -> T:
    """`use` of one checkpoint per place, all of them locked."""
    if not places:
        return use([])
    first, *others = places
    return _read(first, lambda path: _read_all(others, lambda paths: use([path, *paths])))


CHECKPOINT = Group(
    "List, verify, compare, merge or delete the checkpoints of a run. No GPU is needed.",
    "minimind checkpoint verify out",
    {
        "list": List,
        "verify": Verify,
        "diff": Diff,
        "consolidate": Consolidate,
        "average": Average,
        "prune": Prune,
    },
)
