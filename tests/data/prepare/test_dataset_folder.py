"""`minimind prepare` as it is typed: killed, shared out, mixed, misused."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from minimind.cli.main import main
from minimind.data.prepare import dataset_folder as folder
from minimind.data.prepare import encode
from minimind.data.prepare.prepared import open_prepared
from minimind.data.prepare.work_units import MAX_UNITS, SMALLEST_UNIT, Plan, make_plan
from minimind.data.shards.manifest import Options
from minimind.data.text.inputs import Source, parse_source
from minimind.data.tokenizer.sentencepiece import MODEL_NAME, train_tokenizer
from minimind.errors import UsageError
from tests.conftest import ROOT, sentences
from tests.killing import killed_in_replacing

SHARDS = ["--shard_bytes", "1000000"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of three kinds and a tokenizer."""
    place = tmp_path_factory.mktemp("folder")
    texts = sentences(3, 6000)
    for name, part in (("a", texts[:4000]), ("b", texts[4000:])):
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in part)
        (place / f"{name}.jsonl").write_text("".join(lines))
    train_tokenizer(texts[:300], 600, place / MODEL_NAME)
    return place


def words(place: Path, out: Path, *more: str) -> list[str]:
    text = [str(place / "a.jsonl"), str(place / "b.jsonl")]
    return ["prepare", *text, "--tokenizer", str(place / MODEL_NAME), "--out", str(out), *more]


def files_of(directory: Path) -> dict[str, bytes]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[str, bytes]:
    """The files of an unbroken preparation."""
    assert main(words(place, place / "whole", *SHARDS)) == 0
    files = files_of(place / "whole")
    assert len([name for name in files if name.startswith("train-")]) >= 6
    return files


def test_killed_while_it_writes_the_tokenizer_it_continues(
    place: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(folder, "merge", stop)
        assert main(words(place, out, *SHARDS)) == 130
    (tmp_path / "out.part" / "tokenizer" / "tokenizer.json.tmp-1").write_text("half")
    assert main(words(place, out, *SHARDS)) == 0
    assert files_of(out) == whole


@pytest.mark.parametrize("path", ["~nobody-of-this-name/a.jsonl", "x" * 5000 + ":2"])
def test_a_path_that_cannot_be_is_reported_like_any_other(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for words in ([path], ["--source", f"a={path}"]):
        assert main(["prepare", *words, "--out", str(tmp_path / "out")]) in (2, 3)
        assert len(capsys.readouterr().err.splitlines()) == 1


def start(command: list[str], stderr: int | None = None) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "minimind.cli.main", *command]
    return subprocess.Popen(
        command,
        env=environ,
        start_new_session=True,
        stderr=stderr,
        # A suite in the background of a script has it ignored, and so would what it starts.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def kill_at_random(place: Path, out: Path, times: int, seed: int, *more: str) -> int:
    """How many of `times` kills found the preparation at work."""
    draw = random.Random(seed)
    hits = 0
    for _ in range(times):
        process = start(words(place, out, *SHARDS, *more))
        time.sleep(draw.uniform(0.15, 0.9))
        hits += process.poll() is None
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if out.exists():
            break
    return hits


@pytest.mark.sample(1)
@pytest.mark.parametrize("more", [(), ("--processes", "2")])
@pytest.mark.parametrize("kills", [4, pytest.param(30, marks=pytest.mark.long)])
def test_killed_at_random_and_started_again_gives_the_same_bytes(
    place: Path, whole: dict[str, bytes], tmp_path: Path, more: tuple[str, ...], kills: int
):
    hits = rounds = 0
    while hits < kills:
        out = tmp_path / f"killed-{rounds}"
        hits += kill_at_random(place, out, kills - hits, rounds, *more)
        if not out.exists():
            assert main(words(place, out, *SHARDS, *more)) == 0
        assert files_of(out) == whole
        assert list(tmp_path.glob("*.part")) == []
        rounds += 1


def test_three_shares_put_together_are_one_preparation(
    place: Path, whole: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "shared"
    for part in (2, 0):
        assert main(words(place, out, *SHARDS, "--shard", f"{part}/3")) == 0
        assert not out.exists()
    assert main(["prepare", "--merge", "--out", str(out)]) == 2
    assert "units are not done, the first is 1; run the --shard" in capsys.readouterr().err
    assert main(words(place, out, *SHARDS, "--shard", "1/3")) == 0
    assert main(["prepare", "--merge", "--out", str(out)]) == 0
    assert files_of(out) == whole


def test_done_units_are_not_done_again(place: Path, whole: dict[str, bytes], tmp_path: Path):
    out = tmp_path / "shared"
    assert main(words(place, out, *SHARDS, "--shard", "0/2")) == 0
    (draft,) = tmp_path.glob("*.part")
    before = {path: path.stat().st_mtime_ns for path in draft.glob("train-*.bin")}
    assert main(words(place, out, *SHARDS)) == 0
    after = {out / path.name: stamp for path, stamp in before.items()}
    assert {path: path.stat().st_mtime_ns for path in after} == after
    assert files_of(out) == whole


def test_sources_keep_their_names_weights_and_order(place: Path, tmp_path: Path):
    out = tmp_path / "mixed"
    command = ["prepare", "--tokenizer", str(place / MODEL_NAME), "--out", str(out)]
    named = [f"--source=first={place}/b.jsonl:3", f"--source=second={place}/a*.jsonl:1.5"]
    assert main([*command, *named]) == 0
    prepared = open_prepared(out)
    found = [(s["name"], s["weight"], s["documents"]) for s in prepared.manifest["sources"]]
    assert found == [("first", 3.0, 2000), ("second", 1.5, 4000)]
    (tmp_path / "sources.yaml").write_text(
        f"first: {{paths: {place}/b.jsonl, weight: 3}}\n"
        f"second: {{paths: [{place}/a.jsonl], weight: 1.5}}\n"
    )
    command[-1] = str(tmp_path / "from_yaml")
    assert main([*command, "--sources", str(tmp_path / "sources.yaml")]) == 0
    again = open_prepared(tmp_path / "from_yaml")
    assert again.manifest["fingerprint"] == prepared.manifest["fingerprint"]


def test_a_learnt_tokenizer_is_kept_with_the_shards(place: Path, tmp_path: Path):
    for name in ("one", "two"):
        out = tmp_path / name
        assert (
            main(["prepare", str(place / "b.jsonl"), "--vocab_size", "512", "--out", str(out)]) == 0
        )
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert open_prepared(out).tokenizer.vocab_size == 512


SKIPPING = ["--on_bad_data", "skip", "--tokenizer", "{tokenizer}"]
MISUSE: dict[str, tuple[list[str], str]] = {
    "nothing named": (["--out", "{out}"], "no text was named; give PATHs"),
    "no out": (["{text}"], "arguments are required: --out"),
    "no such file": (["nowhere.jsonl", "--out", "{out}"], "nowhere.jsonl: there is no such file"),
    "share": (["{text}", "--out", "{out}", "--shard", "3/3"], "'3/3' is not I/N with I from 0"),
    "both": (["--out", "{out}", "--merge", "--shard", "0/3"], "--merge and --shard cannot"),
    "merge of nothing": (["--out", "{out}", "--merge"], ".part: does not exist; run"),
    "source": (["--out", "{out}", "--source", "a.jsonl"], "is not NAME=PATH or NAME=PATH:WEIGHT"),
    "name": (["--out", "{out}", "--source", "a/b={text}"], "'a/b' is not a name; use letters"),
    "weight": (["--out", "{out}", "--source", "a={text}:0"], "weight = 0 is not a number from"),
    "large weight": (
        ["--out", "{out}", "--source", "a={text}:1e308"],
        ":1e308: weight = 1e308 is not a number from 2**-53 to 2**53; give one",
    ),
    "small weight": (["--out", "{out}", "--source", "a={text}:1e-400"], "weight = 1e-400 is not a"),
    "some weights": (
        ["--out", "{out}", "--source", "a={text}:2", "--source", "b={text}"],
        "source b has no weight and others have",
    ),
    "two weights": (
        ["--out", "{out}", "--source", "a={text}:2", "--source", "a={text}:3"],
        "source a has weight 2.0 and 3.0; give one",
    ),
    "vocabulary": (["{text}", "--out", "{out}", "--vocab_size", "10"], "vocab_size = 10 is less"),
    "column": (
        ["{text}", "--out", "{out}", "--text_field", "body"],
        'a.jsonl:1 (byte 0): has no "body"',
    ),
    "field": (["{text}", "--out", "{out}", "--text_field", "t\udcff"], r"'t\udcff' is not UTF-8"),
    "twice": (["{text}", "{text}", "--out", "{out}"], "is named twice; name it once"),
    "merge and text": (["{text}", "--out", "{out}", "--merge"], "--merge and PATH cannot"),
    "merge and policy": (
        ["--out", "{out}", "--merge", "--on_bad_data", "skip"],
        "--merge and --on_bad_data cannot be used together",
    ),
    "merge and tokenizer": (
        ["--out", "{out}", "--merge", "--tokenizer", "{tokenizer}"],
        "--merge and --tokenizer cannot be used together",
    ),
    "two sizes": (
        ["{text}", "--out", "{out}", "--tokenizer", "{tokenizer}", "--vocab_size", "9999"],
        "has 600; leave one of them out",
    ),
    "empty path": (["", "--out", "{out}"], "the path of a text is empty"),
    "empty tokenizer": (["{text}", "--out", "{out}", "--tokenizer", ""], "--tokenizer is empty"),
    "small shards": (["{text}", "--out", "{out}", "--shard_bytes", "1"], "shard_bytes = 1 cuts"),
    "weight nan": (["--out", "{out}", "--source", "a={text}:nan"], "weight = nan is not a number"),
    "weight comma": (
        ["--out", "{out}", "--source", "a={text}:2,5"],
        "weight = 2,5 is not a number",
    ),
    "weight of a glob": (
        ["--out", "{out}", "--source", "a=*.txt:2x"],
        "weight = 2x is not a number",
    ),
    "source twice": (
        ["--out", "{out}", "--sources", "{here}/twice.yaml"],
        "twice.yaml:2:1: duplicate key a; correct the YAML",
    ),
    "source nested": (["--out", "{out}", "--sources", "{here}/deep.yaml"], "deep.yaml: maximum"),
    "weight of nothing": (
        ["--out={out}", "--source=a={text}:1", "--source=b={here}/none.jsonl:2", *SKIPPING],
        "source b: has weight 2 and no training document; add",
    ),
    "all bad": (
        ["--out", "{out}", "{here}/none.jsonl", "--on_bad_data", "skip"],
        "no document is left to train on: all were bad",
    ),
    "empty file": (
        ["{here}/none.jsonl", "--out", "{out}"],
        "none.jsonl:1 (byte 0): is empty; fill it or leave it out, or skip bad documents",
    ),
    "fraction": (["{text}", "--out", "{out}", "--val_fraction", "1"], "1 must be at least 0 and"),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", MISUSE)
def test_a_mistake_is_one_line_and_leaves_no_folder(
    case: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given, output = MISUSE[case]
    out = tmp_path / "out"
    (tmp_path / "none.jsonl").touch()
    for name, content in (("twice", "a: x\na: y"), ("day", "a: 2024-99-99"), ("deep", "[" * 3000)):
        (tmp_path / f"{name}.yaml").write_text(content)
    known = {"out": out, "text": place / "a.jsonl", "here": tmp_path}
    known["tokenizer"] = place / MODEL_NAME
    filled = [word.format(**known) for word in given]
    assert main(["prepare", *filled]) in (2, 3)
    error = capsys.readouterr().err
    assert output in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_what_is_there_is_replaced_by_force_alone(
    place: Path, whole: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    assert main(words(place, out, "--val_fraction", "0.3")) == 0
    assert main(words(place, out, *SHARDS)) == 2
    assert "exists; give another folder, or --force to replace it" in capsys.readouterr().err
    assert main(words(place, out, *SHARDS, "--force")) == 0
    assert files_of(out) == whole
    (tmp_path / "mine").mkdir()
    for name in ("manifest.json", "weights"):
        (tmp_path / "mine" / name).touch()
    assert main(words(place, tmp_path / "mine", "--force")) == 2
    assert (
        "holds 'weights', which this version of minimind prepare does not write"
        in capsys.readouterr().err
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("at", range(1, 5))
def test_killed_while_the_new_folder_takes_the_place_of_the_old_one_of_them_is_put_there(
    place: Path, whole: dict[str, bytes], tmp_path: Path, at: int
):
    out = tmp_path / "out"
    assert main(words(place, out, "--val_fraction", "0.3")) == 0
    old = files_of(out)
    killed_in_replacing(words(place, out, *SHARDS, "--force"), at)
    assert len([*tmp_path.iterdir()]) > 1
    is_new = out.exists() and files_of(out) == whole
    assert main(["prepare", "nothing", "--out", str(out)]) == 2  # it is there
    assert files_of(out) == (whole if is_new else old)
    assert main(words(place, out, *SHARDS, "--force")) == 0
    assert files_of(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_left_of_another_preparation_is_not_mixed_into_this(
    place: Path, whole: dict[str, bytes], tmp_path: Path
):
    out = tmp_path / "out"
    small = ("--shard_bytes", "300KiB", "--on_bad_data", "skip", "--shard", "0/2")
    assert main(words(place, out, *small)) == 0
    (tmp_path / "out.part" / "unit-00001.json").write_text("{}")
    (tmp_path / "out.part" / "unit-00002.json").write_text("[")
    assert main(words(place, out, *SHARDS)) == 0
    assert files_of(out) == whole


def test_a_mended_line_is_all_that_is_done_again(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text, out = tmp_path / "t.jsonl", tmp_path / "out"
    good = (place / "b.jsonl").read_text()
    text.write_text(good + "[]\n")
    command = ["prepare", str(place / "a.jsonl"), str(text), "--out", str(out), *SHARDS]
    command += ["--tokenizer", str(place / MODEL_NAME)]
    assert main(command) == 3
    draft = tmp_path / "out.part"
    kept = {path: path.stat().st_mtime_ns for path in draft.glob("train-0000[01].bin")}
    assert len(kept) == 2
    text.write_text(good)
    assert main(command) == 0
    assert all((out / p.name).stat().st_mtime_ns == stamp for p, stamp in kept.items())
    assert "error" in capsys.readouterr().err


def test_what_was_passed_over_is_judged_by_who_asks_last(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    bad, out = tmp_path / "bad.jsonl", tmp_path / "out"
    bad.write_text((place / "b.jsonl").read_text() + "[]\n")
    command = ["prepare", str(bad), "--tokenizer", str(place / MODEL_NAME), "--out", str(out)]
    assert main([*command, "--on_bad_data", "skip", "--shard", "0/1"]) == 0
    assert main(command) == 3
    assert "bad.jsonl:2001 " in capsys.readouterr().err
    assert main([*command, "--on_bad_data", "skip"]) == 0
    assert len((out / "rejected.jsonl").read_text().splitlines()) == 1


def test_of_much_that_is_bad_all_is_counted_and_a_part_listed(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(encode, "MAX_LISTED", 3)
    good = (place / "b.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(good + "[]\n" * 5 + good[: good.index("\n") + 1])
    (tmp_path / "b.jsonl").write_text(good + "[]\n" * 2)
    command = ["prepare", "--on_bad_data", "skip", "--tokenizer", str(place / MODEL_NAME)]
    command += [f"--source={name}={tmp_path / name}.jsonl" for name in "ab"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    assert "7 skipped (5 of them in rejected.jsonl)" in output
    assert main(["data", "inspect", str(tmp_path / "out")]) == 0
    assert "7 skipped (5 of them in rejected.jsonl)" in capsys.readouterr().out
    manifest = open_prepared(tmp_path / "out").manifest
    assert manifest["rejected"]["count"] == 7
    assert [source["rejected"] for source in manifest["sources"]] == [5, 2]
    listed = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in listed] == [2001, 2002, 2003, 2001, 2002]


@pytest.fixture(scope="module")
def bad_everywhere(place: Path) -> list[str]:
    """The command to prepare what is bad in every unit; --out is to be given."""
    text = place / "bad.jsonl"
    lines = (place / "a.jsonl").read_text().splitlines(keepends=True)
    text.write_text("".join("[]\n" + line if n % 50 == 7 else line for n, line in enumerate(lines)))
    command = ["prepare", str(text), "--tokenizer", str(place / MODEL_NAME)]
    return [*command, "--shard_bytes", "100000", "--on_bad_data", "skip"]


def test_three_shares_list_what_is_bad_as_one_job_does(bad_everywhere: list[str], tmp_path: Path):
    assert main([*bad_everywhere, "--out", str(tmp_path / "one")]) == 0
    command = [*bad_everywhere, "--out", str(tmp_path / "three")]
    for share in ("2/3", "0/3", "1/3"):
        assert main([*command, "--shard", share]) == 0
    assert len(list((tmp_path / "three.part").glob("rejected-*"))) > 6
    assert main(["prepare", "--merge", "--out", str(tmp_path / "three")]) == 0
    assert files_of(tmp_path / "three") == files_of(tmp_path / "one")
    listed = (tmp_path / "one" / "rejected.jsonl").read_text().splitlines()
    lines = [json.loads(bad)["line"] for bad in listed]
    assert lines == [8 + 51 * n for n in range(80)]


def test_a_unit_that_an_older_version_marked_is_made_again(
    bad_everywhere: list[str], tmp_path: Path
):
    out = tmp_path / "out"
    command = [*bad_everywhere, "--out", str(out)]
    assert main(command) == 0
    expected = files_of(out)
    assert main([*command, "--force", "--shard", "0/1"]) == 0
    draft = tmp_path / "out.part"
    plan = Plan.from_json(json.loads((draft / "plan.json").read_bytes()))
    fingerprint = open_prepared(out).tokenizer.fingerprint
    # The old format gave the first bad line in words, and counted lines from the file's first.
    for unit in plan.units:
        path = draft / f"unit-{unit.number:05d}.json"
        marker = json.loads(path.read_bytes())
        del marker["lines"]
        old = {"first_rejected": "", "key": plan.key_of(unit, fingerprint)}
        path.write_text(json.dumps({**marker, **old}))
    assert main([*command, "--force"]) == 0
    assert files_of(out) == expected


def test_a_shard_that_is_cut_is_made_again_before_the_merge(
    place: Path, whole: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    assert main(words(place, out, *SHARDS, "--shard", "0/1")) == 0
    (tmp_path / "out.part" / "train-00001.idx").unlink()
    assert main(["prepare", "--merge", "--out", str(out)]) == 2
    assert "1 of" in capsys.readouterr().err
    assert main(words(place, out, *SHARDS)) == 0
    assert files_of(out) == whole


def test_a_merge_that_is_cut_while_it_clears_up_is_finished_and_nothing_done_again(
    place: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def cut(directory: Path) -> None:
        (directory / "unit-00001.json").unlink()
        raise KeyboardInterrupt

    def no_unit(*_: Any) -> None:
        raise AssertionError("done again")

    for finish in (words(place, tmp_path / "0", *SHARDS), ["prepare", "--merge", "--out", "1"]):
        out = tmp_path / Path(finish[-1]).name if finish[1] == "--merge" else tmp_path / "0"
        with monkeypatch.context() as patch:
            patch.setattr(folder, "clear", cut)
            assert main(words(place, out, *SHARDS)) == 130
        with monkeypatch.context() as patch:
            patch.setattr(encode, "encode_unit", no_unit)
            patch.chdir(tmp_path)
            assert main(finish) == 0
        assert files_of(out) == whole


def test_two_at_once_in_one_folder_are_one_preparation(
    place: Path, whole: dict[str, bytes], tmp_path: Path
):
    out = tmp_path / "out"
    both = [start(words(place, out, *SHARDS)) for _ in range(2)]
    assert sorted(process.wait() for process in both) in ([0, 0], [0, 2])  # or one came too late
    assert files_of(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("more", [(), ("--processes", "2")])
def test_ctrl_c_is_answered_in_one_line_and_the_same_command_continues(
    place: Path, tmp_path: Path, more: tuple[str, ...]
):
    text, out, draft = tmp_path / "long.jsonl", tmp_path / "out", tmp_path / "out.part"
    text.write_text((place / "a.jsonl").read_text() * 20)
    command = ["prepare", str(text), "--tokenizer", str(place / MODEL_NAME), *SHARDS, *more]
    command += ["--out", str(out)]
    process = start(command, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (done := [*draft.glob("unit-*.json")]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, output = process.communicate()
    assert process.returncode == 130
    assert output.decode().splitlines() == [
        f"minimind: error[INTERRUPTED]: stopped; {draft} keeps what is done, and the same command"
        " resumes from it"
    ]
    names = [path.name.replace("unit", "train").replace("json", "bin") for path in done]
    kept = {name: (draft / name).stat().st_mtime_ns for name in names}
    assert main(command) == 0
    assert {name: (out / name).stat().st_mtime_ns for name in names} == kept


def test_ctrl_c_before_anything_is_kept_reports_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder.PrepareRequest, "plan", interrupted)
    assert main(words(place, tmp_path / "out")) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("stopped before anything was written; run it again")


def test_helpers_end_with_a_parent_that_is_killed(place: Path, tmp_path: Path):
    text = tmp_path / "long.jsonl"
    text.write_text((place / "a.jsonl").read_text() * 6)
    command = ["prepare", str(text), "--tokenizer", str(place / MODEL_NAME), *SHARDS]
    process = start([*command, "--out", str(tmp_path / "out"), "--processes", "3"])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 120
    while len(pids := children.read_text().split()) < 2:
        assert time.monotonic() < deadline
    process.kill()
    process.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "helpers are left"
        time.sleep(0.05)


def test_a_helper_that_meets_bad_text_ends_all_in_its_words(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    bad = tmp_path / "bad.jsonl"
    bad.write_text((place / "b.jsonl").read_text() + "[]\n")
    command = ["prepare", str(bad), "--tokenizer", str(place / MODEL_NAME), *SHARDS]
    assert main([*command, "--out", str(tmp_path / "out"), "--processes", "2"]) == 3
    error = capsys.readouterr().err
    assert "bad.jsonl:2001 (byte " in error
    assert "is a list, not an object" in error


def test_inspect_shows_what_is_there_and_finds_damage(
    place: Path, whole: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    doubled = tmp_path / "doubled.jsonl"
    text = (place / "b.jsonl").read_text()
    doubled.write_text(text + text.splitlines(keepends=True)[0] * 2)
    out = tmp_path / "out"
    command = ["prepare", str(doubled), "--tokenizer", str(place / MODEL_NAME), "--out", str(out)]
    assert main(command) == 0
    capsys.readouterr()
    assert main(["data", "inspect", str(out), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["sources"][0]["documents"] == 2002
    assert found["duplicates"][0]["times"] == 3
    assert sum(count for _, count in found["lengths"]) == 2002
    assert len(found["rows"]) == 3
    shard = out / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    assert main(["data", "inspect", str(out)]) == 3
    (out / "train-00000.idx").unlink()
    assert main(["data", "inspect", str(out)]) == 3
    output = capsys.readouterr().out
    assert "DAMAGED: train-00000.bin: does not match its sha256" in output
    assert "DAMAGED: train-00000.idx: is missing" in output
    assert main(["data", "inspect", str(place)]) == 3
    assert "holds no prepared data" in capsys.readouterr().err


@pytest.mark.parametrize(("bytes_", "is_refused"), [(1024, False), (1025, True), (10**13, True)])
def test_a_given_size_of_shards_makes_no_more_than_a_run_can_open(
    tmp_path: Path, bytes_: int, is_refused: bool
):
    file = tmp_path / "large.jsonl"
    with open(file, "wb") as made:
        made.truncate(bytes_)  # sparse
    source = [Source("x", (str(file),))]
    if is_refused:
        report = f"shard_bytes = 1 cuts {bytes_:,} bytes of text into more than 1,024 shards"
        with pytest.raises(UsageError, match=report):
            make_plan(source, Options(), 1)
    else:
        assert len(make_plan(source, Options(), 1).units) == MAX_UNITS


def test_files_that_are_not_cut_are_counted_too(tmp_path: Path):
    for number in range(MAX_UNITS + 1):
        (tmp_path / f"{number}.txt").write_text("x")
    with pytest.raises(UsageError, match="cuts 1,025 bytes of text into more than 1,024 shards"):
        make_plan([Source("x", (str(tmp_path),))], Options(), 1)


def test_a_path_that_ends_like_a_weight_is_a_path_if_it_is_there(place: Path, tmp_path: Path):
    (tmp_path / "d:7").mkdir()
    assert parse_source(f"a={tmp_path}/d:7") == Source("a", (f"{tmp_path}/d:7",))
    assert parse_source(f"a={tmp_path}/d:7:2") == Source("a", (f"{tmp_path}/d:7",), 2.0)
    assert parse_source("a=x:*.jsonl") == Source("a", ("x:*.jsonl",))


def test_a_merge_judges_by_the_fraction_it_is_given(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    bad, out = tmp_path / "bad.jsonl", tmp_path / "out"
    bad.write_text((place / "b.jsonl").read_text() + "[]\n" * 200)
    command = ["prepare", str(bad), "--tokenizer", str(place / MODEL_NAME), "--out", str(out)]
    assert main([*command, "--on_bad_data", "skip", "--shard", "0/1"]) == 0
    assert main(["prepare", "--merge", "--out", str(out)]) == 3
    assert "raise --max_bad_fraction" in capsys.readouterr().err
    assert main(["prepare", "--merge", "--out", str(out), "--max_bad_fraction", "0.1"]) == 0
    assert open_prepared(out).manifest["rejected"]["count"] == 200


def test_a_plan_is_about_a_thousand_units_at_most(tmp_path: Path):
    file = tmp_path / "large.jsonl"
    with open(file, "wb") as made:
        made.truncate(40 * 2**30)  # sparse
    for bytes_, most in ((2**20, 1), (20 * 2**20, 2), (40 * 2**30, MAX_UNITS)):
        os.truncate(file, bytes_)
        units = make_plan([Source("x", (str(file),))], Options()).units
        assert most / 2 <= len(units) <= most
        assert all(unit.bytes <= max(SMALLEST_UNIT, 2 * bytes_ // MAX_UNITS) for unit in units)
