"""Runs on a folder that `minimind prepare` wrote, in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import minimind.train as training
from minimind.cli.main import main
from minimind.errors import CheckpointError, DataError, UsageError
from tests.checkpoint.test_changes import BASE, steps
from tests.conftest import sentences
from tools.runs import events

train: Any = training  # a package that is called like a function


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of two kinds; `raw` and `mixed`, folders of it, of one tokenizer."""
    place = tmp_path_factory.mktemp("prepared")
    for name, seed, documents in (("a", 1, 300), ("b", 2, 100)):
        lines = (json.dumps({"text": text}) + "\n" for text in sentences(seed, documents))
        (place / f"{name}.jsonl").write_text("".join(lines))
    raw = ["prepare", f"{place}/a.jsonl", "--vocab_size", "600", "--out", f"{place}/raw"]
    assert main(raw) == 0
    tokenizer = ["--tokenizer", f"{place}/raw/tokenizer"]
    for name, weights in (("mixed", (1, 3)), ("even", (1, 1))):
        given = zip("ab", weights, strict=True)
        sources = [f"--source={source}={place}/{source}.jsonl:{w}" for source, w in given]
        assert main(["prepare", *sources, *tokenizer, "--out", f"{place}/{name}"]) == 0
    return place


def flags(place: Path, data: str, **changes: Any) -> dict[str, Any]:
    cache = str(place / "cache")
    return {**BASE, "data_path": f"{place}/{data}", "cache_dir": cache, **changes}


def test_a_folder_trains_as_its_text_does_and_each_continues_from_the_other(
    place: Path, tmp_path: Path
):
    whole, changed = str(tmp_path / "whole"), str(tmp_path / "changed")
    tokenizer = f"{place}/raw/tokenizer"
    train(flags(place, "a.jsonl", tokenizer=tokenizer), out_dir=whole)
    assert train(flags(place, "raw"), out_dir=changed, stop_at_step=5) == 75
    assert train(flags(place, "a.jsonl", tokenizer=tokenizer), out_dir=changed) == 0
    for step, line in steps(Path(whole)).items():
        assert steps(Path(changed))[step]["loss"] == line["loss"]


def test_a_flag_that_contradicts_the_folder_is_refused_and_others_are_taken_from_it(
    place: Path, tmp_path: Path
):
    out = str(tmp_path / "out")
    train(flags(place, "raw", max_steps=1), out_dir=out)
    assert "val_fraction: 0.01" in (tmp_path / "out" / "config.yaml").read_text()
    for wrong in ({"vocab_size": 700}, {"val_fraction": 0.2}, {"text_field": "body"}):
        ((name, value),) = wrong.items()
        with pytest.raises(UsageError, match=rf"{name} = {value} .* but --data_path .*/raw has"):
            train(flags(place, "raw", **wrong), out_dir=str(tmp_path / "other"))
    both = {"max_document_bytes": 1000, "text_field": "body"}
    with pytest.raises(UsageError, match="text_field = body"):  # as in the order of --help
        train(flags(place, "raw", **both), out_dir=str(tmp_path / "other"))
    two = flags(place, "", data_path=[f"{place}/raw", f"{place}/a.jsonl"])
    with pytest.raises(UsageError, match="must be the only path"):
        train(two, out_dir=str(tmp_path / "other"))


def test_a_mixture_is_resumed_bit_for_bit_and_other_weights_are_another_text(
    place: Path, tmp_path: Path
):
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(flags(place, "mixed"), out_dir=str(whole))
    assert train(flags(place, "mixed"), out_dir=str(run), stop_at_step=5) == 75
    with pytest.raises(CheckpointError, match=r"data\.weights"):
        train(flags(place, "even"), out_dir=str(run))
    assert train(flags(place, "mixed"), out_dir=str(run)) == 0
    for step, line in steps(whole).items():
        again = steps(run)[step]
        assert (again["loss"], again["rows"]) == (line["loss"], line["rows"])
    sources = json.loads((place / "mixed" / "manifest.json").read_bytes())["sources"]
    rows = sum(source["tokens"]["train"] // 33 for source in sources)
    assert events(whole, "run_start")[0]["rows_per_epoch"] == rows


def test_the_validation_loss_of_a_mixture_weighs_its_sources(place: Path, tmp_path: Path):
    train(flags(place, "mixed", max_steps=1, eval_rows=100), out_dir=str(tmp_path / "out"))
    (measured,) = events(tmp_path / "out", "eval")
    losses = [measured["by_source"][name]["val_loss"] for name in "ab"]
    assert measured["val_loss"] == pytest.approx((losses[0] + 3 * losses[1]) / 4, rel=1e-6)
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)


def test_a_source_without_a_row_is_named(place: Path, tmp_path: Path):
    (tmp_path / "c.jsonl").write_text('{"text": "abc"}\n')
    sources = [f"--source=a={place}/a.jsonl", f"--source=c={tmp_path}/c.jsonl"]
    tokenizer = ["--tokenizer", f"{place}/raw/tokenizer", "--val_fraction", "0"]
    assert main(["prepare", *sources, *tokenizer, "--out", f"{tmp_path}/data"]) == 0
    with pytest.raises(DataError, match=r"source c has \d training tokens, fewer than a row of 33"):
        train(flags(place, "", data_path=f"{tmp_path}/data"), out_dir=str(tmp_path / "out"))


def test_too_much_bad_text_is_reported_by_the_path_of_the_text(place: Path, tmp_path: Path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text((place / "b.jsonl").read_text() + "[]\n" * 30)
    requested = {"on_bad_data": "skip", "max_bad_fraction": 0.1, "cache_dir": f"{tmp_path}/cache"}
    requested["tokenizer"] = f"{place}/raw/tokenizer"
    wanted = rf"^{bad}: 30 of 130 documents are bad, more than max_bad_fraction = 0\.1; the first"
    for _ in range(2):
        with pytest.raises(DataError, match=wanted):
            train(flags(place, "", **requested, data_path=[str(bad)]), out_dir=f"{tmp_path}/out")
    train(flags(place, "", **{**requested, "max_bad_fraction": 0.5}, data_path=[str(bad)]),
          out_dir=f"{tmp_path}/out")  # fmt: skip
    with pytest.raises(DataError, match=wanted):
        train(flags(place, "", **requested, data_path=[str(bad)]), out_dir=f"{tmp_path}/other")
