"""The files that paths, directories and globs name, and the parts in which they are read."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

from minimind.data.text.tables import dataset_bytes, dataset_rows, is_dataset, row_groups
from minimind.errors import DataError, UsageError

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt", ".parquet")
DATASET = "dataset"
ANY_DEPTH = "**"
WEIGHTED = ", and give its source a weight if it should be read more often"
KNOWN = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"


@dataclass(frozen=True)
class Segment:
    """A part of one input that is read by itself.

    `start` and `stop` are bytes of a .jsonl file, where a line belongs to the segment in which it
    begins, rows of .parquet files and datasets, and 0 and the size of what is read whole. `weight`
    is about how many bytes of input that is, counted as they lie on disk.
    """

    path: Path
    start: int
    stop: int
    weight: int


def kind_of(path: Path) -> str:
    """One of SUFFIXES or DATASET, by the name alone where it is a file; a DataError for others."""
    if path.is_dir():
        return DATASET
    for suffix in SUFFIXES:
        if path.name.lower().endswith(suffix):
            return suffix
    raise DataError(
        f"{path}: the suffix {path.suffix!r} is not {KNOWN};"
        " convert the file, or rename it if it is one of these"
    )


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The inputs that `paths` name, in their order; those of a directory sorted, all depths.

    A Hugging Face dataset is one input though it is a directory. In directories and globs, hidden
    files and those of other suffixes are passed over: editors and packers leave them there. A
    path that names nothing, or what cannot be read, is a DataError, an empty one a UsageError.
    """
    if any(str(path) == "" for path in paths):
        raise UsageError("the path of a text is empty, as of a variable that is not set; name one")
    found: list[Path] = []
    for path in (Path(os.path.expanduser(path)) for path in paths):
        try:
            found += _named_by(path)
        except OSError as error:
            raise DataError(
                f"{error.filename or path}: cannot be read ({error.strerror}); check the path"
            ) from error
    return found


def require_once(files: Sequence[Path], more: str = WEIGHTED) -> None:
    """Nothing, or a UsageError for a file that is there twice, perhaps by way of a link."""
    seen: dict[Path, Path] = {}
    for path in files:
        real = path.resolve()
        if (first := seen.get(real)) is not None:
            problem = "is named twice" if first == path else f"is one file with {first}"
            raise UsageError(f"{path}: {problem}; name it once{more}")
        seen[real] = path


def _named_by(path: Path) -> list[Path]:
    if _is_ours(path):
        raise DataError(
            f"{path}: is what `minimind prepare` wrote or still writes, not text; name the text,"
            " or what it has finished alone as --data_path of a run"
        )
    if path.exists() or not glob.has_magic(str(path)):
        found = _inputs_of(path)
        if not found:
            raise DataError(f"{path}: holds no {KNOWN} file; name one that does")
    else:
        parts = path.parts[1:] if path.anchor else path.parts
        matches = sorted(_matching(Path(path.anchor or "."), parts), key=str)
        wanted = (p for p in matches if _is_wanted(p) and not _is_ours(p) | _is_ours(p.parent))
        inside = [p for match in wanted for p in _inputs_of(match)]
        found = list(dict.fromkeys(inside))  # "**" gives a directory and what is in it
        if not found:
            raise DataError(f"{path}: matches no {KNOWN} file; correct the pattern")
    for file in found:
        _require_printable(file)
        _require_readable(file)
    return found


def _inputs_of(path: Path) -> list[Path]:
    if not path.is_dir() or is_dataset(path):
        return [path]
    return [found for found, is_folder in _walk(path) if not is_folder]


def _walk(top: Path) -> Iterator[tuple[Path, bool]]:
    """`top` and all below, each with whether it is a folder: in order, each before what is in it.

    Links to directories are followed, each directory once: a link can lead back up. Not recursive,
    as directories may be nested deeper than Python's calls.
    """
    seen: set[tuple[int, int]] = set()
    levels = [iter([top])]
    while levels:
        path = next(levels[-1], None)
        if path is None:
            levels.pop()
            continue
        is_folder = path.is_dir() and not is_dataset(path)
        if is_folder:
            state = path.stat()
            if (state.st_dev, state.st_ino) in seen:
                continue
            seen.add((state.st_dev, state.st_ino))
            inside = (p for p in path.iterdir() if not p.name.startswith("."))
            levels.append(iter(sorted(p for p in inside if _is_wanted(p) and not _is_ours(p))))
        yield path, is_folder


def _matching(root: Path, parts: Sequence[str]) -> Iterator[Path]:
    """The paths below `root` that the parts of a pattern mean; `**` is read as a directory is.

    glob's own goes round in circles where links lead back up.
    """
    if ANY_DEPTH not in parts:
        names = glob.glob(os.path.join(*parts), root_dir=root) if parts else [""]
        yield from (root / name for name in names)
        return
    at = parts.index(ANY_DEPTH)
    rest = list(dropwhile(ANY_DEPTH.__eq__, parts[at:]))
    for base in _matching(root, parts[:at]):
        if rest and base.is_dir():
            folders = (path for path, is_folder in _walk(base) if is_folder)
            yield from (path for folder in folders for path in _matching(folder, rest))
        elif base.is_dir():
            yield base  # with all that is in it


def _is_ours(path: Path) -> bool:
    """Whether a folder is what a preparation wrote or writes: its lists are no text."""
    return path.is_dir() and (path / "plan.json").is_file()


def _is_wanted(path: Path) -> bool:
    return path.is_dir() or path.name.lower().endswith(SUFFIXES)


def _require_printable(path: Path) -> None:
    """Names go into JSON, and into messages of one line."""
    if any(ord(c) < 32 or c == "\x7f" or "\ud800" <= c <= "\udfff" for c in str(path)):
        raise DataError(
            f"{str(path)!r}: has a name that is not UTF-8, or control characters in it; rename it"
        )


def _require_readable(path: Path) -> None:
    kind = kind_of(path) if path.exists() else None
    if kind is None and path.is_symlink():
        raise DataError(f"{path}: is a link to a file that is not there; remove it")
    if kind is None:
        raise DataError(f"{path}: there is no such file or directory; correct the path")
    if kind == DATASET:
        return
    if not path.is_file():
        raise DataError(f"{path}: is a pipe or a device, not a file; write the text to a file")
    with open(path, "rb"):
        pass  # or an OSError: it may not be readable


def is_cut(path: Path) -> bool:
    """Whether segments of an input are as small as one wants."""
    return kind_of(path) in (".jsonl", DATASET)


def segments_of(path: Path, unit_bytes: int) -> list[Segment]:
    """The parts of an input, in order, of about `unit_bytes` each where its format can be cut.

    What is empty is one part of nothing, for its reader to say so.
    A DataError when the tables of a .parquet file or a dataset are damaged.
    """
    return _parts(path, unit_bytes) or [Segment(path, 0, 0, 0)]


def _parts(path: Path, unit_bytes: int) -> list[Segment]:
    kind = kind_of(path)
    if kind != DATASET and path.stat().st_size == 0:
        return []
    if kind == ".parquet":
        return _grouped(path, row_groups(path), path.stat().st_size, unit_bytes)
    if kind == DATASET:
        rows, size = dataset_rows(path), dataset_bytes(path)
        step = max(1, rows * unit_bytes // max(size, 1))
        ends = [(first, min(first + step, rows)) for first in range(0, rows, step)]
        return [Segment(path, a, b, (b - a) * size // rows) for a, b in ends]
    size = path.stat().st_size
    step = unit_bytes if kind == ".jsonl" else max(size, 1)
    cuts = [(start, min(start + step, size)) for start in range(0, size, step)]
    return [Segment(path, start, stop, stop - start) for start, stop in cuts]


def _grouped(path: Path, counts: list[int], size: int, unit_bytes: int) -> list[Segment]:
    """Neighbouring groups of `counts` rows put together up to about `unit_bytes`."""
    total = sum(counts)
    segments: list[Segment] = []
    start = stop = 0
    for count in counts:
        stop += count
        weight = (stop - start) * size // max(total, 1)
        if weight >= unit_bytes or stop == total:
            segments.append(Segment(path, start, stop, weight))
            start = stop
    return [segment for segment in segments if segment.stop > segment.start]
