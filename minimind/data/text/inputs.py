"""Sources by name and weight, and their files: of paths, directories and globs."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from pathlib import Path
from typing import Any

from minimind.config.names import is_utf8, no_such_file, utf8_fault
from minimind.config.yaml_files import WEIGHTS, load_yaml_texts, source_weight
from minimind.data.text.formats import DATASET, FORMATS, KNOWN, RECORDS, format_of
from minimind.data.text.tables import TRAIN, is_dataset
from minimind.errors import DataError, UsageError
from minimind.runtime import disk
from minimind.runtime.urls import HUB_PREFIX, OF_THE_HUB, masked

# What is beside text, and not text: of the Hub, of models, of `minimind data filter`.
BESIDE_TEXT = re.compile(
    r"(readme|license|changelog)\.md|(\w+_)?(config|infos?|dict|map|index|tokens|vocab)\.json"
    r"|(tokenizer|state|report)\.json|removed\.ndjson",
    re.IGNORECASE,
)
# Words of names by the part of a data set that they tell; those that the Hub reads.
AUTO, VALIDATION = "auto", "validation"
PARTS = {
    TRAIN: {"train", "training"},
    VALIDATION: {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
ANY_DEPTH = "**"
WEIGHTED = ", and give its source a weight if it should be read more often"


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the inputs of `paths` in order; directories recursively, sorted.

    A Hugging Face dataset is one input. In directories and globs, hidden files, other suffixes and
    what is `BESIDE_TEXT` are ignored. Raise DataError for missing or unreadable paths, UsageError
    for an empty one.
    """
    if any(str(path) == "" for path in paths):
        raise UsageError("the path of a text is empty, as of a variable that is not set; name one")
    files: list[Path] = []
    for path in (Path(os.path.expanduser(path)) for path in paths):
        try:
            files += _named_by(path)
        except OSError as error:
            raise _unreadable(error, path) from error
    return files


def _unreadable(error: OSError, path: Path) -> DataError:
    place = error.filename or path
    return DataError(f"{place}: cannot be read ({error.strerror}); check the path")


def without(files: Sequence[Path], left_out: Sequence[Path]) -> list[Path]:
    """The files that are not in `left_out`, compared by their real paths."""
    real = {*map(_identity, left_out)}
    return [path for path in files if _identity(path) not in real]


def _identity(path: Path) -> Path:
    """The path without links. Links in the Hub's cache stay: files share their content there."""
    is_in_hub = OF_THE_HUB.match(str(path)) is not None
    return disk.resolve(path.parent) / path.name if is_in_hub else disk.resolve(path)


def require_records(files: Iterable[Path]) -> None:
    """Raise DataError for a file that is one text, so that it cannot hold conversations."""
    for path in files:
        if format_of(path).is_one_text:
            raise DataError(
                f"{path}: conversations are read from {', '.join(RECORDS)} and datasets, not from"
                " whole texts; write one conversation a line of a .jsonl file"
            )


def require_once(files: Sequence[Path], more: str = WEIGHTED) -> None:
    """Raise UsageError for a file that is given twice, also through links."""
    seen: dict[Path, Path] = {}
    for path in files:
        real = _identity(path)
        if (first := seen.get(real)) is not None:
            problem = "is named twice" if first == path else f"is one file with {first}"
            raise UsageError(f"{path}: {problem}; name it once{more}")
        seen[real] = path


def _named_by(path: Path) -> list[Path]:
    if _is_ours(path):
        raise DataError(
            f"{path}: is a folder of `minimind prepare` (perhaps unfinished), not text; name the"
            " text, or give a finished folder alone as --data_path of a run"
        )
    if disk.exists(path) or not glob.has_magic(str(path)):
        files = _inputs_of(path)
        if not files:
            raise DataError(f"{path}: holds no {KNOWN} file; name one that does")
    else:
        matches = sorted(_matching_path(path), key=str)
        if not matches:  # such as run[1]/*.jsonl, where [1] is of the name of a folder
            matches = sorted(_matching_path(Path(with_names(str(path), disk.is_dir))), key=str)
        wanted = (p for p in matches if _is_wanted(p) and not _is_ours(p) | _is_ours(p.parent))
        inside = [p for match in wanted for p in _inputs_of(match)]
        files = list(dict.fromkeys(inside))  # "**" gives a directory and what is in it
        if not files:
            raise DataError(f"{path}: matches no {KNOWN} file; correct the pattern{of_names(path)}")
    for file in files:
        _require_printable(file)
        _require_readable(file)
    return files


def _inputs_of(path: Path) -> list[Path]:
    if not disk.is_dir(path) or is_dataset(path):
        return [path]
    by_part = _by_part(path)
    return by_part.get(TRAIN) or by_part.get("", [])


def _by_part(folder: Path) -> dict[str, list[Path]]:
    """The files of a folder by their parts; see `by_part`."""
    try:
        files = [file for file, is_folder in _walk(folder) if not is_folder]
    except OSError as error:
        raise _unreadable(error, folder) from error
    parts = by_part([str(file.relative_to(folder)) for file in files])
    return {part: [files[number] for number in numbers] for part, numbers in parts.items()}


def by_part(names: Sequence[str]) -> dict[str, list[int]]:
    """The numbers of the files of a folder by the parts that their names tell, as the Hub has them.

    Without text to train on and some that is not, the folder has no parts, and all is in "".
    """
    parts = [*map(part_of, names)]
    if TRAIN not in parts or {TRAIN, ""}.issuperset(parts):
        return {"": [*range(len(names))]}
    found: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        found.setdefault(part or TRAIN, []).append(number)
    return found


def part_of(path: str) -> str:
    """The part that a word of a file's name tells, or of the folders above it; "" for none."""
    for name in reversed(path.split("/")):
        words = re.split(r"[-._ 0-9]+", name)
        for part, names in PARTS.items():
            if not names.isdisjoint(words):
                return part
    return ""


def _folders(paths: Sequence[str | Path]) -> list[Path]:
    return [Path(name) for path in paths if disk.is_dir(name := os.path.expanduser(path))]


def print_left_out(paths: Sequence[str | Path], val_path: str | None = None) -> None:
    """Say what `left_out_of` says, on stderr."""
    for note in left_out_of(paths, val_path):
        print(f"note   {note}", file=sys.stderr)


def left_out_of(paths: Sequence[str | Path], val_path: str | None) -> list[str]:
    """One sentence for each folder of `paths` that has parts which are not read."""
    notes, read = [], {TRAIN, "", VALIDATION if val_path == AUTO else TRAIN}
    for path in _folders(paths):
        if not is_dataset(path) and not _is_ours(path):
            if others := _by_part(path).keys() - read:
                notes.append(left_out(str(path), others))
    return notes


def left_out(place: str, parts: Iterable[str]) -> str:
    """The sentence for parts of a folder that are not read."""
    return f"{place}: its files of {TRAIN} are read; left out: {' and '.join(sorted(parts))}"


def val_paths(val_path: str | None, data_path: Sequence[str]) -> tuple[str, ...]:
    """What --val_path names: a path, or the validation parts (`auto`) of folders, their files, and
    of data sets of the Hub, by their names.

    Raise UsageError if there is none.
    """
    if val_path != AUTO:
        return () if val_path is None else (val_path,)
    from minimind.runtime.hub import DATASET as DATA_SET
    from minimind.runtime.hub import repository

    found: list[Path | str] = []
    for wanted in filter(None, (repository(path, DATA_SET) for path in data_path)):
        inside, _, last = wanted.inside.rpartition("/")
        inside = inside if last in PARTS else wanted.inside
        found.append(str(replace(wanted, inside=f"{inside}/{VALIDATION}".strip("/"))))
    for path in _folders(data_path):
        if is_dataset(path):
            splits = (path / name for name in PARTS[VALIDATION])
            found += sorted(split for split in splits if is_dataset(split))
        else:
            found += _by_part(path).get(VALIDATION, [])
    if not found:
        raise UsageError(
            f"--val_path {AUTO}: no folder of {' '.join(map(masked, data_path))} has a part of"
            f" {VALIDATION} beside one of {TRAIN}; name the text to hold out"
        )
    return tuple(map(str, found))


def _walk(top: Path) -> Iterator[tuple[Path, bool]]:
    """Yield `top` and everything below, sorted, with whether it is a folder.

    Follows links to directories, each directory once. Not recursive, since directories may be
    nested deeper than Python's stack.
    """
    seen: set[tuple[int, int]] = set()
    levels = [iter([top])]
    while levels:
        path = next(levels[-1], None)
        if path is None:
            levels.pop()
            continue
        is_folder = disk.is_dir(path) and not is_dataset(path)
        if is_folder:
            state = disk.stat(path)
            if (state.st_dev, state.st_ino) in seen:
                continue
            seen.add((state.st_dev, state.st_ino))
            inside = (p for p in disk.entries(path) if not p.name.startswith("."))
            levels.append(iter(sorted(p for p in inside if _is_wanted(p) and not _is_ours(p))))
        yield path, is_folder


def with_names(pattern: str, is_folder: Callable[[str], bool]) -> str:
    """The pattern with its longest leading folder that exists escaped, as a name."""
    folder = pattern
    while folder := folder.rpartition("/")[0]:
        if is_folder(folder):
            return glob.escape(folder) + pattern[len(folder) :]
    return pattern


def of_names(pattern: str | Path) -> str:
    """How brackets of names are written in a pattern, if it has some."""
    return ", in which [[] is a bracket of a name" if "[" in str(pattern) else ""


def _matching_path(pattern: Path) -> Iterator[Path]:
    parts = pattern.parts[1:] if pattern.anchor else pattern.parts
    return _matching(Path(pattern.anchor or "."), parts)


def _matching(root: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield the paths below `root` that match the parts of a pattern, with `**`.

    Python's glob does not end on links that lead back up.
    """
    if ANY_DEPTH not in parts:
        yield from disk.matching(root, "/".join(parts), hidden=False) if parts else [root]
        return
    at = parts.index(ANY_DEPTH)
    rest = list(dropwhile(ANY_DEPTH.__eq__, parts[at:]))
    for base in _matching(root, parts[:at]):
        if rest and disk.is_dir(base):
            folders = (path for path, is_folder in _walk(base) if is_folder)
            yield from (path for folder in folders for path in _matching(folder, rest))
        elif disk.is_dir(base):
            yield base  # stands for all that is in the folder


def _is_ours(path: Path) -> bool:
    """Whether a folder is the output or draft of a preparation."""
    return disk.is_dir(path) and disk.is_file(path / "plan.json")


def _is_wanted(path: Path) -> bool:
    return disk.is_dir(path) or is_text_name(path.name)


def is_text_name(name: str) -> bool:
    """Whether a file of this name in a folder is read as text."""
    return name.lower().endswith(tuple(FORMATS)) and not BESIDE_TEXT.fullmatch(name)


def _require_printable(path: Path) -> None:
    """Raise for names that do not fit into JSON or one-line messages."""
    if not is_utf8(str(path)):
        raise DataError(f"{str(path)!r}: its name {utf8_fault(str(path))}")
    if any(ord(c) < 32 or c == "\x7f" for c in str(path)):
        raise DataError(f"{str(path)!r}: has control characters in its name; rename it")


def _require_readable(path: Path) -> None:
    form = format_of(path) if disk.exists(path) else None
    if form is None and disk.is_symlink(path):
        raise DataError(f"{path}: is a link to a file that is not there; remove it")
    if form is None and str(path).startswith(HUB_PREFIX):
        raise DataError(f"{path}: is neither a local path nor hf:USER/SET of the Hub; correct it")
    if form is None:
        raise DataError(no_such_file(path))
    if form is DATASET:
        return
    if not disk.is_file(path):
        raise DataError(f"{path}: is a pipe or a device, not a file; write the text to a file")
    with open(path, "rb"):
        pass  # or an OSError: it may not be readable


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Source:
    """Inputs that are mixed as one; without weights all rows count equally."""

    name: str
    paths: tuple[str, ...]
    weight: float | None = None


def parse_source(text: str) -> Source:
    """Parse `NAME=PATH` or `NAME=PATH:WEIGHT`; raise UsageError otherwise."""
    name, equals, path = text.partition("=")
    head, _, tail = path.rpartition(":")
    weight = None
    if head and not _exists(path) and _is_meant_as_weight(head, tail):
        path, weight = head, _weight(tail, f"--source {masked(text)}")
    if not equals or not path:
        raise UsageError(
            f"--source {masked(text)}: is not NAME=PATH or NAME=PATH:WEIGHT; write it so"
        )
    return Source(name_of(name, f"--source {masked(text)}"), (path,), weight)


def _is_meant_as_weight(head: str, tail: str) -> bool:
    if re.fullmatch(r"[0-9.eE+-]+", tail):
        return True
    return not glob.has_magic(tail) and "/" not in tail and (_exists(head) or glob.has_magic(head))


def _exists(path: str) -> bool:
    try:
        return disk.exists(os.path.expanduser(path))
    except OSError:  # its reader says why
        return False


def read_sources(path: Path) -> list[Source]:
    """Read the sources of a YAML file: `{NAME: {paths: [...], weight: 2}}`, or NAME: PATH."""
    entries = load_yaml_texts(str(path), "--sources")
    return [_source(str(name), given, f"--sources {path}") for name, given in entries.items()]


def _source(name: str, given: Any, where: str) -> Source:
    given = given if isinstance(given, dict) else {"paths": given}
    if unknown := given.keys() - {"paths", "weight"}:
        raise UsageError(f"{where}: {name} has {unknown.pop()!r}; it takes paths and weight")
    paths = given.get("paths")
    paths = [paths] if isinstance(paths, str) else paths
    if not isinstance(paths, list) or not paths or not all(isinstance(p, str) for p in paths):
        raise UsageError(f"{where}: {name} names no paths; write paths: [FILE, ...]")
    weight = given.get("weight")
    value = None if weight is None else _weight(str(weight), f"{where}: {name}")
    return Source(name_of(name, where), tuple(paths), value)


def _weight(text: str, where: str) -> float:
    try:
        return source_weight(text)
    except ValueError as error:
        raise UsageError(f"{where}: weight = {text} is not {WEIGHTS}; give one") from error


def name_of(name: str, where: str) -> str:
    """The name of a source; raise UsageError if it is none."""
    if not NAME.fullmatch(name):
        raise UsageError(f"{where}: {name!r} is not a name; use letters, digits, '.', '_' and '-'")
    return name


def join_sources(sources: Sequence[Source]) -> tuple[Source, ...]:
    """Join sources by name; raise UsageError for different or partly missing weights."""
    joined: dict[str, Source] = {}
    for source in sources:
        before = joined.get(source.name, Source(source.name, (), source.weight))
        if before.weight != source.weight:
            raise UsageError(
                f"source {source.name} has weight {before.weight} and {source.weight}; give one"
            )
        joined[source.name] = Source(source.name, before.paths + source.paths, source.weight)
    without = [source.name for source in joined.values() if source.weight is None]
    if without and len(without) < len(joined):
        raise UsageError(
            f"source {without[0]} has no weight and others have; give all of them one, or none"
        )
    return tuple(joined.values())
