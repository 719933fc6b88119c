"""Text and prepared folders by URL: what arrives, what is fetched again, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from minimind.cli.main import main
from minimind.data.prepare import remote
from minimind.data.prepare.dataset_folder import prepare_folder
from minimind.data.prepare.prepare import PrepareRequest
from minimind.data.text.sources import Source
from minimind.errors import DataError, StorageError
from minimind.storage import filesystem
from minimind.storage.filesystem import Retry
from minimind.storage.object_cache import named, open_cache, path_of
from tests.conftest import sentences
from tests.storage.servers import BUCKET, FaultyProxy, ObjectStore

URL = f"s3://{BUCKET}/text"
NAMES = ("b.jsonl", "a/z.txt", "a.txt", "a/a.jsonl")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = (Retry(first_wait=0.0), filesystem.print_retry, DataError)
    monkeypatch.setattr(filesystem.retrying, "__defaults__", defaults)


def local_text(paths: list[str], cache_dir: Path) -> tuple[str, ...]:
    with open_cache(cache_dir) as cache:
        return remote.local_text(paths, cache)


def local_folder(url: str, cache_dir: Path) -> str:
    with open_cache(cache_dir) as cache:
        return remote.local_folder(url, cache)


def content_of(number: int) -> bytes:
    lines = (json.dumps({"text": text}, ensure_ascii=False) for text in sentences(number, 60))
    return ("\n".join(lines) + "\n").encode()


@pytest.fixture
def texts(tmp_path: Path, store: ObjectStore, proxy: FaultyProxy) -> Path:
    """A local folder of text, which the store has too, with what is no text."""
    for number, name in enumerate(NAMES):
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content_of(number))
        store.put(f"text/{name}", path.read_bytes())
    store.put("text/README.md", b"no text")
    store.put("text/.hidden/c.txt", b"hidden")
    return tmp_path / "text"


@pytest.mark.parametrize("pattern", ["", "/", "/*.txt", "/*", "/a/a.jsonl"])
def test_objects_are_the_local_files_in_their_order(texts: Path, tmp_path: Path, pattern: str):
    from minimind.data.text.inputs import find_files

    found = local_text([URL + pattern], tmp_path / "cache")
    same = find_files([f"{texts}{pattern}"])
    assert [named(path) for path in found] == [f"{URL}/{path.relative_to(texts)}" for path in same]
    assert [Path(path).read_bytes() for path in found] == [path.read_bytes() for path in same]


@pytest.mark.parametrize("fault", ["cut", "truncate", "corrupt"])
def test_faults_of_the_network_do_not_reach_the_files(
    texts: Path, tmp_path: Path, proxy: FaultyProxy, fault: str, capsys: pytest.CaptureFixture[str]
):
    proxy.set(**{fault: 1.0}, most=3)
    found = local_text([f"{URL}/**/*.jsonl"], tmp_path / "cache")
    assert proxy.injected
    assert [Path(path).read_bytes() for path in found] == [content_of(3), content_of(0)]
    assert "tokenizer" not in capsys.readouterr().err


def test_an_unchanged_object_is_fetched_once_and_a_changed_one_again(
    texts: Path, tmp_path: Path, store: ObjectStore, capsys: pytest.CaptureFixture[str]
):
    (path,) = local_text([f"{URL}/b.jsonl"], tmp_path)
    assert "fetched 1 objects" in capsys.readouterr().err
    assert local_text([f"{URL}/b.jsonl"], tmp_path) == (path,)
    assert "fetched" not in capsys.readouterr().err
    store.put("text/b.jsonl", b'{"text": "other"}\n')
    local_text([f"{URL}/b.jsonl"], tmp_path)
    assert Path(path).read_bytes() == b'{"text": "other"}\n'


def test_a_damaged_file_of_the_cache_is_fetched_again(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (path,) = local_text([f"{URL}/b.jsonl"], tmp_path)
    content = bytearray(content_of(0))
    content[100] ^= 1
    Path(path).write_bytes(content)
    local_text([f"{URL}/b.jsonl"], tmp_path)
    assert Path(path).read_bytes() == content_of(0)
    assert "is damaged; fetching it again" in capsys.readouterr().err


def test_without_network_the_cache_is_used_and_said_so(
    texts: Path, tmp_path: Path, proxy: FaultyProxy, capsys: pytest.CaptureFixture[str]
):
    before = local_text([URL], tmp_path)
    proxy.is_down = True
    assert local_text([URL], tmp_path) == before
    assert "using the copy in the cache" in capsys.readouterr().err
    Path(before[0]).write_bytes(b"damaged")
    with pytest.raises(StorageError, match=f"^{URL}: does not answer"):
        local_text([URL], tmp_path)


@pytest.mark.parametrize("name", ["text/none.txt", "text/*.parquet", "none/*.txt"])
def test_what_is_missing_is_an_error_of_data(texts: Path, tmp_path: Path, name: str):
    with pytest.raises(DataError, match=r"^s3://bucket/.*; correct the URL"):
        local_text([f"s3://bucket/{name}"], tmp_path)


def test_wrong_credentials_are_an_error_of_data(texts: Path, tmp_path: Path, store: ObjectStore):
    store.require_credentials(True)
    try:
        with pytest.raises(DataError, match="AWS_ACCESS_KEY_ID"):
            local_text([f"{URL}/b.jsonl"], tmp_path)
    finally:
        store.require_credentials(False)


def test_names_that_leave_the_cache_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="is no file name here"):
        path_of("s3://bucket/../../etc/passwd", tmp_path)


def test_a_signature_is_in_no_path(tmp_path: Path):
    path = path_of("https://me:pw@host/a/b.txt?sig=secret", tmp_path)
    assert "secret" not in str(path)
    assert "pw" not in str(path)
    assert path.name == "b.txt"


@pytest.fixture
def prepared(texts: Path, tmp_path: Path, store: ObjectStore) -> Path:
    """A prepared folder, which the store has too."""
    folder = tmp_path / "tokens"
    request = PrepareRequest((Source("data", (str(texts),)),), vocab_size=600, progress=False)
    prepare_folder(request, folder)
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(f"tokens/{path.relative_to(folder)}", path.read_bytes())
    return folder


def test_a_prepared_folder_is_the_local_one(
    prepared: Path,
    tmp_path: Path,
    proxy: FaultyProxy,
    store: ObjectStore,
    capsys: pytest.CaptureFixture[str],
):
    proxy.set(cut=0.05, truncate=0.05, corrupt=0.05)
    url = f"s3://{BUCKET}/tokens"
    folder = Path(local_folder(url, tmp_path / "cache"))
    for path in prepared.rglob("*"):
        if path.is_file():
            assert (folder / path.relative_to(prepared)).read_bytes() == path.read_bytes()
    shard = folder / "train-00000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    local_folder(url, tmp_path / "cache")
    assert shard.read_bytes() == (prepared / shard.name).read_bytes()
    proxy.is_down = True
    assert local_folder(url, tmp_path / "cache") == str(folder)
    assert "using the copy in the cache" in capsys.readouterr().err


def test_a_shard_that_is_damaged_in_the_bucket_is_refused(
    prepared: Path, tmp_path: Path, store: ObjectStore
):
    shard = (prepared / "train-00000.bin").read_bytes()
    store.put("tokens/train-00000.bin", shard[:-1] + bytes([shard[-1] ^ 1]))
    with pytest.raises(DataError, match=r"train-00000.bin: does not match its sha256"):
        local_folder(f"s3://{BUCKET}/tokens", tmp_path / "cache")


@pytest.mark.long
def test_runs_over_urls_are_the_local_runs(
    texts: Path, prepared: Path, tmp_path: Path, proxy: FaultyProxy
):
    def losses(data: str, out: str) -> list[float]:
        flags = "--model tiny --vocab_size 600 --max_seq_len 32 --max_steps 2 --batch_size 2"
        flags += " --eval_rows 0 --device cpu --log_interval 1 --compile off"
        places = ["--data_path", data, "--out_dir", str(tmp_path / out)]
        places += ["--cache_dir", str(tmp_path / f"cache-{out}")]
        command = [sys.executable, "-m", "minimind", "train", *flags.split(), *places]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / out / "metrics.jsonl").read_text().splitlines()
        return [one["loss"] for one in map(json.loads, lines) if one["event"] == "step"]

    proxy.set(cut=0.05)
    assert losses(URL, "by-url-text") == losses(str(texts), "local-text")
    assert losses(f"s3://{BUCKET}/tokens", "url-tokens") == losses(str(prepared), "local-tokens")
    assert URL in (tmp_path / "by-url-text" / "config.yaml").read_text()


def test_commands_take_urls(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cache = ["--cache_dir", str(tmp_path / "cache")]
    out = str(tmp_path / "out")
    assert (
        main(["prepare", "--source", f"a={URL}:2", "--vocab_size", "600", "--out", out, *cache])
        == 0
    )
    tokenizer = str(tmp_path / "tokenizer")
    words = ["tokenizer", "train", f"{URL}/*.txt", "--out", tokenizer, "--vocab_size", "600"]
    assert main([*words, *cache]) == 0
    assert main(["prepare", f"{URL}/none.txt", "--out", str(tmp_path / "none"), *cache]) == 3
    assert f"{URL}/none.txt: there is no such bucket" in capsys.readouterr().err
