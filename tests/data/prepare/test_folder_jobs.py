"""Several preparations that have one --out: of the same text they are one, of others refused."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minimind.cli.main import main
from minimind.data.prepare import dataset_folder as folder
from minimind.data.prepare.prepared import open_prepared
from minimind.data.tokenizer.sentencepiece import MODEL_NAME, train_tokenizer
from minimind.runtime.locks import held, is_locked_by_anyone
from minimind.runtime.output_folder import NewFolder
from tests.conftest import sentences


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small texts and a tokenizer."""
    place = tmp_path_factory.mktemp("jobs")
    texts = sentences(3, 400)
    for name, part in (("a", texts[:200]), ("b", texts[200:])):
        write(place / f"{name}.jsonl", part)
    train_tokenizer(texts[:100], 512, place / MODEL_NAME)
    return place


def write(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def words(place: Path, out: Path, *more: str, text: tuple[str, ...] = ("a", "b")) -> list[str]:
    named = [f"--source={name}={place / name}.jsonl:1" for name in text]
    tokenizer = ["--tokenizer", str(place / MODEL_NAME)]
    return ["prepare", *named, *tokenizer, "--out", str(out), *more]


def refused(capsys: pytest.CaptureFixture[str], command: list[str]) -> str:
    """The one line of a command that must end with status 2."""
    capsys.readouterr()
    assert main(command) == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    return output


OTHERS: dict[str, tuple[list[str], str]] = {
    "text": (["--data_path", "{place}/a.jsonl"], "another text"),
    "weights": (["--source=a={place}/a.jsonl:9", "--source=b={place}/b.jsonl:1"], "weights"),
    "policy": (["--on_bad_data", "skip"], "on_bad_data (error, here skip)"),
    "limit": (["--max_bad_fraction", "0.5"], "max_bad_fraction (0.05, here 0.5)"),
    "split": (["--val_fraction", "0.5"], "val_fraction (0.01, here 0.5)"),
    "field": (["--text_field", "body"], "text_field (text, here body)"),
    "longest": (["--max_document_bytes", "5"], "max_document_bytes (67108864, here 5)"),
    "cut": (["--shard_bytes", "9KiB"], "shard_bytes"),
    "tokenizer": (["--vocab_size", "520"], "tokenizer"),
}


def other(place: Path, out: Path, case: str) -> list[str]:
    given = [word.format(place=place) for word in OTHERS[case][0]]
    command = words(place, out, *given, text=() if case in ("text", "weights") else ("a", "b"))
    if case == "tokenizer":
        at = command.index("--tokenizer")
        del command[at : at + 2]
    return command


@pytest.mark.parametrize("case", OTHERS)
def test_a_job_that_finds_another_at_work_on_something_else_is_refused(
    case: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    assert main(words(place, out, "--shard", "0/2")) == 0
    before = (tmp_path / "out.part" / "plan.json").read_bytes()
    with held(out, "work", fcntl.LOCK_SH):
        report = refused(capsys, other(place, out, case))
    assert "another prepare is working on" in report
    assert OTHERS[case][1] in report
    assert "; give another --out, or wait" in report
    assert (tmp_path / "out.part" / "plan.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out.part"]


@pytest.mark.parametrize("case", [case for case in OTHERS if case != "text"])
def test_shares_that_are_not_of_one_preparation_are_refused(
    case: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    assert main(words(place, out, "--shard", "0/2")) == 0
    command = [*other(place, out, case), "--shard", "1/2"]
    report = refused(capsys, command)
    assert "out.part was started with another" in report
    assert OTHERS[case][1] in report
    assert "; give all shares the same, or another --out" in report


def test_a_share_continues_after_its_text_was_mended(place: Path, tmp_path: Path):
    write(tmp_path / "t.jsonl", ["one", "two"])
    out = tmp_path / "out"
    command = words(place, out, f"--source=t={tmp_path}/t.jsonl:1", "--val_fraction", "0")
    assert main([*command, "--shard", "0/2"]) == 0
    write(tmp_path / "t.jsonl", ["one", "six"])  # of the same size
    for part in ("0/2", "1/2"):
        assert main([*command, "--shard", part]) == 0
    assert main(["prepare", "--merge", "--out", str(out)]) == 0
    assert last_document(out) == "six"


def last_document(out: Path) -> str:
    prepared = open_prepared(out)
    size = len(prepared.train)
    ids = prepared.train.read_rows(np.arange(max(0, size - 100), size), 1).ravel().tolist()
    eos = prepared.tokenizer.eos_id
    begin = len(ids) - 1 - ids[-2::-1].index(eos)
    return prepared.tokenizer.decode(ids[begin:])


def test_another_preparation_takes_nothing_over_from_one_that_was_cut_at_its_end(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def cut(_: Path) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(folder, "clear", cut)
        assert main(words(place, out, text=("a",))) == 130
    assert (tmp_path / "out.part" / "manifest.json").exists()
    assert main(words(place, out, text=("b",))) == 0
    assert [source["name"] for source in open_prepared(out).manifest["sources"]] == ["b"]


def test_what_was_bad_before_it_was_mended_is_not_listed(place: Path, tmp_path: Path):
    out = tmp_path / "out"
    for name in ("bad", "worse"):
        write(tmp_path / f"{name}.jsonl", ["good", ""])
    named = [f"--source={name}={tmp_path}/{name}.jsonl:1" for name in ("bad", "worse")]
    command = words(place, out, *named, "--on_bad_data", "skip")
    assert main([*command, "--shard", "0/1"]) == 0
    write(tmp_path / "bad.jsonl", ["good", "mended"])
    assert main(command) == 0
    (line,) = (out / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["file"] == str(tmp_path / "worse.jsonl")


def test_a_tokenizer_is_learnt_again_for_another_text(place: Path, tmp_path: Path):
    def command(text: str, name: str) -> list[str]:
        flags = ["--vocab_size", "512", "--out", str(tmp_path / name)]
        return ["prepare", str(place / f"{text}.jsonl"), *flags]

    assert main([*command("a", "out"), "--shard", "0/1"]) == 0
    assert main(command("b", "out")) == 0
    assert main(command("b", "fresh")) == 0
    found = [open_prepared(tmp_path / name).manifest["fingerprint"] for name in ("out", "fresh")]
    assert found[0] == found[1]


def test_other_weights_are_another_fingerprint(place: Path, tmp_path: Path):
    found = set()
    for weight in (1, 9):
        out = tmp_path / str(weight)
        extra = [f"--source=a={place}/a.jsonl:{weight}", f"--source=b={place}/b.jsonl:1"]
        assert main(words(place, out, *extra, text=())) == 0
        found.add(open_prepared(out).manifest["fingerprint"])
    assert len(found) == 2


def test_a_whole_preparation_replaces_another_that_no_one_works_on(place: Path, tmp_path: Path):
    out = tmp_path / "out"
    assert main(words(place, out, "--shard", "0/2", text=("a",))) == 0
    assert main(words(place, out, text=("b",))) == 0
    assert [source["name"] for source in open_prepared(out).manifest["sources"]] == ["b"]


def finish_while_waited_for(out: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> int:
    """The status of a command that waits for a merge, by which `done` becomes `out`."""
    status: list[int] = []
    waiting = threading.Event()
    flock = fcntl.flock

    def report(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_SH:
            waiting.set()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", report)
    with held(out, "work", fcntl.LOCK_EX):
        thread = threading.Thread(target=lambda: status.append(main(command)))
        thread.start()
        assert waiting.wait(120)
        NewFolder(out, False, (), "test", Path.exists).replace(out.with_name("done"))
    thread.join()
    return status[0]


def test_what_appeared_while_a_job_waited_is_its_own_if_it_is_the_same(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_work(*_: Any) -> None:
        raise AssertionError("done again")

    out = tmp_path / "out"
    assert main(words(place, tmp_path / "done")) == 0
    monkeypatch.setattr(folder, "_start_work", no_work)
    assert finish_while_waited_for(out, monkeypatch, words(place, out)) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_appeared_while_a_job_waited_is_refused_if_it_is_another(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    assert main(words(place, tmp_path / "done")) == 0
    command = words(place, out, text=("b",))
    assert finish_while_waited_for(out, monkeypatch, command) == 2
    assert "exists; give another folder, or --force" in capsys.readouterr().err
    assert len(open_prepared(out).manifest["sources"]) == 2


def test_a_plan_that_was_replaced_before_its_merge_is_not_merged(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    encode_plan = folder.encode_plan

    def then_another(*given: Any) -> None:
        encode_plan(*given)
        path = tmp_path / "out.part" / "plan.json"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), "skips_bad": True}))

    monkeypatch.setattr(folder, "encode_plan", then_another)
    report = refused(capsys, words(place, out))
    assert "another prepare has started on" in report
    assert not out.exists()


@pytest.mark.parametrize("is_merge", [False, True])
def test_what_appears_during_the_work_is_not_replaced(
    is_merge: bool,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    out = tmp_path / "out"
    clear = folder.clear

    def meanwhile(draft: Path) -> None:
        out.mkdir()
        (out / "thesis.tex").write_text("mine")
        clear(draft)

    command = words(place, out)
    if is_merge:
        assert main([*command, "--shard", "0/1"]) == 0
        command = ["prepare", "--merge", "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(folder, "clear", meanwhile)
        assert f"--out {out} exists; give another folder, or --force" in refused(capsys, command)
        (out / "thesis.tex").unlink()
        out.rmdir()
        assert "which this version of minimind prepare does not write" in refused(
            capsys, [*command, "--force"]
        )
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    (out / "thesis.tex").rename(tmp_path / "thesis.tex")
    assert main([*command, "--force"]) == 0  # of what is done in the .part
    assert len(open_prepared(out).manifest["sources"]) == 2


def test_no_lock_is_left_by_one_that_failed_or_succeeded(place: Path, tmp_path: Path):
    write(tmp_path / "bad.jsonl", [""])
    bad = [f"--source=t={tmp_path}/bad.jsonl:1"]
    assert main(words(place, tmp_path / "out", *bad)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "out.part"]
    assert main(words(place, tmp_path / "out")) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "out"]


def test_who_waited_for_a_lock_that_was_removed_takes_the_new_one(tmp_path: Path):
    out, lock = tmp_path / "out", tmp_path / ".out.work.lock"
    took: list[bool] = []

    def wait() -> None:
        with held(out, "work", fcntl.LOCK_EX) as descriptor:
            took.append(os.path.samestat(os.fstat(descriptor), lock.stat()))

    holder = os.open(lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    thread = threading.Thread(target=wait)
    thread.start()
    deadline = time.monotonic() + 120
    while _waiters(lock) < 1:
        assert time.monotonic() < deadline
    lock.unlink()  # as its holder does, before it lets go
    lock.touch()
    os.close(holder)
    thread.join()
    assert took == [True]


def _waiters(lock: Path) -> int:
    inode = f":{lock.stat().st_ino} "
    with open("/proc/locks") as locks:
        return sum("->" in line and inode in line for line in locks)


def test_a_lock_is_kept_while_another_shares_it_and_removed_by_the_last(tmp_path: Path):
    out, lock = tmp_path / "out", tmp_path / ".out.work.lock"
    with held(out, "work", fcntl.LOCK_SH):
        with held(out, "work", fcntl.LOCK_SH):
            assert is_locked_by_anyone(out, "work")
        assert lock.exists()
        assert is_locked_by_anyone(out, "work")
    assert not lock.exists()
    assert not is_locked_by_anyone(out, "work")


def test_a_lock_that_cannot_be_made_names_the_folder_requested(
    place: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(words(place, Path("/proc/out"))) == 5
    output = capsys.readouterr().err
    assert " /proc/out: " in output
    assert "lock" not in output


@pytest.mark.parametrize("is_link", [False, True])
def test_what_is_in_the_way_of_the_part_is_named(
    is_link: bool, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    part = tmp_path / "out.part"
    part.symlink_to("nothing") if is_link else part.touch()
    for more in ([], ["--shard", "0/2"]):
        report = refused(capsys, words(place, tmp_path / "out", *more))
        assert f"{part} is a file or a link, and --out {tmp_path / 'out'} is built in" in report
        assert "; move it away, or give another --out" in report


def test_an_out_of_too_long_a_name_is_named_as_it_was_given(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / (250 * "x")
    assert main(words(place, out)) == 5
    assert f": {out}: File name too long" in capsys.readouterr().err
