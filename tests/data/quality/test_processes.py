"""`data filter --processes N`: the same bytes for any N, bounded memory, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from minimind.config.run_config import PROJECT
from minimind.data.prepare.workers import process_pool
from minimind.data.quality import filter as module
from minimind.data.quality.filter import FilterRequest
from tests.data.prepare.test_workers import children, errors_of_killed
from tests.data.quality.test_classifier import a_model
from tests.data.quality.test_decontaminate import planted
from tests.data.quality.test_filter import removed, run, write


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
    monkeypatch.setattr(module, "CHUNK_DOCUMENTS", 7)
    numbers = (1, 2, 3) if pytestconfig.getoption("--long") else (1, 3)
    for processes in numbers:
        out = tmp_path / str(processes)
        assert run(out, text, *steps, "--processes", processes) == 0
    expected = bytes_of(tmp_path / "1")
    assert all(bytes_of(tmp_path / str(processes)) == expected for processes in numbers)
    reasons = {entry["reason"].partition(".")[0] for entry in removed(tmp_path / "1")}
    assert reasons >= {"rejected", "min_chars", "max_chars", "languages", "c4", "gopher"}
    assert reasons >= {"classifier", "decontaminate", "exact_duplicate", "near_duplicate"}


def test_only_a_few_documents_are_read_ahead(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_DOCUMENTS", 10)
    monkeypatch.setattr(module, "CHUNK_CHARACTERS", 100)
    request = FilterRequest((), min_chars=2, processes=2)
    texts = ["a", "bc" * 40, "d"] * 200
    ahead, given = 0, 0

    def documents() -> Iterator[tuple[str, int]]:
        nonlocal given
        for place, text in enumerate(texts):
            given += 1
            yield text, place

    with process_pool(2, "filters the text") as pool:
        checked = module._checked(request, [], request.checks([]), pool, documents())
        for text, (found, left) in zip(texts, checked, strict=True):
            ahead = max(ahead, given - found[1])
            assert found[0] == text
            assert (left == text) == (len(text) > 1)
    assert ahead <= 4 * 10


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("stop", "victim"),
    [(signal.SIGINT, "parent"), (signal.SIGKILL, "worker"), (signal.SIGKILL, "parent")],
)
def test_a_stop_ends_it_in_one_sentence_and_leaves_no_folder(
    stop: signal.Signals, victim: str, tmp_path: Path
):
    text = write(tmp_path / "t.jsonl", [" ".join(f"word{n}" for n in range(60))] * 50_000)
    command = [sys.executable, "-m", "minimind", "data", "filter", str(text), "--out"]
    command += [str(tmp_path / "out"), "--rules", "gopher", "--rules_words", "plain"]
    command += ["--processes", "2"]
    environ = {**os.environ, "PYTHONPATH": str(PROJECT)}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        workers: list[int] = []
        listed = tmp_path / ".out.draft" / "removed.ndjson"
        while len(workers) < 3 or not listed.exists() or not listed.stat().st_size:
            assert process.poll() is None
            workers = children(process.pid)  # with the resource tracker
            time.sleep(0.01)
        errors = errors_of_killed(process, workers, stop, victim)
    if victim == "worker":
        said = "a process that filters the text was killed, perhaps for lack of memory; free some"
        assert said in errors
    if stop == signal.SIGINT or victim == "worker":
        assert {path.name for path in tmp_path.iterdir()} == {"t.jsonl"}
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
