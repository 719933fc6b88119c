"""`data filter`: what stays, what is removed and why, and counts that add up."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from minimind.cli.main import main
from minimind.data.prepare import work_units
from minimind.data.text.documents import ReadOptions, Rejection, Segment
from minimind.data.text.formats import read_segment, segments_of
from minimind.data.text.inputs import find_files
from tests.conftest import sentences


def write(path: Path, texts: list[str], **more: str) -> Path:
    """A .jsonl file of texts, with other fields."""
    lines = (json.dumps({**more, "text": text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_text("".join(lines))
    return path


def texts_of(segment: Segment, text_field: str = "text") -> list[str]:
    """The texts of a segment without bad documents."""
    documents = [*read_segment(segment, ReadOptions(text_field))]
    assert not any(isinstance(one, Rejection) for one in documents)
    return [str(one[0]) for one in documents if not isinstance(one, Rejection)]


def kept(out: Path) -> list[str]:
    """The texts that --data_path reads from the folder."""
    segments = (segment for file in find_files([out]) for segment in segments_of(file, sys.maxsize))
    return [text for segment in segments for text in texts_of(segment)]


def removed(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "removed.ndjson").read_text().splitlines()]


def report_of(out: Path) -> dict[str, Any]:
    """The report, after checking that it adds up and agrees with the lists."""
    report = json.loads((out / "report.json").read_text())
    for what in ("documents", "bytes"):
        others = sum(counts[what] for counts in report["removed"].values())
        others += report["cut"]["bytes"] if what == "bytes" else 0
        assert report["read"][what] == report["kept"][what] + report["rejected"][what] + others
    texts = kept(out)
    assert report["kept"]["documents"] == len(texts)
    assert report["kept"]["bytes"] == sum(len(text.encode()) for text in texts)
    assert sum(one.get("documents", 1) for one in removed(out)) == report["read"][
        "documents"
    ] - len(texts)
    return report


def run(out: Path, *words: object) -> int:
    return main(["data", "filter", *map(str, words), "--out", str(out)])


def test_short_and_long_texts_are_removed_and_counted_in_characters(tmp_path, capsys):
    text = write(tmp_path / "t.jsonl", ["字" * 4, "字" * 5, "a\u2028b\n" * 2, "x" * 9], url="?")
    assert run(tmp_path / "out", text, "--min_chars", 5, "--max_chars", 8) == 0
    assert kept(tmp_path / "out") == ["字" * 5, "a\u2028b\n" * 2]
    report = report_of(tmp_path / "out")
    assert report["read"] == {"documents": 4, "bytes": 12 + 15 + 12 + 9}
    assert report["removed"] == {
        "min_chars": {"documents": 1, "bytes": 12},
        "max_chars": {"documents": 1, "bytes": 9},
    }
    assert report["steps"] == {"min_chars": 5, "max_chars": 8}
    assert removed(tmp_path / "out") == [
        {"file": str(text), "line": 1, "reason": "min_chars"},
        {"file": str(text), "line": 4, "reason": "max_chars"},
    ]
    shown = capsys.readouterr().out
    assert "read                          4  100.00%" in shown
    assert "kept                          2   50.00%" in shown


@pytest.mark.parametrize("unit_bytes", [1, 2**24])
def test_the_first_of_equal_texts_stays_in_any_number_of_tasks(unit_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(work_units, "SMALLEST_UNIT", unit_bytes)
    first = write(tmp_path / "a.jsonl", ["one two", "other", "one  two\n"])
    second = write(tmp_path / "b.jsonl", ["new", " one\ttwo", "One two"])
    assert run(tmp_path / "out", second.parent, "--exact_dedup") == 0
    assert kept(tmp_path / "out") == ["one two", "other", "new", "One two"]
    assert removed(tmp_path / "out") == [
        {"file": str(first), "line": 3, "reason": "exact_duplicate"},
        {"file": str(second), "line": 2, "reason": "exact_duplicate"},
    ]
    report_of(tmp_path / "out")


def test_a_removed_text_is_not_what_others_repeat(tmp_path):
    text = write(tmp_path / "t.jsonl", ["a b", "a   b", "a b"])
    assert run(tmp_path / "out", text, "--min_chars", 4, "--exact_dedup") == 0
    assert kept(tmp_path / "out") == ["a   b"]


def test_all_formats_are_read_and_places_are_those_of_the_file(tmp_path):
    import pyarrow
    from pyarrow import parquet

    texts = sentences(5, 40)
    (tmp_path / "in").mkdir()
    table = pyarrow.table({"text": texts})
    parquet.write_table(table, tmp_path / "in" / "a.parquet", row_group_size=16)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "in" / "c.txt").write_text(texts[7])
    assert run(tmp_path / "out", tmp_path / "in", "--exact_dedup") == 0
    assert kept(tmp_path / "out") == list(dict.fromkeys(texts))
    last, before = removed(tmp_path / "out")[-1], removed(tmp_path / "out")[-2]
    assert last == {"file": str(tmp_path / "in" / "c.txt"), "line": 1, "reason": "exact_duplicate"}
    assert (before["line"], before["file"]) == (40, str(tmp_path / "in" / "b.jsonl.gz"))
    report_of(tmp_path / "out")


def test_bad_lines_end_it_or_are_skipped_and_counted(tmp_path, capsys):
    text = write(tmp_path / "t.jsonl", ["good one", "good two"])
    with open(text, "a") as file:
        file.write("\0\n")
    assert run(tmp_path / "out", text, "--min_chars", 1) == 3
    assert f"{text}:3 (byte 42)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    skip = (text, "--min_chars", 1, "--on_bad_data", "skip")
    assert run(tmp_path / "out", *skip) == 3
    assert (
        "1 of 3 documents are bad, and 2.27% of the bytes are lost, more than"
        in capsys.readouterr().err
    )
    assert run(tmp_path / "out", *skip, "--max_bad_fraction", 0.5) == 0
    assert "note   1 byte of the files is lost\n" in capsys.readouterr().err
    report = report_of(tmp_path / "out")
    assert (report["rejected"], report["lost_bytes"]) == ({"documents": 1, "bytes": 0}, 1)
    (entry,) = removed(tmp_path / "out")
    assert (entry["line"], entry["reason"]) == (3, "rejected")


def test_parts_are_cut_and_the_same_text_gives_the_same_bytes(tmp_path, monkeypatch):
    texts = sentences(6, 60)
    text = write(tmp_path / "t.jsonl", texts)
    monkeypatch.setattr(work_units, "SMALLEST_UNIT", 1000)
    contents = []
    for name in ("a", "b"):
        assert run(tmp_path / name, text, "--min_chars", 1) == 0
        files = find_files([tmp_path / name])
        assert len(files) > 2
        contents.append([file.read_bytes() for file in files])
    assert contents[0] == contents[1]
    assert [text for file in files for text in texts_of(segments_of(file, 1)[0])] == texts


def test_near_duplicates_are_removed_after_the_other_steps_with_their_cluster(tmp_path):
    own = " ".join(sentences(8, 20))
    texts = ["short", own, own + " end", "Another text of six words.", f" {own}"]
    text = write(tmp_path / "t.jsonl", texts)
    words = ("--minhash", "--min_chars", 9, "--exact_dedup")
    assert run(tmp_path / "out", text, *words) == 0
    report = report_of(tmp_path / "out")
    assert {name: counts["documents"] for name, counts in report["removed"].items()} == {
        "min_chars": 1,
        "exact_duplicate": 1,
        "near_duplicate": 1,
    }
    assert report["steps"]["minhash"] == {"ngrams": 5, "buckets": 14, "hashes": 8}
    (near,) = [entry for entry in removed(tmp_path / "out") if entry["reason"] == "near_duplicate"]
    assert near.pop("line") in (2, 3)
    assert near == {"file": str(text), "reason": "near_duplicate", "minhash_cluster_id": 0}
    assert len(kept(tmp_path / "out")) == 2
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".zst", ".json", ".ndjson"}


def test_an_earlier_output_is_not_read_again(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a text")
    words = ["data", "filter", str(tmp_path), "--out", str(tmp_path / "clean"), "--min_chars", "2"]
    assert main(words) == 0
    assert main([*words, "--force"]) == 2
    assert "which is read; give another folder" in capsys.readouterr().err


def test_an_earlier_folder_is_replaced_only_by_force(tmp_path, capsys):
    text = write(tmp_path / "t.jsonl", ["one", "three"])
    assert run(tmp_path / "out", text, "--min_chars", 1) == 0
    assert run(tmp_path / "out", text, "--min_chars", 4) == 2
    assert f"--out {tmp_path / 'out'} exists" in capsys.readouterr().err
    assert kept(tmp_path / "out") == ["one", "three"]
    assert run(tmp_path / "out", text, "--min_chars", 4, "--force") == 0
    assert kept(tmp_path / "out") == ["three"]
    (tmp_path / "out" / "mine").touch()
    assert run(tmp_path / "out", text, "--min_chars", 1, "--force") == 2
    for name in ("write", "swap"):  # of a command that was killed
        (tmp_path / f".out.{name}.lock").touch()
    assert run(tmp_path / "out", text, "--min_chars", 1) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"t.jsonl", "out"}


@pytest.mark.parametrize(
    "report",
    [
        *(b"", b"[]", b"[" * 100_000, b"\xff", b"3", b'{"parts": 3}', b'{"kept": 3}'),
        *(b'{"parts": []}', b'{"parts": ["part-00000.jsonl.zst", "part-00001.jsonl.zst"]}'),
    ],
)
def test_a_folder_with_names_of_an_output_is_known_by_its_report(report, tmp_path, capsys):
    text = write(tmp_path / "t.jsonl", ["one", "three"])
    out, forced = tmp_path / "out", (tmp_path / "out", text, "--min_chars", 1, "--force")
    assert run(*forced) == 0
    assert run(*forced) == 0
    original = (out / "report.json").read_bytes()
    (out / "report.json").write_bytes(report)
    assert run(*forced) == 2
    assert f"--out {out} was not written by minimind data filter" in capsys.readouterr().err
    assert (out / "report.json").read_bytes() == report
    (out / "report.json").write_bytes(original)
    (out / "part-2024.jsonl.gz").touch()  # mine
    assert run(*forced) == 2


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (
            (),
            2,
            "minimind data filter has nothing to do; give one or more of --min_chars, --max_chars",
        ),
        (("--min_chars", 9, "--max_chars", 8), 2, "--min_chars 9 is more than --max_chars 8"),
        (
            ("--exact_dedup", "--minhash_hashes", 4),
            2,
            "--minhash_hashes has no effect without --minhash",
        ),
        (("--min_chars", 99), 3, "none of 2 documents is left, and 2 were removed by min_chars"),
        (("--min_chars", 1, "--text_field", "body"), 3, '"body"'),
    ],
)
def test_what_cannot_be_is_one_sentence_and_leaves_nothing(
    words, status, message, tmp_path, capsys
):
    text = write(tmp_path / "t.jsonl", ["one", "two"])
    assert run(tmp_path / "out", text, *words) == status
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_a_reader_loses_counts_and_long_records_are_told(tmp_path, capsys):
    rows = ["id,text", *(f"{n},row {n} of the file" for n in range(1000))]
    rows[901] = '900,"row 900 of the file'
    (tmp_path / "t.csv").write_text("\n".join(rows) + "\n")
    skip = ("--min_chars", 1, "--on_bad_data", "skip")
    assert run(tmp_path / "out", tmp_path / "t.csv", *skip) == 3
    assert "100 of 1,000 documents are bad, more than max_bad_fraction" in capsys.readouterr().err
    assert run(tmp_path / "out", tmp_path / "t.csv", *skip, "--max_bad_fraction", 0.2) == 0
    assert report_of(tmp_path / "out")["rejected"]["documents"] == 100
    (entry,) = removed(tmp_path / "out")
    assert (entry["line"], entry["documents"], entry["bytes"]) == (902, 100, 0)
    (tmp_path / "t.csv").write_text("\n".join(rows) + '"\n')
    capsys.readouterr()
    assert run(tmp_path / "out2", tmp_path / "t.csv", *skip) == 0
    told = f"note   {tmp_path / 't.csv'}:902: one document is read from the 100 lines up to 1001; "
    assert told in capsys.readouterr().err
