"""A reader that loses its place counts what is lost until the place is found again."""

import bz2
import gzip
import json
import lzma
from hashlib import sha256

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from minimind.data.text import documents, readers
from minimind.data.text.documents import ReadOptions, Rejection
from minimind.data.text.formats import read_segment, segments_of

TEXTS = [f"number {n} of the texts, {n**9:x}" for n in range(1000)]
LINES = [json.dumps({"id": n, "text": text}).encode() for n, text in enumerate(TEXTS)]
ROWS = [b"id,text", *(b'%d,"%s"' % (n, text.encode()) for n, text in enumerate(TEXTS))]
PLAIN = [
    b"id,text",
    *(b"%d,%s" % (n, text.replace(",", "").encode()) for n, text in enumerate(TEXTS)),
]


def lines(content, newline=b"\n"):
    return newline.join(content) + newline


def changed(content, *changes):
    """The lines with others at some places."""
    content = list(content)
    for at, line in changes:
        content[at] = line
    return lines(content)


def listed(content):
    return b"[\n" + b",\n".join(content) + b"\n]\n"


def cut(content, at):
    """Two lines for one, with a newline in a string."""
    line = content[at]
    return [*content[:at], line[:20], line[20:], *content[at + 1 :]]


def found_in(path, content, **reading):
    """The documents, those that are lost, the share of the bytes that is, and the remarks."""
    path.write_bytes(content)
    how = ReadOptions(**reading)
    (segment,) = segments_of(path, 2**62)
    found = [*read_segment(segment, how)]
    bad = [one for one in found if isinstance(one, Rejection)]
    lost = sum(one.documents for one in bad)
    share = sum(one.bytes for one in bad) / len(content)
    return len(found) - len(bad), lost, share, [what for _, what in how.remarks], bad


OPEN = (901, b'900,"%s' % TEXTS[900].encode())
CLOSED = [
    pytest.param("a.csv", lines(ROWS), (1000, 0), id="csv"),
    # Open to the end: quoted rows close it at once, and plain rows never.
    pytest.param("a.csv", changed(PLAIN, OPEN), (900, 100), id="csv-open-to-the-end"),
    pytest.param("a.csv", changed(PLAIN, OPEN)[:-1], (900, 100), id="csv-open-no-newline"),
    pytest.param("a.tsv", changed(PLAIN, OPEN).replace(b",", b"\t"), (900, 100), id="tsv"),
    pytest.param("a.csv", changed(PLAIN, (1, b'0,"a')), (0, 1000), id="csv-first-row"),
    pytest.param("a.csv", changed(ROWS, OPEN), (998, 2), id="csv-quoted-rows"),
    pytest.param(
        "a.csv", changed(PLAIN, (301, b'300,"a'), (601, b'600,"b"')), (699, 301), id="csv-reopened"
    ),
    pytest.param(
        "a.csv", changed(PLAIN, (301, b'300,"a'), (601, b'600,b",c')), (699, 301), id="csv-width"
    ),
    pytest.param(
        "a.csv", changed(PLAIN, (301, b'300,"a'), (601, b'600,b\xff"')), (699, 301), id="csv-utf8"
    ),
    pytest.param("a.csv", changed(PLAIN, (301, b"300,a,b")), (999, 1), id="csv-one-row"),
    pytest.param(
        "a.csv",
        b"text,n\n" + b'"one\ntwo\nthree\nfour",1\n' * 40 + b'"one\n\xff\n\nfour",1,2\n',
        (40, 1),
        id="csv-a-row-of-four-lines",
    ),
    pytest.param(
        "a.jsonl",
        lines([*LINES[:500], b"".join(LINES[500:600]), *LINES[600:]]),
        (900, 100),
        id="joined",
    ),
    pytest.param(
        "a.jsonl", lines([*LINES[:500], LINES[500] + LINES[501], *LINES[502:]]), (998, 2), id="two"
    ),
    pytest.param(
        "a.jsonl",
        lines([*LINES[:500], b"".join(b'[{"role": "user"}, {"role": "tool"}]' for _ in range(7))]),
        (500, 7),
        id="joined-lists-of-turns",
    ),
    pytest.param(
        "a.jsonl", lines([*LINES[:600], b"[%s]" % b",".join(LINES[600:])]), (600, 400), id="a-list"
    ),
    pytest.param("a.jsonl", b'[{"role": "user"}, {"role": "tool"}]\n', (0, 1), id="turns"),
    pytest.param("a.jsonl", b'[{"role": "user"}, 1, {"text": ""}]\n', (0, 1), id="turns-and"),
    pytest.param("a.jsonl", lines(cut(LINES, 500)), (999, 2), id="newline-in-a-string"),
    pytest.param("a.jsonl", lines(LINES)[:-9], (999, 1), id="cut-off"),
    pytest.param("a.jsonl", b'{"text": "a", "text": "b"}\n', (0, 1), id="key-twice"),
    pytest.param("a.jsonl", b'{"n": "a"}{"n": "b"} {"n": "c"}\n', (0, 3), id="joined-other-fields"),
    pytest.param("a.jsonl", b'{"n": "}{\\"a\\": 1}", "n: 1}\n', (0, 1), id="joined-in-a-string"),
    pytest.param("a.json", listed(LINES), (1000, 0), id="list"),
    pytest.param(
        "a.json",
        listed(
            [
                *LINES[:300],
                LINES[300][:-2] + b"}",
                *LINES[301:600],
                b"{" + LINES[600][2:],
                *LINES[601:],
            ]
        ),
        (699, 301),
        id="list-open-quote-that-another-closes",
    ),
    pytest.param(
        "a.json",
        listed([*LINES[:300], LINES[300][:-1], *LINES[301:], b"{}}"]),
        (300, 700),
        id="list-brace",
    ),
    pytest.param(
        "a.json",
        b"[%s]" % b",".join([*LINES[:10], LINES[10] + LINES[11], *LINES[12:]]),
        (998, 2),
        id="list-comma",
    ),
]


@pytest.mark.parametrize(("name", "content", "counts"), CLOSED)
def test_documents_are_counted_until_the_place_is_found(tmp_path, name, content, counts):
    read, lost, share, _, bad = found_in(tmp_path / name, content)
    assert (read, lost, share) == (*counts, 0), [*map(str, bad)]


LONG = json.dumps({"text": '}{ " ' * 2000, "n": [1]}).encode()


@pytest.mark.parametrize("packing", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("form", "content", "counts"),
    [
        ("jsonl", lines([*LINES[:500], b"".join(LINES[500:900]), *LINES[900:]]), (600, 400)),
        ("jsonl", lines([*LINES[:500], b"\r".join(LINES[500:])]), (500, 500)),
        ("jsonl", lines([*LINES[:500], LONG, *LINES[500:]]), (1000, 1)),
        ("json", listed([*LINES[:500], b" ".join(LINES[500:900]), *LINES[900:]]), (600, 400)),
        ("json", listed([*LINES[:500], LONG, *LINES[500:]]), (1000, 1)),
    ],
)
def test_documents_of_a_line_that_is_too_long_are_counted(
    tmp_path, monkeypatch, form, content, counts, packing
):
    monkeypatch.setattr(documents, "LINE_BYTES_BESIDE_TEXT", 1000)
    monkeypatch.setattr(readers, "PIECE_BYTES", 300)
    path = tmp_path / ("a." + form + ("" if packing is bytes else ".gz"))
    how = {"max_document_bytes": 1000}
    read, lost, share, _, bad = found_in(path, packing(content), **how)
    assert read == counts[0]
    # A place where two are joined may be between two pieces that are looked at.
    assert lost == pytest.approx(counts[1], rel=0.05), [*map(str, bad)]
    assert share == 0


NAMES = [sha256(b"%d" % n).hexdigest() for n in range(6000)]
RECORDS = [b'{"text": "%s"}' % name.encode() for name in NAMES]
MUCH = {"jsonl": lines(RECORDS), "json": listed(RECORDS)}
MUCH["csv"] = lines([b"id,text", *(b"%d,%s" % (n, one.encode()) for n, one in enumerate(NAMES))])
PACKERS = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    "bz2": lambda content: bz2.compress(content, 1),  # the smallest blocks
}
PACKED = [(f"a.{form}.{packing}", form, packing) for form in MUCH for packing in PACKERS]


@pytest.mark.parametrize(
    ("name", "content", "read", "share"),
    [
        ("a.json", listed([*LINES[:500], LINES[500][:-2] + b"}", *LINES[501:]]), 500, 0.52),
        ("a.json", listed([*LINES[:500], LINES[500] + b"}", *LINES[501:]]), 500, 0.52),
        ("a.json", listed(LINES[:500]) + listed(LINES[500:]), 500, 0.52),
        ("a.json", listed([*LINES[:500], b"{}]", *LINES[501:]]), 500, 0.52),
        ("a.jsonl", lines([*LINES[:400], bytes(20_000), *LINES[700:]]), 700, 0.3),
        ("a.jsonl", lines([*LINES[:400], bytes(200_000), *LINES[700:]]), 700, 0.82),
        ("a.json", listed([*LINES[:400], bytes(200_000), *LINES[700:]]), 700, 0.82),
        ("a.jsonl.gz", gzip.compress(lines([*LINES[:700], bytes(20_000)])), 700, 0.3),
        ("a.json.xz", lzma.compress(listed([*LINES[:400], bytes(200_000), *LINES])), 1400, 0.68),
        ("a.csv.gz", gzip.compress(lines([*ROWS[:401], b'0,"%s"' % bytes(3000)])), 400, 0.13),
        ("a.csv", changed(PLAIN, (501, b'500,"a')), 500, 0.52),
    ],
)
def test_what_follows_is_counted_in_bytes(tmp_path, monkeypatch, name, content, read, share):
    monkeypatch.setattr(readers, "LINE_BYTES_BESIDE_TEXT", 2000)
    documents, _, found, *_ = found_in(tmp_path / name, content, max_document_bytes=2000)
    assert documents == read
    assert found == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(("name", "form", "packing"), PACKED)
def test_the_rest_of_a_damaged_stream_is_counted_in_bytes(tmp_path, name, form, packing):
    content = PACKERS[packing](MUCH[form])
    half = len(content) // 2
    wrong = bytes(~byte & 255 for byte in content[half : half + 64])
    damaged = content[:half] + wrong + content[half + 64 :]
    documents, _, share, (remark,), bad = found_in(tmp_path / name, damaged)
    # What a damaged stream gives before its sum is checked may still be lines.
    assert share > 0.4 or documents + len(bad) > 4500
    assert share == pytest.approx(1 - documents / 6000, abs=0.07) or packing == "gz"
    assert remark == str(bad[-1]).removeprefix(str(tmp_path / name))
    documents, _, share, (remark,), _ = found_in(tmp_path / name, content[:half])
    assert documents < 4500
    known = "it lacks " if packing == "zst" else "what it lacks is unknown"
    assert f"the compressed stream is cut off, and {known}" in remark
    assert packing != "zst" or share == pytest.approx(1 - documents / 6000, abs=0.07)


def test_a_record_that_swallows_rows_and_looks_like_one_is_told_with_its_lines(tmp_path):
    swallowing = changed(PLAIN, (301, b'300,"a'), (601, b'600,b"'))
    read, lost, _, remarks, _ = found_in(tmp_path / "a.csv", swallowing)
    assert (read, lost) == (700, 0)
    assert remarks == [
        ":302: one document is read from the 301 lines up to 602; if it holds other rows, end the"
        " quotes of its first line"
    ]
    long = b'"' + b"a line of a long text\n" * 200 + b'"\n'
    assert not found_in(tmp_path / "a.csv", b"text\n" + long * 50)[3]
    assert len(found_in(tmp_path / "a.csv", b"text\n" + long + b"a line\n" * 50)[3]) == 1
    assert len(found_in(tmp_path / "a.csv", b"text\n" + long)[3]) == 1
    assert not found_in(tmp_path / "a.csv", b"text\n" + (b'"' + b"line\n" * 30 + b'"\n') * 50)[3]


def test_rows_of_a_group_that_cannot_be_read_are_lost_and_the_next_group_is_read(tmp_path):
    path, how = tmp_path / "a.parquet", {"row_group_size": 250, "use_dictionary": False}
    table = pyarrow.table({"text": TEXTS})
    parquet.write_table(table, path, write_page_checksum=True, compression="none", **how)
    content = bytearray(path.read_bytes())
    for group in (1, 2):
        chunk = parquet.ParquetFile(path).metadata.row_group(group).column(0)
        content[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    read, lost, _, _, bad = found_in(path, bytes(content))
    assert (read, lost) == (500, 500)
    assert [one.line for one in bad] == [251, 501]
    assert bad[0].what.endswith(", nor are the 249 rows behind it read")
