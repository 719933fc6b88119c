"""Parquet files and datasets on disk against the rows that were put into them."""

import json
import struct
import sys
from itertools import accumulate

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from minimind.data.text.documents import ReadOptions, Rejection
from minimind.data.text.formats import read_segment, segments_of
from minimind.errors import DataError
from tests.data.text.reading import documents_of, read

TEXTS = [f"document {n} 春眠\r\n" * (n % 5 + 1) for n in range(700)]
# A bad cell, and what is said of it.
BAD_CELLS = [
    (None, '"text" is null'),
    (b"", "document is empty"),
    (b"a\0b", "NUL character"),
    (b"a\xff", "not UTF-8"),
    (b"\xed\xa0\x80", "not UTF-8"),
    (b"a" * 1001, "has 1001 bytes"),
]


def column(cells, kind=None):
    """Strings that were never checked, as other writers leave them."""
    content = [cell.encode() if isinstance(cell, str) else cell for cell in cells]
    large = pyarrow.array(content, pyarrow.large_binary()).view(pyarrow.large_string())
    plain = pyarrow.array(content, pyarrow.binary()).view(pyarrow.string())
    return large if kind == "large" else plain


def write_parquet(path, cells, kind=None, **options):
    table = pyarrow.table({"id": range(len(cells)), "text": column(cells, kind)})
    parquet.write_table(table, path, **options)
    return path


def write_dataset(path, cells, kind=None):
    datasets.disable_progress_bars()
    table = pyarrow.table({"id": range(len(cells)), "text": column(cells, kind)})
    datasets.Dataset(table).save_to_disk(path)
    return path


WRITERS = [
    pytest.param(lambda at, cells, kind: write_parquet(at / "a.parquet", cells, kind), id="file"),
    pytest.param(lambda at, cells, kind: write_dataset(at / "saved", cells, kind), id="dataset"),
]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("kind", ["plain", "large"])
def test_rows_are_documents_in_order_whatever_the_segments(tmp_path, write, kind):
    path = write(tmp_path, TEXTS, kind)
    for unit in (1000, 10**9):
        assert read(path, unit) == TEXTS


def test_texts_that_are_named_by_numbers_are_texts(tmp_path):
    cells = [TEXTS[n % 7] for n in range(700)]
    table = pyarrow.table({"text": column(cells).cast(pyarrow.string()).dictionary_encode()})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", 1000) == cells
    others = pyarrow.array([*cells[:3], None, "", *cells[5:]])
    table = pyarrow.table({"text": others.dictionary_encode()})
    parquet.write_table(table, tmp_path / "a.parquet")
    found = [str(one)[-60:] for one in read(tmp_path / "a.parquet", 1000)[3:5]]
    assert "text" in found[0]
    assert "is null" in found[0]
    assert "document is empty" in found[1]


KINDS = [
    *[pyarrow.string_view(), pyarrow.binary_view(), pyarrow.binary(), pyarrow.large_binary()],
    *[pyarrow.dictionary(pyarrow.int8(), kind) for kind in (pyarrow.string(), pyarrow.binary())],
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_texts_of_any_type_of_strings_and_bytes(tmp_path, kind):
    cells = [*TEXTS[:50], None, "", "a" * 50_000]
    of_values = getattr(kind, "value_type", kind)
    column = pyarrow.array(cells, pyarrow.large_string()).cast(of_values)
    if of_values is not kind:
        column = column.dictionary_encode().cast(kind)
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    datasets.disable_progress_bars()
    datasets.Dataset(pyarrow.table({"text": column})).save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "a.parquet", tmp_path / "saved"):
        *found, null, empty, long = read(path, max_document_bytes=1000)
        assert found == TEXTS[:50]
        assert '(row 51): "text" is null, not a string; remove the row' in str(null)
        assert "(row 52): the document is empty" in str(empty)
        assert "(row 53): the document has 50000 bytes, more than" in str(long)


def test_bytes_that_are_not_utf8_are_reported_with_their_row(tmp_path):
    for kind in (pyarrow.binary_view(), pyarrow.large_binary()):
        column = pyarrow.array([b"a", b"b\xff"], kind)
        parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
        good, bad = read(tmp_path / "a.parquet")
        assert good == "a"
        assert "(row 2): is not UTF-8 (0xff: invalid start byte)" in str(bad)


def test_a_file_without_any_text_is_read_before_those_with_some(tmp_path):
    parquet.write_table(pyarrow.table({"text": pyarrow.nulls(2)}), tmp_path / "a.parquet")
    found = [str(one) for one in read(tmp_path / "a.parquet")]
    assert ['"text" is null, not a string; remove the row' in one for one in found] == [True] * 2
    datasets.disable_progress_bars()
    datasets.Dataset(pyarrow.table({"text": pyarrow.nulls(2)})).save_to_disk(tmp_path / "saved")
    assert len(read(tmp_path / "saved")) == 2


JSON_TEXTS = [
    '"q"',
    '"a \\"b\\" \\u6625"',
    "7",
    "null",
    "NaN",
    '""',
    '["q"]',
    '"\\ud800"',
    "[" * 101 + "]" * 101,
]


@pytest.mark.parametrize("name", ["a.parquet", "saved"])
def test_texts_in_json_are_those_of_the_same_lines(tmp_path, name):
    storage = pyarrow.array(
        [*JSON_TEXTS, None, '"\\u0061' + "\\n" * 999 + '"', '"' + "a" * 1001 + '"']
    )
    table = pyarrow.table({"text": pyarrow.ExtensionArray.from_storage(pyarrow.json_(), storage)})
    parquet.write_table(table, tmp_path / "a.parquet")
    datasets.disable_progress_bars()
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    lines = "".join(f'{{"text": {source}}}\n' for source in JSON_TEXTS)
    (tmp_path / "a.jsonl").write_text(lines)
    *found, null, escaped, long = read(tmp_path / name, max_document_bytes=1000)
    for one, other in zip(found, read(tmp_path / "a.jsonl"), strict=True):
        if isinstance(other, Rejection):
            assert isinstance(one, Rejection)
            assert one.what.split(" (")[0] == other.what.split(" (")[0]
        else:
            assert one == other
    assert '"text" is null' in str(null)
    assert escaped == "a" + "\n" * 999
    assert "the document has 1001 bytes, more than" in str(long)


def test_a_column_of_another_extension_type_is_refused(tmp_path):
    uuid = pyarrow.array([b"a" * 16], pyarrow.binary(16))
    column = pyarrow.ExtensionArray.from_storage(pyarrow.uuid(), uuid)
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r'holds the extension type "arrow\.uuid", which is not'):
        read(tmp_path / "a.parquet")


def test_columns_whose_names_are_alike_or_twice(tmp_path):
    def of(*names):
        columns = [[name] for name in names]
        parquet.write_table(pyarrow.table(columns, names=names), tmp_path / "a.parquet")
        return tmp_path / "a.parquet"

    for names in (("text", "text"), ("text", "id", "text", "text")):
        words = rf'a\.parquet: has the column "text" {names.count("text")} times; keep the one'
        with pytest.raises(DataError, match=words):
            read(of(*names))
    texts = pyarrow.array(["text"])
    inner = pyarrow.StructArray.from_arrays([texts, texts], names=["text", "text"])
    outer = pyarrow.StructArray.from_arrays([inner], names=["inner"])
    twins = pyarrow.StructArray.from_arrays([outer, outer], names=["a", "a"])
    for column, field, words in [
        (inner, "data.text", '"data.text"'),
        (outer, "data.inner.text", '"data.inner.text"'),
        (twins, "data.a.inner.text", '"data.a"'),
        (inner, "{data.text}!", '"data.text"'),
    ]:
        parquet.write_table(pyarrow.table({"data": column}), tmp_path / "a.parquet")
        with pytest.raises(DataError, match=rf"a\.parquet: has {words} 2 times; keep the one that"):
            read(tmp_path / "a.parquet", text_field=field)
    parquet.write_table(pyarrow.table({"data": inner, "text": texts}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ["text"]
    for names in (("id", "id", "text"), ("Text", "text", "TEXT"), ("text.a", "text"), ("", "text")):
        assert read(of(*names)) == ["text"]
    with pytest.raises(DataError, match='has no column "text" but "Text", ""; give'):
        read(of("Text", ""))
    table = pyarrow.table({"text": pyarrow.array([{}], pyarrow.struct([("a", pyarrow.int8())]))})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match='column "text" holds struct<a: int8>, not string'):
        read(tmp_path / "a.parquet")


def test_row_groups_of_any_size_are_read_once(tmp_path):
    for size in (30, 256, 699, 700):
        path = write_parquet(tmp_path / f"{size}.parquet", TEXTS, row_group_size=size)
        for unit in (1, 5000):
            assert read(path, unit) == TEXTS


@pytest.mark.parametrize("write", WRITERS)
def test_a_bad_cell_is_reported_with_its_row(tmp_path, write):
    cells = ["good"] * 300
    for place, (cell, _) in enumerate(BAD_CELLS):
        cells[254 + place] = cell
    path = write(tmp_path, cells, None)
    for unit in (500, 10**9):
        found = read(path, unit, max_document_bytes=1000)
        report = [one for one in found if isinstance(one, Rejection)]
        assert found.count("good") == 300 - len(BAD_CELLS)
        assert len(report) == len(BAD_CELLS)
        for row, one, (_, words) in zip(range(255, 300), report, BAD_CELLS, strict=False):
            assert (one.line, one.byte) == (row, None)
            assert str(one).startswith(f"{path}:{row} (row {row}): ")
            assert words in one.what


@pytest.mark.parametrize("write", WRITERS)
def test_a_table_without_a_column_of_text_is_refused(tmp_path, write):
    path = write(tmp_path, TEXTS, None)
    report = 'has no column "content" but "id", "text"; give --text_field text$'
    with pytest.raises(DataError, match=report):
        read(path, text_field="content")
    with pytest.raises(DataError, match='column "id" holds int64, not string; '):
        read(path, text_field="id")


def test_a_table_of_conversations_is_called_fine_tuning_data(tmp_path):
    turns = [[{"role": "user", "content": "Hi"}]]
    parquet.write_table(pyarrow.table({"conversations": turns}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match='has "conversations", a conversation to fine-tune on'):
        read(tmp_path / "a.parquet")


def test_a_selection_of_a_dataset_is_read_as_selected(tmp_path):
    datasets.disable_progress_bars()
    chosen = datasets.Dataset.from_dict({"text": TEXTS}).select([5, 3, 600])
    chosen.save_to_disk(tmp_path / "saved")
    assert documents_of(tmp_path / "saved") == [TEXTS[5], TEXTS[3], TEXTS[600]]


def test_a_dataset_of_splits_gives_train_or_names_them(tmp_path):
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"test": rows.select([0]), "train": rows}).save_to_disk(tmp_path / "a")
    assert documents_of(tmp_path / "a") == TEXTS
    assert documents_of(tmp_path / "a" / "test") == TEXTS[:1]
    datasets.DatasetDict({"test": rows, "dev": rows}).save_to_disk(tmp_path / "b")
    with pytest.raises(DataError, match=r'has no split "train" but "test", "dev"; .*b/test'):
        segments_of(tmp_path / "b", 1000)


def test_a_damaged_parquet_file_is_refused_or_reported_at_its_row(tmp_path):
    path = write_parquet(
        tmp_path / "a.parquet", TEXTS, row_group_size=100, write_page_checksum=True
    )
    whole = bytearray(path.read_bytes())
    for content in (whole[:-9], b"PAR1", whole[:4] + b"nonsense" + whole[:4]):
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read as Parquet"):
            segments_of(path, 1000)
    options = {"row_group_size": 100, "use_dictionary": False, "write_page_checksum": True}
    chunk = (
        parquet.ParquetFile(write_parquet(path, TEXTS, **options)).metadata.row_group(3).column(1)
    )
    whole = bytearray(path.read_bytes())
    whole[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    path.write_bytes(whole)
    found = read(path)
    (report,) = (one for one in found if isinstance(one, Rejection))
    lost = range(report.line - 1, report.line - 1 + report.documents)
    assert 300 <= lost.start < lost.stop == 400
    assert "cannot be read (" in report.what
    assert report.what.endswith(f", nor are the {len(lost) - 1} rows behind it read")
    assert found == [*TEXTS[: lost.start], report, *TEXTS[lost.stop :]]


def test_rows_that_are_missing_are_reported(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", TEXTS)
    (segment,) = segments_of(path, 10**9)
    write_parquet(path, TEXTS[:500])
    *documents, report = read_segment(segment, ReadOptions())
    assert len(documents) == 500
    assert str(report).startswith(f"{path}:501 (row 501): the rows from here to 700 are missing; ")


def test_a_dataset_whose_texts_lie_in_the_wrong_place_is_reported(tmp_path):
    path = write_dataset(tmp_path / "saved", TEXTS) / "data-00000-of-00001.arrow"
    ends = list(accumulate(len(text.encode()) for text in TEXTS[:20]))
    whole, wrong = path.read_bytes(), [*ends[:9], 0, *ends[10:]]
    assert whole.count(struct.pack("<20i", *ends)) == 1
    path.write_bytes(whole.replace(struct.pack("<20i", *ends), struct.pack("<20i", *wrong)))
    report, *documents = read(tmp_path / "saved")
    assert ":1 (row 1): cannot be read (" in str(report)
    assert isinstance(report, Rejection)
    assert documents == TEXTS[report.documents :]


def test_a_damaged_dataset_is_refused(tmp_path):
    path = write_dataset(tmp_path / "saved", TEXTS)
    for name, content in [
        ("state.json", b"{"),
        ("state.json", b'{"_data_files": 3}'),
        ("dataset_info.json", b'{"features": "text"}'),
        ("data-00000-of-00001.arrow", b"nonsense"),
    ]:
        kept = (path / name).read_bytes()
        (path / name).write_bytes(content)
        with pytest.raises(DataError, match="is not a dataset that save_to_disk wrote"):
            segments_of(path, 1000)
        (path / name).write_bytes(kept)
    (path / "dataset_dict.json").write_text(json.dumps(["train"]))
    with pytest.raises(DataError, match=r"dataset_dict\.json: is damaged"):
        segments_of(path, 1000)


@pytest.mark.parametrize(("package", "name"), [("pyarrow", "a.parquet"), ("datasets", "saved")])
def test_what_is_not_installed_is_reported(tmp_path, monkeypatch, package, name):
    write_parquet(tmp_path / "a.parquet", TEXTS)
    write_dataset(tmp_path / "saved", TEXTS)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"{package}, .* install -e '\.\[data\]'"):
        segments_of(tmp_path / name, 1000)
