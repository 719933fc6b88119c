"""Damaged files by the thousand; `python -m tools.fuzz_documents` makes any number."""

import pytest

from tools.fuzz_documents import check_inputs, judge


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_every_line_of_a_damaged_file_is_a_document_or_a_truthful_rejection(tmp_path, seed):
    lines, rejected = check_inputs(250, seed, tmp_path)
    assert 100 < rejected < lines / 2


def test_a_reader_that_loses_a_document_is_found(tmp_path, monkeypatch):
    from minimind.data.text import readers

    lenient = readers.document_of_line
    monkeypatch.setattr(readers, "document_of_line", lambda line, how: lenient(line, how).strip())
    with pytest.raises(AssertionError, match="seed 0, input"):
        check_inputs(50, 0, tmp_path)


@pytest.mark.parametrize(
    ("line", "document"),
    [
        (b'{"text": "a", "n": 1}\r', "a"),
        (b'{"text": "a", "text": "a"}', None),
        (b'{"text": "a", "n": NaN}', "a"),
        (b'{"text": NaN}', None),
        (b'{"text": "\\ud83d"}', None),
        (b'{"text": "\\ud83d\\ude00"}', "😀"),
        (b'{"text": "a\xff"}', None),
        (b'{"text": ""}', None),
        (b'["text"]', None),
    ],
)
def test_the_judge_knows_a_document(line, document):
    assert judge(line, "text") == document
