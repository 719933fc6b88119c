"""Each form of a file against the loader that people know it by: json, csv, pyarrow, pandas, ...

Texts and mutations are made from seeds.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pandas
import pyarrow
import pytest
import zstandard
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from minimind.data.chat.conversations import conversation_records
from minimind.data.text import readers
from minimind.data.text.documents import ReadOptions, Rejection
from minimind.data.text.formats import segments_of
from minimind.data.text.inputs import find_files
from minimind.data.text.packed import PACKINGS
from minimind.errors import DataError
from tests.data.text.reading import documents_of, read

GZIPPED = gzip.compress(b"text\n", mtime=0)  # with a time it would be another test id each second
PACKERS = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
PIECES = [
    "春眠",
    "a b",
    '"',
    '""',
    ",",
    "\t",
    "\n",
    "\r\n",
    "\\",
    "\\\\",
    "[",
    "]}",
    "{",
    "é",
    "\U0001f600",
]


def made(seed: int, count: int) -> list[str]:
    """Texts of what a reader may stumble over; none is empty or blank."""
    chance = random.Random(seed)
    return ["x" + "".join(chance.choices(PIECES, k=chance.randrange(9))) for _ in range(count)]


def records_of(texts: list[str]) -> list[dict[str, object]]:
    return [{"id": n, "text": text, "meta": {"tags": ["a,b]"]}} for n, text in enumerate(texts)]


def put(path: Path, content: bytes) -> Path:
    path.write_bytes(PACKERS[path.suffix if path.suffix in PACKINGS else ""](content))
    return path


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("layout", ["lines", "ndjson", "list", "pretty", "ascii"])
def test_json_of_any_layout_is_what_json_loads(tmp_path, monkeypatch, packing, layout):
    records = records_of(made(1, 300))
    if layout in ("lines", "ndjson"):
        content = "".join(json.dumps(record) + "\n" for record in records).encode()
        reference = [json.loads(line) for line in content.splitlines()]
    else:
        how = {
            "list": {},
            "pretty": {"indent": 2, "ensure_ascii": False},
            "ascii": {"indent": None},
        }
        content = json.dumps(records, **how[layout]).encode()
        reference = json.loads(content)
    name = "a.ndjson" if layout == "ndjson" else "a.json"
    path = put(tmp_path / f"{name}{packing}", content)
    wanted = [record["text"] for record in reference]
    for size in (readers.PIECE_BYTES, 97, 1):
        monkeypatch.setattr(readers, "PIECE_BYTES", size)
        assert documents_of(path) == wanted


def test_json_is_what_datasets_loads(tmp_path, monkeypatch):
    datasets.disable_progress_bars()
    records = [{"id": n, "text": text} for n, text in enumerate(made(2, 200))]
    for name, content in [
        ("a.json", json.dumps(records, indent=1)),
        ("b.json", "".join(json.dumps(record) + "\n" for record in records)),
    ]:
        path = put(tmp_path / name, content.encode())
        loaded = datasets.load_dataset("json", data_files=str(path), cache_dir=str(tmp_path / "c"))
        assert documents_of(path) == list(loaded["train"]["text"])


@pytest.mark.long  # thousands of texts
def test_a_mutated_list_is_read_as_json_loads_it_or_refused(tmp_path):
    """No item is read differently, and none of what is no JSON is read without a word."""
    chance = random.Random(3)
    content = json.dumps(records_of(made(3, 5)), ensure_ascii=False).encode()
    counts = {"same": 0, "refused": 0}
    for _ in range(3000):
        mutated = bytearray(content)
        for _ in range(chance.randrange(1, 3)):
            at = chance.randrange(1, len(mutated))
            put_in = chance.choice([b"", b"[", b"]", b"{", b"}", b",", b'"', b"\\", b"\xff", b" "])
            mutated[at : at + chance.randrange(3)] = put_in
        found = read(put(tmp_path / "a.json", bytes(mutated)))
        bad = [one for one in found if isinstance(one, Rejection)]
        try:
            items = json.loads(mutated)
        except ValueError:
            assert bad, mutated
            counts["refused"] += 1
            continue
        texts = [item.get("text") if isinstance(item, dict) else None for item in items]
        assert [one for one in found if isinstance(one, str)] == [
            text for text, one in zip(texts, found, strict=True) if isinstance(one, str)
        ]
        assert bad or found == texts
        counts["same" if not bad else "refused"] += 1
    assert min(counts.values()) > 300


@pytest.mark.parametrize(
    ("content", "report"),
    [
        (b"[]", "1 (byte 0): is empty; fill it or leave it out"),
        (b'[{"text": "a"}', "1 (byte 0): the list is cut off; copy the file again"),
        (b'[{"text": "a"}, ', "2 (byte 15): the list is cut off (1 of 16 bytes of the file are"),
        (b'[{"text": "a"}, {"text": "b}]', "2 (byte 15): the list is cut off, or a quote or"),
        (b'[{"text": "a"}]\n{}', "2 (byte 15): text follows the list (3 of 18 bytes of the file"),
        (b'[{"text": "a"}}]', "1 (byte 0): the list holds a } without its {; correct it"),
        (b'[\n {"text": "a"},\n]', "2 (byte 18): the line is blank; remove it"),
        (
            b'[{"text": "a"},\n  {"text": 1}]',
            '2 (byte 18): "text" is a number, not a string; write',
        ),
        (b'[{"text": "a"},  {"text": "\xff"}]', "2 (byte 27): is not UTF-8 (0xff: invalid start"),
        (b'[{"text": "a"}, {"text": "%s"}]' % (b"b" * 2**17), "2 (byte 15): the line is longer"),
    ],
)
def test_a_bad_list_is_named_by_item_and_byte(tmp_path, content, report):
    path = put(tmp_path / "a.json", content)
    found = read(path, max_document_bytes=2**10)
    assert [one for one in found if isinstance(one, str)] == ["a"] * (len(found) - 1)
    assert str(found[-1]).startswith(f"{path}:{report}")


def test_a_list_that_is_larger_than_memory_allows_is_read_item_by_item(tmp_path):
    """200 MiB of text in a list of JSON, and in a string that never ends, in 160 MiB more."""
    for name in ("items", "string"):
        with zstandard.open(tmp_path / f"{name}.json.zst", "wb") as file:
            piece = b"x" * 2**20
            file.write(b'[{"text": "')
            for _ in range(200):
                file.write(piece + (b'"}, {"text": "' if name == "items" else b""))
            file.write(b'"}]' if name == "items" else b"")
    code = f"""
from pathlib import Path
from minimind.runtime.environment import peak_bytes
from tests.data.text.reading import read
before = peak_bytes()
from minimind.data.text.documents import ReadOptions, Rejection
from minimind.data.text.formats import segments_of
from minimind.data.text.formats import read_segment
for name in ("items", "string"):
    (segment,) = segments_of(Path({str(tmp_path)!r}) / f"{{name}}.json.zst", 2**62)
    found = read_segment(segment, ReadOptions(max_document_bytes=2**21))
    bad = [isinstance(one, Rejection) for one in found]
    print(len(bad), sum(bad))
print((peak_bytes() - before) >> 20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *counts, mebibytes = done.stdout.splitlines()
    assert counts == ["201 1", "1 1"]  # the last item is empty; the string is too long
    assert int(mebibytes) < 160


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("form", [".txt", ".md"])
def test_a_whole_file_is_its_text(tmp_path, form, packing):
    text = "".join(made(4, 400))
    assert documents_of(put(tmp_path / f"a{form}{packing}", text.encode())) == [text]
    (report,) = read(put(tmp_path / f"b{form}{packing}", b"ab\n\xff"))
    assert f"b{form}{packing}:2 (byte " in str(report)
    assert "is not UTF-8" in str(report)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_packed_file_of_nothing_or_cut_off_is_reported(tmp_path, packing):
    for form in (".txt", ".csv", ".json"):
        for content, words in [(b"", "is empty"), (b"text\nb" * 2000, "cut off")]:
            path = put(tmp_path / f"a{form}{packing}", content)
            if content:
                path.write_bytes(path.read_bytes()[:-9])
            elif form == ".csv":
                with pytest.raises(DataError, match='has no column "text"'):
                    read(path)
                continue
            assert words in str(read(path)[-1])


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "a.tsv.xz"])
def test_cells_are_what_csv_pyarrow_and_pandas_read(tmp_path, name, end, quoting):
    texts = [*made(5, 400), "NA", "null", "1", "true", " x ", "1e3"]
    delimiter = "\t" if ".tsv" in name else ","
    written = io.StringIO(newline="")
    writer = csv.writer(written, delimiter=delimiter, lineterminator=end, quoting=quoting)
    writer.writerow(["id", "text", "n"])
    writer.writerows([n, text, n % 3] for n, text in enumerate(texts))
    content = written.getvalue().encode()
    path = put(tmp_path / name, content)
    found = documents_of(path)
    assert found == texts
    rows = csv.DictReader(io.StringIO(written.getvalue(), newline=""), delimiter=delimiter)
    assert found == [row["text"] for row in rows]
    table = arrow_csv.read_csv(
        io.BytesIO(content),
        parse_options=arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=arrow_csv.ConvertOptions(column_types={"text": pyarrow.string()}),
    )
    assert found == table["text"].to_pylist()
    frame = pandas.read_csv(
        io.BytesIO(content), sep=delimiter, dtype=str, keep_default_na=False, lineterminator=None
    )
    assert found == frame["text"].tolist()
    assert documents_of(put(tmp_path / name, b"\xef\xbb\xbf" + content), text_field="text") == texts


@pytest.mark.parametrize(
    ("content", "reports"),
    [
        (
            b"id,text\n1,a\n\n2,b,c\n3,d\n",
            ["a", "4 (byte 13): has 3 cells, and the first row 2", "d"],
        ),
        (b'text,n\n"a\nb",1\n"c"d,1\ne,1\n', ["a\nb", "4 (byte 15): is not CSV (", "e"]),
        (b"text\na\nb\rc\r", ["a", "3 (byte 7): has \\r alone at the end of lines; write \\n"]),
        (b"text\na\n\xff\nb\n", ["a", "3 (byte 7): is not UTF-8 (0xff", "b"]),
        (b'n,text\n1,""\n2,b\n', ["2 (byte 7): the document is empty; remove it", "b"]),
        (b'text\na\n"b\n', ["a", "3 (byte 7): is not CSV (unexpected end of data)"]),
        (b"text\n", ["1 (byte 0): is empty; fill it or leave it out"]),
    ],
)
def test_a_bad_row_is_named_by_line_and_byte(tmp_path, content, reports):
    path = put(tmp_path / "a.csv", content)
    found = read(path)
    for one, wanted in zip(found, reports, strict=True):
        assert one == wanted or str(one).startswith(f"{path}:{wanted}")


@pytest.mark.long  # thousands of texts
def test_a_mutated_csv_is_read_as_csv_and_pyarrow_read_it_or_refused(tmp_path):
    chance = random.Random(7)
    written = io.StringIO(newline="")
    csv.writer(written, lineterminator="\n").writerows(
        [["id", "text"], *([n, text] for n, text in enumerate(made(7, 12)))]
    )
    content = written.getvalue().encode()
    counts = {"same": 0, "refused": 0}
    types = {"id": pyarrow.binary(), "text": pyarrow.string()}
    for _ in range(2000):
        mutated = bytearray(content)
        for _ in range(chance.randrange(1, 3)):
            at = chance.randrange(len(b"id,text\n"), len(mutated))
            put_in = chance.choice([b"", b'"', b'""', b",", b"\n", b"\r", b"\xff", b" ", b"\n\n"])
            mutated[at : at + chance.randrange(3)] = put_in
        found = read(put(tmp_path / "a.csv", bytes(mutated)))
        if any(isinstance(one, Rejection) for one in found):
            counts["refused"] += 1
            continue
        counts["same"] += 1
        text = mutated.decode(errors="surrogateescape")  # of the other column
        assert found == [row["text"] for row in csv.DictReader(io.StringIO(text, newline=""))]
        table = arrow_csv.read_csv(
            io.BytesIO(mutated),
            parse_options=arrow_csv.ParseOptions(newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(column_types=types),
        )
        assert found == table["text"].to_pylist(), text
    assert min(counts.values()) > 300


def test_quotes_without_an_end_do_not_take_the_whole_file_into_memory(tmp_path):
    path = put(tmp_path / "a.csv", b'text\na\n"' + b"b\n" * 2**18)
    report = (
        f"{path}:3 (byte 7): the record is longer than {2 * 1000 + 2**16} bytes"
        f" ({2**19 + 1:,} of {2**19 + 8:,} bytes of the file are not read); end its quotes"
    )
    one, rejection = read(path, max_document_bytes=1000)
    assert one == "a"
    assert str(rejection).startswith(report)
    assert isinstance(rejection, Rejection)
    assert rejection.bytes == 2**19 + 1


ERRORS = [
    {"error": "Repository not found"},
    {"error": {"code": 404, "message": "No such object: a", "errors": []}},
    {"error": "invalid_token", "error_description": "expired"},
    {"detail": "Not Found"},
    {"message": "Not Found", "documentation_url": "https://docs", "status": "404"},
    {"code": 403, "message": "Permission denied"},
    {"Code": 404, "Message": "record missing", "RequestId": "0", "Success": False},
    {"errcode": 40001, "errmsg": "hint: [a]"},
    {"type": "https://docs", "title": "Not Found", "status": 404, "traceId": "00"},
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.txt"])
def test_what_an_api_says_in_place_of_data_is_named(tmp_path, name):
    for error in ERRORS:
        for content in (
            json.dumps(error),
            json.dumps(error, indent=1),
            f"{json.dumps(error)}\n" * 3,
        ):
            (tmp_path / name).write_bytes(content.encode())
            one, *_ = read(tmp_path / name)
            assert re.search("is an error message(, not gzip)?; download the file itself", str(one))
    good = json.dumps({"text": "a"})
    for error in ERRORS:
        *_, bad = read(put(tmp_path / "a.jsonl", f"{good}\n{json.dumps(error)}\n".encode()))
        assert "; if it is the answer of a server, remove it or download its text again" in str(bad)
    for record in (
        {"message": "hello"},
        {"title": "a", "body": "not found"},
        {"error": "a", "n": 1},
    ):
        *_, bad = read(put(tmp_path / "a.jsonl", json.dumps(record).encode()))
        assert 'has no "text" but ' in str(bad)
        assert "server" not in str(bad)


LOGS = [{"message": f"connection {n} timed out", "code": 504} for n in range(200)]
ANSWERS = [
    b"<Error> is the element that S3 answers with; its Code says why.\n",
    b"<Error><Code>NoSuchKey</Code></Error>\nis what S3 answers.\n",
    b"<?xml version='1.0'?>\n<Error><Message>a</Message>\n</Error>\n\nThe above is XML.\n",
    b'{"error": "a"}\n\nis what the interface answers.\n',
    b"<p>A part of a page</p>\n",
    b"".join(json.dumps(log).encode() + b"\n" for log in LOGS),
]


@pytest.mark.parametrize("content", ANSWERS)
def test_a_text_on_answers_of_servers_is_a_text(tmp_path, content):
    assert read(put(tmp_path / "a.txt", content)) == [content.decode()]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_records_that_look_like_answers_of_servers_are_read_and_named_as_records(tmp_path, name):
    lines = [json.dumps(log).encode() for log in LOGS]
    content = b"\n".join([*lines, b'{"message": ""}', b'{"message": '])
    path = put(tmp_path / name, content)
    *texts, empty, cut = read(path, text_field="message")
    assert texts == [log["message"] for log in LOGS]
    assert "the document is empty; remove it" in str(empty)
    assert "is cut off" in str(cut)
    one, *_ = read(put(tmp_path / "b.jsonl", b"\n".join(lines)))
    assert str(one).endswith("download its text again; else give --text_field message")


@pytest.mark.parametrize(
    ("name", "packer", "kind"),
    [
        (f"a{form}{packing}", other, kind)
        for form in (".jsonl", ".json", ".txt", ".csv")
        for packing in PACKINGS
        for other, kind in [(".gz", "gzip"), (".zst", "zstd"), (".xz", "xz"), (".bz2", "bzip2")]
        if other != packing
    ],
)
def test_what_is_packed_otherwise_is_named(tmp_path, name, packer, kind):
    (tmp_path / name).write_bytes(PACKERS[packer](b'{"text": "a"}\n'))
    try:
        report = str(read(tmp_path / name)[0])
    except DataError as error:
        report = str(error)
    own = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bzip2"}[Path(name).suffix]
    assert f"the file is {kind}, not {own}; unpack it" in report


def test_a_wrong_kind_is_named_at_the_first_line(tmp_path):
    for name, content, words in [
        ("a.jsonl", json.dumps([{"text": "a"}], indent=1).encode(), "or name it .json"),
        ("a.ndjson", '{"text": "a"}\n'.encode("utf-16"), "the file is UTF-16; convert"),
        ("a.json", GZIPPED, "the file is gzip; unpack it (gzip -d), or name it .gz"),
        ("a.json", b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer; fetch"),
        ("b.json", b"%PDF-1.7\n", "the file is a PDF; write its text as .txt"),
        ("c.md", b"PK\x03\x04" + b"\0" * 60, "the file is a zip archive; unpack it (unzip)"),
    ]:
        (report,) = read(put(tmp_path / name, content))[:1]
        assert words in str(report)


@pytest.mark.sample(1)
@pytest.mark.parametrize("packing", [".xz", ".bz2"])
def test_a_bomb_is_unpacked_in_pieces(tmp_path, packing):
    packer = lzma.LZMACompressor() if packing == ".xz" else bz2.BZ2Compressor()
    with open(tmp_path / f"a.txt{packing}", "wb") as file:
        for _ in range(150):
            file.write(packer.compress(bytes(2**20)))
        file.write(packer.flush())
    code = f"""
from pathlib import Path
from minimind.runtime.environment import peak_bytes
from tests.data.text.reading import read
before = peak_bytes()
print(read(Path({str(tmp_path / f"a.txt{packing}")!r}), max_document_bytes=1000)[0])
print((peak_bytes() - before) >> 20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    report, mebibytes = done.stdout.splitlines()
    assert "holds a NUL byte" in report
    assert int(mebibytes) < 100


def test_xz_that_needs_more_memory_than_its_strongest_level_is_refused(tmp_path):
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2**29}]
    content = lzma.compress(b'{"text": "a"}\n', format=lzma.FORMAT_XZ, filters=filters)
    (tmp_path / "a.jsonl.xz").write_bytes(content)
    (report,) = map(str, read(tmp_path / "a.jsonl.xz"))
    assert report.endswith(
        "needs more than 256 MiB of memory; compress it again with xz -9 at most"
    )


def test_a_file_of_a_folder_that_is_beside_the_text_is_left_out(tmp_path):
    for name in ("a.json", "README.md", "dataset_infos.json", "tokenizer_config.json", "b.md"):
        put(tmp_path / name, b"{}")
    assert [path.name for path in find_files([tmp_path])] == ["a.json", "b.md"]
    assert [path.name for path in find_files([tmp_path / "README.md"])] == ["README.md"]


FIELDS = {"title": "T", "text": "春\n", "data": {"text": "inner", "deep": {"x": "X"}}, "a.b": "dot"}
TEMPLATES = [
    ("text", "春\n"),
    ("data.text", "inner"),
    ("data.deep.x", "X"),
    ("a.b", "dot"),
    ("{title}\n{text}", "T\n春\n"),
    ("{title}\\n{data.text}", "T\ninner"),
    ("{{{title}}} {data.deep.x}{a.b}.", "{T} Xdot."),
    ("{text}{text}", "春\n春\n"),
]


@pytest.mark.parametrize(("field", "text"), TEMPLATES)
def test_a_template_is_filled_like_format_in_every_form(tmp_path, field, text):
    rows = [FIELDS, FIELDS | {"extra": "e"}]
    plain = field.replace("\\n", "\n")
    if "{" in field and "." not in field.replace("}.", ""):
        assert text == plain.format(**FIELDS)
    lines = put(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    as_list = put(tmp_path / "a.json", json.dumps(rows, indent=2).encode())
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "a.parquet")
    datasets.disable_progress_bars()
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    for path in (lines, as_list, tmp_path / "a.parquet", tmp_path / "saved"):
        assert documents_of(path, text_field=field) == [text, text]


def test_a_template_of_columns_is_read_from_csv(tmp_path):
    path = put(tmp_path / "a.csv", b'title,n,text\nT,1,"a\nb"\nU,2,\n')
    assert read(path, text_field="{title}: {text}") == ["T: a\nb", "U: "]


def test_what_a_template_misses_is_named(tmp_path):
    lines = put(tmp_path / "a.jsonl", b'{"title": "T", "data": {"body": "b"}}\n')
    parquet.write_table(
        pyarrow.Table.from_pylist([{"title": "T", "data": {"body": "b"}}]), tmp_path / "a.parquet"
    )
    table = put(tmp_path / "a.csv", b"title,n\nT,1\n")
    for field, words in [
        (
            "{title} {text}",
            'has no "text" but "title", "data"; give --text_field and the field with'
            ' the text, or write {"title": "...", "text": "..."}',
        ),
        (
            "data.text",
            'has no "data.text" but "title", "data"; give --text_field and the field with'
            ' the text, or write {"data": {"text": "..."}}',
        ),
        ("data", '"data" is an object, not a string; write {"data": "..."}'),
    ]:
        assert str(read(lines, text_field=field)[0]) == f"{lines}:1 (byte 0): {words}"
    for path, field, words in [
        (
            tmp_path / "a.parquet",
            "data.text",
            'has no column "data.text" but "title", "data"; give',
        ),
        (tmp_path / "a.parquet", "{title}{data}", 'column "data" holds struct<body: string>, not'),
        (table, "{title}{text}", 'has no column "text" but "title", "n"; give --text_field'),
    ]:
        with pytest.raises(DataError) as caught:
            read(path, text_field=field)
        assert str(caught.value).startswith(f"{path}: {words}")
    only = put(tmp_path / "b.jsonl", b'{"data": {"body": "b"}}\n')
    assert "; give --text_field data.body, or write" in str(read(only)[0])


def test_a_null_in_a_template_is_a_bad_row(tmp_path):
    rows = [{"a": {"x": "1"}, "b": "2"}, {"a": None, "b": "2"}, {"a": {"x": None}, "b": "2"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    one, *bad = read(tmp_path / "a.parquet", text_field="{a.x}{b}")
    assert one == "12"
    assert [str(report).partition(": ")[2] for report in bad] == [
        '"a.x" is null, not a string; remove the row'
    ] * 2


def test_a_file_that_is_not_cut_is_one_segment(tmp_path):
    content = json.dumps(records_of(made(6, 50))).encode()
    for name in ("a.json", "a.csv", "a.ndjson.gz", "a.md"):
        assert len(segments_of(put(tmp_path / name, content), 100)) == 1
    assert len(segments_of(put(tmp_path / "a.ndjson", content), 500)) > 5


def test_conversations_are_the_same_from_every_form(tmp_path):
    records = conversation_records(ReadOptions(), set())
    pairs = [{"prompt": text, "completion": text[::-1]} for text in made(8, 40)]
    lines = "".join(json.dumps(pair) + "\n" for pair in pairs).encode()
    wanted = documents_of(put(tmp_path / "a.jsonl", lines), records=records)
    assert len(wanted) == 40
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, ["id", "prompt", "completion"])
    writer.writeheader()
    writer.writerows({"id": n, **pair} for n, pair in enumerate(pairs))
    for name, content in [
        ("a.json", json.dumps(pairs, indent=1).encode()),
        ("a.ndjson.xz", lines),
        ("a.csv.bz2", table.getvalue().encode()),
    ]:
        assert documents_of(put(tmp_path / name, content), records=records) == wanted


def test_nested_columns_of_many_rows_are_those_of_their_rows_whatever_the_segments(tmp_path):
    """Arrays of a memory-mapped dataset begin within their buffers."""
    texts = made(9, 700)
    rows = [{"n": n, "a": {"n": n, "b": {"text": text}}} for n, text in enumerate(texts)]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=90)
    datasets.disable_progress_bars()
    datasets.Dataset(table).select(range(3, 700)).flatten_indices().save_to_disk(tmp_path / "saved")
    for unit_bytes in (2**62, 2000):
        assert read(tmp_path / "a.parquet", unit_bytes, text_field="a.b.text") == texts
        found = read(tmp_path / "saved", unit_bytes, text_field="{a.b.text}{a.b.text}")
        assert found == [text * 2 for text in texts[3:]]
