"""Held-out text of one's own: what is prepared, what a run does with it, and what is refused."""

from __future__ import annotations

import csv
import json
import lzma
import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

import minimind.train as training
from minimind.cli.command import command_of
from minimind.cli.main import build_parser, main
from minimind.config.parse import parse_flags
from minimind.data.prepare.prepared import Prepared, open_prepared
from minimind.data.text.inputs import find_files, left_out_of, val_paths
from minimind.errors import CheckpointError, DataError, UsageError
from minimind.train.inputs import require_inputs
from tests.checkpoint.test_changes import BASE, steps
from tests.conftest import sentences
from tools.runs import events

train: Any = training  # a package that is called like a function


def write_lines(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a.jsonl` to train on, `val.jsonl`, a tokenizer, and `apart/train`, `apart/val` of each."""
    place = tmp_path_factory.mktemp("held_out")
    write_lines(place / "a.jsonl", sentences(1, 300))
    write_lines(place / "val.jsonl", sentences(2, 40))
    made = ["prepare", f"{place}/a.jsonl", "--vocab_size", "600", "--out", f"{place}/learnt"]
    assert main([*made, "--val_fraction", "0"]) == 0
    for name in ("a", "val"):
        assert prepare(place, f"apart-{name}", f"{place}/{name}.jsonl", val_fraction=0)
    return place


def prepare(place: Path, out: str, *paths: str, **flags: Any) -> Prepared:
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    given = ["--tokenizer", f"{place}/learnt/tokenizer", "--out", f"{place}/{out}", *words]
    command = command_of(build_parser().parse_args(["prepare", *paths, *given]))
    assert command
    assert not command.execute()
    return open_prepared(place / out)


def tokens(prepared: Prepared, split: str) -> list[int]:
    shards = prepared.train if split == "train" else prepared.val
    return shards.stretch(0, len(shards)).tolist()


def test_each_split_has_the_tokens_of_its_text_and_no_other(place: Path):
    for name, more in {"one": {}, "many": {"shard_bytes": 3000, "processes": 2}}.items():
        both = prepare(place, name, f"{place}/a.jsonl", val_path=f"{place}/val.jsonl", **more)
        for split, text in (("train", "a"), ("val", "val")):
            alone = open_prepared(place / f"apart-{text}")
            assert tokens(both, split) == tokens(alone, "train")
        assert both.manifest["options"]["val_fraction"] == 0
        assert both.manifest["held_out"] == [f"{place}/val.jsonl"]
    learnt = ["prepare", f"{place}/a.jsonl", "--val_path", f"{place}/val.jsonl", "--vocab_size"]
    assert main([*learnt, "600", "--out", f"{place}/own"]) == 0  # no held-out text is learnt from
    assert open_prepared(place / "own").tokenizer.fingerprint == (
        open_prepared(place / "learnt").tokenizer.fingerprint
    )


def test_shares_of_several_machines_are_merged_to_the_same(place: Path):
    given = {"val_path": f"{place}/val.jsonl", "shard_bytes": 3000}
    whole = prepare(place, "whole", f"{place}/a.jsonl", **given)
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    words += ["--tokenizer", f"{place}/learnt/tokenizer", "--out", f"{place}/shared"]
    for share in ("0/2", "1/2"):
        assert main(["prepare", f"{place}/a.jsonl", *words, "--shard", share]) == 0
    assert main(["prepare", "--merge", "--out", f"{place}/shared"]) == 0
    shared = open_prepared(place / "shared")
    assert shared.manifest["fingerprint"] == whole.manifest["fingerprint"]


def test_a_folder_with_the_held_out_file_in_it_is_trained_on_without_it(place: Path):
    folder = place / "both"
    for name in ("a", "val"):
        shutil.copy(place / f"{name}.jsonl", write_lines(folder / f"{name}.jsonl", []))
    (folder / "link.jsonl").symlink_to(folder / "val.jsonl")
    both = prepare(place, "inside", str(folder), val_path=folder / "val.jsonl")
    assert tokens(both, "train") == tokens(open_prepared(place / "apart-a"), "train")
    assert tokens(both, "val") == tokens(open_prepared(place / "apart-val"), "train")
    with pytest.raises(DataError, match=r"val.jsonl: is all of the text; name text to train on"):
        prepare(place, "none", f"{place}/val.jsonl", val_path=place / "val.jsonl")


def test_a_document_in_both_is_an_error_or_is_left_out_and_counted(place: Path, tmp_path: Path):
    held_out = sentences(2, 40)
    text = write_lines(tmp_path / "a.jsonl", [*sentences(1, 300), held_out[3], held_out[7]])
    val = f"{place}/val.jsonl"
    words = rf"^{text}:301 \(byte \d+\): is also in {val}, which is held out; remove it from one"
    given = {"data_path": [str(text)], "val_path": val, "cache_dir": f"{tmp_path}/cache"}
    given |= {"tokenizer": f"{place}/learnt/tokenizer", "out_dir": f"{tmp_path}/out"}
    with pytest.raises(DataError, match=words):
        train({**BASE, **given})
    with pytest.raises(DataError, match=words):  # while a tokenizer is learnt
        train({**BASE, **given, "tokenizer": None, "vocab_size": 600})
    prepared = prepare(place, "overlap", str(text), val_path=val, on_bad_data="skip")
    assert prepared.manifest["rejected"]["count"] == 2
    listed = (place / "overlap" / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in listed] == [301, 302]
    assert tokens(prepared, "train") == tokens(open_prepared(place / "apart-a"), "train")
    with pytest.raises(DataError, match=r"2 of 342 documents are bad, more than max_bad_fraction"):
        prepare(place, "few", str(text), val_path=val, on_bad_data="skip", max_bad_fraction=0.001)


def flags(place: Path, **changes: Any) -> dict[str, Any]:
    given = {"data_path": [f"{place}/a.jsonl"], "val_path": f"{place}/val.jsonl", "eval_rows": 50}
    given |= {"tokenizer": f"{place}/learnt/tokenizer", "cache_dir": f"{place}/cache"}
    return {**BASE, **given, "eval_interval": 3, **changes}


def test_a_run_is_resumed_bit_for_bit_and_measures_the_text_that_was_given(
    place: Path, tmp_path: Path
):
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(flags(place), out_dir=str(whole))
    assert train(flags(place), out_dir=str(run), stop_at_step=5) == 75
    again = ["--config", f"{run}/config.yaml", "--out_dir", str(run)]
    require_inputs(parse_flags(again))
    assert "val_fraction: 0.0" in (run / "config.yaml").read_text()
    assert train(flags(place), out_dir=str(run)) == 0
    for step, line in steps(whole).items():
        assert (steps(run)[step]["loss"], steps(run)[step]["rows"]) == (line["loss"], line["rows"])
    losses = [
        {event["step"]: event["val_loss"] for event in events(one, "eval")} for one in (whole, run)
    ]
    assert losses[0] == losses[1]
    prepare(place, "for-a-run", f"{place}/a.jsonl", val_path=f"{place}/val.jsonl")
    folder = flags(place, data_path=[f"{place}/for-a-run"], val_path=None, tokenizer=None)
    train(folder, out_dir=str(tmp_path / "folder"))
    assert {e["step"]: e["val_loss"] for e in events(tmp_path / "folder", "eval")} == losses[0]


def test_other_held_out_text_is_another_text(place: Path, tmp_path: Path):
    other = write_lines(tmp_path / "other.jsonl", sentences(3, 40))
    assert train(flags(place), out_dir=f"{tmp_path}/out", stop_at_step=5) == 75
    with pytest.raises(CheckpointError, match=r"data\."):
        train(flags(place, val_path=str(other)), out_dir=f"{tmp_path}/out")
    renamed = shutil.copy(place / "val.jsonl", tmp_path / "renamed.jsonl")
    assert train(flags(place, val_path=renamed), out_dir=f"{tmp_path}/out") == 0


def test_the_text_of_a_step_is_found_and_that_of_validation_is_held_out(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    train(flags(place, max_steps=2), out_dir=f"{tmp_path}/out")
    capsys.readouterr()
    assert main(["data", "where", f"{tmp_path}/out", f"{place}/val.jsonl:3"]) == 0
    assert capsys.readouterr().out == f"{place}/val.jsonl:3: held out for validation\n"
    assert main(["data", "at", f"{tmp_path}/out", "--step", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {part["file"] for row in rows for part in row["parts"]} == {f"{place}/a.jsonl"}


def test_held_out_conversations_are_those_of_their_file(place: Path, tmp_path: Path):
    """The same fields and task as the text to train on."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for name, count in (("talk", 40), ("val", 8)):
        records = [
            {"messages": [{**turn, "content": f"{turn['content']} {name} {n}"} for turn in turns]}
            for n in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    text = (tmp_path / "talk.jsonl").read_text() + (tmp_path / "val.jsonl").read_text()
    (tmp_path / "both.jsonl").write_text(text)
    given = {"task": "sft", "data_path": [f"{tmp_path}/both.jsonl"], "eval_rows": 0}
    given |= {"val_path": f"{tmp_path}/val.jsonl", "doc_mask": None, "max_steps": 1}
    given |= {"chat_template": f"{tmp_path}/template.jinja"}
    train(flags(place, max_steps=1), out_dir=f"{tmp_path}/base")
    given |= {"init_from": f"{tmp_path}/base", "tokenizer": None}
    given = {name: value for name, value in flags(place, **given).items() if value is not None}
    with pytest.raises(DataError, match=r"both.jsonl:41 .* is also in .*val.jsonl, which is held"):
        train(given, out_dir=f"{tmp_path}/out")


PARTS = (
    "train-00000-of-00002",
    "train-00001-of-00002",
    "validation-00000-of-00001",
    "test-00000-of-00001",
)


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A folder as the Hub has them."""
    for name in PARTS:
        write_lines(tmp_path / "set" / "data" / f"{name}.jsonl", [name])
    (tmp_path / "set" / "README.md").write_text("about")
    return tmp_path / "set"


def names(files: list[Path] | tuple[str, ...]) -> list[str]:
    return [Path(file).name for file in files]


def test_a_folder_with_parts_is_its_train_part(parts: Path):
    trained = ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    assert names(find_files([parts])) == trained
    note = f"{parts}: its files of train are read; left out: "
    given = [parts, parts / "data" / f"{PARTS[3]}.jsonl"]
    assert left_out_of(given, None) == [f"{note}test and validation"]
    assert left_out_of(given, "auto") == [f"{note}test"]
    assert names(val_paths("auto", [str(parts)])) == [f"{PARTS[2]}.jsonl"]
    assert val_paths(None, [str(parts)]) == ()
    assert names(find_files([parts / "data" / f"{PARTS[2]}.jsonl"])) == [f"{PARTS[2]}.jsonl"]


@pytest.mark.parametrize(
    ("files", "trained", "held_out"),
    [
        (["train.jsonl", "dev.jsonl", "test.jsonl"], ["train.jsonl"], ["dev.jsonl"]),
        (["train/a.jsonl", "valid/b.jsonl"], ["train/a.jsonl"], ["valid/b.jsonl"]),
        (
            ["en.train.jsonl", "en_val.jsonl", "x.jsonl"],
            ["en.train.jsonl", "x.jsonl"],
            ["en_val.jsonl"],
        ),
        (["training.jsonl", "evaluation.jsonl"], ["training.jsonl"], []),
        (["trainer.jsonl", "test.jsonl"], ["test.jsonl", "trainer.jsonl"], []),
        (["train.jsonl", "a.jsonl"], ["a.jsonl", "train.jsonl"], []),
        (["validation.jsonl", "test.jsonl"], ["test.jsonl", "validation.jsonl"], []),
    ],
)
def test_parts_are_told_by_words_of_names(tmp_path, files, trained, held_out):
    for name in files:
        write_lines(tmp_path / name, ["a"])
    found = [str(file.relative_to(tmp_path)) for file in find_files([tmp_path])]
    assert found == trained
    if held_out:
        assert val_paths("auto", [str(tmp_path)]) == tuple(
            f"{tmp_path}/{name}" for name in held_out
        )
    else:
        with pytest.raises(UsageError, match=r"has a part of validation beside one of train; name"):
            val_paths("auto", [str(tmp_path)])


def test_parts_are_those_that_datasets_finds(parts: Path, tmp_path: Path):
    datasets.disable_progress_bars()
    loaded = datasets.load_dataset(str(parts), cache_dir=str(tmp_path / "cache"))
    texts = {
        "train": [json.loads(file.read_text())["text"] for file in find_files([parts])],
        "validation": [
            json.loads(Path(f).read_text())["text"] for f in val_paths("auto", [str(parts)])
        ],
    }
    for split, found in texts.items():
        assert list(loaded[split]["text"]) == found


def test_auto_takes_the_validation_of_a_saved_dataset(tmp_path: Path):
    datasets.disable_progress_bars()
    saved = datasets.DatasetDict()
    for name in ("train", "validation"):
        saved[name] = datasets.Dataset.from_dict({"text": [name]})
    saved.save_to_disk(tmp_path / "saved")
    assert val_paths("auto", [f"{tmp_path}/saved"]) == (f"{tmp_path}/saved/validation",)


def test_a_run_says_what_is_left_out_and_takes_the_validation_part(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "set"
    shutil.copy(place / "a.jsonl", write_lines(folder / "train.jsonl", []))
    shutil.copy(place / "val.jsonl", write_lines(folder / "validation.jsonl", []))
    write_lines(folder / "test.jsonl", ["not read"])
    given = flags(place, data_path=[str(folder)], val_path="auto", max_steps=3)
    train(given, out_dir=f"{tmp_path}/out")
    note = "its files of train are read; left out: test"
    assert " ".join(capsys.readouterr().out.split()).count(note) == 1
    train(flags(place, max_steps=3), out_dir=f"{tmp_path}/same")
    losses = [[e["val_loss"] for e in events(tmp_path / one, "eval")] for one in ("out", "same")]
    assert losses[0] == losses[1] != []
    assert main(["prepare", str(folder), "--out", f"{tmp_path}/data", "--tokenizer",
                 f"{place}/learnt/tokenizer"]) == 0  # fmt: skip
    assert "are read; left out: test and validation\n" in capsys.readouterr().err


def test_what_does_not_go_with_val_path_is_refused_by_name(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = ["--data_path", f"{place}/a.jsonl", "--val_path", f"{place}/val.jsonl"]
    with pytest.raises(UsageError, match=r"val_path = .* and val_fraction = 0.1 .*; remove one"):
        parse_flags([*data, "--val_fraction", "0.1"])
    assert parse_flags([*data, "--keep_best", "1", "--eval_rows", "8"]).val_path
    with pytest.raises(DataError, match=r"gone.jsonl: there is no such file"):
        require_inputs(parse_flags([*data[:3], f"{place}/gone.jsonl"]))
    with pytest.raises(
        UsageError, match=r"apart-a is prepared and has its own held-out text; remove"
    ):
        train(flags(place, data_path=[f"{place}/apart-a"], tokenizer=None), out_dir=f"{tmp_path}/o")
    for words, message in [
        (
            ["--val_fraction", "0.1"],
            r"and --val_fraction 0.1 both choose the validation text; remove",
        ),
        (
            [f"--source=b={place}/a.jsonl"],
            r"cannot be shared by 2 sources; remove it, or prepare a",
        ),
    ]:
        assert main(["prepare", *data, *words, "--out", f"{tmp_path}/no"]) == 2
        assert re.search(message, capsys.readouterr().err)


def test_the_documents_of_every_form_are_found_at_their_places(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    texts = [f"{text}\n{text}" for text in sentences(4, 80)]
    items = [{"text": text} for text in texts]
    (tmp_path / "a.json").write_text(json.dumps(items[:20], indent=2))
    with open(tmp_path / "b.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text", "n"], *([text, 1] for text in texts[20:40])])
    lines = "".join(json.dumps(item) + "\n" for item in items[40:])
    (tmp_path / "c.ndjson").write_text(lines[: lines.index("\n", len(lines) // 2) + 1])
    with lzma.open(tmp_path / "d.jsonl.xz", "wt") as file:
        file.write(lines[lines.index("\n", len(lines) // 2) + 1 :])
    (tmp_path / "e.md").write_text("# " + texts[0])
    given = flags(place, data_path=[str(tmp_path)], val_path=None, val_fraction=0.0, eval_rows=0)
    train(given | {"max_steps": 40}, out_dir=f"{place}/forms")
    capsys.readouterr()
    assert main(["data", "at", f"{place}/forms", "--step", "3", "--json", "--text"]) == 0
    parts = [part for row in json.loads(capsys.readouterr().out)["rows"] for part in row["parts"]]
    assert not [part for part in parts if part["file"] is None]
    for name, line, text in [
        ("a.json", 17, texts[16]),
        ("b.csv", 2 + sum(text.count("\n") + 1 for text in texts[20:24]), texts[24]),
        ("c.ndjson", 5, texts[44]),
        ("d.jsonl.xz", 1, None),
        ("e.md", 1, "# " + texts[0]),
    ]:
        assert main(["data", "where", f"{place}/forms", f"{tmp_path}/{name}:{line}", "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["texts"]
        assert found["split"] == "train"
        step = found["reads"][0]["step"]
        words = ["--step", str(step), "--json", "--text"]
        assert main(["data", "at", f"{place}/forms", *words]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        own = [part for row in rows for part in row["parts"] if part["file"].endswith(name)]
        assert own
        if text is not None:
            assert any(part["text"].removesuffix("</s>").strip() in text for part in own)
