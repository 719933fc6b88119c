"""--task sft on several sources: rows by weight, validation by source, weights of the loss."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minimind.train as training
from minimind.cli.main import main as minimind
from minimind.config.loss_weights import loss_weights
from minimind.errors import CheckpointError, TooFewRows, UsageError
from minimind.inference.score import LossSums
from minimind.recovery.step_rows import RunLog, documents_of, read_run, rows_at, steps_reading
from minimind.train.evaluate import HeldOutRows, mixture
from tests.train.test_fine_tuning import BASE, conversations, evaluated, events, held_out, write
from tools.runs import sentences

train: Any = training  # a package that is called like a function
FRACTION = 0.2
STEPS, ROWS = 12, 24  # of a run, and of each step


def talk(n: int) -> list[dict[str, Any]]:
    """Long answers of few questions."""
    texts = sentences(7, n)
    return [{"prompt": f"tell {at}", "completion": text[:48]} for at, text in enumerate(texts)]


def sums(n: int) -> list[dict[str, Any]]:
    """Short answers."""
    draw = random.Random(5)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(n)]
    return [{"prompt": f"add {a} and {b}", "completion": str(a + b)} for a, b in pairs]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of conversations, and a base run."""
    place = tmp_path_factory.mktemp("mixed")
    write(place / "talk.jsonl", talk(60))
    write(place / "sums.jsonl", sums(200))
    write(place / "text.jsonl", [{"text": text} for text in sentences(1, 200)])
    flags = {**BASE, "data_path": str(place / "text.jsonl"), "cache_dir": str(place / "cache")}
    assert train(flags, out_dir=str(place / "base"), max_steps=2) == 0
    return place


def sources(place: Path, *weights: object) -> list[str]:
    pairs = zip(("talk", "sums"), weights or ("", ""), strict=True)
    return [f"{name}={place / name}.jsonl{f':{w}' if w else ''}" for name, w in pairs]


def flags(place: Path, *weights: object, **changes: Any) -> dict[str, Any]:
    keys = ("dim", "n_layers", "n_heads", "n_kv_heads", "max_seq_len", "vocab_size", "batch_size")
    given = {name: value for name, value in BASE.items() if name not in keys}
    given |= {"task": "sft", "init_from": str(place / "base"), "cache_dir": str(place / "cache")}
    given |= {"source": sources(place, *weights), "val_fraction": FRACTION, "max_steps": STEPS}
    return {**given, "batch_size": ROWS, "learning_rate": 5e-3, "eval_rows": 64, **changes}


def steps(out_dir: Path) -> list[list[Any]]:
    names = ("step", "loss", "grad_norm", "rows")
    return [[line[name] for name in names] for line in events(out_dir, "step")]


def read_by_source(log: RunLog, of: range) -> Counter[str]:
    """Rows of the sources in some steps, by the files of their conversations."""
    documents, found = documents_of(log.at(1)), Counter[str]()
    rows = [row for step in of for row in rows_at(log.at(step), documents, step, None)]
    places = documents.places({part.document for row in rows for part in row.parts})
    for row in rows:
        (file,) = {places[part.document].file for part in row.parts}  # a row is of one source
        found[Path(file).stem] += 1
    return found


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A run of 1 to 3, over two epochs."""
    assert train(flags(place, 1, 3), out_dir=str(place / "whole")) == 0
    return place / "whole"


def test_an_epoch_reads_the_sources_by_weight(whole: Path):
    (start,), (balance,) = events(whole, "run_start"), events(whole, "token_balance")
    sizes = start["order"]["mixture"]["sizes"]
    total, per_epoch = sum(sizes), start["steps_per_epoch"]
    assert STEPS >= 2 * per_epoch
    quotas = [round(total / 4), total - round(total / 4)]
    assert [one["epoch"] for one in balance["sources"]] == pytest.approx(quotas, abs=1)
    assert [one["rows"] for one in balance["sources"]] == sizes
    log = read_run(whole)
    for epoch in range(2):
        found = read_by_source(log, range(1 + epoch * per_epoch, 1 + (epoch + 1) * per_epoch))
        dropped = total - ROWS * per_epoch  # after the last whole step
        assert sum(found.values()) == ROWS * per_epoch
        for name, quota in zip(("talk", "sums"), quotas, strict=True):
            assert quota - dropped - 1 <= found[name] <= quota + 1


@pytest.mark.parametrize("step", [1, 5, 6, 11])
def test_stopped_at_any_step_it_is_the_same_run(whole: Path, place: Path, tmp_path: Path, step):
    given = flags(place, 1, 3, out_dir=str(tmp_path / "run"))
    assert train(given, stop_at_step=step) == 75
    assert train(given) == 0
    assert steps(tmp_path / "run") == steps(whole)
    assert (
        events(tmp_path / "run", "eval")[-1]["by_source"]
        == (events(whole, "eval")[-1]["by_source"])
    )


def test_each_validation_loss_is_that_of_the_file_alone(
    whole: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    last = events(whole, "eval")[-1]
    assert list(last["by_source"]) == ["talk", "sums"]
    for name, own in last["by_source"].items():
        lines = held_out(place / f"{name}.jsonl", FRACTION)
        (tmp_path / "held.jsonl").write_bytes(b"\n".join(lines))
        words = ("--checkpoint", whole, "--data_path", tmp_path / "held.jsonl")
        found = evaluated(capsys, *words, "--cache_dir", tmp_path)
        assert found["targets"] == own["tokens"]
        assert own["val_loss"] == pytest.approx(found["loss"], rel=1e-6)
    parts = last["by_source"].values()
    shares = [w * one["tokens"] / one["rows"] for w, one in zip((1, 3), parts, strict=True)]
    expected = np.average([one["val_loss"] for one in parts], weights=shares)
    assert last["val_loss"] == pytest.approx(expected, rel=1e-12)


def test_the_total_counts_targets_as_training_does():
    """Rows by weight, or by their held-out number, then targets by the weights of the loss."""
    found = {"a": LossSums(6.0, 3.0, 0.0, rows=1.0), "b": LossSums(80.0, 80.0, 0.0, rows=4.0)}

    class Rows:
        def sizes(self, row_tokens: int) -> tuple[int, ...]:
            return (10, 30)

    def total(weights: Any, of_loss: Any) -> float:
        stand_in: Any = Rows()
        rows = HeldOutRows(stand_in, np.arange(5), 33, [], ("a", "b"), weights, None, of_loss)
        return mixture(found, rows).mean

    # 3 targets a row of a, with a mean loss of 2, and 20 of b, with 1
    assert total(None, None) == pytest.approx((10 * 3 * 2 + 30 * 20 * 1) / (10 * 3 + 30 * 20))
    assert total((1.0, 2.0), None) == pytest.approx((3 * 2 + 2 * 20) / (3 + 2 * 20))
    assert total((1.0, 2.0), (5.0, 1.0)) == pytest.approx((5 * 3 * 2 + 2 * 20) / (5 * 3 + 2 * 20))


def test_the_smallest_weight_of_the_loss_is_1():
    assert loss_weights([], ["a", "b"]) is None
    assert loss_weights(["b=4"], ["a", "b", "c"]) == (1.0, 4.0, 1.0)
    assert loss_weights(["b=0.25", "a=2"], ["a", "b", "c"]) == (8.0, 1.0, 4.0)


def test_other_weights_are_the_same_tokens(whole: Path, place: Path, tmp_path: Path):
    before = {*(place / "cache").glob("tokens-*")}
    renamed = [text.replace("talk=", "other=") for text in sources(place, 2, 1)]
    assert train(flags(place, source=renamed, max_steps=2), out_dir=str(tmp_path)) == 0
    assert {*(place / "cache").glob("tokens-*")} == before
    assert [*events(tmp_path, "eval")[-1]["by_source"]] == ["other", "sums"]
    (start,) = events(tmp_path, "run_start")
    assert start["order"]["mixture"]["weights"] == [2.0, 1.0]


def test_without_weights_every_row_is_read_once_an_epoch(place: Path, tmp_path: Path):
    assert train(flags(place, epochs=1, max_steps=None), out_dir=str(tmp_path)) == 0
    (start,) = events(tmp_path, "run_start")
    assert start["order"]["mixture"] is None
    order = read_run(tmp_path).at(1).order
    rows = [row for step in range(order.steps_per_epoch) for row in order.rows_for(step, 0, 1)]
    assert len(set(rows)) == len(rows) == start["order"]["rows"] // ROWS * ROWS


def test_a_weighted_loss_goes_on_after_a_stop_and_is_another_run_with_other_weights(
    whole: Path, place: Path, tmp_path: Path
):
    given = flags(place, 1, 3, loss_weight=["sums=5"])
    assert train(given, out_dir=str(tmp_path / "run")) == 0
    first, others = steps(tmp_path / "run"), steps(whole)
    assert [row[3] for row in first] == [row[3] for row in others]  # the rows are the same
    assert first[0][1] != others[0][1]
    assert train(given, out_dir=str(tmp_path / "stopped"), stop_at_step=5) == 75
    same = {**given, "loss_weight": ["talk=0.2"]}  # only the ratio counts
    assert train(same, out_dir=str(tmp_path / "stopped")) == 0
    assert steps(tmp_path / "stopped") == first
    other = {**given, "loss_weight": ["sums=4"], "out_dir": str(tmp_path / "other")}
    assert train({**other, "loss_weight": None}, stop_at_step=5) == 75
    with pytest.raises(CheckpointError, match="loss_weights"):
        train(other)
    assert train(other, allow_change="lr") == 0
    assert [row[3] for row in steps(tmp_path / "other")] == [row[3] for row in first]


@pytest.mark.parametrize("weights", [(), (2, 1)])
def test_a_changed_source_is_another_run(whole: Path, place: Path, weights: tuple[int, ...]):
    with pytest.raises(CheckpointError, match="--allow_change data"):
        train(flags(place, *weights, max_steps=STEPS + 1), out_dir=str(whole))


def test_data_where_names_the_steps_of_a_conversation(
    whole: Path, place: Path, capsys: pytest.CaptureFixture[str]
):
    log = read_run(whole)
    documents = documents_of(log.at(1))
    (row, *_) = rows_at(log.at(3), documents, 3, None)
    document = row.parts[0].document
    place_of = documents.places([document])[document]
    reads = [step for step, *_ in steps_reading(log, documents, document)]
    assert 3 in reads
    capsys.readouterr()
    assert minimind(["data", "where", str(whole), str(place_of), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["texts"]
    assert [read["step"] for read in told["reads"]] == reads
    assert minimind(["data", "at", str(whole), "--step", "3", "--text"]) == 0
    assert f"{place_of}" in capsys.readouterr().out


def test_stages_change_weights_and_row_length(place: Path, tmp_path: Path):
    stages = {
        "sources": {name: str(place / f"{name}.jsonl") for name in ("talk", "sums")},
        "stages": [
            {"name": "short", "weights": {"talk": 1, "sums": 3}, "until": "50%", "max_seq_len": 32},
            {"name": "both", "weights": {"talk": 2, "sums": 1}},
        ],
    }
    (tmp_path / "s.yaml").write_text(json.dumps(stages))
    given = {**flags(place), "stages": str(tmp_path / "s.yaml"), "loss_weight": ["talk=2"]}
    del given["source"]
    assert train(given, out_dir=str(tmp_path / "run")) == 0
    log = read_run(tmp_path / "run")
    assert [one.row_tokens for one in log.stretches] == [33, 65]
    assert read_by_source(log, range(1, 7)) == {"talk": 1.5 * ROWS, "sums": 4.5 * ROWS}
    assert read_by_source(log, range(7, 13)) == {"talk": 4 * ROWS, "sums": 2 * ROWS}
    lengths = np.diff(documents_of(log.at(1)).prepared.train.document_ends(), prepend=0)
    longer = int((lengths > 33).sum())
    assert 0 < longer < (lengths > 20).sum()
    told = " ".join((tmp_path / "run" / "console.log").read_text().split())
    assert f"stage short: {longer} conversations of talk, sums cut or dropped" in told
    assert told.count("cut or dropped") == 1
    assert train(given, out_dir=str(tmp_path / "stopped"), stop_at_step=7) == 75
    assert train(given, out_dir=str(tmp_path / "stopped")) == 0
    assert steps(tmp_path / "stopped") == steps(tmp_path / "run")
    assert [*events(tmp_path / "run", "eval")[-1]["by_source"]] == ["talk", "sums"]
    stages["stages"][0]["weights"] = {"song": 1}
    (tmp_path / "s.yaml").write_text(json.dumps(stages))
    with pytest.raises(UsageError, match="song is not a source of the text; the sources are talk,"):
        train(given, out_dir=str(tmp_path / "refused"))
    assert not (tmp_path / "refused").exists()


def test_bad_conversations_of_a_source_are_listed(place: Path, tmp_path: Path):
    write(tmp_path / "bad.jsonl", [*conversations(60), {"messages": "x"}])
    mixed = [*sources(place), f"bad={tmp_path / 'bad.jsonl'}"]
    given = flags(place, source=mixed, on_bad_data="skip", max_steps=1)
    assert train(given, out_dir=str(tmp_path / "run")) == 0
    (line,) = (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["line"] == 61
    (start,) = events(tmp_path / "run", "run_start")
    assert start["skipped"]["count"] == 1


def test_a_source_without_a_row_is_refused_with_its_way_out(place: Path, tmp_path: Path):
    long = [{"prompt": f"{n} {'x ' * 99}", "completion": "y"} for n in range(40)]
    write(tmp_path / "long.jsonl", long)
    (tmp_path / "empty.jsonl").write_text("")
    for name, words in (("long", "first answer .* or raise"), ("empty", "to train on; .* out$")):
        given = flags(place, source=[*sources(place), f"{name}={tmp_path / name}.jsonl"])
        with pytest.raises(TooFewRows, match=f"source {name} has no conversation .*{words}"):
            train({**given, "on_bad_data": "skip"}, out_dir=str(tmp_path / "run"))


def test_sources_are_files_of_conversations(place: Path, tmp_path: Path):
    words = ["prepare", str(place / "text.jsonl"), "--out", str(tmp_path / "prepared")]
    assert minimind([*words, "--vocab_size", "600"]) == 0
    with pytest.raises(UsageError, match=r"text=.*prepared is prepared; give the files"):
        train(flags(place, source=[*sources(place), f"text={tmp_path / 'prepared'}"]))
