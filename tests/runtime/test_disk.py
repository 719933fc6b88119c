"""What is at a path: every fault is an OSError that names it, and nothing is left out."""

from __future__ import annotations

import ast
import errno
import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minimind.config.paths import error_of
from minimind.errors import CURES, StorageError, is_of_disk, known_error
from minimind.runtime import disk
from minimind.runtime.durable_files import storing
from minimind.runtime.output_folder import NewFolder
from tests.closed import closed
from tests.packages import modules

ASKED = (disk.exists, disk.lexists, disk.is_dir, disk.is_file, disk.is_symlink, disk.stat)
FAULTS = {
    "closed/in": errno.EACCES,
    "closed/in/deep": errno.EACCES,
    "loop/in": errno.ELOOP,
    "n" * 300: errno.ENAMETOOLONG,
    "nul\0": errno.EINVAL,
    "surrogate\ud800": errno.EINVAL,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    (tmp_path / "closed").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nothing")
    return tmp_path


@pytest.mark.parametrize("ask", ASKED)
@pytest.mark.parametrize(("name", "number"), FAULTS.items())
def test_a_path_that_nothing_can_be_said_of(
    name: str, number: int, ask: Callable[[Path], Any], folder: Path
):
    with closed(folder / "closed"), pytest.raises(OSError, match=rf"^\[Errno {number}\]") as caught:
        ask(folder / name)
    assert caught.value.errno == number
    assert caught.value.filename is not None
    assert isinstance(known_error(caught.value), StorageError)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EACCES])
@pytest.mark.parametrize("ask", [*ASKED, disk.entries, lambda path: [*disk.matching(path, "*")]])
def test_a_disk_that_fails(
    number: int, ask: Callable[[Path], Any], folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(path: Any, **_: Any) -> Any:
        raise OSError(number, os.strerror(number), str(path))

    for name in ("stat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match=rf"^\[Errno {number}\]") as caught:
        ask(folder)
    assert caught.value.errno == number
    assert str(known_error(caught.value)).startswith(f"{folder}: {os.strerror(number)}; ")


def test_what_is_not_there(folder: Path):
    for name in ("nothing", "nothing/in", "file/in", "dangling/in"):
        assert not any(ask(folder / name) for ask in ASKED[:-1])
        assert [*disk.matching(folder / name, "*")] == []
        assert disk.is_absent(folder / name)
        assert not disk.seems_there(folder / name)
    assert disk.lexists(folder / "dangling")
    assert not disk.exists(folder / "dangling")
    assert disk.is_symlink(folder / "loop")


def test_words_that_may_be_paths(folder: Path):
    with closed(folder / "closed"):
        assert disk.seems_there(folder / "closed/in")
        assert not disk.is_absent(folder / "closed/in")
    assert not disk.seems_there("n" * 300)
    assert not disk.seems_there("a question?\0")


PATTERNS = [
    "*",
    "*.txt",
    "a",
    "a/*",
    "*/*.txt",
    "*/b",
    "[ab]*",
    ".*",
    "nothing/*",
    "*/.h*",
    "x/y/*",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_are_those_of_pathlib(pattern: str, tmp_path: Path):
    for name in ("a/1.txt", "a/b/2.txt", "b/3.txt", ".h/4.txt", "a/.hidden", "5.txt", "x/y/z"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert sorted(disk.matching(tmp_path, pattern)) == sorted(tmp_path.glob(pattern))
    shown = {tmp_path / name for name in glob.glob(pattern, root_dir=tmp_path)}
    assert {*disk.matching(tmp_path, pattern, hidden=False)} == shown
    assert {*disk.files_below(tmp_path)} == {p for p in tmp_path.rglob("*") if p.is_file()}


def test_a_closed_folder_among_others_is_not_left_out(folder: Path):
    (folder / "open").mkdir()
    (folder / "loop").unlink()
    with closed(folder / "closed"):
        for found in (disk.matching(folder, "*/*"), disk.files_below(folder)):
            with pytest.raises(PermissionError):
                list(found)


METHODS = {"exists", "is_dir", "is_file", "is_symlink", "stat", "lstat", "iterdir", "resolve"}
METHODS |= {"glob", "rglob", "samefile", "is_char_device", "is_mount", "is_fifo", "walk", "iglob"}
OF_OS = {"stat", "lstat", "listdir", "scandir", "walk", "fwalk"}
OF_OS_PATH = {"exists", "lexists", "isdir", "isfile", "islink", "getsize", "getmtime", "samefile"}
OF_OS_PATH |= {"realpath", "ismount"}
ALLOWED = {
    "minimind.runtime.disk",
    # Parts of exports, which look at paths of the system alone.
    "minimind.runtime.hardware",
    "minimind.runtime.environment",
    # What others keep closed in a shared cache is not counted.
    "minimind.runtime.object_cache: os.walk",
}
NAMES = METHODS | OF_OS | OF_OS_PATH
OTHERS = {"filesystem", "setup"}  # of fsspec; of a run
OF_OURS = {"self.exists", "one.exists", "Path(__file__).resolve"}


def test_no_other_module_asks_the_disk():
    found = {
        f"{module}: {asked}"
        for module, source in modules().items()
        if module not in ALLOWED
        for asked in asked_in(source)
    }
    assert found <= ALLOWED


def asked_in(source: str) -> list[str]:
    """The names of functions of others by which a source looks at paths."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return [ast.unparse(node) for node in nodes if node.attr in NAMES and _asks(node)]


def _asks(node: ast.Attribute) -> bool:
    base = ast.unparse(node.value)
    if base in ("os", "os.path"):
        return node.attr in (OF_OS if base == "os" else OF_OS_PATH)
    is_ours = ast.unparse(node) in OF_OURS or base in ("disk", *OTHERS)
    return node.attr in METHODS and not is_ours


@pytest.mark.parametrize(
    "source",
    ["path.exists()", "map(Path.is_dir, x)", "os.path.isdir(p)", "os.scandir(p)", "(a / b).stat()"],
)
def test_what_asks_is_seen(source: str):
    assert len(asked_in(source)) == 1


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EACCES, "correct its permissions"),
        (errno.EPERM, "correct its permissions"),
        (errno.EROFS, "mount its file system for writing"),
        (errno.ENAMETOOLONG, "shorten the name"),
        (errno.ENOTDIR, "correct the path"),
        (errno.ELOOP, "correct its links"),
        (errno.EIO, None),
    ],
)
def test_the_advice_is_that_of_the_cause(number: int, cure: str | None):
    error = OSError(number, os.strerror(number), "/cache/file")
    fault = f"/cache/file: {os.strerror(number)}"
    unknown = "correct the path or its permissions"
    assert str(known_error(error)) == f"{fault}; {cure or unknown}"
    with pytest.raises(StorageError) as caught, storing("/cache", "give another --cache_dir"):
        raise error
    first = f"{cure}, or " if cure else ""
    assert str(caught.value) == f"{fault}; {first}give another --cache_dir"
    if is_of_disk(error):
        told = error_of(error, {"cache_dir": "/cache"})
        assert str(told).endswith(f"; give another --cache_dir, or {cure or CURES[errno.EACCES]}")


@pytest.mark.parametrize("key", [None, b"key"])
def test_a_full_disk_leaves_the_draft_that_the_same_command_continues(
    key: bytes | None, tmp_path: Path
):
    folder = NewFolder(tmp_path / "out", False, (), "test", Path.exists)
    with pytest.raises(StorageError) as raised, folder.written_aside(key=key) as draft:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rows.bin")
    kept = f"; {draft} is kept for the same command" if key else ""
    assert str(raised.value).endswith(f"; free some space, or give another --out{kept}")
    assert draft.exists() == bool(key)
