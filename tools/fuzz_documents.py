"""Damaged JSONL against a judge that shares no code with the readers.

    python -m tools.fuzz_documents --inputs 20000 --seed 7

Good documents are written, damaged, and read: as one piece, cut into segments, and packed. Exactly
the lines that the judge calls documents have to come out, and every other line as a rejection that
names the file, the line and the byte, and says of it what is so.
"""

from __future__ import annotations

import argparse
import faulthandler
import gzip
import json
import random
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import zstandard
from pyarrow import parquet

from minimind.data.text.documents import Rejection
from tests.data.text.reading import read

LIMIT = 2000  # max_document_bytes
HANGS_AFTER = 60  # seconds for one input
Damage = Callable[[random.Random, bytes], bytes]

ALPHABETS = [
    "abcdefghij klmnop .,\n",
    "春眠不覺曉處聞啼鳥。\n",
    '{}[]":,\\/ \t\n\r',
    "é Привет 😀🏳️‍🌈\u2028\u2581\ufeff\x1b\x7f",
]


def good_file(draw: random.Random) -> bytes:
    """Lines that are all documents, spelled in every way JSON has."""
    end = draw.choice([b"\n", b"\n", b"\n", b"\r\n"])
    content = end.join(_good_line(draw) for _ in range(draw.randint(1, 12)))
    return content + draw.choice([end, end, b""])


def _good_line(draw: random.Random) -> bytes:
    alphabet = draw.choice(ALPHABETS)
    text = "".join(draw.choices(alphabet, k=draw.choice([1, 10, 40, 200])))
    pairs: list[tuple[str, Any]] = [("text", text)]
    for _ in range(draw.choice([0, 0, 1, 3])):
        extra = draw.choice([1, -2.5e3, True, None, "é", [1, [2]], {"text": "inner"}, "x" * 3000])
        pairs.insert(draw.randint(0, len(pairs)), (f"k{draw.randint(0, 99)}", extra))
    spelled = json.dumps(dict(pairs), ensure_ascii=draw.random() < 0.5)
    return spelled.encode("utf-8")


def _somewhere(draw: random.Random, content: bytes) -> int:
    return draw.randint(0, len(content))


def _flip(draw: random.Random, content: bytes) -> bytes:
    at = draw.randrange(len(content)) if content else 0
    flipped = bytes([content[at] ^ 1 << draw.randrange(8)]) if content else b"?"
    return content[:at] + flipped + content[at + 1 :]


def _truncate(draw: random.Random, content: bytes) -> bytes:
    return content[: _somewhere(draw, content)]


def _insert(draw: random.Random, content: bytes) -> bytes:
    strange = [
        b"\0",
        b"\r",
        b"\n",
        b"\n\n",
        b"\r\n",
        b"\xef\xbb\xbf",
        b"\xff",
        b"\xc0\xaf",
        b"\xe6",
    ]
    strange += [b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b'"', b"\\", b"{", b"}", b"[", b",", b"\t"]
    at = _somewhere(draw, content)
    return content[:at] + draw.choice(strange) + content[at:]


def _insert_line(draw: random.Random, content: bytes) -> bytes:
    deep = draw.choice([90, 99, 100, 101, 500, 5000])
    half = draw.choice([b"\\ud83d", b"\\ude00", b"\\ud83d\\ud83d", b"\\ude00\\ud83d"])
    lines = [
        b'{"text": ' + b"[" * deep + b"]" * draw.choice([deep, deep, 0]) + b"}",
        b'{"text": "a", "n": ' + b"[" * deep + b"]" * deep + b"}",
        b'{"n":' * deep + b"1" + b"}" * deep,
        b'{"text": "a", "n": ' + b"7" * draw.choice([300, 4300, 4301, 9000]) + b"}",
        b'{"text": "a", "n": ' + draw.choice([b"1e999", b"-1e-999", b"01", b".5", b"+1"]) + b"}",
        b'{"text": "a", "n": ' + draw.choice([b"NaN", b"Infinity", b"-Infinity", b"nan"]) + b"}",
        b'{"text": "' + half + b'"}',
        b'{"text": "a", "n": "' + half + b'"}',
        b'{"text": "a", "text": "b"}',
        b'{"text": "a", "te\\u0078t": null}',
        b'{"text": "a", "n": {"text": 1, "text": 2}}',
        b'{"text": "' + b"x" * draw.choice([LIMIT, LIMIT + 1, 90_000]) + b'"}',
        b'{"text": "' + b"\\u00e9" * draw.choice([LIMIT // 2, LIMIT // 2 + 1, 20_000]) + b'"}',
        b'{"text": ' + draw.choice([b"null", b"3", b"[]", b"{}", b'""', b"true", b"'a'"]) + b"}",
        draw.choice([b"{}", b"[]", b"null", b'"a"', b"1", b"", b" ", b"\t\r", b"\x0b", b"\0\0"]),
        b'{"text": "a\\u0000b"}',
    ]
    parts = content.split(b"\n")
    parts.insert(draw.randint(0, len(parts)), draw.choice(lines))
    return b"\n".join(parts)


def _swap_quotes(draw: random.Random, content: bytes) -> bytes:
    return content.replace(b'"', b"'", draw.randint(1, 4))


def _join_lines(draw: random.Random, content: bytes) -> bytes:
    return content.replace(b"\n", draw.choice([b"", b" ", b"\r"]), draw.randint(1, 2))


def _double_lines(draw: random.Random, content: bytes) -> bytes:
    parts = content.splitlines(keepends=True) or [b"\n"]
    at = draw.randrange(len(parts))
    return b"".join([*parts[: at + 1], *parts[at:]])


def _cut_out(draw: random.Random, content: bytes) -> bytes:
    first, last = sorted((_somewhere(draw, content), _somewhere(draw, content)))
    return content[:first] + content[min(last, first + 30) :]


def _rename_field(draw: random.Random, content: bytes) -> bytes:
    return re.sub(rb'"text"', draw.choice([b'"Text"', b'"txt"', b"text", b"1"]), content, count=1)


def _spoil_start(draw: random.Random, content: bytes) -> bytes:
    return draw.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"\n", b" "]) + content


DAMAGES: list[Damage] = [
    _flip,
    _truncate,
    _insert,
    _insert_line,
    _swap_quotes,
    _join_lines,
    _double_lines,
    _cut_out,
    _rename_field,
    _spoil_start,
]


def damaged_file(draw: random.Random, field: str) -> bytes:
    """A good file with a few things gone wrong, one time in ten with none; never empty."""
    content = good_file(draw)
    for _ in range(draw.choice([0, 1, 1, 1, 2, 2, 3, 4, 6, 9])):
        content = draw.choice(DAMAGES)(draw, content)
    return content.replace(b'"text"', f'"{field}"'.encode()) or b"\n"


class _Pairs(list[Any]):
    """An object of JSON with all its pairs."""


def _depth(text: str) -> int:
    """The deepest nesting of JSON that is known to be valid, by its brackets outside strings."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    depth = deepest = 0
    for character in bare:
        depth += (character in "[{") - (character in "]}")
        deepest = max(deepest, depth)
    return deepest


def judge(line: bytes, field: str) -> str | None:
    """The document in a line, None where there is none."""
    if line.startswith(b"\xef\xbb\xbf") or b"\0" in line or len(line) > LIMIT * 6 + 65536:
        return None
    try:
        text = line.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, _Pairs) or _depth(text) > 100:
        return None
    match [content for key, content in value if key == field]:
        case [str(document)]:
            strange = any(c == "\0" or "\ud800" <= c <= "\udfff" for c in document)
            usable = document and not strange and len(document.encode()) <= LIMIT
            return document if usable else None
    return None


def _is_bad_json(line: bytes) -> bool:
    try:
        json.loads(line.decode(), parse_constant=lambda name: 0)
    except ValueError:
        return True
    return False


def _objects_field(line: bytes, field: str) -> list[Any]:
    value = json.loads(line.decode(), object_pairs_hook=_Pairs)
    return [content for key, content in value if key == field]


# The words of a rejection, and whether they are so of a line and its field.
CLAIMS: dict[str, Callable[[bytes, str], bool]] = {
    "begins with a byte order mark": lambda line, field: line[:3] == b"\xef\xbb\xbf",
    "holds a NUL byte": lambda line, field: b"\0" in line,
    "the line is blank": lambda line, field: not line.strip(),
    "is not UTF-8": lambda line, field: line.decode(errors="replace").count("\ufffd") > 0,
    "has \\r alone": lambda line, field: b"\r" in line.strip() and _is_bad_json(line),
    "is the first line of an object": lambda line, field: line.strip() == b"{",
    "is cut off": lambda line, field: _is_bad_json(line),
    "is not JSON (": lambda line, field: _is_bad_json(line),
    "too many digits": lambda line, field: re.search(rb"\d{4301}", line) is not None,
    "is nested too deep": lambda line, field: sum(map(line.count, (b"[", b"{"))) > 100,
    "not an object": lambda line, field: (
        not isinstance(json.loads(line, object_pairs_hook=_Pairs), _Pairs)
    ),
    "has no ": lambda line, field: _objects_field(line, field) == [],
    " times": lambda line, field: len(_objects_field(line, field)) > 1,
    "not a string": lambda line, field: not isinstance(_objects_field(line, field)[0], str),
    "the document is empty": lambda line, field: _objects_field(line, field) == [""],
    "a NUL character": lambda line, field: "\0" in _objects_field(line, field)[0],
    "contains a lone surrogate": lambda line, field: (
        re.search(rb"\\u[dD][89a-fA-F]", line) is not None
    ),
    "the document has ": lambda line, field: len(_objects_field(line, field)[0].encode()) > LIMIT,
    "the line is longer": lambda line, field: len(line) > LIMIT + 65536,
}


def _require_true(rejection: Rejection, line: bytes, begin: int, field: str) -> None:
    """Nothing, or an AssertionError where the byte or the words do not fit the line."""
    assert rejection.byte is not None
    if rejection.what.startswith("the file is UTF-16"):
        assert rejection.path.read_bytes()[:2] in (b"\xff\xfe", b"\xfe\xff")
        return
    at = rejection.byte - begin
    if rejection.what.startswith("is not UTF-8"):
        line[:at].decode()
        assert all(_is_broken(line[at : at + size]) for size in (1, 2, 3, 4))
        assert f"(0x{line[at]:02x}" in rejection.what
    else:
        assert at == 0
    report = [claim for words, claim in CLAIMS.items() if words in rejection.what]
    assert report, rejection.what
    assert any(claim(line, field) for claim in report), rejection.what


def _is_broken(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return True
    return False


def require_right(path: Path, content: bytes, found: list[str | Rejection], field: str) -> int:
    """How many lines were rejected, each for what it is; an AssertionError for anything else."""
    lines = content.split(b"\n")
    lines = lines[:-1] if not lines[-1] else lines
    assert len(found) == len(lines)
    begin = rejected = 0
    for number, (line, one) in enumerate(zip(lines, found, strict=True), 1):
        expected = judge(line, field)
        if isinstance(one, Rejection):
            assert expected is None, f"line {number} is a document but was rejected: {one}"
            assert (one.path, one.line) == (path, number)
            assert str(one).startswith(f"{path}:{number} (byte {one.byte}): {one.what}; ")
            assert "\n" not in str(one)
            _require_true(one, line, begin, field)
            rejected += 1
        else:
            assert one == expected, f"line {number}"
        begin += len(line) + 1
    return rejected


def check_input(draw: random.Random, directory: Path) -> tuple[int, int]:
    """(lines, rejected among them) of one damaged file that was read rightly in every way."""
    field = draw.choice(["text", "text", "text", "content"])
    content = damaged_file(draw, field)
    how = {"text_field": field, "max_document_bytes": LIMIT}
    path = directory / "a.jsonl"
    path.write_bytes(content)
    found = read(path, **how)
    rejected = require_right(path, content, found, field)
    for unit in (draw.randint(1, 40), draw.randint(1, len(content))):
        if len(content) < 400 * unit:  # a segment of a byte each, for a long file, says no more
            assert read(path, unit, **how) == found, f"in segments of {unit} bytes"
    packed = directory / draw.choice(["a.jsonl.gz", "a.jsonl.zst"])
    at = _somewhere(draw, content)
    packed.write_bytes(_packed(packed, content[:at]) + _packed(packed, content[at:]))
    assert _without_path(read(packed, **how)) == _without_path(found), packed.suffix
    stream = _packed(packed, content)
    cut = draw.random() < 0.5
    packed.write_bytes(stream[: draw.randrange(1, len(stream))] if cut else _flip(draw, stream))
    _require_reported(read(packed, **how), _without_path(found), cut)
    _check_table(draw, directory / "a.parquet", found, how)
    return len(found), rejected


def _packed(path: Path, content: bytes) -> bytes:
    if path.suffix == ".gz":
        return gzip.compress(content)
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


def _require_reported(found: list[str | Rejection], whole: list[Any], cut: bool) -> None:
    """What was read of a damaged packed file is never silently less than it held."""
    last = found[-1] if found else None
    is_reported = isinstance(last, Rejection) and "compressed stream" in last.what
    if isinstance(last, Rejection) and is_reported:
        assert last.line == len(found)
    if cut:
        assert is_reported
        assert _without_path(found[:-1]) == whole[: len(found) - 1]
    if not is_reported:  # a bit can stand where it changes nothing, such as the time in the header
        assert _without_path(found) == whole


def _check_table(
    draw: random.Random, path: Path, found: list[str | Rejection], how: dict[str, Any]
) -> None:
    """The same documents, with a null where a rejection was, in row groups of any size."""
    cells = [None if isinstance(one, Rejection) else one for one in found]
    kind = draw.choice([pyarrow.string(), pyarrow.large_string()])
    table = pyarrow.table({"n": range(len(cells)), how["text_field"]: pyarrow.array(cells, kind)})
    parquet.write_table(table, path, row_group_size=draw.randint(1, 6))
    for unit in (draw.randint(1, 2000), 2**40):
        for row, (cell, one) in enumerate(zip(cells, read(path, unit, **how), strict=True), 1):
            if isinstance(one, Rejection):
                assert cell is None
                assert str(one).startswith(f"{path}:{row} (row {row}): ")
            else:
                assert one == cell


def _without_path(found: list[str | Rejection]) -> list[Any]:
    return [(one.line, one.byte, one.what) if isinstance(one, Rejection) else one for one in found]


def check_inputs(inputs: int, seed: int, directory: Path) -> tuple[int, int]:
    """(lines, rejected) of that many damaged files; an AssertionError says which one failed."""
    lines = rejected = 0
    for index in range(inputs):
        faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
        try:
            counts = check_input(random.Random(f"{seed}/{index}"), directory)
        except Exception as error:  # whatever escapes is the finding
            raise AssertionError(f"seed {seed}, input {index}: {error!r}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()  # or it would end whatever comes next
        lines, rejected = lines + counts[0], rejected + counts[1]
    return lines, rejected


def main() -> None:
    """Print the seed and what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    requested = parser.parse_args()
    print(f"seed {requested.seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        lines, rejected = check_inputs(requested.inputs, requested.seed, Path(directory))
    seconds = time.monotonic() - began
    print(f"{requested.inputs} damaged files, {lines} lines, {rejected} rejected, {seconds:.0f} s")


if __name__ == "__main__":
    main()
