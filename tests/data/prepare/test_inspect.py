"""What `data inspect` says of folders that are not what they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minimind.cli.main import main
from minimind.data.prepare import inspect as module
from minimind.data.prepare.prepared import open_prepared
from tests.conftest import sentences


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of 300 documents, some of them twice."""
    place = tmp_path_factory.mktemp("inspect")
    texts = ["first", *sentences(3, 249)]
    lines = (json.dumps({"text": text}) + "\n" for text in texts + texts[:50])
    (place / "t.jsonl").write_text("".join(lines))
    command = ["prepare", str(place / "t.jsonl"), "--vocab_size", "512", "--val_fraction", "0"]
    assert main([*command, "--out", str(place / "whole")]) == 0
    return place / "whole"


@pytest.fixture
def out(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "out"))


ENDS = np.arange(1, 301, dtype="<u8")
DAMAGE: dict[str, tuple[bytes | None, str]] = {
    "gone": (None, "cannot be read (No such file or directory)"),
    "cut": (bytes(ENDS)[:-8], "has 2392 bytes, not 2400"),
    "odd": (bytes(ENDS) + b"x", "has 2401 bytes, not 2400"),
    "full of ones": (b"\xff" * 2400, "has impossible document ends"),
    "of another shard": (bytes(ENDS), "has impossible document ends"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_an_index_that_cannot_be_is_reported_though_nothing_is_hashed(
    case: str, out: Path, capsys: pytest.CaptureFixture[str]
):
    content, output = DAMAGE[case]
    index = out / "train-00000.idx"
    index.unlink() if content is None else index.write_bytes(content)
    assert main(["data", "inspect", str(out), "--no_verify"]) == 3
    error = capsys.readouterr().err
    assert f"{index}: {output}; restore it, or prepare the text again" in error


@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "tokenizer"])
def test_what_a_folder_lacks_is_named(name: str, out: Path, capsys: pytest.CaptureFixture[str]):
    shutil.rmtree(out / name) if name == "tokenizer" else (out / name).unlink()
    assert main(["data", "inspect", str(out)]) == 3
    assert f"out: has no {name}, so it is not prepared" in capsys.readouterr().err


def test_another_tokenizer_in_the_folder_is_reported_without_naming_a_flag(
    out: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text = str(whole.with_name("t.jsonl"))
    assert main(["tokenizer", "train", text, "--vocab_size", "520", "--out", f"{tmp_path}/t"]) == 0
    shutil.copy(tmp_path / "t" / "tokenizer.model", out / "tokenizer")
    assert main(["data", "inspect", str(out), "--no_verify"]) == 3
    output = capsys.readouterr().err
    assert "is not the tokenizer of" in output
    assert "; restore that one, or prepare the text again" in output
    assert "--tokenizer" not in output


def test_a_row_shows_where_its_documents_end(
    out: Path, whole: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["data", "inspect", str(out), "--rows", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    second = json.loads(whole.with_name("t.jsonl").read_text().splitlines()[1])["text"]
    assert row.startswith(f"row 0: first [end] {second[:20]}")


def test_of_very_many_documents_a_share_is_compared(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def found() -> dict[str, Any]:
        capsys.readouterr()
        assert main(["data", "inspect", str(out), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert open_prepared(out).manifest["documents"] == 300
    assert found()["compared"] == 300
    monkeypatch.setattr(module, "MOST_HASHES", 100)
    share = found()
    assert 30 < share["compared"] < 140
    assert 0.05 < share["duplicate_share"] < 0.35
