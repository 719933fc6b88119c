"""Text and prepared folders by URL: what arrives, what is fetched again, what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minimind.checkpoint.run_folder import recorded_flags
from minimind.cli.main import main
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.parse import parse_flags
from minimind.data.prepare import remote
from minimind.data.prepare.dataset_folder import prepare_folder
from minimind.data.prepare.prepare import PrepareRequest
from minimind.data.prepare.prepared import Prepared, open_prepared
from minimind.data.rows.order import Order
from minimind.data.text.inputs import Source
from minimind.errors import DataError, StorageError
from minimind.runtime import filesystem
from minimind.runtime.object_cache import ObjectCache, open_cache, path_of
from minimind.runtime.urls import named
from minimind.train.run_start import flag_rows, logged_order
from tests.conftest import sentences
from tests.runtime.servers import BUCKET, FaultyProxy, ObjectStore
from tools.runs import events

URL = f"s3://{BUCKET}/text"
NAMES = ("b.jsonl", "a/z.txt", "a.txt", "a/a.jsonl")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "WAITS", (0.0,) * 5)


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


def test_a_prefix_with_parts_is_its_train_part_as_a_local_folder_is(
    tmp_path: Path, store: ObjectStore, proxy: FaultyProxy, capsys: pytest.CaptureFixture[str]
):
    from minimind.data.text.inputs import find_files

    for number, name in enumerate(("data/train-0.jsonl", "data/train-1.jsonl", "data/test.jsonl")):
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content_of(number))
        store.put(f"set/{name}", path.read_bytes())
    url = f"s3://{BUCKET}/set"
    found = local_text([url], tmp_path / "cache")
    assert [Path(path).name for path in found] == ["train-0.jsonl", "train-1.jsonl"]
    note = f"note   {url}: its files of train are read; left out: test\n"
    assert capsys.readouterr().err.count(note) == 1
    assert [path.name for path in find_files([tmp_path / "set"])] == [Path(p).name for p in found]


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
    assert "fetched 1 object of" in capsys.readouterr().err
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


ODD = ("a.jsonl", "a b.jsonl", "a%20b.jsonl", "x::y.jsonl", "a(1).jsonl", "it's.jsonl", "#a.jsonl")
ODD += (
    "c:d.jsonl",
    "ü.jsonl",
    "a,b.jsonl",
    "a=b&c.jsonl",
    "[1].jsonl",
    "run[1]/a.jsonl",
    "a@b.txt",
)


def test_files_of_any_name_are_read_by_url(tmp_path: Path):
    for name in ODD:
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        (found,) = local_text([f"file://{path}"], tmp_path / "cache")
        assert Path(found).read_text() == name
        assert named(found) == f"file://{path}"
        with pytest.raises(DataError) as caught, open_cache(tmp_path / "cache"):
            raise DataError(f"{found}: line 3")
        assert str(caught.value) == f"file://{path}: line 3"
    whole = local_text([f"file://{tmp_path}/text"], tmp_path / "cache")
    assert sorted(Path(one).read_text() for one in whole) == sorted(ODD)


@pytest.mark.long
def test_objects_of_any_name_are_read(tmp_path: Path, store: ObjectStore, proxy: FaultyProxy):
    for name in ODD:
        store.put(f"text/{name}", name.encode())
        (found,) = local_text([f"{URL}/{name}"], tmp_path)
        assert Path(found).read_text() == name
    for pattern, names in (("run[1]/*", ["run[1]/a.jsonl"]), ("[[]1].*", ["[1].jsonl"])):
        found = local_text([f"{URL}/{pattern}"], tmp_path)
        assert [Path(one).read_text() for one in found] == names


@pytest.mark.parametrize("pattern", ["", "/**/*.jsonl"])
def test_folders_nested_too_deep_for_a_url_are_named(tmp_path: Path, pattern: str):
    deepest = tmp_path / "deep"
    deepest.mkdir()
    for _ in range(1100):
        deepest /= "d"
        deepest.mkdir()
    try:
        with pytest.raises(
            DataError, match=r"deep\S*: cannot be used \(its folders are nested too "
        ):
            local_text([f"file://{tmp_path}/deep{pattern}"], tmp_path / "cache")
    finally:  # pytest's own clean-up is recursive
        while deepest != tmp_path:
            deepest.rmdir()
            deepest = deepest.parent


def test_a_prepared_folder_may_have_brackets_in_its_name(prepared: Path, tmp_path: Path):
    place = Path(shutil.copytree(prepared, tmp_path / "run[1]"))
    copy = Path(local_folder(f"file://{place}", tmp_path / "a cache"))
    assert (copy / "manifest.json").read_bytes() == (place / "manifest.json").read_bytes()


def test_inspect_names_a_url_without_prepared_data(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["data", "inspect", URL, "--cache_dir", str(tmp_path / "cache")]) == 3
    assert f"{URL}: holds no prepared data" in capsys.readouterr().err


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
    put_folder(store, folder)
    return folder


def put_folder(store: ObjectStore, folder: Path) -> None:
    """Store a folder as `tokens/`."""
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(f"tokens/{path.relative_to(folder)}", path.read_bytes())


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


def test_a_rewritten_folder_leaves_the_copy_of_a_run(
    prepared: Path, tmp_path: Path, store: ObjectStore, proxy: FaultyProxy
):
    url = f"s3://{BUCKET}/tokens"
    before = open_prepared(Path(local_folder(url, tmp_path / "cache")))
    other = tmp_path / "other"
    request = PrepareRequest(
        (Source("data", (f"{tmp_path}/text/a.txt",)),), vocab_size=600, progress=False
    )
    prepare_folder(request, other)
    put_folder(store, other)
    after = open_prepared(Path(local_folder(url, tmp_path / "cache")))
    assert after.manifest["fingerprint"] != before.manifest["fingerprint"]
    before.train.require_unchanged()
    assert (
        before.train.stretch(0, 9).tolist() == open_prepared(prepared).train.stretch(0, 9).tolist()
    )


@pytest.mark.long
def test_a_prepared_folder_below_a_prefix_is_no_text(
    texts: Path, prepared: Path, tmp_path: Path, store: ObjectStore
):
    for name in ("plan.json", "rejected.jsonl"):
        store.put(f"text/a/tokens/{name}", b"{}")
    for pattern in ("", "/**/*.jsonl", "/*/*"):
        found = local_text([URL + pattern], tmp_path / "cache")
        assert found
        assert not [path for path in found if "tokens" in path]
    with pytest.raises(DataError, match="matches no"):
        local_text([f"{URL}/a/tokens/*.jsonl"], tmp_path / "cache")
    with pytest.raises(DataError, match="is what `minimind prepare` wrote or still writes"):
        local_text([f"{URL}/a/tokens"], tmp_path / "cache")


@pytest.mark.long
def test_a_cache_of_another_user_is_read(
    texts: Path, tmp_path: Path, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
):
    found = local_text([URL], tmp_path)

    def refused(path: Path, *rest: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(remote, "write_whole", refused)
    monkeypatch.setattr(Path, "touch", refused)
    assert local_text([URL], tmp_path) == found
    assert local_text([f"{URL}/"], tmp_path) == found  # of which the cache has no listing


def test_a_full_disk_is_not_taken_for_a_missing_network(
    prepared: Path, tmp_path: Path, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
):
    url = f"s3://{BUCKET}/tokens"
    local_folder(url, tmp_path)
    proxy.is_down = True
    assert local_folder(url, tmp_path)
    proxy.is_down = False

    def full(self: ObjectCache, *rest: object) -> None:
        raise StorageError("No space left on device")

    monkeypatch.setattr(ObjectCache, "fetch", full)
    with pytest.raises(StorageError, match="No space left"):
        local_folder(url, tmp_path)


def test_signed_urls_are_recorded_without_their_signature(tmp_path: Path):
    words = ["--data_path", "https://host/a.jsonl?sig=secret", "--out_dir", str(tmp_path)]
    run = parse_flags(words)
    assert recorded_flags(run)["data_path"] == ("https://host/a.jsonl?***",)
    assert "secret" not in str(flag_rows(ResolvedConfig(run, "single")))


@pytest.mark.long
def test_a_step_of_a_run_over_urls_is_named_by_them(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    places = ["--cache_dir", str(tmp_path / "a cache")]
    words = f"prepare {URL} --vocab_size 600 --out".split()
    assert main([*words, str(tmp_path / "tokens"), *places]) == 0
    prepared = open_prepared(tmp_path / "tokens")
    inputs = [one["path"] for one in prepared.manifest["sources"][0]["inputs"]]
    assert inputs == [f"{URL}/{name}" for name in ("a/a.jsonl", "a/z.txt", "a.txt", "b.jsonl")]
    out = run_log(tmp_path / "run", prepared)
    shutil.rmtree(tmp_path / "a cache")  # so that the text is fetched again
    capsys.readouterr()
    assert main(["data", "at", out, "--step", "1", *places]) == 0
    shown = capsys.readouterr().out
    assert f"  {URL}/a/a.jsonl:1 (byte 0)  document 0" in shown
    assert main(["data", "where", out, f"{URL}/b.jsonl:3", *places]) == 0
    assert f"{URL}/b.jsonl:3: document" in capsys.readouterr().out


def test_the_folder_of_a_run_may_be_a_url(
    prepared: Path, tmp_path: Path, store: ObjectStore, proxy: FaultyProxy
):
    places = ["--cache_dir", str(tmp_path / "a cache")]
    url = f"s3://{BUCKET}/tokens"
    copy = open_prepared(Path(local_folder(url, tmp_path / "a cache")))
    out = run_log(tmp_path / "run", copy)
    start, _ = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(start)["data"]["url"] == url
    shutil.rmtree(tmp_path / "a cache")
    assert main(["data", "at", out, "--step", "1", *places]) == 0
    assert main(["data", "at", out, "--step", "1", "--data_path", url, *places]) == 0


def run_log(run_dir: Path, prepared: Prepared) -> str:
    """The log of a run of one step over all rows of a folder."""
    run_dir.mkdir()
    rows = prepared.train.rows(33)
    facts = {"event": "run_start", "time": 0.0, "step": 0, "resume_from": None, "world_size": 1}
    facts |= {"micro_batch_rows": rows, "total_steps": 1}
    facts |= logged_order(Order(rows, rows, 42), 33, prepared)
    lines = (facts, {"event": "step", "step": 1, "loss": 1.0, "time": 1.0})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(run_dir)


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
        return [event["loss"] for event in events(tmp_path / out, "step")]

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
