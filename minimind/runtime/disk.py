"""What is at a path. Every module asks the disk here, so that every fault is an OSError.

`Path.exists` and its kin raise or return False for the same fault, depending on its number, on the
function and on Python's version; `Path.glob` leaves out what it may not read, and `Path.resolve`
raises a RuntimeError for a loop of links. Here False and "no entries" mean that nothing is there.
A path that nothing can be said of raises an OSError that names it: a folder of another user, a
loop, a name that is too long or that no file can have, a disk or a server that fails.
"""

from __future__ import annotations

import errno
import os
import stat as modes
from collections.abc import Iterator
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path

AnyPath = str | os.PathLike[str]


def stat(path: AnyPath, follow: bool = True) -> os.stat_result:
    """`os.stat`; a name that no file can have (a NUL) is an OSError as well."""
    try:
        return os.stat(path, follow_symlinks=follow)
    except ValueError as error:  # of embedded NULs and of characters that have no bytes
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path)) from error


def mode_of(path: AnyPath, follow: bool = True) -> int:
    """The mode of what is there, 0 if nothing is."""
    try:
        return stat(path, follow).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def exists(path: AnyPath) -> bool:
    """Whether something is there; a link counts if its target is there."""
    return mode_of(path) != 0


def lexists(path: AnyPath) -> bool:
    """Whether something is there, were it a link to nothing."""
    return mode_of(path, follow=False) != 0


def is_dir(path: AnyPath) -> bool:
    """Whether a folder is there, or a link to one."""
    return modes.S_ISDIR(mode_of(path))


def is_file(path: AnyPath) -> bool:
    """Whether a regular file is there, or a link to one."""
    return modes.S_ISREG(mode_of(path))


def is_symlink(path: AnyPath) -> bool:
    """Whether a link is there."""
    return modes.S_ISLNK(mode_of(path, follow=False))


def same_file(path: AnyPath, other: AnyPath) -> bool:
    """Whether both paths are there, and are one file."""
    return exists(path) and exists(other) and os.path.samestat(stat(path), stat(other))


def seems_there(text: AnyPath) -> bool:
    """Whether something is there, as far as this user can see; never raises.

    For words that may be a path or something else. Who opens the path reports its faults.
    """
    try:
        return lexists(text)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EPERM)


def is_absent(path: AnyPath) -> bool:
    """Whether nothing is there for certain; never raises.

    False also where nothing can be said of the path: who opens it next reports why.
    """
    try:
        return not exists(path)
    except OSError:
        return False


def entries(folder: AnyPath) -> list[Path]:
    """What is in a folder, in no order; raises FileNotFoundError if it is not there."""
    try:
        return [Path(folder, name) for name in os.listdir(folder)]
    except ValueError as error:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(folder)) from error


def matching(folder: AnyPath, pattern: str, hidden: bool = True) -> Iterator[Path]:
    """The paths in a folder that match a pattern as of `Path.glob`, without `**`; in no order.

    None if the folder is not there. Without `hidden`, only `.*` matches names that begin so.
    """
    part, _, rest = pattern.partition("/")
    if has_magic(part):
        try:
            found = [path for path in entries(folder) if fnmatchcase(path.name, part)]
        except (FileNotFoundError, NotADirectoryError):
            return
        if not hidden and not part.startswith("."):
            found = [path for path in found if not path.name.startswith(".")]
    else:
        found = [path] if lexists(path := Path(folder, part)) else []
    for path in found:
        if not rest:
            yield path
        elif is_dir(path):
            yield from matching(path, rest, hidden)


def files_below(folder: AnyPath) -> Iterator[Path]:
    """The files in a folder and in those below it, and links to files; in no order."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # or another process has just removed it
            raise error

    for place, _, names in os.walk(folder, onerror=fail):
        yield from (path for name in names if is_file(path := Path(place, name)))


def resolve(path: AnyPath) -> Path:
    """The absolute path without links, as far as there are any to follow; a loop stays."""
    return Path(os.path.realpath(path))
