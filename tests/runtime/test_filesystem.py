"""URLs, errors of a real server in one sentence, and retries."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from minimind.errors import DataError, RunError, StorageError, UsageError
from minimind.runtime import filesystem
from minimind.runtime.download import READS, RemoteObject, download
from minimind.runtime.filesystem import (
    WAITS,
    NoAnswer,
    Progress,
    Truncated,
    is_passing,
    open_filesystem,
    retrying,
)
from minimind.runtime.urls import SCHEMES, is_url, masked
from tests.runtime.servers import FaultyProxy, ObjectStore


def test_every_scheme_has_a_library():
    assert tuple(filesystem.LIBRARY_OF) == SCHEMES


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "WAITS", (0.0,) * 5)


def read(url: str) -> bytes:
    fs, path = open_filesystem(url)
    return retrying(url, lambda: fs.cat_file(path))


def test_urls_and_paths_are_told_apart():
    assert all(map(is_url, ["s3://b/k", "gs://b/*.txt", "hf://datasets/a/b", "https://h/f.txt"]))
    assert not any(map(is_url, ["/data/x", "s3/x", "s3:/x", "name=s3://b", "C://x", ""]))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pw@host/a.txt", "https://***@host/a.txt"),
        ("https://host/a.txt?X-Amz-Signature=12&b=3", "https://host/a.txt?***"),
        ("url='https://host/a?token=12' failed", "url='https://host/a?***' failed"),
        ("s3://bucket/key", "s3://bucket/key"),
    ],
)
def test_no_secret_of_a_url_is_shown(text, shown):
    assert masked(text) == shown


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UsageError, match=r"is not installed; .* install -e '\.\[remote\]'"):
        open_filesystem("s3://bucket/key")


def test_an_object_is_read(store: ObjectStore, proxy: FaultyProxy):
    assert read(store.put("a/b.txt", b"text")) == b"text"


@pytest.mark.parametrize("fault", ["cut", "delay"])
def test_errors_that_pass_are_tried_again_and_told(
    store: ObjectStore,
    proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(filesystem, "READ_TIMEOUT_S", 0.2)
    url = store.put("large", b"0123456789" * 5_000)
    proxy.set(**{fault: 1.0}, delay_s=1.0, most=2)
    assert read(url) == b"0123456789" * 5_000
    assert proxy.injected == 2  # the second on a connection that aiohttp itself opens again
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith(f"{url}: ") for line in lines)
    assert lines[0].endswith("trying again in 0.0 s (2 of 6)")


def test_a_download_that_stalls_ends_soon(
    store: ObjectStore, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Not after the product of the library's attempts and ours."""
    monkeypatch.setattr(filesystem, "READ_TIMEOUT_S", 0.2)
    monkeypatch.setattr(filesystem, "SILENT_S", 6 * 0.2)
    url = store.put("large", b"0123456789" * 5_000)
    proxy.set(delay=1.0, delay_s=60)
    fs, path = open_filesystem(url)
    with pytest.raises(NoAnswer, match=r"Read timeout .*, tried 2 times;"):
        download(fs, RemoteObject(url, path, 50_000), tmp_path / "file")
    assert proxy.requests <= 2 * READS


def test_a_download_that_is_cut_a_few_times_reads_on(
    store: ObjectStore,
    proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    content = b"0123456789" * 5_000
    url = store.put("large", content)
    monkeypatch.setattr(proxy._draw, "uniform", lambda *_: 4.2)  # 16,000 bytes: within the body
    proxy.set(cut=1.0, most=READS - 1)
    fs, path = open_filesystem(url)
    download(fs, RemoteObject(url, path, len(content)), tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == content
    assert (proxy.injected, capsys.readouterr().err) == (READS - 1, "")


@pytest.mark.parametrize(("moved", "attempts"), [((9, 8, 9, 9, 9, 9), 2), (range(1, 7), 6)])
def test_only_bytes_that_are_new_are_progress(
    moved: Iterable[int], attempts: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(filesystem, "SILENT_S", 0.05)
    progress, left = Progress(), iter(moved)

    def work() -> None:
        time.sleep(0.1)
        progress.callback().relative_update(next(left))
        raise Truncated("cut")

    with pytest.raises(NoAnswer, match=f"tried {attempts} times"):
        retrying("s3://b/k", work, progress=progress)


class ClientPayloadError(Exception):
    """As aiohttp's, of a body that is cut: the status of its cause is not that of an answer."""

    def __init__(self) -> None:
        super().__init__("cut")
        self.__cause__ = ServerFault(400)


class ServerFault(OSError):
    def __init__(self, status: int) -> None:
        super().__init__(f"answer {status}")
        self.status = status


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        *((ServerFault(status), True) for status in (408, 409, 425, 429, 500, 502, 503, 504)),
        *((ServerFault(status), False) for status in (301, 400, 401, 403, 404, 416, 501)),
        *((error, True) for error in (Truncated("4 of 9 bytes"), TimeoutError(), EOFError())),
        *((error, True) for error in (ConnectionResetError(), ClientPayloadError())),
        *((error, False) for error in (FileNotFoundError(), PermissionError(), ValueError("no"))),
    ],
)
def test_which_errors_are_tried_again(error: Exception, passes: bool):
    assert is_passing(error) is passes


def test_the_lines_of_retries(capsys: pytest.CaptureFixture[str]):
    answers = iter([ServerFault(503), Truncated("4 of 9 bytes"), TimeoutError()])

    def work() -> str:
        if error := next(answers, None):
            raise error
        return "done"

    assert retrying("s3://b/k", work) == "done"
    assert capsys.readouterr().err.splitlines() == [
        "s3://b/k: answer 503; trying again in 0.0 s (2 of 6)",
        "s3://b/k: 4 of 9 bytes; trying again in 0.0 s (3 of 6)",
        "s3://b/k: TimeoutError; trying again in 0.0 s (4 of 6)",
    ]


def test_waits_double_and_are_random(monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []
    monkeypatch.setattr(filesystem, "WAITS", WAITS)
    monkeypatch.setattr(filesystem.time, "sleep", waits.append)

    def work() -> None:
        raise Truncated("cut")

    with pytest.raises(StorageError, match=r"^s3://b/k: does not answer \(cut\), tried 6 times;"):
        retrying("s3://b/k", work)
    for wait, most in zip(waits, (0.5, 1, 2, 4, 8), strict=True):
        assert most / 2 <= wait <= most


def test_a_storage_that_is_down_is_an_error_of_storage(store: ObjectStore, proxy: FaultyProxy):
    url = store.put("key", b"text")
    proxy.is_down = True
    with pytest.raises(StorageError, match=r"^s3://bucket/key: does not answer .*, tried 6 times;"):
        read(url)


@pytest.mark.parametrize("url", ["s3://bucket/no-such-key", "s3://no-such-bucket/key"])
def test_what_is_missing_is_not_tried_again(proxy: FaultyProxy, url: str):
    proxy.set()
    with pytest.raises(DataError, match=f"^{url}: there is no such bucket, object or file; "):
        read(url)
    assert proxy.requests <= 2


def test_wrong_credentials_are_not_tried_again(store: ObjectStore, proxy: FaultyProxy):
    url = store.put("key", b"text")
    store.require_credentials(True)
    try:
        with pytest.raises(DataError, match=r"access is refused .*AWS_ACCESS_KEY_ID") as caught:
            read(url)
    finally:
        store.require_credentials(False)
    assert "not-a-secret" not in str(caught.value)


def test_without_credentials_the_error_names_where_they_are_read(
    store: ObjectStore, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
):
    url = store.put("key", b"text")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(DataError, match=r"Unable to locate credentials.*FSSPEC_S3_ANON=true"):
        read(url)


@pytest.mark.parametrize(
    ("name", "value", "url"),
    [
        *(("AWS_ENDPOINT_URL", value, "s3://bucket/key") for value in ("nonsense", "http://h:x")),
        ("AWS_ENDPOINT_URL_S3", "http://user:secret@h", "s3://bucket/key"),
        ("AWS_ENDPOINT_URL", "ftp://h\n", "s3://bucket/key"),
        ("HTTP_PROXY", "nonsense", "http://h/a.txt"),
        ("https_proxy", "http://user:secret@[::1", "https://h/a.txt"),
    ],
)
def test_a_server_that_is_none_is_named(
    name: str, value: str, url: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=f"^{url}: .* and {name}=") as caught:
        read(url)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


PROFILES = {
    "nobody": ("", r"The config profile \(me\) could not be found"),
    "broken": ("[profile me\nnonsense", r"Unable to parse config file"),
    "command": ("[profile me]\ncredential_process = /nonexistent", r"No such file .*/nonexistent"),
    "token": (
        "[profile me]\nweb_identity_token_file = /nonexistent\nrole_arn = arn:aws:iam::1:role/x",
        "No such file .*/nonexistent",
    ),
    "sign-on": (
        "[profile me]\nsso_start_url = https://h\nsso_region = us-east-1\nsso_account_id = 1\n"
        "sso_role_name = r",
        "Token for https://h does not exist",
    ),
}


@pytest.mark.parametrize("kind", PROFILES)
def test_a_profile_that_gives_no_credentials_is_not_a_wrong_url(
    kind: str,
    tmp_path: Path,
    store: ObjectStore,
    proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    content, reason, url = *PROFILES[kind], store.put("key", b"text")
    (tmp_path / "config").write_text(content)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "me")
    with pytest.raises(DataError, match=f"access is refused .*{reason}.*AWS_PROFILE"):
        read(url)
    assert "Traceback" not in capfd.readouterr().err


def test_local_errors_and_bugs_pass():
    for error in (OSError(28, "No space left on device"), TypeError("a bug")):

        def work(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            retrying("s3://b/k", work)
        assert caught.value is error
