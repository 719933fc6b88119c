"""The example corpus against itself: the same interpreter writes the same bytes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.text.reading import documents_of

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "stdlib_corpus.py"


def write(path, megabytes="0.5"):
    command = [sys.executable, str(SCRIPT), str(path), "--max_megabytes", megabytes]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_corpus_is_the_same_every_time_and_readable(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "new" / "b.jsonl"
    report = write(first)
    write(second)
    assert first.read_bytes() == second.read_bytes()
    before = first.stat()
    assert write(first) == report
    assert first.stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in second.parent.iterdir()] == ["b.jsonl"]
    documents = documents_of(first, max_document_bytes=64_000)
    assert report == f"{len(documents)} documents, {before.st_size / 1e6:.1f} MB, {first}\n"
    assert 0.4e6 < before.st_size <= 0.5e6
    assert any("import " in document for document in documents)
    assert documents[0].startswith('The "assert" statement\n')  # as help("assert") begins
    assert any(document.startswith('"""') and "\ndef " in document for document in documents)


@pytest.mark.long
def test_it_is_words_and_not_tables(tmp_path):
    path = tmp_path / "all.jsonl"
    write(path, "12")
    text = "".join(documents_of(path, max_document_bytes=64_000))
    assert sum(map(str.isdigit, text)) < 0.02 * len(text)
    assert text.count("0x") < 1e-4 * len(text)
