"""Runs in stages, and of prepared folders mixed at train time, in one process."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import minimind.train as training
from minimind.cli.main import main
from minimind.config.stages import stage_text
from minimind.data.prepare.prepared import open_prepared
from minimind.errors import CheckpointError, DataError, UsageError
from minimind.recovery.step_rows import documents_of, read_run, rows_at, steps_reading
from tests.checkpoint.test_changes import BASE, steps
from tests.conftest import sentences
from tests.data.tokenizer.test_hf_tokenizer import byte_level
from tools.runs import events

train: Any = training  # a package that is called like a function
NAMES = ("loss", "lr", "grad_norm", "tokens", "rows", "stage")
# Rows and batch change at step 6, weights and the rate at step 9.
STAGES = [
    {"name": "short", "until": 768, "weights": {"a": 1}, "max_seq_len": 16},
    {"name": "mixed", "until": "70%", "weights": {"a": 1, "b": 1}, "batch_size": 1},
    {"name": "last", "weights": {"a": 1, "b": 3}},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts a and b, each prepared alone, with one tokenizer; both as a weighted mixture."""
    place = tmp_path_factory.mktemp("stages")
    for name, seed, documents in (("a", 1, 300), ("b", 2, 100)):
        lines = (json.dumps({"text": text}) + "\n" for text in sentences(seed, documents))
        (place / f"{name}.jsonl").write_text("".join(lines))
    assert main(["prepare", f"{place}/a.jsonl", "--vocab_size", "600", "--out", f"{place}/A"]) == 0
    tokenizer = ["--tokenizer", f"{place}/A/tokenizer"]
    assert main(["prepare", f"{place}/b.jsonl", *tokenizer, "--out", f"{place}/B"]) == 0
    both = [f"--source=a={place}/a.jsonl:1", f"--source=b={place}/b.jsonl:3"]
    assert main(["prepare", *both, *tokenizer, "--out", f"{place}/mixed"]) == 0
    return place


def file_of(folder: Path, place: Path, stages: Any = None, **more: Any) -> str:
    path = folder / "stages.yaml"
    content = {"sources": {"a": f"{place}/A", "b": f"{place}/B"}, "stages": stages or STAGES}
    path.write_text(yaml.safe_dump({**content, **more}))
    return str(path)


def flags(place: Path, **changes: Any) -> dict[str, Any]:
    length: dict[str, Any] = {"max_steps": None, "max_tokens": 2500.0}
    schedule = {"schedule": "wsd", "warmup_steps": 0}
    return {**BASE, **length, **schedule, "cache_dir": str(place / "cache"), **changes}


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """The unbroken run of STAGES."""
    out_dir = place / "whole"
    path = file_of(place, place, decay_from="last")
    assert train(flags(place, stages=path), out_dir=str(out_dir)) == 0
    return out_dir


def test_each_stage_has_its_steps_rows_batch_and_rate(whole: Path):
    lines = steps(whole)
    assert events(whole, "run_start")[0]["tokens_at_end"] == [*lines.values()][-1]["tokens"]
    assert [line["stage"] for line in lines.values()] == [
        *["short"] * 6,  # of 8 x 16 tokens
        *["mixed"] * 7,  # of 4 x 32, up to 1,750
        *["last"] * 3,  # of 8 x 32
    ]
    rows = [line["rows"][1] - line["rows"][0] for line in lines.values()]
    assert rows == [8] * 6 + [4] * 7 + [8] * 3
    assert lines[16]["tokens"] == 768 + 7 * 128 + 3 * 256
    rates = [line["lr"] for line in lines.values()]
    assert rates[:13] == [2e-3] * 13
    assert 2e-3 > rates[13] > rates[14] > rates[15]


def test_the_start_says_what_every_stage_reads(whole: Path, capsys: pytest.CaptureFixture[str]):
    (start,) = events(whole, "run_start")
    assert [stage["name"] for stage in start["stages"]] == ["short", "mixed", "last"]
    assert start["stages"][2]["sources"][1]["tokens"] == 18 * 32  # of b, of 24 rows
    (balance,) = events(whole, "token_balance")
    assert balance["trained"] == steps(whole)[16]["tokens"]
    assert list(balance["stages"]) == start["stages"]
    assert main(["report", str(whole)]) == 0
    text = capsys.readouterr().out
    assert "last, steps 14 to 16, 8 rows x 32, 768 tokens, epochs: 0.00" in text
    assert "data_path:" not in (whole / "config.yaml").read_text()
    page = (whole / "report.html").read_text()
    assert "<td>steps 14 to 16</td><td>8 rows x 32</td><td>768 tokens</td>" in page


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", [5, 6, 7, 12, 13, 14])
def test_a_stop_at_or_beside_a_boundary_changes_no_bit(
    whole: Path, place: Path, tmp_path: Path, step: int
):
    path = file_of(tmp_path, place, decay_from="last")
    given = flags(place, stages=path, out_dir=str(tmp_path / "run"))
    assert train(given, stop_at_step=step) == 75
    assert train(given) == 0
    for number, line in steps(whole).items():
        again = steps(tmp_path / "run")[number]
        assert [again[name] for name in NAMES] == [line[name] for name in NAMES]


def test_another_split_of_the_same_batch_reads_the_same_rows(
    whole: Path, place: Path, tmp_path: Path
):
    stages = [{**stage, "batch_size": 2 * stage.get("batch_size", 2)} for stage in STAGES]
    path = file_of(tmp_path, place, stages, decay_from="last")
    given = flags(place, stages=path, accumulation_steps=2, batch_size=4)
    assert train(given, out_dir=str(tmp_path / "run"), dtype="float32") == 0
    for number, line in steps(whole).items():
        again = steps(tmp_path / "run")[number]
        assert [again[name] for name in ("lr", "tokens", "rows")] == [
            line[name] for name in ("lr", "tokens", "rows")
        ]
    log = [read_run(one) for one in (whole, tmp_path / "run")]
    for step in range(1, 17):
        first, other = (one.at(step).order.rows_for(step - 1, 0, 1) for one in log)
        np.testing.assert_array_equal(first, other)


def test_data_at_and_where_know_the_rows_of_every_stage(whole: Path):
    log = read_run(whole)
    documents = documents_of(log.stretches[0])
    assert [one.row_tokens for one in log.stretches] == [17, 33, 33]
    assert [one.micro_batch_rows for one in log.stretches] == [2, 1, 2]
    shards, read = documents.prepared.train, {}
    for step in range(1, 17):
        stretch = log.at(step)
        for row in rows_at(stretch, documents, step, None):
            assert row.first_token == shards.row_starts(np.array([row.row]), stretch.row_tokens)[0]
            for part in row.parts:
                read.setdefault(part.document, []).append((step, row.rank, row.row))
    for document in (*read, 0):
        assert steps_reading(log, documents, document) == sorted(read.get(document, []))
    for step, first, stop in ((6, 0, 8), (7, 0, 4)):
        rows = rows_at(log.at(step), documents, step, None)
        assert [row.position for row in rows] == [
            *range(steps(whole)[step]["rows"][0], steps(whole)[step]["rows"][1])
        ]
        assert len(rows) == stop - first


def test_rows_of_other_lengths_are_left_out_where_they_overlap(
    whole: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["data", "at", str(whole), "--steps", "14:16", "--rows"]) == 0
    (tmp_path / "skip.txt").write_text(capsys.readouterr().out)
    path = file_of(tmp_path, place, decay_from="last")
    given = flags(place, stages=path, skip_rows=str(tmp_path / "skip.txt"))
    assert train(given, out_dir=str(tmp_path / "run")) == 0
    before, after = read_run(whole), read_run(tmp_path / "run")
    documents = documents_of(after.stretches[0])
    shards = documents.prepared.train
    left_out = np.concatenate([before.at(s).order.rows_for(s - 1, 0, 1) for s in (14, 15, 16)])
    starts = shards.row_starts(left_out, 33)
    for step in range(1, 17):
        stretch = after.at(step)
        own = shards.row_starts(stretch.order.rows_for(step - 1, 0, 1), stretch.row_tokens)
        for start in own.tolist():
            assert not ((starts < start + stretch.row_tokens) & (start < starts + 33)).any()
    capsys.readouterr()
    assert train(given, dry_run=True) == 0
    printed = capsys.readouterr().out
    (start_event,) = events(tmp_path / "run", "run_start")
    assert start_event["stages"] != events(whole, "run_start")[0]["stages"]
    for stage in start_event["stages"]:
        assert stage_text(stage) in printed
    assert main(["data", "at", str(whole), "--step", "2", "--rows"]) == 0
    (tmp_path / "skip.txt").write_text(capsys.readouterr().out)
    for dry_run in (True, False):
        with pytest.raises(UsageError, match=r"has rows of 17 tokens .* reads rows of 33"):
            train(given, out_dir=str(tmp_path / "other"), dry_run=dry_run)
    assert main(["data", "at", str(whole), "--steps", "5:8", "--rows"]) == 2
    assert "the length of its rows, changed within these steps" in capsys.readouterr().err


def test_a_changed_file_is_another_run_unless_it_is_allowed(
    whole: Path, place: Path, tmp_path: Path
):
    run = str(tmp_path / "run")
    path = file_of(tmp_path, place, decay_from="last")
    assert train(flags(place, stages=path), out_dir=run, stop_at_step=8) == 75
    changes = (
        ("data", {"weights": {"a": 1, "b": 5}}),
        ("batch", {"batch_size": 4}),
        ("batch", {"max_seq_len": 16}),
    )
    for group, change in changes:
        path = file_of(tmp_path, place, [*STAGES[:2], {**STAGES[2], **change}], decay_from="last")
        with pytest.raises(CheckpointError, match=rf"{group}\.stages"):
            train(flags(place, stages=path), out_dir=run)
    path = file_of(tmp_path, place, [STAGES[0], {**STAGES[1], "until": "60%"}, STAGES[2]])
    with pytest.raises(CheckpointError, match=r"schedule\.stages"):
        train(flags(place, stages=path), out_dir=run)
    unstaged = flags(place, max_steps=16, max_tokens=None, source=[f"a={place}/A", f"b={place}/B"])
    with pytest.raises(CheckpointError, match=r"data\.stages"):
        train(unstaged, out_dir=run)
    changed = [*STAGES[:2], {**STAGES[2], "weights": {"b": 1}}]
    path = file_of(tmp_path, place, changed, decay_from="last")
    assert train(flags(place, stages=path), out_dir=run, allow_change="data") == 0
    lines = steps(Path(run))
    assert [lines[step]["loss"] for step in range(1, 14)] == [
        steps(whole)[step]["loss"] for step in range(1, 14)
    ]
    assert lines[14]["loss"] != steps(whole)[14]["loss"]
    log = read_run(Path(run))
    documents = documents_of(log.stretches[0])
    begin_of_b = int(documents.prepared.train.source_ends()[0])
    assert all(row.first_token >= begin_of_b for row in rows_at(log.at(15), documents, 15, None))


def test_a_run_without_stages_goes_on_in_stages_and_back(place: Path, tmp_path: Path):
    run, sources = str(tmp_path / "run"), [f"a={place}/A", f"b={place}/B"]
    plain = flags(place, source=sources, max_steps=16, max_tokens=None, schedule="constant")
    assert train(plain, out_dir=run, stop_at_step=4) == 75
    path = file_of(
        tmp_path, place, [{"until": 0.5}, {"weights": {"b": 1}, "max_seq_len": 16}], sources={}
    )
    given = {**plain, "stages": path, "out_dir": run}
    with pytest.raises(CheckpointError, match=r"data\.stages"):
        train(given)
    assert train(given, allow_change="data,batch,schedule", stop_at_step=10) == 75
    assert train(given, stop_at_step=12) == 75
    assert train(plain, out_dir=run, allow_change="data,batch,schedule") == 0
    lines = steps(Path(run))
    assert [line.get("stage") for line in lines.values()] == [
        *[None] * 4,
        *["stage-1"] * 4,
        *["stage-2"] * 4,
        *[None] * 4,
    ]
    assert [line["tokens"] for line in lines.values()][-1] == (8 + 4) * 256 + 4 * 128


def test_folders_mixed_at_train_time_are_the_mixture_that_prepare_writes(
    place: Path, tmp_path: Path
):
    given = flags(place, max_steps=12, max_tokens=None)
    sources = [f"a={place}/A:1", f"b={place}/B:3"]
    train({**given, "data_path": f"{place}/mixed"}, out_dir=str(tmp_path / "whole"))
    run = str(tmp_path / "run")
    assert train(given, source=sources, out_dir=run, stop_at_step=5) == 75
    assert train({**given, "data_path": f"{place}/mixed"}, out_dir=run, stop_at_step=8) == 75
    at_url = [f"a=file://{place}/A:1", sources[1]]
    assert train(given, source=at_url, out_dir=run) == 0
    for step, line in steps(tmp_path / "whole").items():
        assert (steps(Path(run))[step]["loss"], "stage" in line) == (line["loss"], False)
    written = (Path(run) / "config.yaml").read_text()
    assert "data_path:" not in written
    again = tmp_path / "again"
    assert train({}, config=f"{run}/config.yaml", out_dir=str(again)) == 0
    assert steps(again)[12]["loss"] == steps(tmp_path / "whole")[12]["loss"]


def test_a_source_of_a_folder_of_several_is_read_alone_or_weighted_anew(
    place: Path, tmp_path: Path
):
    given = flags(place, max_steps=3, max_tokens=None)
    sources = [f"a={place}/mixed:5", f"b={place}/mixed:1"]
    assert train(given, source=sources, out_dir=str(tmp_path / "run")) == 0
    (start,) = events(tmp_path / "run", "run_start")
    assert start["order"]["mixture"]["weights"] == [5.0, 1.0]
    (stretch,) = read_run(tmp_path / "run").stretches
    mixed, whole = documents_of(stretch).prepared, open_prepared(place / "mixed")
    np.testing.assert_array_equal(
        mixed.train.stretch(0, len(mixed.train)), whole.train.stretch(0, len(whole.train))
    )
    assert str(mixed) == f"a={place}/mixed b={place}/mixed"
    assert train(given, source=[f"a={place}/mixed:5"], out_dir=str(tmp_path / "alone")) == 0
    alone = documents_of(read_run(tmp_path / "alone").stretches[0])
    assert alone.find(f"{place}/a.jsonl", 3)[0].place.line == 3
    with pytest.raises(UsageError, match=r"b\.jsonl is not a file of this text"):
        alone.find(f"{place}/b.jsonl", 3)
    with pytest.raises(UsageError, match=r"source c: .*/mixed holds the sources a, b; name one of"):
        train(given, source=[f"c={place}/mixed:5"], out_dir=str(tmp_path / "other"))


def test_what_one_folder_holds_out_is_a_document_of_another(place: Path, tmp_path: Path):
    """As it was when each was prepared: documents keep their numbers."""
    lines = (place / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "held_out.jsonl").write_text("".join(lines[5:9]))
    val_path = {"a": ["--val_fraction", "0"], "b": ["--val_path", f"{tmp_path}/held_out.jsonl"]}
    for name, held_out in val_path.items():
        words = ["prepare", f"{place}/{name}.jsonl", "--tokenizer", f"{place}/A/tokenizer"]
        assert main([*words, *held_out, "--out", f"{tmp_path}/{name}"]) == 0
    given = flags(place, max_steps=3, max_tokens=None)
    sources = [f"a={tmp_path}/a:1", f"b={tmp_path}/b:1"]
    assert train(given, source=sources, out_dir=str(tmp_path / "run")) == 0
    (stretch,) = read_run(tmp_path / "run").stretches
    documents = documents_of(stretch)
    places = documents.places(range(len(documents.ends)))
    assert len(places) == len(documents.ends) == 400
    assert {one.file for one in places.values()} == {f"{place}/a.jsonl", f"{place}/b.jsonl"}
    assert documents.find(f"{place}/a.jsonl", 7)[1] == 6


def test_a_line_that_one_folder_holds_out_and_another_trains_on(place: Path, tmp_path: Path):
    """The folder that holds the file out comes first."""
    words = ["prepare", "--tokenizer", f"{place}/A/tokenizer"]
    held_out = ["--val_path", f"{place}/a.jsonl", "--out", f"{tmp_path}/b"]
    assert main([*words, f"{place}/b.jsonl", *held_out]) == 0
    assert main([*words, f"{place}/a.jsonl", "--val_fraction", "0", "--out", f"{tmp_path}/a"]) == 0
    given = flags(place, max_steps=3, max_tokens=None, out_dir=str(tmp_path / "run"))
    assert train(given, source=[f"b={tmp_path}/b:1", f"a={tmp_path}/a:1"]) == 0
    (stretch,) = read_run(tmp_path / "run").stretches
    found, number = documents_of(stretch).find(f"{place}/a.jsonl", 7)
    assert (found.split, number) == ("train", 106)


def test_a_folder_that_moved_is_read_where_the_run_has_resumed(place: Path, tmp_path: Path):
    shutil.copytree(place / "A", tmp_path / "A")
    given = flags(place, max_steps=4, max_tokens=None, out_dir=str(tmp_path / "run"))
    assert train(given, source=[f"a={tmp_path}/A:1", f"b={place}/B:1"], stop_at_step=2) == 75
    (tmp_path / "A").rename(tmp_path / "moved")
    with pytest.raises(DataError, match=rf"^{tmp_path}/A: has no manifest\.json, .* restore it$"):
        documents_of(read_run(tmp_path / "run").at(1))
    assert train(given, source=[f"a={tmp_path}/moved:1", f"b={place}/B:1"]) == 0
    assert len(documents_of(read_run(tmp_path / "run").at(1)).ends) == 390


def test_a_mixture_lists_no_document_that_one_folder_left_out(place: Path, tmp_path: Path):
    lines = (place / "a.jsonl").read_text()
    (tmp_path / "bad.jsonl").write_text("[]\n" + lines)
    words = ["prepare", f"{tmp_path}/bad.jsonl", "--tokenizer", f"{place}/A/tokenizer"]
    assert main([*words, "--on_bad_data", "skip", "--out", f"{tmp_path}/a"]) == 0
    assert (tmp_path / "a" / "rejected.jsonl").exists()
    given = flags(place, max_steps=2, max_tokens=None, out_dir=str(tmp_path / "run"))
    assert train(given, source=[f"a={tmp_path}/a:1", f"b={place}/B:1"]) == 0
    assert not (tmp_path / "run" / "rejected.jsonl").exists()


def test_a_file_that_changes_the_tokenizer_of_a_mixture_is_refused(place: Path, tmp_path: Path):
    tokenizer = tmp_path / "hf"
    byte_level(tokenizer)
    for name in ("a", "b"):
        words = ["prepare", f"{place}/{name}.jsonl", "--tokenizer", str(tokenizer)]
        assert main([*words, "--out", f"{tmp_path}/{name}"]) == 0
    given = flags(place, max_steps=2, max_tokens=None, out_dir=str(tmp_path / "run"))
    sources = [f"a={tmp_path}/a:1", f"b={tmp_path}/b:1"]
    (tmp_path / "a" / "tokenizer" / "special_tokens_map.json").write_text('{"eos_token": "a"}')
    with pytest.raises(DataError, match=r"a/tokenizer.*: is not the tokenizer of .*/a; restore"):
        train(given, source=sources)


def test_folders_that_cannot_be_mixed(place: Path, tmp_path: Path):
    given = flags(place, max_steps=3, max_tokens=None, out_dir=str(tmp_path / "run"))
    other = ["prepare", f"{place}/b.jsonl", "--out", f"{tmp_path}/B"]
    assert main([*other, "--vocab_size", "560"]) == 0
    with pytest.raises(UsageError, match=r"source b: .*/B has another tokenizer than .*/A of sour"):
        train(given, source=[f"a={place}/A:1", f"b={tmp_path}/B:1"])
    shutil.rmtree(tmp_path / "B")
    assert main([*other, "--tokenizer", f"{place}/A/tokenizer", "--val_fraction", "0.1"]) == 0
    with pytest.raises(
        UsageError, match=r"with val_fraction = 0\.1, and .*/A of source a with 0\.0"
    ):
        train(given, source=[f"a={place}/A:1", f"b={tmp_path}/B:1"])
    refused = (
        ([f"a={place}/A:1", f"b={place}/B"], "source b has no weight and others have"),
        ([f"a={place}/A:1", f"a={place}/B:2"], "source a is given twice"),
        ([f"a={place}/A:1", f"b={place}/B/../A:2"], "source b: .*/A is the text of source a, too"),
        ([f"a={place}/a.jsonl:1"], r"source a: .*/a\.jsonl is not a folder of `minimind prepare`"),
        (["a"], "--source a: is not NAME=PATH or NAME=PATH:WEIGHT"),
    )
    for sources, message in refused:
        with pytest.raises(UsageError, match=message):
            train(given, source=sources)
    with pytest.raises(
        UsageError, match=r": --source a=.*/A:1 is prepared and has its own held-out"
    ):
        train(given, source=[f"a={place}/A:1"], val_path=f"{place}/a.jsonl")
    staged = flags(place, stages=file_of(tmp_path, place), val_path=f"{place}/a.jsonl")
    with pytest.raises(UsageError, match=r": --stages .*\.yaml: a=.*/A b=.*/B is prepared and has"):
        train(staged, out_dir=str(tmp_path / "run"))
    with pytest.raises(UsageError, match=r"source = .* and data_path = .* both name the text"):
        train(given, source=[f"a={place}/A:1"], data_path=f"{place}/B")
    with pytest.raises(UsageError, match=r"has sources, and data_path = .* names other text"):
        train(given, stages=file_of(tmp_path, place), data_path=f"{place}/B")


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.idx"])
def test_a_file_that_a_source_lost_is_named_in_its_own_folder(
    place: Path, tmp_path: Path, name: str, dry_run: bool
):
    shutil.copytree(place / "B", tmp_path / "B")
    given = flags(place, source=[f"b={tmp_path}/B:1"], max_steps=3, max_tokens=None)
    given |= {"out_dir": str(tmp_path / "run"), "dry_run": dry_run}
    assert train({**given, "dry_run": True}) == 0  # which leaves the mixture in the cache
    (tmp_path / "B" / name).unlink()
    with pytest.raises(DataError, match=rf"^{tmp_path}/B/{name}: is missing or cut; put it back"):
        train(given)


def test_a_changed_shard_of_a_source_is_refused_before_the_first_step(place: Path, tmp_path: Path):
    shutil.copytree(place / "B", tmp_path / "B")
    (shard,) = (tmp_path / "B").glob("train-*.bin")
    content = shard.read_bytes()
    shard.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    given = flags(place, source=[f"b={tmp_path}/B:1"], max_steps=3, max_tokens=None)
    with pytest.raises(DataError, match=r"train-00000\.bin: was changed after it was prepared"):
        train(given, out_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_stages_of_plain_text_change_its_row_length(place: Path, tmp_path: Path):
    stages = [{"until": 0.5, "max_seq_len": 8}, {}]
    path = file_of(tmp_path, place, stages, sources={})
    given = flags(place, max_steps=4, max_tokens=None, stages=path, schedule="cosine")
    given["data_path"] = f"{place}/a.jsonl"
    assert train(given, out_dir=str(tmp_path / "run")) == 0
    assert [line["tokens"] for line in steps(tmp_path / "run").values()] == [64, 128, 384, 640]


def test_the_spike_guard_looks_back_over_a_boundary_and_corruption_is_checked(
    whole: Path, place: Path, tmp_path: Path
):
    path = file_of(tmp_path, place, decay_from="last")
    given = flags(place, stages=path, spike_guard=True, max_rollbacks=0, verify_interval=1)
    assert train(given, out_dir=str(tmp_path / "run")) == 0
    assert all(one["passed"] for one in events(tmp_path / "run", "verified"))
    for step, line in steps(whole).items():
        assert steps(tmp_path / "run")[step]["loss"] == line["loss"]


def test_a_model_card_has_the_batches_of_all_stages(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["export", "--checkpoint", str(whole), "--format", "llama", "--out", f"{tmp_path}/x"]
    assert main(words) == 0
    capsys.readouterr()
    card = (tmp_path / "x" / "README.md").read_text()
    sizes = "8 rows of 16 tokens, then of 4 rows of 32 tokens, then of 8 rows of 32 tokens"
    assert f"2,432 tokens in 16 steps of {sizes}" in card
    assert "stages.yaml" in card


def test_a_dry_run_and_the_plan_know_the_stages(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = file_of(tmp_path, place, decay_from="last", max_epochs={"b": 1})
    words = f"--stages {path} --schedule wsd --max_tokens 2500 --accumulation_steps 4"
    words += " --max_seq_len 32 --batch_size 2 --device cpu --deepspeed_config none"
    assert train(flags(place, stages=path, dry_run=True), out_dir=str(tmp_path / "run")) == 0
    line = "mixed: steps 7 to 13 of 4 rows x 32, 896 tokens"
    assert f"{line} of 0.0202 times a, 0.0227 times b" in capsys.readouterr().out
    assert main(["plan", *words.split()]) == 0
    assert line in (printed := capsys.readouterr().out)
    assert "1-sqrt decay over the last 3" in printed
    path = file_of(tmp_path, place, decay_from="last", max_epochs={"b": 0.01})
    with pytest.raises(UsageError, match=r"source b is read 0\.0519 times, more than max_epochs"):
        train(flags(place, stages=path, dry_run=True), out_dir=str(tmp_path / "run"))


def test_mistakes_are_usage_errors_before_anything_is_written(place: Path, tmp_path: Path):
    for stages, message in (
        ([{"weights": {"a": 1, "c": 1}}], "c is not a source of the text; the sources are a, b"),
        ([{"wieghts": {"a": 1}}], r"unknown key 'wieghts'; did you mean weights\?"),
    ):
        path = file_of(tmp_path, place, stages)
        with pytest.raises(UsageError, match=message) as raised:
            train(flags(place, stages=path), out_dir=str(tmp_path / "run"))
        assert raised.value.status == 2


@pytest.mark.parametrize("dry_run", [True, False])
def test_weights_of_sources_are_refused_before_raw_text_is_read(
    place: Path, tmp_path: Path, dry_run: bool
):
    given = flags(place, stages=file_of(tmp_path, place, sources={}), dry_run=dry_run)
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\nno JSON, where the text is read\n')
    with pytest.raises(UsageError, match="a is not a source of the text; the sources are data"):
        train(given, data_path=str(tmp_path / "bad.jsonl"), out_dir=str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([{"b": 1}, {"b": 1}], [0.0, 1.0]),
        ([{"a": 1}, {"b": 1}], [0.5, 0.5]),
        ([{"a": 1, "b": 3}, {"a": 3, "b": 1}], [0.5, 0.5]),
        ([{"a": 1, "b": 3}, {"a": 1, "b": 3}], [0.25, 0.75]),
        ([None, None], None),
    ],
)
def test_the_epochs_of_the_rules_are_those_of_the_sources_that_are_read(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    weights: list[Any],
    shares: list[float] | None,
):
    """The mean over tokens of how often their source is read."""
    sizes = [json.loads((place / name / "manifest.json").read_text()) for name in "AB"]
    rows = [one["splits"]["train"]["tokens"] // 33 for one in sizes]
    tokens = 4 * rows[1] * 32
    of_text = [size / sum(rows) for size in rows]
    reads = [share * tokens for share in shares or of_text]
    epochs = sum(read / tokens * read / (size * 32) for read, size in zip(reads, rows, strict=True))
    stages = [{"until": "50%"}, {"name": "last"}]
    stages = [
        {**stage, **({"weights": one} if one else {})}
        for stage, one in zip(stages, weights, strict=True)
    ]
    path = file_of(tmp_path, place, stages)
    given = flags(place, stages=path, max_tokens=float(tokens), weight_decay="auto")
    given["out_dir"] = str(tmp_path / "out")
    assert train(given, dry_run=True) == 0
    (found,) = re.findall(r"^  weight_decay +([\d.]+)", capsys.readouterr().out, re.M)
    assert float(found) == pytest.approx(0.1 * max(1.0, epochs) ** 0.9, rel=0.02)


def test_the_epochs_of_the_rules_are_those_of_weighted_sources(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = flags(place, out_dir=str(tmp_path / "out"), weight_decay="auto")
    found = []
    both = [f"a={place}/A", f"b={place}/B"]
    for sources in (both, [f"{both[0]}:1", f"{both[1]}:9"], both[1:]):
        assert train({**given, "source": sources, "max_tokens": 80_000.0}, dry_run=True) == 0
        found += re.findall(r"^  weight_decay +([\d.]+)", capsys.readouterr().out, re.M)
    by_size, uneven, alone = map(float, found)
    assert 0.1 < by_size < uneven < alone
