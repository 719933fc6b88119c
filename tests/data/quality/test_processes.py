"""`data filter --processes N`: the same bytes for any N, and after a stop."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minimind.config.run_config import PROJECT
from minimind.data.prepare import work_units
from minimind.data.quality import filter as module
from tests.data.prepare.test_workers import children, errors_of_killed
from tests.data.quality.test_classifier import a_model
from tests.data.quality.test_decontaminate import planted
from tests.data.quality.test_filter import removed, run, write
from tests.data.quality.test_rules import words


def bytes_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def test_output_report_and_list_are_the_same_for_any_number(
    tmp_path: Path, monkeypatch, pytestconfig: pytest.Config
):
    questions, texts = planted(5)
    foreign = write(tmp_path / "questions.jsonl", questions)
    model = a_model(tmp_path / "model.bin")
    texts = [f"{text} good" if number % 5 else text for number, text in enumerate(texts)]
    texts = [f"{text} It is so{end}" for end in (".", " .", ".") for text in texts]
    lines = [json.dumps({"url": f"u{number}", "text": one}) for number, one in enumerate(texts)]
    lines[5:5] = lines[7:7] = lines[300:300] = ["{", '{"text": ""}', "[]"]
    text = tmp_path / "t.jsonl"
    text.write_text("".join(line + "\n" for line in lines))
    steps = [
        *("--min_chars", 20, "--max_chars", 100_000, "--rules", "c4,gopher", "--rules_words"),
        *("plain", "--languages", "en,fr,la,de,es,it", "--min_language_probability", 0.01),
        *("--classifier", model, "--classifier_keep", "hq=0.6", "--decontaminate", foreign),
        *("--exact_dedup", "--minhash", "--on_bad_data", "skip", "--max_bad_fraction", 0.5),
    ]
    # A task costs a tenth of a second, whatever is in it.
    is_long = pytestconfig.getoption("--long")
    monkeypatch.setattr(work_units, "SMALLEST_UNIT", 20_000 if is_long else 200_000)
    numbers = (1, 2, 3) if is_long else (1, 2)
    for processes in numbers:
        out = tmp_path / str(processes)
        assert run(out, text, *steps, "--processes", processes) == 0
    expected = bytes_of(tmp_path / "1")
    assert all(bytes_of(tmp_path / str(processes)) == expected for processes in numbers)
    reasons = {entry["reason"].partition(".")[0] for entry in removed(tmp_path / "1")}
    assert reasons >= {"rejected", "min_chars", "max_chars", "languages", "c4", "gopher"}
    assert reasons >= {"classifier", "decontaminate", "exact_duplicate", "near_duplicate"}


UNITS = """
import sys
from minimind.cli.main import main
from minimind.data.prepare import work_units
work_units.SMALLEST_UNIT = 130_000
sys.exit(main(sys.argv[1:]))
"""


def a_text(path: Path, documents: int) -> Path:
    """Texts that are too short, that break rules, and that repeat others, in many tasks."""
    rng = random.Random(0)
    known = words(rng, 2000)
    texts = [" ".join([*rng.choices(known, k=60), "the", "of", "and."]) for _ in range(documents)]
    texts[::3] = texts[1::3]
    return write(path, [text if n % 7 else text[:50] for n, text in enumerate(texts)])


STEPS = ["--min_chars", "60", "--rules", "gopher", "--rules_words", "plain"]
STEPS += ["--exact_dedup", "--minhash"]


def command(text: Path, out: Path) -> list[str]:
    given = ["data", "filter", str(text), "--out", str(out), "--processes", "2", *STEPS]
    return [sys.executable, "-c", UNITS, *given]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("stop", "victim"),
    [(signal.SIGINT, "parent"), (signal.SIGKILL, "worker"), (signal.SIGKILL, "parent")],
)
def test_after_a_stop_the_same_command_goes_on_and_ends_with_the_same_bytes(
    stop: signal.Signals, victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text, out, draft = a_text(tmp_path / "t.jsonl", 4200), tmp_path / "out", tmp_path / ".out.draft"
    environ = {**os.environ, "PYTHONPATH": str(PROJECT)}
    monkeypatch.setattr(work_units, "SMALLEST_UNIT", 130_000)
    assert run(tmp_path / "undisturbed", text, *STEPS) == 0
    given = {"env": environ, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command(text, out), **given) as process:
        workers: list[int] = []
        while len(workers) < 3 or not [*draft.glob("scratch/0_filters/completions/*")]:
            assert process.poll() is None
            workers = children(process.pid)  # with the resource tracker
            time.sleep(0.01)
        errors = errors_of_killed(process, workers, stop, victim)
    if victim == "worker":
        said = "a process that filters the text was killed, perhaps for lack of memory; free some"
        assert said in errors
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not out.exists()
    assert 0 < len([*draft.glob("scratch/0_filters/completions/*")]) < 10
    folder = draft.stat().st_ino
    subprocess.run(command(text, out), env=environ, check=True)
    assert out.stat().st_ino == folder
    assert bytes_of(out) == bytes_of(tmp_path / "undisturbed")
    assert len(bytes_of(out)) > 10


def test_what_a_task_wrote_is_on_disk_before_the_task_counts_as_complete(tmp_path, monkeypatch):
    draft, synced = tmp_path / ".out.draft", set()

    def sync(path: Path) -> None:
        assert len([*draft.glob("scratch/*/completions/00000")]) < 4
        synced.add(path.relative_to(draft).as_posix())

    text, stages = write(tmp_path / "t.jsonl", ["one", "a b c d e f"]), []
    monkeypatch.setattr(module, "sync_file", sync)
    defaults = (False, lambda given, processes: stages.extend(given))
    monkeypatch.setattr(module.filter_text, "__defaults__", defaults)
    assert run(tmp_path / "out", text, "--min_chars", 4, "--minhash") == 70
    module.run_here(lambda: stages, stages, 1)
    assert {"part-00000.jsonl.zst", "scratch/removed/00000-02"} <= synced
    assert "scratch/near_passed/00000.jsonl.zst" in synced
    assert "scratch/near_signatures/bucket_013/00000.minhash.sig" in synced
    left = {path.relative_to(draft).as_posix() for path in draft.rglob("*") if path.is_file()}
    of_datatrove = ("completions/", "stats", "logs/", "executor.json")
    assert {one for one in left - synced if not any(part in one for part in of_datatrove)} == set()


def test_a_text_that_changes_while_it_is_filtered_ends_the_command(tmp_path: Path, capsys):
    text = write(tmp_path / "t.jsonl", ["one two three"])

    def change(stages: list[module.Stage], processes: int) -> None:
        content = text.read_bytes()
        text.write_bytes(content * 2)
        module.run_here(lambda: stages, stages, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.filter_text, "__defaults__", (False, change))
        assert run(tmp_path / "out", text, "--min_chars", 4) == 3
    assert "changed since its preparation started" in capsys.readouterr().err
    assert run(tmp_path / "out", text, "--min_chars", 4) == 0
    assert len(bytes_of(tmp_path / "out")["part-00000.jsonl.zst"]) > 0


def test_another_request_does_not_go_on_with_the_draft(tmp_path: Path, monkeypatch, capsys):
    text = write(tmp_path / "t.jsonl", ["one", "three"])
    stages = []

    def stop(found: list[object], processes: int) -> None:
        stages.extend(found)

    monkeypatch.setattr(module.filter_text, "__defaults__", (False, stop))
    assert run(tmp_path / "out", text, "--min_chars", 4) == 70
    assert "tasks of 0_filters are not complete, the first is 0" in capsys.readouterr().err
    (tmp_path / ".out.draft" / "mark").touch()
    assert run(tmp_path / "out", text, "--min_chars", 4) == 70
    assert (tmp_path / ".out.draft" / "mark").exists()
    for other in (["--min_chars", 5], ["--min_chars", 4, "--on_bad_data", "skip"]):
        (tmp_path / ".out.draft" / "mark").touch()
        assert run(tmp_path / "out", text, *other) == 70
        assert not (tmp_path / ".out.draft" / "mark").exists()
    monkeypatch.undo()
    assert run(tmp_path / "out", text, "--min_chars", 4) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"t.jsonl", "out"}
