"""Decontamination: n-grams of datatrove's own indexer and filter, and planted questions."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from minimind.data.quality.steps import WORD_OR_MARK, Decontamination, PlainWords
from tests.data.quality.test_filter import kept, removed, report_of, run, write
from tests.data.quality.test_rules import documents, words

QUESTION = "Which 3 of the many rivers in this old country flow to the sea?"
NGRAM = "which 0 of the many rivers in this old country flow to"


def planted(seed: int) -> tuple[list[str], list[str]]:
    """Questions, and texts of which every third one has a part of a question."""
    rng = random.Random(seed)
    questions = [" ".join(words(rng, rng.randint(5, 30))) for _ in range(60)]
    texts = documents(seed, 10)
    for at in range(0, len(texts), 3):
        part = rng.choice(questions).split()[: rng.randint(8, 16)]
        texts[at] += f" {' '.join(part).upper()}. {' '.join(words(rng, 5))}"
    return questions, texts


def test_what_is_removed_is_what_datatroves_indexer_and_filter_remove(tmp_path: Path):
    from datatrove.data import Document
    from datatrove.pipeline.decont import (
        NGramsDecontConfig,
        NGramsDecontFilter,
        NGramsDecontIndexer,
    )
    from datatrove.utils.hashing import HashConfig

    questions, texts = planted(3)
    foreign = write(tmp_path / "questions.jsonl", questions)
    text = write(tmp_path / "t.jsonl", texts)
    assert run(tmp_path / "out", text, "--decontaminate", foreign) == 0

    given: dict[str, Any] = {
        "config": NGramsDecontConfig(hash_config=HashConfig(hash_fc="sha1")),
        "language": PlainWords(WORD_OR_MARK),
    }
    indexer = object.__new__(NGramsDecontIndexer)  # `new` would ask for lighteval
    indexer.__init__(str(tmp_path / "index"), **given)
    hashes = {found for question in questions for found in indexer.compute_hashes(question)}
    ours = Decontamination(tmp_path / "ours", ["questions"])
    assert ours.write_index(0, iter(questions))
    ours.load_index_hashes()
    assert set(ours._index_hashes or {}) == hashes
    reference = NGramsDecontFilter(str(tmp_path / "index"), **given)
    reference._index_hashes = dict.fromkeys(hashes, "task")
    left = [one.text for one in reference.run(Document(text, "") for text in texts)]  # type: ignore[arg-type] (an iterable is taken too)
    assert kept(tmp_path / "out") == left
    assert 20 < report_of(tmp_path / "out")["removed"]["decontaminate"]["documents"] < 100


def test_the_ngram_and_the_file_are_listed(tmp_path, capsys):
    first = write(tmp_path / "a.jsonl", [" ".join("abcdefghijkl")])
    second = tmp_path / "b.jsonl"
    second.write_text(f'{{"question": "{QUESTION}"}}\n')
    first.write_text(first.read_text().replace('"text"', '"question"'))
    near = QUESTION.replace("old", "new")
    text = write(tmp_path / "t.jsonl", [near, f"It asks: {QUESTION.upper().replace('3', '412')}"])
    words = ("--decontaminate", first, second, "--decontaminate_field", "question")
    assert run(tmp_path / "out", text, *words) == 0
    assert kept(tmp_path / "out") == [near]
    assert removed(tmp_path / "out") == [
        {
            **{"file": str(text), "line": 2, "reason": "decontaminate"},
            **{"ngram": NGRAM, "of": str(second)},
        }
    ]
    assert report_of(tmp_path / "out")["steps"] == {
        "decontaminate": [str(first), str(second)],
        "decontaminate_field": "question",
    }
    words = ("--decontaminate", tmp_path / "out", "--min_chars", 2, "--force")
    assert run(tmp_path / "out", text, *words) == 2
    assert "part-00000.jsonl.zst, which is read" in capsys.readouterr().err


def test_files_that_can_find_nothing_are_refused(tmp_path, capsys, monkeypatch):
    text = write(tmp_path / "t.jsonl", [QUESTION])
    short = write(tmp_path / "short.jsonl", ["too few words"])
    assert run(tmp_path / "out", text, "--decontaminate", short) == 3
    assert f"--decontaminate {short}: no text has 12 words" in capsys.readouterr().err
    assert run(tmp_path / "out", text, "--decontaminate", text, "--decontaminate_field", "q") == 3
    assert f"{text}:1" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "datatrove", None)
    assert run(tmp_path / "out", text, "--decontaminate", text) == 2
    assert "data filter needs datatrove" in capsys.readouterr().err
