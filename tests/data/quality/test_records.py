"""`data filter` keeps the records: every other field, in its order, as it was written."""

from __future__ import annotations

import datetime
import decimal
import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from minimind.cli.main import main
from minimind.data.quality.records import InRecord, with_records, with_text
from minimind.data.text.documents import ReadOptions
from minimind.data.text.formats import segments_of
from minimind.data.text.inputs import find_files
from tests.data.quality.test_filter import kept, run, texts_of, write
from tests.data.quality.test_rules import CLEAN, MENU, STORY


def lines_of(out: Path) -> list[str]:
    """The lines of the parts."""
    import zstandard

    parts = sorted(out.glob("part-*.jsonl.zst"))
    read = (zstandard.open(part, "rt", encoding="utf-8", newline="\n") for part in parts)
    return [line for file in read for line in file.read().split("\n")[:-1]]


def filtered(out: Path, text: Path, *words: object) -> list[Any]:
    """The records that stay of a text whose documents all do."""
    assert run(out, text, "--min_chars", 1, *words) == 0
    return [json.loads(line) for line in lines_of(out)]


def texts_with(out: Path, field: str) -> list[str]:
    """The texts that `prepare` and a run read with --text_field."""
    (segments,) = (segments_of(file, sys.maxsize) for file in find_files([out]))
    return texts_of(segments[0], field)


# Written otherwise by a decoder and an encoder: numbers, escapes, names that repeat.
VERBATIM = (
    '{"url": "a\\u002fb", "n": 1.10, "big": 123456789012345678901234567890, "e": 1E400,'
    ' "text": "one\\n\\"two\\"", "lone": "\\ud800", "x": 1, "x": {"text": "}, \\"text\\": 1"},'
    ' "": []}'
)


def test_other_fields_stay_as_they_are_written(tmp_path: Path):
    text = tmp_path / "t.jsonl"
    text.write_text(f'{VERBATIM}\n{{"text":"a","meta":{{"k" : [1,2]}}}}\r\n')
    filtered(tmp_path / "out", text)
    assert lines_of(tmp_path / "out") == [VERBATIM, '{"text":"a","meta":{"k" : [1,2]}}']
    assert kept(tmp_path / "out") == ['one\n"two"', "a"]


def value(rng: random.Random, depth: int) -> Any:
    """What JSON can hold, with what separates its parts inside of strings."""
    kind = rng.randrange(6 if depth else 4)
    if kind < 4:
        return [None, True, -1.5e10, rng.choice(['é"\\\n\u2028{}[],: ', "", "text"])][kind]
    inner = [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return inner if kind == 4 else {rng.choice('ab"{:,'): one for one in inner}


def test_another_text_changes_nothing_else():
    rng = random.Random(1)
    records = with_records(ReadOptions()).records
    assert records is not None
    for number in range(2_000):
        names = rng.sample(["a", 'c"', "{x", "te\u0301xt", "text2", "b.c", "text"], 7)
        fields = {name: value(rng, 3) for name in names[rng.randrange(7) :]}
        fields["text"] = f"text {number}"
        separators = rng.choice([(",", ":"), (" ,  ", ":\t")])
        line = json.dumps(fields, ensure_ascii=rng.random() < 0.5, separators=separators)
        document = records.of_line(line.encode() + b"\n")
        assert isinstance(document, InRecord)
        assert document.record == line
        assert with_text(line, "text", fields["text"]) == line
        again = with_text(document.record, "text", "new")
        assert [*json.loads(again).items()] == [*{**fields, "text": "new"}.items()]


def test_items_of_a_list_are_lines(tmp_path: Path):
    records = [{"id": 1, "text": "a\n\n b", "meta": {"k": [1, {}]}}, {"text": "c", "url": None}]
    text = tmp_path / "t.json"
    text.write_text(json.dumps(records, indent=2))
    assert filtered(tmp_path / "out", text) == records
    assert len(lines_of(tmp_path / "out")) == 2


def test_records_with_the_text_alone_are_the_bytes_that_json_writes(tmp_path: Path):
    texts = ['a "quote"\\\n\t字\u2028\x7f\x01', "é\U0001f600", " "]
    text = write(tmp_path / "t.jsonl", texts)
    (tmp_path / "u.txt").write_text(texts[0])
    assert run(tmp_path / "out", text, tmp_path / "u.txt", "--min_chars", 1) == 0
    expected = [json.dumps({"text": one}, ensure_ascii=False) for one in [*texts, texts[0]]]
    assert lines_of(tmp_path / "out") == expected


@pytest.mark.parametrize(
    ("field", "line", "written"),
    [
        ("body", '{"id": 1, "body": "%s", "text": "other"}', None),
        ("data.text", '{"data": {"id": 1, "text": "%s"}, "text": "other"}', None),
        ("data.text", '{"data": {"text": "other"}, "data.text": "%s"}', None),
        ("{title} {text}", '{"text": "%s", "n": 1, "title": "T"}', None),
        ("{t} {d.b}", '{"t": "T", "d": {"b": "%s"}}', '{"t": "T", "d": {"b": "%o"}, "text": "%s"}'),
    ],
)
def test_what_is_left_stands_where_the_flag_says_and_the_text_of_a_template_in_text(
    field, line, written, tmp_path: Path, capsys
):
    def with_text(line: str, text: str) -> str:
        return line.replace("%s", json.dumps(text)[1:-1])

    text = tmp_path / "t.jsonl"
    text.write_text(with_text(line, MENU + STORY) + "\n")
    words = ("--text_field", field, "--rules", "c4", "--rules_words", "plain")
    assert run(tmp_path / "out", text, *words) == 0
    expected = (written or line).replace("%o", json.dumps(MENU + STORY)[1:-1])
    assert lines_of(tmp_path / "out") == [with_text(expected, CLEAN)]
    again = "text" if "{" in field else field
    told = capsys.readouterr().out.splitlines()[-1]
    flag = "" if again == "text" else f" --text_field {again}"
    assert told == f"done: --data_path {tmp_path / 'out'}{flag}"
    assert texts_with(tmp_path / "out", again) == [CLEAN]


def test_a_text_of_a_template_replaces_no_other_field(tmp_path: Path, capsys):
    text = write(tmp_path / "t.jsonl", ["other"], title="T")
    assert run(tmp_path / "out", text, "--min_chars", 1, "--text_field", "{title}!") == 3
    message = 'has "text", where the text of --text_field {title}! is written; rename it, or'
    assert message in capsys.readouterr().err


def test_near_duplicates_keep_their_fields(tmp_path: Path):
    text = tmp_path / "t.jsonl"
    texts = [STORY, STORY + " End.", STORY, "Another text of some six words."]
    own = [{"url": f"u{n}", "in": {"body": one}, "n": n} for n, one in enumerate(texts)]
    text.write_text("".join(json.dumps(one) + "\n" for one in own))
    found = filtered(tmp_path / "out", text, "--minhash", "--text_field", "in.body")
    assert len(found) == 2
    assert all(one in own for one in found)


def test_columns_of_csv_are_kept(tmp_path: Path, capsys):
    text = tmp_path / "t.csv"
    text.write_text('id,body,"a ""b"""\n01,"x,\ny",\n2,z,q\n')
    assert filtered(tmp_path / "out", text, "--text_field", "body") == [
        {"id": "01", "body": "x,\ny", 'a "b"': ""},
        {"id": "2", "body": "z", 'a "b"': "q"},
    ]
    text.write_bytes(b"id,text,id\n1,x,2\n")
    assert run(tmp_path / "no", text, "--min_chars", 1) == 3
    assert 'has the column "id" 2 times; keep the one that is meant' in capsys.readouterr().err
    text.write_bytes(b"id,text\n\xff,x\n")
    assert run(tmp_path / "no", text, "--min_chars", 1) == 3
    assert '"id" is not UTF-8 (0xff: invalid start byte); write it as' in capsys.readouterr().err


TIME = datetime.datetime(2024, 1, 2, 3, 4, 5)


def test_columns_of_tables_are_kept_and_what_json_lacks_is_text(tmp_path: Path, capsys):
    columns = {
        "id": [1, 2**62],
        "text": ["a", "b"],
        "at": [TIME, None],
        "day": [TIME.date(), TIME.date()],
        "meta": pyarrow.array([{"k": [1.5, float("nan")], "at": TIME}, None]),
        "kind": pyarrow.array(["x", "y"]).dictionary_encode(),
        "raw": [b"caf\xc3\xa9", b""],
        "cost": [decimal.Decimal("1.10"), None],
        "took": [datetime.timedelta(seconds=1), None],
    }
    expected = [
        {
            **{"id": 1, "text": "a", "at": "2024-01-02 03:04:05.000000", "day": "2024-01-02"},
            "meta": {"k": [1.5, None], "at": "2024-01-02 03:04:05.000000"},
            **{"kind": "x", "raw": "café", "cost": "1.10", "took": 1_000_000},
        },
        {
            **{"id": 2**62, "text": "b", "at": None, "day": "2024-01-02", "meta": None},
            **{"kind": "y", "raw": "", "cost": None, "took": None},
        },
    ]
    table = pyarrow.table(columns)
    parquet.write_table(table, tmp_path / "t.parquet")
    found = filtered(tmp_path / "out", tmp_path / "t.parquet")
    assert found == expected
    assert [*found[0]] == [*columns]
    datasets = pytest.importorskip("datasets", reason="extra: data")
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    assert filtered(tmp_path / "of_dataset", tmp_path / "saved") == expected

    table = pyarrow.table({"text": ["a"], "image": [b"\x89PNG"]})
    parquet.write_table(table, tmp_path / "t.parquet")
    assert run(tmp_path / "no", tmp_path / "t.parquet", "--min_chars", 1) == 3
    said = '"image" is not UTF-8 (0x89: invalid start byte); write it as text, or leave the field'
    assert said in capsys.readouterr().err
    parquet.write_table(pyarrow.table({"text": [1]}), tmp_path / "t.parquet")
    assert run(tmp_path / "no", tmp_path / "t.parquet", "--min_chars", 1) == 3
    assert 'column "text" holds int64, not string' in capsys.readouterr().err


def test_json_in_tables_and_text_within_a_column(tmp_path: Path):
    table = pyarrow.table(
        {
            "data": [{"text": "a", "id": 1}, {"text": "b", "id": 2}],
            "more": pyarrow.array(['{"k":\n 1.10}', None], pyarrow.json_()),
        }
    )
    parquet.write_table(table, tmp_path / "t.parquet")
    filtered(tmp_path / "out", tmp_path / "t.parquet", "--text_field", "data.text")
    assert lines_of(tmp_path / "out") == [
        '{"data": {"text": "a", "id": 1}, "more": {"k": 1.10}}',
        '{"data": {"text": "b", "id": 2}, "more": null}',
    ]
    assert texts_with(tmp_path / "out", "data.text") == ["a", "b"]


def test_prepare_reads_the_output_with_the_same_flag(tmp_path: Path):
    text = tmp_path / "t.jsonl"
    texts = [f"This is text number {number} of them." for number in range(40)]
    text.write_text("".join(json.dumps({"n": {"t": one}, "url": "u"}) + "\n" for one in texts))
    (tmp_path / "u.txt").write_text("A file of text has no fields.")
    words = ("--text_field", "n.t")
    paths = (text, tmp_path / "u.txt")
    assert run(tmp_path / "clean", *paths, "--exact_dedup", *words) == 0
    given = ("prepare", tmp_path / "clean", "--out", tmp_path / "tokens", "--vocab_size", 512)
    assert main([*map(str, given), *words]) == 0
    manifest = json.loads((tmp_path / "tokens" / "manifest.json").read_text())
    assert sum(split["documents"] for split in manifest["splits"].values()) == 41
