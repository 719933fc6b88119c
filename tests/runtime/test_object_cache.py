"""The bound of the cache, what is in use, leftovers of killed processes, and names of its files."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minimind.data.prepare.remote import local_text
from minimind.errors import DataError, StorageError, UsageError
from minimind.runtime import object_cache
from minimind.runtime.download import Cancelled, RemoteObject, download
from minimind.runtime.drafts import draft_of
from minimind.runtime.filesystem import open_filesystem
from minimind.runtime.object_cache import CacheUse, in_parallel, open_cache
from minimind.runtime.urls import named
from tests.runtime.servers import FaultyProxy, ObjectStore

KIB = 2**-20  # in GiB
LINE = b'{"text": "%s"}\n'


def text_of(letter: bytes) -> bytes:
    return LINE % (letter * 1011)  # 1,024 bytes


@pytest.fixture
def three(store: ObjectStore, proxy: FaultyProxy) -> list[str]:
    """URLs of three objects of a KiB."""
    return [store.put(f"{name.decode()}.jsonl", text_of(name)) for name in (b"a", b"b", b"c")]


def fetched(url: str, cache_dir: Path, max_gib: float | None = None) -> Path:
    with open_cache(cache_dir, max_gib) as cache:
        return Path(local_text([url], cache)[0])


def test_objects_used_longest_ago_are_deleted_to_stay_within_the_bound(
    three: list[str], tmp_path: Path
):
    first, second = (fetched(url, tmp_path) for url in three[:2])
    past = first.stat().st_mtime - 100
    for path, age in ((first, 0), (second, 50)):
        os.utime(path.with_name(f".{path.name}.json"), (past + age, past + age))
    third = fetched(three[2], tmp_path, 2 * KIB)
    assert [path.exists() for path in (first, second, third)] == [False, True, True]
    assert sorted(path.name for path in first.parent.iterdir() if "a.jsonl" in path.name) == []
    assert fetched(three[0], tmp_path, 2 * KIB).read_bytes() == text_of(b"a")


def test_a_use_counts_as_the_last_one(three: list[str], tmp_path: Path):
    first, second = (fetched(url, tmp_path) for url in three[:2])
    for path in (first, second):
        os.utime(path.with_name(f".{path.name}.json"), (1, 1))
    fetched(three[0], tmp_path)
    fetched(three[2], tmp_path, 2 * KIB)
    assert (first.exists(), second.exists()) == (True, False)


def test_more_than_the_bound_is_refused_with_both_numbers(three: list[str], tmp_path: Path):
    with pytest.raises(
        UsageError,
        match=r"^s3://bucket/\*.jsonl: needs 3,072 bytes \(0.0 MiB\) of objects at once, more than"
        r" max_cache_gib = 1.90735e-06 \(2,048 bytes\); raise --max_cache_gib, or remove it$",
    ):
        fetched("s3://bucket/*.jsonl", tmp_path, 2 * KIB)


def test_what_another_command_uses_stays(three: list[str], tmp_path: Path):
    with open_cache(tmp_path) as cache:
        (used,) = local_text(three[:1], cache)
        fetched(three[1], tmp_path, 2 * KIB)
        fetched(three[2], tmp_path, 2 * KIB)
        assert Path(used).read_bytes() == text_of(b"a")
        with pytest.raises(StorageError, match="the 1,024 that other commands use"):
            fetched("s3://bucket/[bc].jsonl", tmp_path, 2 * KIB)
    fetched("s3://bucket/[bc].jsonl", tmp_path, 2 * KIB)
    assert not Path(used).exists()


USING = """
import os, signal, sys
from pathlib import Path
from minimind.runtime.drafts import draft_of
from minimind.runtime.filesystem import open_filesystem
from minimind.runtime.object_cache import CacheUse
path = Path(sys.argv[1], "s3/bucket/a.jsonl")
CacheUse(Path(sys.argv[1])).claim({path: 1024}, "text")
path.parent.mkdir(parents=True)
draft_of(path.with_name(".a.jsonl"), "34").write_bytes(b"half")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_command_uses_nothing_and_leaves_no_drafts(three: list[str], tmp_path: Path):
    folder = tmp_path / "by-url"
    subprocess.run([sys.executable, "-c", USING, str(folder)], timeout=60)
    assert len([*folder.glob(".use-*")]) == 1
    assert len([*folder.glob("s3/bucket/.*.tmp-*")]) == 1
    first = fetched(three[0], tmp_path)
    assert not [*folder.glob(".use-*")]
    assert not [*first.parent.glob(".*.tmp-*")]


def test_the_draft_of_another_command_stays(tmp_path: Path):
    draft = draft_of(tmp_path / "s3" / ".a", "34")
    draft.parent.mkdir()
    draft.write_bytes(b"half")
    one, other = CacheUse(tmp_path), CacheUse(tmp_path)
    one.claim({tmp_path / "s3" / "a": 9}, "text")
    draft.write_bytes(b"half")
    other.claim({tmp_path / "s3" / "b": 9}, "text")
    assert draft.exists()
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/a cache/by-url/s3/bucket/a.txt", "s3://bucket/a.txt"),
        ("/c/by-url/@0123456789abcdef/gs/bucket/tokens", "gs://bucket/tokens"),
        ("/c/by-url/https/host/q-0123456789abcdef/a.txt:3 (bad)", "https://host/a.txt:3 (bad)"),
        ("/c/by-url/file/data/a.txt", "file:///data/a.txt"),
        ("https://host/a.txt?sig=12", "https://host/a.txt?***"),
        ("my text/a.txt", "my text/a.txt"),
    ],
)
def test_files_of_the_cache_are_named_by_their_urls(path: str, name: str):
    assert named(path) == name


def test_errors_name_urls_also_below_a_folder_with_a_blank(tmp_path: Path):
    (tmp_path / "a cache").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a cache")
    for place in ("a cache", "link"):
        with pytest.raises(DataError, match=r"^s3://bucket/a.txt is bad, as https://host/b.txt$"):
            _fail(tmp_path / place)


def _fail(cache_dir: Path) -> None:
    with open_cache(cache_dir) as cache:
        path = cache.path("s3://bucket/a.txt").resolve()
        raise DataError(f"{path} is bad, as {cache.path('https://host/b.txt?sig=12')}")


def test_what_this_command_fetched_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    content, real = bytes(2**20), object_cache._fetch
    filesystem = SimpleNamespace(get_file=lambda _, draft, **more: Path(draft).write_bytes(content))
    etag = hashlib.md5(content).hexdigest()
    objects = [RemoteObject(f"s3://b/{name}", name, len(content), etag) for name in "ab"]

    def fetch(filesystem: Any, pair: tuple[RemoteObject, Path], stopped: Any) -> int | None:
        if pair[0].path == "a":  # another command fetches it meanwhile
            real(filesystem, pair, stopped)
        return real(filesystem, pair, stopped)

    monkeypatch.setattr(object_cache, "_fetch", fetch)
    with open_cache(tmp_path) as cache:
        cache.fetch(filesystem, objects, "s3://b")
    assert capsys.readouterr().err == "fetched 1 object of s3://b, 1.0 MiB\n"


def test_an_object_that_is_replaced_while_it_is_fetched_is_fetched_once(tmp_path: Path):
    old, new, asked = b"old content", b"new content", []

    def get_file(path: str, draft: str, **options: object) -> None:
        asked.append(path)
        Path(draft).write_bytes(new)

    filesystem = SimpleNamespace(
        get_file=get_file, info=lambda path: {"ETag": hashlib.md5(new).hexdigest()}
    )
    listed = RemoteObject("s3://b/k", "b/k", len(old), hashlib.md5(old).hexdigest())
    with pytest.raises(DataError, match=r"^s3://b/k: was replaced while it was fetched;"):
        download(filesystem, listed, tmp_path / "k")
    assert len(asked) == 1


def test_an_object_whose_connection_is_cut_is_read_on(
    store: ObjectStore, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import s3fs
    from aiohttp import ClientPayloadError

    call, asked, first = s3fs.S3FileSystem._call_s3, [], []

    async def cutting(self: Any, method: str, **options: str) -> Any:
        answer = await call(self, method, **options)
        asked.append(options.get("Range"))
        body = answer["Body"]

        async def read(most: int) -> bytes:
            if len(asked) == 1 and asked[0] == "cut":
                raise ClientPayloadError("cut")
            if len(asked) == 1:
                asked[0] = "cut"
                first.append(await body.read(most))  # it may be less
                return first[0]
            return await body.read(most)

        return {**answer, "Body": SimpleNamespace(read=read, close=body.close)}

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", cutting)
    content = bytes(range(256)) * 4096
    url = store.put("large", content)
    filesystem, path = open_filesystem(url)
    filesystem.default_block_size = 2**17  # larger objects would be fetched in parts of it
    etag = hashlib.md5(content).hexdigest()
    download(filesystem, RemoteObject(url, path, len(content), etag), tmp_path / "large")
    assert (tmp_path / "large").read_bytes() == content
    assert asked == ["cut", f"bytes={len(first[0])}-"]


def test_what_is_not_wanted_any_more_ends(store: ObjectStore, proxy: FaultyProxy, tmp_path: Path):
    url, stopped = store.put("k", b"text"), threading.Event()
    filesystem, path = open_filesystem(url)
    stopped.set()
    with pytest.raises(Cancelled):
        download(filesystem, RemoteObject(url, path, 4), tmp_path / "k", stopped)
    assert not [*tmp_path.iterdir()]


def test_work_in_parallel_ends_with_the_first_error():
    def work(item: int, stopped: threading.Event) -> int:
        if item == 3:
            raise DataError("three")
        return item

    with pytest.raises(DataError, match="three"):
        list(in_parallel(work, range(20), 4))
    assert sorted(in_parallel(work, [1, 2, 4], 4)) == [1, 2, 4]


def test_ctrl_c_does_not_wait_for_objects_in_flight():
    waiting, seen = threading.Event(), []

    def work(item: int, stopped: threading.Event) -> int:
        if item:
            waiting.wait(60)
            seen.append(stopped.is_set())
        return item

    results = in_parallel(work, [0, 1], 2)
    assert next(results) == 0
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt())
    assert not seen  # the other one still runs
    waiting.set()
