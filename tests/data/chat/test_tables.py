"""Conversations in Parquet files and datasets are those of the same lines of JSON."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from minimind.cli.main import main
from minimind.data.prepare.encode import Work, encode_unit
from minimind.data.prepare.work_units import make_plan
from minimind.data.text.documents import Rejection
from minimind.data.text.inputs import segments_of
from minimind.data.text.readers import read_segment
from minimind.data.text.sources import Source
from minimind.errors import DataError
from tests.data.chat.made import conversation
from tests.data.chat.malformed import FORMS, record
from tests.data.chat.test_malformed import OPTIONS, prepared

SEED = 29
ROWS = 300
TEXT = pyarrow.large_string()
A_TURN = [("role", TEXT), ("content", TEXT), ("tool_calls", TEXT), ("name", TEXT)]
OF_MESSAGES = pyarrow.schema([("messages", pyarrow.list_(pyarrow.struct(A_TURN)))])
USER, ANSWER = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}


def write_parquet(place: Path, rows: list[Any], schema: Any = None, **options: Any) -> Path:
    path = place / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path, **options)
    return path


def write_dataset(place: Path, rows: list[Any], schema: Any = None, **_: Any) -> Path:
    datasets.disable_progress_bars()
    table = pyarrow.Table.from_pylist(rows, schema)
    datasets.Dataset(table).save_to_disk(place / "saved")
    return place / "saved"


def write_splits(place: Path, rows: list[Any], schema: Any = None, **_: Any) -> Path:
    datasets.disable_progress_bars()
    rows_of = datasets.Dataset(pyarrow.Table.from_pylist(rows, schema))
    datasets.DatasetDict({"test": rows_of.select([0]), "train": rows_of}).save_to_disk(place / "d")
    return place / "d"


WRITERS = [write_parquet, write_dataset, write_splits]


def pairs(draw: random.Random) -> list[dict[str, Any]]:
    found = [conversation(draw, words=5)[-2:] for _ in range(ROWS)]
    return [{"prompt": one.content, "completion": other.content} for one, other in found]


def records(form: str) -> list[dict[str, Any]]:
    draw = random.Random(SEED)
    if form == "prompt":
        return pairs(draw)
    if form == "mixed":  # a row has one of the columns
        forms = zip(records("messages"), records("value"), records("prompt"), strict=True)
        names = ("id", "messages", "conversations", "prompt", "completion")
        rows = [row for of_a_form in forms for row in of_a_form][:ROWS]
        return [{name: row.get(name) for name in names} for row in rows]
    names = next(names for names in FORMS if form in names)
    return [record(draw, names)[0] for _ in range(ROWS)]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("form", ["messages", "conversations", "value", "prompt", "mixed"])
def test_rows_are_the_conversations_of_the_same_lines(
    form: str, write: Any, tokenizer: Any, tmp_path: Path
):
    rows = records(form)
    lines = read(written(tmp_path, rows), tokenizer)
    assert not any(isinstance(one, Rejection) for one in lines)
    path = write(tmp_path, rows, row_group_size=100)
    for unit_bytes in (5000, 2**62):
        assert read(path, tokenizer, unit_bytes) == lines


def test_the_shards_are_those_of_the_same_lines(folder: Path, tmp_path: Path):
    rows = records("messages")
    whole = prepared([written(tmp_path, rows)], folder, tmp_path)
    parts = [tmp_path / "1", tmp_path / "2", tmp_path / "3"]
    for part in parts:
        part.mkdir()
    paths = [write_parquet(parts[0], rows[:100]), write_dataset(parts[1], rows[100:200])]
    mixed = prepared([*paths, written(parts[2], rows[200:])], folder, tmp_path)
    assert mixed.manifest["splits"] == whole.manifest["splits"]
    assert mixed.manifest["documents"] == ROWS


def written(place: Path, rows: list[Any]) -> Path:
    """Lines of JSON without what is not given."""
    given = ({key: value for key, value in row.items() if value is not None} for row in rows)
    (place / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    return place / "a.jsonl"


def read(path: Path, tokenizer: Any, unit_bytes: int = 2**62) -> list[str | Rejection]:
    plan = make_plan([Source("data", (str(path),))], OPTIONS)
    reading = Work(path.parent, plan, tokenizer, is_strict=False).reading
    found = [one for part in segments_of(path, unit_bytes) for one in read_segment(part, reading)]
    return [one if isinstance(one, Rejection) else one[0] for one in found]


def unchecked(cells: list[bytes]) -> Any:
    """Strings that were never checked, as other writers leave them."""
    return pyarrow.array(cells, pyarrow.binary()).view(pyarrow.string())


# A row with these messages, and what is said of it.
BAD_ROWS: list[tuple[Any, str]] = [
    (None, 'has no "conversations" or "messages"'),
    ([], '"messages" is an empty list'),
    ([USER], "has no assistant turn among 1"),
    ([USER, None], "turn 2: is null, not an object"),
    ([USER, {"role": "assistant"}], 'turn 2: has no "content"'),
    ([{"content": "x"}, ANSWER], 'turn 1: has no "role"'),
    ([USER, {}], 'turn 2: has no "role"'),
    ([USER, {**ANSWER, "role": "boss"}], 'turn 2: "role" is "boss"'),
    ([USER, {**ANSWER, "content": ""}], 'turn 2: "content" is empty'),
    ([USER, {**ANSWER, "content": " \n"}], 'turn 2: "content" is blank'),
    ([USER, {**ANSWER, "content": "a\0"}], "turn 2: the text holds a NUL character"),
    ([USER, {**ANSWER, "content": "a<|end|>"}], 'turn 2: contains "<|end|>"'),
    ([USER, {**ANSWER, "tool_calls": "f()"}], 'turn 2: has "tool_calls", and tool calls are not'),
    ([USER, USER, ANSWER], "turn 2 (user) follows another user turn"),
    ([ANSWER], "turn 1 (assistant) begins the conversation"),
]


@pytest.mark.parametrize("write", WRITERS)
def test_a_bad_row_is_reported_with_its_row_and_turn(tokenizer: Any, tmp_path: Path, write: Any):
    rows = [{"messages": [USER, ANSWER]} for _ in range(300)]
    for place, (messages, _) in enumerate(BAD_ROWS):
        rows[250 + place] = {"messages": messages}
    path = write(tmp_path, rows, OF_MESSAGES, row_group_size=100)
    for unit_bytes in (500, 2**62):
        found = read(path, tokenizer, unit_bytes)
        assert len(found) == 300
        rejected = [one for one in found if isinstance(one, Rejection)]
        for row, one, (_, words) in zip(range(251, 300), rejected, BAD_ROWS, strict=False):
            assert str(one).startswith(f"{path}:{row} (row {row}): {words}")
            assert one.remedy
        assert len(rejected) == len(BAD_ROWS)
    plan = make_plan([Source("data", (str(path),))], OPTIONS)
    with pytest.raises(
        DataError, match=r":251 \(row 251\): .*; or skip bad documents with --on_bad"
    ):
        encode_unit(Work(tmp_path, plan, tokenizer, is_strict=True), plan.units[0])


def test_bytes_that_are_no_text_are_reported_in_their_turn(tokenizer: Any, tmp_path: Path):
    content = unchecked([b"one", b"two", b"one", b"t\xff", b"one", b"two"])
    roles = pyarrow.array(["user", "assistant"] * 3)
    turns = pyarrow.StructArray.from_arrays([roles, content], ["role", "content"])
    lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, 2, 4, 6]), turns)
    parquet.write_table(pyarrow.table({"messages": lists}), tmp_path / "a.parquet")
    good, bad, other = read(tmp_path / "a.parquet", tokenizer)
    assert good == other
    assert "a.parquet:2 (row 2): turn 2: is not UTF-8 (0xff: invalid start byte); " in str(bad)
    columns = {"prompt": unchecked([b"a", b"\xed\xa0\x80"]), "completion": ["b", "c"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "b.parquet")
    assert '(row 2): "prompt" is not UTF-8' in str(read(tmp_path / "b.parquet", tokenizer)[1])


ODD_COLUMNS: list[tuple[Any, str | None]] = [
    (pyarrow.array([[USER, ANSWER]]).cast(pyarrow.large_list(pyarrow.struct(A_TURN[:2]))), None),
    (pyarrow.array([[USER, ANSWER]], pyarrow.list_(pyarrow.struct(A_TURN[:2]), 2)), None),
    (
        pyarrow.array([[[*USER.items()]]], pyarrow.list_(pyarrow.map_(TEXT, TEXT))),
        "turn 1: is a li",
    ),
    (
        pyarrow.array([[*USER.items()]], pyarrow.map_(TEXT, TEXT)),
        "turn 1: is a list, not an object",
    ),
    (pyarrow.array([json.dumps([USER, ANSWER])]), '"messages" is a string, not a list'),
    (pyarrow.array([5]), '"messages" is a number, not a list'),
    (pyarrow.array([[5]]), "turn 1: is a number, not an object"),
    (pyarrow.array([[1]], pyarrow.list_(pyarrow.timestamp("ns"))), "turn 1: is a number, not an"),
    (pyarrow.array([{"role": ["user"], "content": ["x"]}]), '"messages" is an object, not a list'),
    (pyarrow.array([[{**USER, "at": 1}, ANSWER]]), 'turn 1: has "at", which is not supported'),
    (pyarrow.nulls(1), 'has no "conversations" or "messages"'),
    (
        pyarrow.array([[{"role": "user", "content": [{"type": "text", "text": "x"}]}]]),
        "has no assistant turn among 1",
    ),
]


@pytest.mark.parametrize(("column", "words"), ODD_COLUMNS)
def test_columns_of_any_type_are_read_or_reported(
    column: Any, words: str | None, tokenizer: Any, tmp_path: Path
):
    parquet.write_table(pyarrow.table({"messages": column}), tmp_path / "a.parquet")
    (found,) = read(tmp_path / "a.parquet", tokenizer)
    if words is None:
        assert not isinstance(found, Rejection)
    else:
        assert f"a.parquet:1 (row 1): {words}" in str(found)


def test_content_that_is_named_by_numbers(tokenizer: Any, tmp_path: Path):
    names = pyarrow.array(["user", "assistant"]).dictionary_encode()
    turns = pyarrow.StructArray.from_arrays([names, pyarrow.array(["a", "b"])], ["role", "content"])
    lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, 2]), turns)
    pair = {"prompt": pyarrow.array(["a"]).dictionary_encode(), "completion": ["b"]}
    for number, columns in enumerate(({"messages": lists}, pair)):
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(pyarrow.table(columns), path)
        (found,) = read(path, tokenizer)
        assert '"content":"a"' in str(found)


def test_a_key_without_any_value(tokenizer: Any, tmp_path: Path):
    rows = [{"messages": [USER, {**ANSWER, "tool_calls": None}] * (n % 3 + 1)} for n in range(99)]
    for row in rows:
        row["messages"][0] = {**USER, "tool_calls": None}
    assert not any(
        isinstance(one, Rejection) for one in read(write_parquet(tmp_path, rows), tokenizer)
    )


def test_a_dataset_whose_turns_lie_in_the_wrong_place_is_reported(tokenizer: Any, tmp_path: Path):
    rows = [{"messages": [USER, ANSWER]} for _ in range(40)]
    path = write_dataset(tmp_path, rows) / "data-00000-of-00001.arrow"
    whole = path.read_bytes()
    for ends in ([*range(0, 80, 2)], [*range(0, 240, 3)]):  # of turns in rows, of text in contents
        right = struct.pack(f"<{len(ends)}i", *ends)
        assert right in whole
        for wrong in (-5, 0, 10**6):
            bad = struct.pack(f"<{len(ends)}i", *ends[:9], wrong, *ends[10:])
            path.write_bytes(whole.replace(right, bad))
            (report,) = read(tmp_path / "saved", tokenizer)
            assert ":1 (row 1): cannot be read (" in str(report)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"text": ["a"]}, 'has "text" and no conversation; drop --task sft'),
        ({"prompt": ["a"], "n": [1]}, 'has "prompt" and no "completion"'),
        ({"n": [1], "m": [2]}, 'has no "conversations" or "messages" but "n", "m"; write {"conv'),
    ],
)
def test_a_table_without_conversations_is_refused(
    columns: dict[str, Any], words: str, tokenizer: Any, tmp_path: Path
):
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.parquet", tokenizer)
    assert f"a.parquet: {words}" in str(caught.value)


def test_a_column_twice_is_refused(tokenizer: Any, tmp_path: Path):
    twice = pyarrow.table([["a"], ["b"], ["c"]], names=["prompt", "prompt", "completion"])
    parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(DataError, match='has "prompt" 2 times; keep the one that is meant'):
        read(tmp_path / "a.parquet", tokenizer)


def test_damaged_and_empty_tables(tokenizer: Any, tmp_path: Path):
    rows = records("messages") * 2
    path = write_parquet(tmp_path, rows, row_group_size=100, write_page_checksum=True)
    whole = bytearray(path.read_bytes())
    chunk = parquet.ParquetFile(path).metadata.row_group(3).column(1)
    whole[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    path.write_bytes(whole)
    *documents, report = read(path, tokenizer)
    assert 256 <= len(documents) < 400
    assert isinstance(report, Rejection)
    assert report.line == len(documents) + 1
    assert "cannot be read (" in report.what
    path.write_bytes(whole[:-9])
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        read(path, tokenizer)
    path = write_parquet(tmp_path, [], OF_MESSAGES)
    (report,) = read(path, tokenizer)
    assert "a.parquet:1 (row 1): is empty; " in str(report)


def test_the_limit_of_a_document(tokenizer: Any, tmp_path: Path):
    path = write_parquet(tmp_path, [{"messages": [USER, {**ANSWER, "content": "x" * 3000}]}])
    plan = make_plan([Source("data", (str(path),))], replace(OPTIONS, max_document_bytes=1000))
    work = Work(tmp_path, plan, tokenizer, is_strict=False)
    (segment,) = segments_of(path, 2**62)
    (found,) = read_segment(segment, work.reading)
    assert "bytes, more than max_document_bytes = 1000" in str(found)


def test_prepare_names_the_way_to_fine_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_parquet(tmp_path, [{"messages": [USER, ANSWER]}])
    words = ["prepare", str(path), "--vocab_size", "512", "--out", str(tmp_path / "out")]
    assert main(words) == 3
    error = capsys.readouterr().err
    assert 'has "messages", a conversation to fine-tune on' in error
    assert "fine-tune on it with --task sft" in error
