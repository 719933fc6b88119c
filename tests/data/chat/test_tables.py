"""Conversations in Parquet files and datasets are those of the same lines of JSON."""

from __future__ import annotations

import json
import random
import struct
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
from minimind.data.text.formats import read_segment, segments_of
from minimind.data.text.inputs import Source
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


@pytest.mark.sample(3)
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
    work = Work(path.parent, plan, tokenizer, is_strict=False)
    reading = work.reading_of(plan.units[0], set())
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
    ([USER, {**ANSWER, "tool_calls": "f()"}], 'turn 2: "tool_calls" is not JSON'),
    ([USER, USER, ANSWER], "turn 2 (user) follows a turn of user"),
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
        DataError, match=r":251 \(row 251\): .*, or skip bad documents with --on_bad"
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


# The JSON source of a value where a string is usual.
SOURCES = [
    *[
        '"q"',
        '"a \\"b\\" \\n \\u6625"',
        "7",
        "1e400",
        "NaN",
        "null",
        "true",
        "[]",
        '""',
        '"a\\u0000"',
    ],
    *['"\\ud800"', "{}", '{"a": 1, "a": 2}', "[" * 101 + "]" * 101, "9" * 5000],
    '[{"type": "text", "text": "q"}]',
    '[{"type": "text", "text": "q", "text": "r"}]',
    '[{"type": "image"}, {"type": "text", "text": "q"}]',
]


def as_json(sources: list[str], storage: Any = None) -> Any:
    return pyarrow.ExtensionArray.from_storage(
        pyarrow.json_(storage or pyarrow.string()), pyarrow.array(sources, storage)
    )


def of_contents(contents: Any, make: Any = pyarrow.ListArray.from_arrays) -> dict[str, Any]:
    """One conversation a row, whose first turn has such a content."""
    answers = as_json(['"a"'] * len(contents))
    both = pyarrow.concat_arrays([contents.cast(answers.type), answers])
    order = [n + len(contents) * half for n in range(len(contents)) for half in (0, 1)]
    roles = pyarrow.array(["user", "assistant"] * len(contents))
    turns = pyarrow.StructArray.from_arrays([roles, both.take(order)], ["role", "content"])
    return {"messages": make(range(0, len(turns) + 1, 2), turns)}


def line_of(turn: str) -> str:
    return f'{{"messages": [{turn}, {{"role": "assistant", "content": "a"}}]}}'


TURN = '{{"role": "user", "content": {}}}'
PLACES: dict[str, tuple[Any, Any]] = {  # of JSON in a column, and the line of the same content
    "content": (lambda found: of_contents(as_json(found)), lambda one: line_of(TURN.format(one))),
    "turn": (
        lambda found: {
            "messages": pyarrow.ListArray.from_arrays(
                range(0, 2 * len(found) + 1, 2),
                as_json(
                    [
                        source
                        for one in found
                        for source in (TURN.format(one), '{"role": "assistant", "content": "a"}')
                    ]
                ),
            )
        },
        lambda one: line_of(TURN.format(one)),
    ),
    "turns": (
        lambda found: {
            "messages": as_json(
                [f'[{TURN.format(one)}, {{"role": "assistant", "content": "a"}}]' for one in found]
            )
        },
        lambda one: line_of(TURN.format(one)),
    ),
    "column": (lambda found: {"messages": as_json(found)}, lambda one: f'{{"messages": {one}}}'),
    "prompt": (
        lambda found: {"prompt": as_json(found), "completion": ["a"] * len(found)},
        lambda one: f'{{"prompt": {one}, "completion": "a"}}',
    ),
    "completion": (
        lambda found: {"prompt": ["q"] * len(found), "completion": as_json(found)},
        lambda one: f'{{"prompt": "q", "completion": {one}}}',
    ),
    "system": (
        lambda found: {**of_contents(as_json(['"q"'] * len(found))), "system": as_json(found)},
        lambda one: line_of(TURN.format('"q"'))[:-1] + f', "system": {one}}}',
    ),
    "a list of parts": (
        lambda found: {
            "messages": pyarrow.ListArray.from_arrays(
                range(len(found) + 1),
                pyarrow.StructArray.from_arrays(
                    [
                        pyarrow.array(["user"] * len(found)),
                        pyarrow.ListArray.from_arrays(range(len(found) + 1), as_json(found)),
                    ],
                    ["role", "content"],
                ),
            )
        },
        lambda one: f'{{"messages": [{TURN.format(f"[{one}]")}]}}',
    ),
}


def write_json_dataset(path: Path, columns: dict[str, Any]) -> Path:
    datasets.disable_progress_bars()
    datasets.Dataset(pyarrow.table(columns)).save_to_disk(path / "saved")
    return path / "saved"


def write_json_parquet(path: Path, columns: dict[str, Any]) -> Path:
    parquet.write_table(pyarrow.table(columns), path / "a.parquet")
    return path / "a.parquet"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("write", [write_json_parquet, write_json_dataset])
def test_json_in_columns_is_what_it_is_in_lines(
    place: str, write: Any, tokenizer: Any, tmp_path: Path
):
    columns, line = PLACES[place]
    (tmp_path / "a.jsonl").write_text("".join(f"{line(one)}\n" for one in SOURCES))
    expected = read(tmp_path / "a.jsonl", tokenizer)
    found = read(write(tmp_path, columns(SOURCES)), tokenizer)
    for source, one, other in zip(SOURCES, found, expected, strict=True):
        if isinstance(other, Rejection):
            assert isinstance(one, Rejection), source
            assert one.what.removeprefix("turn 1: ").endswith(other.what.split(": ", 1)[-1]), source
        else:
            assert one == other, source


def test_bad_json_in_a_column_is_reported_with_its_row(tokenizer: Any, tmp_path: Path):
    contents = [b"'q'", b'"q', b"", b'"\xff"', b'"q"']
    cells = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), unchecked(contents))
    *bad, good = read(write_json_parquet(tmp_path, of_contents(cells)), tokenizer)
    assert '"content":"q"' in str(good)
    words = ["is not JSON", "is cut off", "is cut off", "is not UTF-8"]
    for row, (one, what) in enumerate(zip(bad, words, strict=True), 1):
        assert f"a.parquet:{row} (row {row}): turn 1: {what}" in str(one)


def test_other_extension_types_in_a_column_that_is_read_are_refused(tokenizer: Any, tmp_path: Path):
    uuid = pyarrow.ExtensionArray.from_storage(
        pyarrow.uuid(), pyarrow.array([b"a" * 16], pyarrow.binary(16))
    )
    opaque = pyarrow.opaque(pyarrow.string(), "geometry", "maps")
    named = pyarrow.field("prompt", pyarrow.string(), metadata={"ARROW:extension:name": "a.b"})
    struct = pyarrow.struct([("role", pyarrow.string()), named.with_name("content")])
    tables = {
        "arrow.uuid": pyarrow.table({"prompt": uuid, "completion": ["a"]}),
        "arrow.opaque": pyarrow.table(
            {
                "prompt": pyarrow.ExtensionArray.from_storage(opaque, pyarrow.array(["a"])),
                "completion": ["a"],
            }
        ),
        "a.b": pyarrow.table([["q"], ["a"]], pyarrow.schema([named, ("completion", TEXT)])),
        "a.b ": pyarrow.table({"messages": pyarrow.array([[USER]], pyarrow.list_(struct))}),
    }
    for name, table in tables.items():
        parquet.write_table(table, tmp_path / "a.parquet")
        words = f'column ".*" holds the extension type "{name.strip()}", which is not read; '
        with pytest.raises(DataError, match=words):
            read(tmp_path / "a.parquet", tokenizer)
    beside = pyarrow.table({"prompt": ["q"], "completion": ["a"], "id": uuid})
    parquet.write_table(beside, tmp_path / "a.parquet")
    assert '"content":"q"' in str(read(tmp_path / "a.parquet", tokenizer))


VIEWS = pyarrow.struct([("role", pyarrow.string_view()), ("content", pyarrow.binary_view())])
BYTES = pyarrow.struct([("role", pyarrow.binary()), ("content", pyarrow.large_binary())])
JSON_TURN = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.json_())])


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.list_(VIEWS),
        pyarrow.list_(BYTES),
        pyarrow.large_list(VIEWS),
        pyarrow.list_(VIEWS, 2),
        pyarrow.large_list_view(BYTES),
        pyarrow.list_view(JSON_TURN),
        pyarrow.large_list_view(JSON_TURN),
    ],
    ids=str,
)
def test_turns_of_any_kind_of_list_and_string(kind: Any, tokenizer: Any, tmp_path: Path):
    is_json = kind.value_type == JSON_TURN
    turns = [{**one, "content": json.dumps(one["content"])} for one in (USER, ANSWER)]
    storage = pyarrow.list_(pyarrow.struct([("role", TEXT), ("content", TEXT)]))
    plain = pyarrow.array([turns if is_json else [USER, ANSWER]] * 3, storage)
    values = plain.flatten()
    content = values.field(1).cast(kind.value_type.field(1).type)
    role = values.field(0).cast(kind.value_type.field(0).type)
    made = pyarrow.StructArray.from_arrays([role, content], fields=list(kind.value_type))
    if pyarrow.types.is_fixed_size_list(kind):
        column = pyarrow.FixedSizeListArray.from_arrays(made, 2)
    elif "view" in str(kind).split("<")[0]:
        is_large = str(kind).startswith("large")
        make = pyarrow.LargeListViewArray if is_large else pyarrow.ListViewArray
        column = make.from_arrays([0, 2, 4], [2, 2, 2], made)
    else:
        is_large = pyarrow.types.is_large_list(kind)
        make = pyarrow.LargeListArray if is_large else pyarrow.ListArray
        column = make.from_arrays([0, 2, 4, 6], made)
    # Arrow writes no lists of views to Parquet.
    write = write_json_dataset if kind.value_type == VIEWS else write_json_parquet
    path = write(tmp_path, {"messages": column})
    expected = read(written(tmp_path, [{"messages": [USER, ANSWER]}]), tokenizer)
    assert read(path, tokenizer) == expected * 3


def test_a_key_of_turns_twice_is_refused(tokenizer: Any, tmp_path: Path):
    arrays = [pyarrow.array([word]) for word in ("user", "a", "b")]
    turns = pyarrow.StructArray.from_arrays(arrays, ["role", "content", "content"])
    path = write_json_parquet(tmp_path, {"messages": pyarrow.ListArray.from_arrays([0, 1], turns)})
    with pytest.raises(DataError, match='column "messages" has the key "content" 2 times; keep'):
        read(path, tokenizer)


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
        ({"text": ["a"]}, 'has no "conversations" or "messages" but "text"; write {"conv'),
        (
            {"prompt": ["a"], "n": [1]},
            'has no "conversations" or "messages" but "prompt", "n"; write',
        ),
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
    found = read(path, tokenizer)
    (report,) = (one for one in found if isinstance(one, Rejection))
    assert found.index(report) == report.line - 1 >= 300
    assert report.line - 1 + report.documents == 400
    assert len(found) == len(rows) - report.documents + 1
    assert "cannot be read (" in report.what
    path.write_bytes(whole[:-9])
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        read(path, tokenizer)
    path = write_parquet(tmp_path, [], OF_MESSAGES)
    (report,) = read(path, tokenizer)
    assert "a.parquet:1 (row 1): is empty; " in str(report)


def test_the_limit_of_a_document(tokenizer: Any, tmp_path: Path):
    path = write_parquet(tmp_path, [{"messages": [USER, {**ANSWER, "content": "x" * 3000}]}])
    options = OPTIONS.model_copy(update={"max_document_bytes": 1000})
    plan = make_plan([Source("data", (str(path),))], options)
    work = Work(tmp_path, plan, tokenizer, is_strict=False)
    (segment,) = segments_of(path, 2**62)
    (found,) = read_segment(segment, work.reading_of(plan.units[0], set()))
    assert "bytes, more than max_document_bytes = 1000" in str(found)


def test_prepare_names_the_way_to_fine_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_parquet(tmp_path, [{"messages": [USER, ANSWER]}])
    words = ["prepare", str(path), "--vocab_size", "512", "--out", str(tmp_path / "out")]
    assert main(words) == 3
    error = capsys.readouterr().err
    assert 'has "messages", a conversation to fine-tune on' in error
    assert "fine-tune on it with --task sft" in error
