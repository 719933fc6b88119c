"""Readers against files whose documents, or whose one mistake, are known by line and byte."""

import os

import pytest

from minimind.data.documents import find_files, read_documents
from minimind.errors import DataError

GOOD = b'{"text": "one"}\n'
SECOND = len(GOOD)
LIMIT = 1000


def documents(tmp_path, content, name="a.jsonl", limit=LIMIT):
    path = tmp_path / name
    path.write_bytes(content)
    return list(read_documents(path, limit))


# What the second line is, the byte a complaint names (from the line's beginning), and its words.
MISTAKES = [
    (b'{"text": "\xff"}', 10, "not UTF-8"),
    (b'{"text": "\xe6\x98"}', 10, "not UTF-8"),
    (b'{"text": "\xed\xa0\x80"}', 10, "not UTF-8"),
    (b'{"text": "a\x00b"}', 0, "NUL byte"),
    (b'{"text": "a\\u0000b"}', 0, "NUL character"),
    (b"\0" * 50, 0, "NUL byte"),
    (b'{"text": "cut o', 0, "cut off"),
    (b'{"text": "two"', 0, "cut off"),
    (b'{"text": two}', 0, "not JSON"),
    (b'{"text": "two"} {"text": "three"}', 0, "not JSON"),
    (b'{"text": "two", "score": NaN}', 0, "NaN is not JSON"),
    (b'{"text": "two", "score": -Infinity}', 0, "-Infinity is not JSON"),
    (b'{"text": "two", "n": ' + b"1" * 5000 + b"}", 0, "too many digits"),
    (b'{"text": ' + b"[" * 60_000, 0, "nested too deep"),
    (b'["two"]', 0, "is a list, not an object"),
    (b'"two"', 0, "is a string, not an object"),
    (b"3", 0, "is a number, not an object"),
    (b"null", 0, "is null, not an object"),
    (b'{"content": "two"}', 0, 'has no "text"'),
    (b'{"text": null}', 0, '"text" is null, not a string'),
    (b'{"text": ["two"]}', 0, '"text" is a list, not a string'),
    (b'{"text": 2}', 0, '"text" is a number, not a string'),
    (b'{"text": ""}', 0, "document is empty"),
    (b"", 0, "line is blank"),
    (b" \t\r", 0, "line is blank"),
    (b'{"text": "\\ud83d"}', 0, "half a surrogate pair (\\ud83d)"),
    (b'{"text": "' + b"a" * 1001 + b'"}', 0, "has 1001 bytes"),
    (b'{"text": "' + "字".encode() * 334 + b'"}', 0, "has 1002 bytes"),
    (b'{"text": "' + b"a" * 100_000 + b'"}', 0, "line is longer"),
]


@pytest.mark.parametrize(("line", "byte", "words"), MISTAKES)
def test_a_mistake_is_told_with_its_line_and_byte(tmp_path, line, byte, words):
    with pytest.raises(DataError) as caught:
        documents(tmp_path, GOOD + line + b"\n" + GOOD)
    told = str(caught.value)
    assert told.startswith(f"{tmp_path / 'a.jsonl'}:2 (byte {SECOND + byte}): ")
    assert words in told
    assert "; " in told
    assert "\n" not in told


def test_a_byte_order_mark_is_told(tmp_path):
    for name in ("a.jsonl", "a.txt"):
        with pytest.raises(DataError, match=r":1 \(byte 0\): .*byte order mark"):
            documents(tmp_path, b"\xef\xbb\xbf" + GOOD, name)


def test_a_file_cut_off_in_the_last_line_is_told(tmp_path):
    with pytest.raises(DataError, match=r":2 \(byte 16\): is cut off"):
        documents(tmp_path, GOOD + GOOD[:-4])


def test_a_line_without_end_is_never_held(tmp_path):
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"text": "')
        file.seek(2**33)  # a hole of 8 GiB: held, it would not fit
        file.write(b"x")
    with pytest.raises(DataError, match="line is longer"):
        list(read_documents(path, LIMIT))


def test_documents_before_a_mistake_are_given_first(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"nonsense")
    reader = read_documents(tmp_path / "a.jsonl", LIMIT)
    assert next(reader) == "one"
    with pytest.raises(DataError):
        next(reader)


def test_a_line_is_a_document(tmp_path):
    longest = "字" * 333 + "."
    lines = ['{"text": "a\\nb", "id": 3}', '{"id": {"x": [1]}, "text": " \\t"}']
    lines += ['{"text": "\\u6625\\ud83d\\ude00"}', f'{{"text": "{longest}"}}']
    expected = ["a\nb", " \t", "春😀", longest]
    for end in ("\n", "\r\n"):
        assert documents(tmp_path, end.join(lines).encode()) == expected
        assert documents(tmp_path, (end.join(lines) + end).encode()) == expected


def test_a_text_file_is_one_document_as_it_is(tmp_path):
    text = " 春眠\r\n\n不覺曉\t \n"
    assert documents(tmp_path, text.encode(), "a.txt") == [text]


@pytest.mark.parametrize(
    ("content", "line", "byte", "words"),
    [
        (b"one\ntwo \xff\n", 2, 8, "not UTF-8"),
        (b"one\ntwo \0\n", 2, 4, "NUL byte"),
        (b"a" * 1001, 1, 0, "longer than max_document_bytes = 1000"),
    ],
)
def test_a_mistake_in_a_text_file_is_told_too(tmp_path, content, line, byte, words):
    with pytest.raises(DataError) as caught:
        documents(tmp_path, content, "a.txt")
    assert f"a.txt:{line} (byte {byte}): " in str(caught.value)
    assert words in str(caught.value)


def test_a_directory_is_searched_at_every_depth_and_sorted(tmp_path):
    for name in ("b.txt", "a/z.jsonl", "a/b/c.txt", ".hidden.txt", ".cache/d.txt", "notes.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(GOOD)
    found = find_files([tmp_path / "b.txt", str(tmp_path)])
    names = [path.relative_to(tmp_path).as_posix() for path in found]
    assert names == ["b.txt", "a/b/c.txt", "a/z.jsonl", "b.txt"]


def test_what_is_no_text_file_is_refused_by_name(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "zero.txt").touch()
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone.txt")
    for name, words in [
        ("missing.jsonl", "no such file"),
        ("empty", "holds no .jsonl or .txt"),
        ("zero.txt", "is empty"),
        ("a.parquet", "suffix '.parquet'"),
        ("pipe.jsonl", "pipe or a device"),
        ("link.txt", "no such file"),
    ]:
        with pytest.raises(DataError) as caught:
            find_files([tmp_path / name])
        assert str(caught.value).startswith(f"{tmp_path / name}: ")
        assert words in str(caught.value)
