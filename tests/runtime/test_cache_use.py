"""Lists of what commands use: on NFS, cut, of other users; leftovers of killed commands."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import IO

import pytest

from minimind.runtime import object_cache
from minimind.runtime.drafts import draft_of
from minimind.runtime.object_cache import GIB, CacheUse

REAL = fcntl.flock


def flock_of_nfs(file: IO[str], how: int) -> None:
    """flock(2): over NFS a shared lock needs reading, and an exclusive one writing."""
    mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
    if mode == (os.O_RDONLY if how & fcntl.LOCK_EX else os.O_WRONLY):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    REAL(file, how)


def test_two_commands_use_a_cache_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(object_cache.fcntl, "flock", flock_of_nfs)
    (tmp_path / ".use-dead").write_text("{}")
    one, other = CacheUse(tmp_path), CacheUse(tmp_path)
    one.claim({tmp_path / "s3/b/k": 5}, "text")
    other.claim({tmp_path / "s3/b/k": 5}, "text")
    assert len([*tmp_path.glob(".use-*")]) == 2
    one.close()
    other.close()


def test_a_cut_list_does_not_stop_other_commands(tmp_path: Path):
    with open(tmp_path / ".use-full", "w") as file:  # its disk was full: it is about to end
        fcntl.flock(file, fcntl.LOCK_EX)
        use = CacheUse(tmp_path)
        use.claim({tmp_path / "s3/b/k": 5}, "text")
        use.close()


def test_a_cache_whose_lock_is_of_another_user_is_for_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refused(path: Path, *how: str) -> IO[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(object_cache, "open", refused, raising=False)
    CacheUse(tmp_path).claim({tmp_path / "s3/b/k": 5}, "text")
    assert not [*tmp_path.glob(".use-*")]


def evict(folder: Path) -> None:
    """Make room for 900 of 1,000 bytes."""
    use = CacheUse(folder, 1000 / GIB)
    use.claim({folder / "s3/b/new": 900}, "text")
    use.close()


def test_a_file_without_a_record_counts(tmp_path: Path):
    (tmp_path / "s3/b").mkdir(parents=True)
    draft = draft_of(Path("s3/b/manifest.json"))
    paths = [tmp_path / name for name in ("s3/b/k", draft, "listing-a.json")]
    for path in paths:
        path.write_bytes(bytes(5000))
    evict(tmp_path)
    assert [path.exists() for path in paths] == [False, True, True]


def test_the_folder_of_a_deleted_object_stays(tmp_path: Path):
    path = tmp_path / "s3/b/k"
    path.parent.mkdir(parents=True)
    for name in ("k", ".k.json"):
        path.with_name(name).write_bytes(bytes(500))
    evict(tmp_path)
    assert not [*path.parent.iterdir()]  # another command may be about to write there
