"""Lines and texts whose one mistake is known by line and byte, against what is said of them."""

import json

import pytest

from minimind.data.text import documents as documents_module
from minimind.data.text.documents import Rejection
from tests.data.text.reading import documents_of, read

GOOD = b'{"text": "one"}\n'
SECOND = len(GOOD)
LIMIT = 1000


def found_in(tmp_path, content, name="a.jsonl", **reading):
    path = tmp_path / name
    path.write_bytes(content)
    return read(path, **{"max_document_bytes": LIMIT, **reading})


def documents(tmp_path, content, name="a.jsonl"):
    path = tmp_path / name
    path.write_bytes(content)
    return documents_of(path, max_document_bytes=LIMIT)


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
    (b'{"text": NaN}', 0, '"text" is NaN, not a string'),
    (b'{"n": NaN, "text": -Infinity}', 0, '"text" is -Infinity, not a string'),
    (b'{"text": "two", "n": nan}', 0, "not JSON"),
    (b'{"text": "two"}{"text": "three"}', 0, "is not JSON (Extra data at column 16)"),
    (b" {\r", 0, "is the first line of an object"),
    (b'{"text": "two"}\r{"text": "three"}', 0, "has \\r alone at the end of lines"),
    (b"NaN", 0, "is NaN, not an object"),
    (b'{"text": "two", "n": ' + b"1" * 5000 + b"}", 0, "too many digits"),
    (b'{"text": ' + b"[" * 60_000, 0, "nested too deep"),
    (b'{"text": "two", "n": ' + b"[" * 100 + b"]" * 100 + b"}", 0, "nested too deep"),
    (b'{"n": ' * 101 + b"1" + b"}" * 101, 0, "nested too deep"),
    (b'["two"]', 0, "is a list, not an object"),
    (b'"two"', 0, "is a string, not an object"),
    (b"3", 0, "is a number, not an object"),
    (b"null", 0, "is null, not an object"),
    (b'{"content": "two"}', 0, 'has no "text"'),
    (b'{"a": 1, "b": 2, "\\ud83d\\n": 3, "d": 4}', 0, 'but "a", "b", "\\ud83d\\n", ...'),
    (b'{"text": "two", "text": "two"}', 0, '"text" 2 times'),
    (b'{"text": null, "te\\u0078t": "two"}', 0, '"text" 2 times'),
    (b'{"text": {"text": "two"}}', 0, '"text" is an object, not a string'),
    (b"\xef\xbb\xbf" + GOOD[:-1], 0, "begins with a byte order mark"),
    (b'{"text": null}', 0, '"text" is null, not a string'),
    (b'{"text": ["two"]}', 0, '"text" is a list, not a string'),
    (b'{"text": 2}', 0, '"text" is a number, not a string'),
    (b'{"text": ""}', 0, "document is empty"),
    (b"", 0, "line is blank"),
    (b" \t\r", 0, "line is blank"),
    (b'{"text": "\\ud83d"}', 0, "contains a lone surrogate (\\ud83d)"),
    (b'{"text": "' + b"a" * 1001 + b'"}', 0, "has 1001 bytes"),
    (b'{"text": "' + "字".encode() * 334 + b'"}', 0, "has 1002 bytes"),
    (b'{"text": "' + b"a" * 100_000 + b'"}', 0, "line is longer"),
    (b'{"text": "' + b"a" * 2**21 + b'"}', 0, "line is longer"),
    (b'{"text": "' + b"\\u0001" * 2**18 + b'"}', 0, "line is longer"),
    (b'{"text": "two\rthree"}', 0, "Invalid control character"),
]


@pytest.mark.parametrize(("line", "byte", "words"), MISTAKES)
def test_a_mistake_is_reported_with_its_line_and_byte_and_reading_continues(
    tmp_path, line, byte, words
):
    first, report, last = found_in(tmp_path, GOOD + line + b"\n" + GOOD)
    assert (first, last) == ("one", "one")
    assert isinstance(report, Rejection)
    assert (report.path, report.line, report.byte) == (tmp_path / "a.jsonl", 2, SECOND + byte)
    assert str(report).startswith(f"{tmp_path / 'a.jsonl'}:2 (byte {SECOND + byte}): ")
    assert words in report.what
    assert str(report).endswith(f"; {report.remedy}")
    assert "\n" not in str(report)


FINE = [
    b'{"text": "two", "n": ' + b"[" * 99 + b"]" * 99 + b"}",
    b'{"text": "two", "n": ' + b"[" * 99 + b"1" + b"]" * 99 + b', "m": [[], {}]}',
    b'{"text": "two", "n": "' + b"[" * 5000 + b'"}',
    b'{"text": "two", "n": ' + b"1" * 4300 + b"}",
    b'{"text": "two", "n": 1e999}',
    b'{"text": "two", "n": "\\ud83d"}',
    b'{"text": "two", "n": {"text": 1, "text": 2}}',
    b'{"text": "two", "n": 1, "n": 2}',
    b' \t{"text":"two"} \r',
    *(b'{"text": "two", "n": %s}' % name for name in (b"NaN", b"Infinity", b"-Infinity", b"1e999")),
    b'{"n": [{"n": NaN}], "text": "two"}',
    b'{"te\\u0078t": "tw\\u006f"}',
    b'{"text": "two", "n": "' + b"a" * 2**16 + b'"}',
]


@pytest.mark.parametrize("line", FINE)
def test_what_is_strange_beside_the_text_is_no_mistake(tmp_path, line):
    assert documents(tmp_path, GOOD + line + b"\n") == ["one", "two"]


def test_a_byte_order_mark_is_reported(tmp_path):
    for name, others in (("a.jsonl", ["one"]), ("a.txt", [])):
        report, *rest = found_in(tmp_path, b"\xef\xbb\xbf" + GOOD + GOOD, name)
        assert ":1 (byte 0): begins with a byte order mark; " in str(report)
        assert rest == others


def test_a_file_cut_off_in_the_last_line_is_reported(tmp_path):
    _, report = found_in(tmp_path, GOOD + GOOD[:-4])
    assert ":2 (byte 16): is cut off" in str(report)


def test_another_field_can_hold_the_text(tmp_path):
    content = b'{"text": 3, "Inhalt": "eins"}\n{"text": "two"}\n'
    one, report = found_in(tmp_path, content, text_field="Inhalt")
    assert one == "eins"
    remedy = 'give --text_field text, or write {"Inhalt": "..."}'
    assert f'has no "Inhalt" but "text"; {remedy}' in str(report)


NO_TEXT = [
    ({"content": "two"}, 'give --text_field content, or write {"text": "..."}'),
    ({"id": 3, "raw content": "two"}, "give --text_field 'raw content', or write"),
    ({"title": "a", "body": "two"}, "give --text_field and the field with the text, or write"),
    ({"a\x1b[2Jb": "two"}, "give --text_field and the field with the text, or write"),
    ({"n": 1}, '; write {"text": "..."}'),
    ({"conversations": "two"}, "give --text_field conversations"),
]


@pytest.mark.parametrize(("line", "words"), NO_TEXT)
def test_the_field_that_has_the_text_is_named_with_the_flag_for_it(tmp_path, line, words):
    (report,) = found_in(tmp_path, json.dumps(line).encode() + b"\n")
    assert words in str(report)
    assert "\x1b" not in str(report)


@pytest.mark.parametrize("field", ["conversations", "messages", "chosen"])
def test_fine_tuning_data_is_called_so(tmp_path, field):
    line = {field: [{"role": "user", "content": "Hi"}]}
    (report,) = found_in(tmp_path, json.dumps(line).encode() + b"\n")
    assert f'has "{field}", a conversation to fine-tune on, and no "text"; ' in str(report)
    assert '; fine-tune on it with --task sft, or write {"text": "..."}, plain text' in str(report)


@pytest.mark.parametrize("field", ["text", "te.x(t", "文\u2028", 'a"b\\', ""])
def test_the_short_way_for_a_text_alone_judges_as_the_long_one(tmp_path, monkeypatch, field):
    name = json.dumps(field, ensure_ascii=False)
    texts = [
        '"one"',
        '"\\ud83d"',
        '"\\u0000"',
        '""',
        '"a\\nb \\"',
        '"a\\n\\"b"',
        '"a\tb"',
        "1",
        "null",
    ]
    ends = ["}", "} ", "}\r", "}}", "", ",", ', "n": 1}', f', {name}: "two"}}', "}x"]
    opened = ["{%s: ", "{%s:", "{ %s\t:\t", "{%s ", "[%s, ", " {%s: "]
    lines = [way % name + text + end for way in opened for text in texts for end in ends]
    content = "\n".join(lines).encode()
    short, taken = documents_module._text_fast_path, []

    def counted(line, reading):
        text = short(line, reading)
        taken.append(text is not None)
        return text

    monkeypatch.setattr(documents_module, "_text_fast_path", counted)
    found = found_in(tmp_path, content, text_field=field)
    monkeypatch.setattr(documents_module, "_text_fast_path", lambda line, reading: None)
    assert found_in(tmp_path, content, text_field=field) == found
    assert len(found) == len(taken) == len(lines)
    assert sum(taken) > 10
    assert not all(taken)


def test_a_line_is_a_document(tmp_path):
    longest = "字" * 333 + "."
    lines = ['{"text": "a\\nb", "id": 3}', '{"id": {"x": [1]}, "text": " \\t"}']
    lines += ['{"text": "\\u6625\\ud83d\\ude00"}', f'{{"text": "{longest}"}}']
    lines += ['{"text": "a\\r\\nb\ufeff"}']
    expected = ["a\nb", " \t", "春😀", longest, "a\r\nb\ufeff"]
    for end in ("\n", "\r\n"):
        assert documents(tmp_path, end.join(lines).encode()) == expected
        assert documents(tmp_path, (end.join(lines) + end).encode()) == expected


def test_the_longest_document_is_read_however_it_is_spelled(tmp_path):
    for spelled in (b"a", b"\\u0001", b"\\n"):
        content = b'{"text": "' + spelled * 300_000 + b'"}\n' + GOOD
        first, second = found_in(tmp_path, content, max_document_bytes=300_000)
        assert isinstance(first, str)
        assert len(first) == 300_000
        assert second == "one"


def test_a_text_file_is_one_document_as_it_is(tmp_path):
    text = " 春眠\r\n\n不覺曉\t \n"
    assert documents(tmp_path, text.encode(), "a.txt") == [text]
