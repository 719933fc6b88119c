"""The Hub in a run and an export: text and models from there, a run that goes on, uploads."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM

import minimind.train as training
from minimind.cli.main import main
from minimind.errors import CheckpointError, UsageError
from minimind.inference.load_model import load_model
from minimind.interop.weights import read_weights
from minimind.runtime import filesystem
from minimind.runtime.hub import DATASET, MODEL, newest
from tests.checkpoint.test_changes import BASE, steps
from tests.conftest import sentences
from tests.runtime.fixtures import _hub, hub  # noqa: F401 (fixtures, found by their names)
from tests.runtime.hub_server import GROUP, SIGNATURE, TOKEN, USER, Hub

train: Any = training  # a package that is called like a function
NET, SET = f"{USER}/small", f"{USER}/poems"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of an upload
ONE_FILE = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
ONE_FILE |= {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", ".gitattributes"}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "WAITS", (0.0,) * 5)


def lines(seed: int, count: int) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in sentences(seed, count)).encode()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the text of `text`, of which `text/validation.jsonl` was held out."""
    place = tmp_path_factory.mktemp("hub_run")
    text = place / "text"
    text.mkdir()
    (text / "train.jsonl").write_bytes(lines(1, 300))
    (text / "validation.jsonl").write_bytes(lines(2, 30))
    flags = {**BASE, "cache_dir": str(place / "cache"), "eval_rows": 4}
    train(flags, data_path=str(text), val_path="auto", out_dir=str(place / "run"), save_interval=6)
    return place


@pytest.fixture
def poems(hub: Hub, run: Path) -> Hub:  # noqa: F811 (the fixture of that name)
    """The Hub with the text of `run`."""
    files = {path.name: path.read_bytes() for path in (run / "text").iterdir()}
    hub.commit(DATASET, SET, {**files, "README.md": b"# Poems\n"})
    return hub


@pytest.fixture
def user(poems: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The Hub, and the token of a user of it."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return poems


def export(run: Path, out: Path, name: str, *more: str) -> int:
    place = ["export", "--checkpoint", str(run / "run"), "--format", "llama", "--out", str(out)]
    return main([*place, "--push_to_hub", name, *more])


def test_a_run_on_a_data_set_is_that_on_its_files(
    poems: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    flags = {**BASE, "cache_dir": str(tmp_path / "cache"), "eval_rows": 4, "save_interval": 6}
    flags |= {"data_path": f"hf:{SET}", "val_path": "auto", "out_dir": str(tmp_path / "out")}
    assert train(flags, stop_at_step=6) == 75
    expected = {step: line["loss"] for step, line in steps(run / "run").items()}
    newest.cache_clear()
    assert train(flags) == 0
    assert {step: line["loss"] for step, line in steps(tmp_path / "out").items()} == expected
    capsys.readouterr()
    shutil.rmtree(tmp_path / "hub_cache")
    assert main(["data", "at", str(tmp_path / "out"), "--step", "2"]) == 0
    places = capsys.readouterr().out
    assert f"hf:{SET}@{poems.commits[DATASET, SET][0][0]}/train.jsonl:" in places
    assert "?" not in places
    poems.commit(DATASET, SET, {"train.jsonl": lines(5, 300), "validation.jsonl": lines(2, 30)})
    newest.cache_clear()
    flags |= {"max_steps": 13}
    with pytest.raises(CheckpointError, match="belongs to another run"):
        train(flags)


def test_an_export_is_uploaded_and_loads_from_there(
    user: Hub, run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    assert export(run, tmp_path / "out", NET) == 0
    shown = capfd.readouterr()
    assert f"/{NET}: has the files of {tmp_path / 'out'}\n" in shown.out
    assert not shown.err
    assert user.files(NET).keys() == ONE_FILE
    assert NET not in user.private
    for path in (tmp_path / "out").iterdir():
        assert user.files(NET)[path.name] == path.read_bytes()
    model, tokenizer, _ = load_model(None, f"hf:{NET}")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([tokenizer.encode("The cat sat on the mat.")])
    assert torch.allclose(model(ids).logits, theirs(ids).logits, atol=1e-5)
    weights = read_weights(f"hf:{NET}", lambda found: found)
    assert weights.config.hidden_size == BASE["dim"]


def test_a_run_starts_from_a_model_of_the_hub_and_goes_on_without_it(
    user: Hub, run: Path, tmp_path: Path
):
    assert export(run, tmp_path / "export", NET) == 0
    sha = user.commits[MODEL, NET][-1][0]
    flags = {"data_path": str(run / "text"), "max_steps": 4, "learning_rate": 1e-3, "device": "cpu"}
    flags |= {"cache_dir": str(run / "cache"), "batch_size": 2, "log_interval": 1}
    train(flags, init_from=f"hf:{NET}", out_dir=str(tmp_path / "hub"), stop_at_step=2)
    train(flags, init_from=str(tmp_path / "export"), out_dir=str(tmp_path / "local"))
    manifest = json.loads((tmp_path / "hub/checkpoints/step_00000002/manifest.json").read_text())
    assert manifest["init_from"] == {"place": f"hf:{NET}@{sha}", "kind": "llama"}
    user.commits.clear()
    newest.cache_clear()
    train(flags, init_from=f"hf:{NET}", out_dir=str(tmp_path / "hub"))
    for step, line in steps(tmp_path / "local").items():
        assert steps(tmp_path / "hub")[step]["loss"] == line["loss"]
    with pytest.raises(UsageError, match=f"hf:{NET}: the Hub has no such model"):
        train(flags, init_from=f"hf:{NET}", out_dir=str(tmp_path / "new"))


def test_a_tokenizer_and_an_architecture_come_from_a_model(user: Hub, run: Path, tmp_path: Path):
    assert export(run, tmp_path / "export", NET) == 0
    flags = {"data_path": str(run / "text"), "max_steps": 1, "device": "cpu", "batch_size": 2}
    flags |= {"cache_dir": str(run / "cache"), "max_seq_len": 32, "log_interval": 1}
    own = {name: BASE[name] for name in ("dim", "n_layers", "n_heads", "n_kv_heads")}
    train(flags, **own, tokenizer=f"hf:{NET}", out_dir=str(tmp_path / "one"))
    first = (tmp_path / "one/checkpoints/step_00000001/tokenizer.model").read_bytes()
    assert first == user.files(NET)["tokenizer.model"]
    train(flags, model=f"hf:{NET}", out_dir=str(tmp_path / "two"))
    config = json.loads((tmp_path / "two/checkpoints/step_00000001/config.json").read_text())
    assert (config["model_type"], config["hidden_size"]) == ("llama", BASE["dim"])


def test_parts_of_an_earlier_export_are_deleted_and_an_edited_card_stays(
    user: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert export(run, tmp_path / "parts", f"{GROUP}/small", "--max_shard_size", "20KB") == 0
    before = user.files(f"{GROUP}/small")
    assert sum("-of-" in name for name in before) > 1
    edited = {**before, "README.md": before["README.md"] + b"More.\n", "notes.txt": b"mine"}
    user.commit(MODEL, f"{GROUP}/small", edited)
    capsys.readouterr()
    assert export(run, tmp_path / "whole", f"{GROUP}/small") == 0
    after = user.files(f"{GROUP}/small")
    assert after.keys() == ONE_FILE | {"notes.txt"}
    assert after["README.md"] == edited["README.md"]
    assert "; its README.md is not as an export wrote it, and stays\n" in capsys.readouterr().out
    assert len(user.commits[MODEL, f"{GROUP}/small"]) == 4  # made, parts, edited, whole


def test_a_private_model_is_private_from_the_start(user: Hub, run: Path, tmp_path: Path):
    assert export(run, tmp_path / "one", NET, "--hub_private_repo") == 0
    assert user.private == {NET}
    assert export(run, tmp_path / "two", NET, "--hub_private_repo") == 0
    assert len(user.commits[MODEL, NET]) == 3


def test_what_is_public_is_not_taken_for_private(
    user: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    user.commit(MODEL, NET, {"README.md": b"mine"})
    assert export(run, tmp_path / "out", NET, "--hub_private_repo") == 2
    assert f"--push_to_hub {NET}: the model exists and is public" in capsys.readouterr().err
    assert user.files(NET) == {"README.md": b"mine"}
    assert not (tmp_path / "out").exists()


def test_weights_of_no_export_are_not_replaced(
    user: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    mine = {"README.md": b"mine", "config.json": b"{}", "model.safetensors": b"weights"}
    user.commit(MODEL, NET, mine)
    assert export(run, tmp_path / "out", NET) == 2
    assert (
        "the model there has model.safetensors, which no export writes" in capsys.readouterr().err
    )
    assert user.files(NET) == mine
    assert not (tmp_path / "out").exists()
    user.commit(MODEL, NET, {"README.md": b"mine", "notes.txt": b"x"})
    assert export(run, tmp_path / "out", NET) == 0
    assert user.files(NET).keys() == ONE_FILE - {".gitattributes"} | {"notes.txt"}
    assert user.files(NET)["README.md"] == b"mine"


def test_a_gguf_stands_beside_another_format(user: Hub, run: Path, tmp_path: Path):
    assert export(run, tmp_path / "llama", NET) == 0
    place = ["export", "--checkpoint", str(run / "run"), "--format", "gguf"]
    assert main([*place, "--out", str(tmp_path / "gguf"), "--push_to_hub", NET]) == 0
    assert user.files(NET).keys() == ONE_FILE | {"model.gguf"}


def test_files_of_another_format_are_deleted(user: Hub, run: Path, tmp_path: Path):
    place = ["export", "--checkpoint", str(run / "run"), "--format", "minimind"]
    assert main([*place, "--out", str(tmp_path / "ours"), "--push_to_hub", NET]) == 0
    ours = user.files(NET)
    assert "decoder.py" in ours
    user.commit(MODEL, NET, {**ours, "chat_template.jinja": b"old"})
    assert export(run, tmp_path / "llama", NET) == 0
    assert user.files(NET).keys() == ONE_FILE


@pytest.mark.parametrize(
    ("name", "role", "token", "message"),
    [
        (
            "bob/small",
            "write",
            TOKEN,
            "the token belongs to ana, who is not a member of bob; name one of ana, poets",
        ),
        (NET, "read", TOKEN, "the token of ana may only read; make one that may write"),
        (NET, "write", "", "has no token; check HF_TOKEN, or run `hf auth login`"),
        (NET, "write", "hf_wrong", "access is refused: "),
        ("small", "write", TOKEN, "is not USER/NAME, such as ana/poems; write it so"),
        (f"{NET}@v1", "write", TOKEN, "is not USER/NAME"),
        ("ana/x--y", "write", TOKEN, "is not a name of a model ("),
        ("ana/" + "x" * 100, "write", TOKEN, "is not a name of a model ("),
    ],
)
def test_nothing_is_written_where_nothing_may_be_uploaded(
    user: Hub,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    role: str,
    token: str,
    message: str,
):
    user.role = role
    monkeypatch.setenv("HF_TOKEN", token)
    assert export(run, tmp_path / "out", name) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert not token or token not in shown
    assert not (tmp_path / "out").exists()
    assert (MODEL, NET) not in user.commits


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning")  # peft asks it
@pytest.mark.parametrize("has_base", [True, False])
def test_an_adapter_is_merged_into_a_model_of_the_hub(
    user: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_base: bool
):
    assert export(run, tmp_path / "base", NET) == 0
    about = {"base_model_name_or_path": NET if has_base else "ana/none", "peft_type": "LORA"}
    adapter = {"adapter_config.json": json.dumps(about).encode()}
    adapter["adapter_model.safetensors"] = save({"x.lora_A.weight": torch.zeros(2)})
    user.commit(MODEL, "ana/lora", adapter)
    out = ["--out", str(tmp_path / "out")]
    status = main(["import", "--from", "llama", "hf:ana/lora", *out])
    shown = capsys.readouterr().err
    if find_spec("peft") is None:
        assert status == 2
        assert f"holds a LoRA adapter of hf:{about['base_model_name_or_path']}, which the" in shown
    elif has_base:
        assert status == 4, shown  # it is one of nothing
        assert "is not an adapter of" in shown
    else:
        assert status == 2
        assert "hf:ana/none: the Hub has no such model" in shown


def test_an_upload_that_is_cut_changes_nothing_and_is_done_again(
    user: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    user.lost_uploads = 3
    assert export(run, tmp_path / "one", NET) == 0
    assert user.lost_uploads == 0
    before = len(user.commits[MODEL, NET])
    user.lost_uploads = 10_000
    assert export(run, tmp_path / "two", NET) == 5
    shown = capsys.readouterr()
    assert f"{tmp_path / 'two'} has the export: give the same command with --force" in shown.err
    assert (tmp_path / "two/model.safetensors").exists()
    assert SIGNATURE not in f"{shown.out}{shown.err}"
    assert len(user.commits[MODEL, NET]) == before
    user.lost_uploads = 0
    assert export(run, tmp_path / "two", NET, "--force") == 0
