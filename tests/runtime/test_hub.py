"""Data sets and models of the Hub: what is fetched, what is refused, what works without network."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minimind.cli.main import main
from minimind.data.prepare import remote
from minimind.data.text.inputs import find_files, require_once, val_paths, without
from minimind.errors import DataError, StorageError, UsageError
from minimind.runtime import filesystem
from minimind.runtime import hub as on_the_hub
from minimind.runtime.hub import DATASET, MODEL, Repository, local_model, newest, repository
from minimind.runtime.object_cache import open_cache
from minimind.runtime.urls import is_url, named
from tests.conftest import Messages, sentences
from tests.runtime.fixtures import use_hub
from tests.runtime.hub_server import SIGNATURE, TOKEN, Hub
from tests.runtime.servers import FaultyProxy, faulty_proxy

SET, NET = "ana/poems", "ana/small"


def lines(seed: int, count: int = 60) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in sentences(seed, count)).encode()


FILES = {
    ".gitattributes": b"*.jsonl filter=lfs\n",
    "README.md": b"# Poems\n",
    "dataset_infos.json": b"{}",
    "data/train-00001-of-00002.jsonl": lines(2),
    "data/train-00000-of-00002.jsonl": lines(1),
    "data/validation-00000-of-00001.jsonl": lines(3, 10),
    "data/test.jsonl": lines(4, 10),
    "data/[odd] train*.txt": b"short\n",
}
MODEL_FILES = {
    ".gitattributes": b"",
    "README.md": b"# Small\n",
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"a": 1}' * 500,
    "tokenizer.model": b"pieces" * 300,
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model-00001-of-00002.safetensors": b"first" * 10_000,
    "model-00002-of-00002.safetensors": b"second" * 10_000,
    "model.safetensors.index.json": b"{}",
    "pytorch_model.bin": b"twice" * 10_000,
    "consolidated.00.pth": b"thrice" * 10_000,
    "original/params.json": b"{}",
    "onnx/model.onnx": b"graph" * 10_000,
    "train.py": b"raise SystemExit",
}
BESIDE = {"config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"}
BESIDE |= {"chat_template.jinja", "model.safetensors.index.json"}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "WAITS", (0.0,) * 5)


@pytest.fixture
def proxy(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyProxy]:
    """A proxy before the Hub, which huggingface_hub asks."""
    with faulty_proxy(hub) as running:
        use_hub(running.url, tmp_path / "hub_cache", monkeypatch)
        yield running


def local_text(place: str, tmp_path: Path) -> list[Path]:
    with open_cache(tmp_path / "cache") as cache:
        return [*map(Path, remote.local_text([place], cache))]


def names_of(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_what_names_a_repository():
    found = repository("hf:ana/poems@v1.0/data/train", DATASET)
    assert found == Repository(DATASET, "ana/poems", "v1.0", "data/train")
    assert str(found) == "hf:ana/poems@v1.0/data/train"
    converted = repository("hf:ana/poems@refs/convert/parquet/default/train", DATASET)
    assert converted == Repository(DATASET, "ana/poems", "refs/convert/parquet", "default/train")
    assert repository("hf:datasets/ana/poems", DATASET) == Repository(DATASET, "ana/poems")
    with pytest.raises(
        DataError, match="hf:poems: is neither a local path nor hf:USER/SET of the Hub"
    ):
        find_files(["hf:poems"])
    assert repository("hf:ana/poems/", DATASET) == Repository(DATASET, "ana/poems")
    others = ("ana/poems", "hf://datasets/ana/poems", "hf:/ana/poems", "hf:../poems", "hf:poems")
    for place in (*others, "hf:~/poems", "hf:./a/b", "s3://hf:a/b", "hf:"):
        assert repository(place, MODEL) is None, place
    assert is_url("hf:ana/poems")
    assert not is_url("hf:/ana/poems")


def test_the_parts_and_paths_of_a_data_set(hub: Hub, tmp_path: Path, capsys: Any):
    sha = hub.commit(DATASET, SET, FILES)
    train = ["[odd] train*.txt", "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    assert names_of(local_text(f"hf:{SET}", tmp_path)) == train
    shown = capsys.readouterr().err
    assert f"hf:{SET}: its files of train are read; left out: test and validation" in shown
    assert f"fetching 3 files of hf:{SET}@{sha}, " in shown
    for place, expected in {
        "train": train,
        "validation": ["validation-00000-of-00001.jsonl"],
        "test": ["test.jsonl"],
        "data": train,
        "data/test": ["test.jsonl"],
        "data/train-00001-of-00002.jsonl": train[2:],
        "data/[odd] train*.txt": train[:1],
    }.items():
        paths = local_text(f"hf:{SET}/{place}", tmp_path)
        assert names_of(paths) == expected, place
        for path in paths:
            assert path.read_bytes() == FILES[f"data/{path.name}"]
        assert find_files(paths) == paths
    folder = tmp_path / "local"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    assert names_of(find_files([folder])) == train


def test_records_name_the_commit_and_lead_to_the_same_file(hub: Hub, tmp_path: Path):
    sha = hub.commit(DATASET, SET, FILES)
    (path,) = local_text(f"hf:{SET}/data/test.jsonl", tmp_path)
    name = named(str(path))
    assert name == f"hf:{SET}@{sha}/data/test.jsonl"
    hub.commit(DATASET, SET, {**FILES, "data/test.jsonl": lines(9)})
    assert local_text(name, tmp_path) == [path]
    newest.cache_clear()  # as in another process
    (other,) = local_text(f"hf:{SET}/test", tmp_path)
    assert other != path
    assert other.read_bytes() == lines(9)
    assert path.read_bytes() == FILES["data/test.jsonl"]


def test_a_known_commit_needs_no_request(hub: Hub, tmp_path: Path):
    sha = hub.commit(DATASET, SET, FILES)
    local_text(f"hf:{SET}@{sha}", tmp_path)
    newest.cache_clear()
    hub.requests.clear()
    assert len(local_text(f"hf:{SET}@{sha}", tmp_path)) == 3
    assert not hub.requests


def test_the_held_out_part_of_a_data_set():
    assert val_paths("auto", ["hf:ana/poems"]) == ("hf:ana/poems/validation",)
    assert val_paths("auto", ["hf:ana/poems@v1/en/train"]) == ("hf:ana/poems@v1/en/validation",)
    assert val_paths("auto", ["hf:ana/poems/en"]) == ("hf:ana/poems/en/validation",)


@pytest.mark.parametrize(
    ("missing", "weights"),
    [
        ((), {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}),
        ("safetensors", {"pytorch_model.bin"}),
        (("safetensors", "bin"), {"consolidated.00.pth"}),
    ],
)
def test_one_form_of_the_weights_is_fetched(hub: Hub, missing: Any, weights: set[str]):
    files = {n: c for n, c in MODEL_FILES.items() if not missing or not n.endswith(missing)}
    hub.commit(MODEL, NET, files)
    folder = local_model(f"hf:{NET}", weights=False)
    beside = BESIDE & files.keys()
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == beside
    assert local_model(f"hf:{NET}") == folder
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == beside | weights
    assert all((folder / name).read_bytes() == files[name] for name in beside | weights)


def test_a_local_directory_comes_first(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path(NET).mkdir(parents=True)
    assert local_model(f"hf:{NET}") == Path(NET) == local_model(NET)
    assert not hub.requests


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            "ana/nothing",
            r"the Hub has no such dataset, or it is private; correct the name, or check",
        ),
        ("ana/secret", r"the Hub has no such dataset, or it is private; .* `hf auth login`"),
        (
            "ana/gated",
            r"is given to those who accept its terms; accept them on its page, and check",
        ),
        (f"{SET}@v9", r"the Hub has no revision v9 of it; correct it"),
        (
            f"{SET}/valid",
            r"has no text in valid; it has data/\[odd\] train\*.txt, .*; correct the name",
        ),
        (f"{SET}/README.md", r"has no text in README.md; it has data/.*; correct the name"),
    ],
)
def test_what_the_hub_does_not_give(hub: Hub, tmp_path: Path, place: str, message: str):
    for name in (SET, "ana/secret", "ana/gated"):
        hub.commit(DATASET, name, FILES)
    hub.private.add("ana/secret")
    hub.gated.add("ana/gated")
    with pytest.raises(DataError, match=f"^hf:{re.escape(place)}: {message}"):
        local_text(f"hf:{place}", tmp_path)


@pytest.mark.parametrize("status", [403, 404, 405, 416, 501])
@pytest.mark.parametrize(
    ("part", "route"),
    [
        ("/api/models/ana/small", "GET /api/models/ana/small"),
        ("/tree/", "GET /api/models/ana/small/tree/[0-9a-f]{40}"),
        ("/resolve/", "HEAD /ana/small/resolve/[0-9a-f]{40}/config.json"),
        ("/cdn/", "GET /cdn/[0-9a-f]{64}"),
    ],
)
def test_a_route_that_a_mirror_lacks_or_refuses_is_named(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, part: str, route: str, status: int
):
    large = {"model.safetensors": b"large" * 500} if part == "/cdn/" else {}
    hub.commit(MODEL, NET, {"config.json": b"{}", **large})
    hub.answers[part] = status
    says = "access is refused: " if status == 403 else "cannot be used: "
    is_own = status == 404 and part != "/cdn/"  # else the Hub's own, or the place it sends on to
    if is_own:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
    server = f"HF_ENDPOINT={hub.url}" if is_own else f"http://[a-z0-9.]+:{hub.port}"
    with pytest.raises(
        UsageError, match=rf": {says}{server} answers {status} \(.*\) to {route}[:;]"
    ):
        local_model(f"hf:{NET}")


def test_a_list_of_files_that_does_not_arrive_is_no_empty_repository(hub: Hub):
    hub.commit(MODEL, NET, MODEL_FILES)
    hub.answers["/tree/"] = 503
    with pytest.raises(StorageError, match=r"does not answer \(.*503.*run `hf download ana/small`"):
        local_model(f"hf:{NET}")


def test_a_page_in_place_of_an_answer(hub: Hub):
    hub.commit(MODEL, NET, MODEL_FILES)
    hub.answers["/api/models/"] = 200
    with pytest.raises(
        UsageError, match=r"answers with something that is not JSON; set HF_ENDPOINT"
    ):
        local_model(f"hf:{NET}")


def test_a_private_data_set_needs_the_token_which_is_stored_nowhere(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
    hub.commit(DATASET, "ana/secret", FILES)
    hub.private.add("ana/secret")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    out = tmp_path / "clean"
    assert main(["data", "filter", "hf:ana/secret", "--out", str(out), "--min_chars", "1"]) == 0
    assert json.loads((out / "report.json").read_text())["kept"]["documents"] == 121
    assert TOKEN not in str(capfd.readouterr())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not any(TOKEN.encode() in path.read_bytes() for path in files)


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    newest.cache_clear()


def test_without_network_it_says_what_would_be_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    hub.commit(MODEL, NET, MODEL_FILES)
    hub.commit(DATASET, SET, FILES)
    folder = local_model(f"hf:{NET}", weights=False)
    offline(monkeypatch)
    with pytest.raises(StorageError) as none:
        local_text(f"hf:{SET}@main/validation", tmp_path)
    assert str(none.value) == (
        f"hf:{SET}@main/validation: HF_HUB_OFFLINE is set, and {tmp_path}/hub_cache has no copy of"
        f" its text in validation; run `hf download {SET} --repo-type dataset --revision main`"
        " where there is a network"
    )
    with pytest.raises(StorageError) as part:
        local_model(f"hf:{NET}")
    sha = hub.commits[MODEL, NET][0][0]
    assert str(part.value) == (
        f"hf:{NET}: HF_HUB_OFFLINE is set, and {folder} lacks model-00001-of-00002.safetensors,"
        " model-00002-of-00002.safetensors, 110,000 bytes (0.1 MiB); run"
        f" `hf download {NET} --revision {sha}` where there is a network"
    )
    capsys.readouterr()
    assert local_model(f"hf:{NET}", weights=False) == folder
    shown = capsys.readouterr().err
    assert shown == f"hf:{NET}: HF_HUB_OFFLINE is set; using the copy in the cache, {folder}\n"
    assert not [request for request in hub.requests if SET in request]


def test_a_network_that_fails_is_tried_again_and_then_the_cache_is_used(
    hub: Hub, proxy: FaultyProxy, tmp_path: Path, capsys: Any
):
    hub.commit(DATASET, SET, FILES)
    before = local_text(f"hf:{SET}", tmp_path)
    newest.cache_clear()
    proxy.is_down = True
    assert local_text(f"hf:{SET}", tmp_path) == before
    shown = capsys.readouterr().err
    assert shown.count("trying again in") == 5
    assert "using the copy in the cache" in shown
    with pytest.raises(StorageError, match=r"does not answer .*, tried 6 times, and .* lacks"):
        local_text(f"hf:{SET}/test", tmp_path)


@pytest.mark.parametrize("cuts", [3, 30])
def test_cut_connections_change_nothing(
    hub: Hub, cuts: int, capfd: pytest.CaptureFixture[str], messages: Messages
):
    files = {**MODEL_FILES, "model.safetensors": bytes(range(256)) * 20_000}
    hub.commit(MODEL, NET, files)
    hub.cuts = cuts
    folder = local_model(f"hf:{NET}")
    assert hub.cuts == 0
    for path in folder.iterdir():
        assert path.read_bytes() == files[path.name], path.name
    shown = capfd.readouterr()
    first, *more = shown.err.splitlines()
    assert first == f"fetching 9 files of hf:{NET}@{folder.name}, 5.0 MiB"
    assert all("; trying again in 0.0 s (" in line for line in more)
    assert SIGNATURE not in f"{shown.out}{shown.err}{messages.found}"


def test_a_file_with_another_hash_is_fetched_again(hub: Hub, capsys: Any):
    sha = hub.commit(MODEL, NET, MODEL_FILES)
    hub.damages = 1
    folder = local_model(f"hf:{NET}")
    again = re.findall(
        rf"hf:{NET}@{sha}/(\S+): is damaged; fetching it again", capsys.readouterr().err
    )
    assert len(again) == 1
    for path in folder.iterdir():
        assert path.read_bytes() == MODEL_FILES[path.name], path.name


def test_a_file_that_always_has_another_hash_is_refused_and_not_kept(hub: Hub):
    hub.commit(MODEL, NET, MODEL_FILES)
    hub.damages = 1000
    for _ in range(2):
        with pytest.raises(StorageError, match="arrives with a wrong hash, fetched 2 times"):
            local_model(f"hf:{NET}")
    hub.damages = 0
    folder = local_model(f"hf:{NET}")
    assert (folder / "tokenizer.json").read_bytes() == MODEL_FILES["tokenizer.json"]


def test_a_full_disk_is_told_before_the_download(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    hub.commit(MODEL, NET, MODEL_FILES)
    monkeypatch.setattr(on_the_hub, "free_bytes", lambda _: 1000)
    with pytest.raises(StorageError, match=r"and \d more, [\d,]+ bytes .* do not fit in the 1,000"):
        local_model(f"hf:{NET}")
    assert not [request for request in hub.requests if "resolve" in request]


def test_a_folder_or_a_file_of_a_model(hub: Hub):
    files = {"config.json": b"{}", "sft.pth": b"a" * 2000, "pretrain.pth": b"b" * 2000}
    files |= {"step-10/config.json": b"{ }", "step-10/model.safetensors": b"c" * 2000}
    files |= {"step-10/deeper/model.safetensors": b"d", "step-10/optimizer.pt": b"e"}
    hub.commit(MODEL, NET, files)
    place = local_model(f"hf:{NET}/sft.pth")
    assert place.read_bytes() == files["sft.pth"]
    folder = place.parent
    assert {path.name for path in folder.iterdir()} == {"sft.pth", "config.json"}
    inner = local_model(f"hf:{NET}/step-10")
    assert inner == folder / "step-10"
    assert {path.name for path in inner.iterdir()} == {"model.safetensors", "config.json"}
    message = rf"hf:{NET}: has 2 files of weights; name one, such as hf:{NET}/sft.pth$"
    with pytest.raises(UsageError, match=message):
        local_model(f"hf:{NET}")
    with pytest.raises(UsageError, match=f"hf:{NET}/none: has no configuration, tokenizer and"):
        local_model(f"hf:{NET}/none")


@pytest.mark.parametrize(
    ("names", "fetched"),
    [
        (("model.safetensors", "consolidated.safetensors"), ["model.safetensors"]),
        (("model.safetensors", "model.fp16.safetensors"), ["model.safetensors"]),
        (("training_args.bin", "pretrain_512.pth"), ["pretrain_512.pth"]),
        (("training_args.bin", "pytorch_model.bin"), ["pytorch_model.bin"]),
        (("adapter_model.safetensors", "training_args.bin"), ["adapter_model.safetensors"]),
        (("weights.safetensors",), ["weights.safetensors"]),
        (("training_args.bin",), []),
    ],
)
def test_files_beside_the_weights_are_left_there(hub: Hub, names: Any, fetched: list[str]):
    hub.commit(MODEL, NET, {"config.json": b"{}", **{name: name.encode() for name in names}})
    folder = local_model(f"hf:{NET}")
    assert sorted(path.name for path in folder.iterdir()) == sorted(["config.json", *fetched])


def test_files_of_equal_content_are_two(hub: Hub, tmp_path: Path):
    hub.commit(DATASET, SET, {"a.jsonl": lines(1), "b.jsonl": lines(1), "c.jsonl": b""})
    paths = local_text(f"hf:{SET}", tmp_path)
    require_once(paths)
    assert names_of(without(paths, paths[:1])) == ["b.jsonl", "c.jsonl"]
    with pytest.raises(UsageError, match="is named twice"):
        require_once([*paths, paths[0]])


def test_several_folders_are_named(hub: Hub, tmp_path: Path, capsys: Any):
    hub.commit(DATASET, SET, {"en/train.jsonl": lines(1), "fr/train.jsonl": lines(2)})
    assert len(local_text(f"hf:{SET}", tmp_path)) == 2
    assert (
        f"note   hf:{SET}: en, fr are read; to read only one, give hf:{SET}/en\n"
        in capsys.readouterr().err
    )
    assert len(local_text(f"hf:{SET}/en", tmp_path)) == 1
    assert "are read" not in capsys.readouterr().err


def test_a_copy_that_other_programs_made_is_used(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hub.commit(MODEL, NET, MODEL_FILES)
    folder = local_model(f"hf:{NET}")
    shutil.rmtree(folder.parents[1] / "trees")
    offline(monkeypatch)
    assert local_model(f"hf:{NET}") == folder


def test_a_cache_that_cannot_be_made_and_a_server_that_is_none(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import constants

    hub.commit(MODEL, NET, MODEL_FILES)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with pytest.raises(StorageError, match="Not a directory; set HF_HOME to another place"):
        local_model(f"hf:{NET}")
    monkeypatch.setattr(constants, "ENDPOINT", "notaurl")
    monkeypatch.setenv("HF_ENDPOINT", "notaurl")
    newest.cache_clear()
    with pytest.raises(UsageError, match=r"cannot be used .*; correct .* and HF_ENDPOINT=notaurl"):
        local_model(f"hf:{NET}")
