"""Rows, documents and places of steps, against a recorder of the rows that are read."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from minimind.cli.main import main as minimind
from minimind.config.run_config import ParallelLayout
from minimind.data.prepare.prepared import Prepared, open_prepared
from minimind.data.rows.batches import Batches
from minimind.data.rows.order import Mixture, Order
from minimind.data.shards.conversation_shards import PADDING
from minimind.errors import DataError, UsageError
from minimind.recovery.documents import Documents
from minimind.recovery.step_rows import documents_of, read_run, rows_at, steps_reading, suspects
from minimind.train.run_start import logged_order
from tests.conftest import sentences

ROW_TOKENS = 33
SEED = 7
# World size, rows per step, micro-batch rows, steps until which a start trains, step it resumes
# from: a resume on another world size, a crash whose steps are trained again, ranks that divide the
# rows unevenly, another batch size.
STARTS = [(1, 8, 4, 300, 0), (2, 8, 2, 700, 250), (4, 8, 1, 900, 700), (3, 8, 2, 1000, 850)]
STARTS += [(2, 16, 8, 1250, 1000)]


@dataclass
class Recorded:
    """A run, and the rows that every rank read at each step that counts, as tokens."""

    run_dir: Path
    prepared: Prepared
    read: dict[int, list[list[np.ndarray]]] = field(default_factory=dict)  # by step, rank

    def rows(self, step: int) -> np.ndarray:
        return np.concatenate([batch for rank in self.read[step] for batch in rank])


def without_padding(batch: torch.Tensor) -> np.ndarray:
    return batch[(batch != PADDING).any(1)].numpy()


def lines_of(texts: list[str]) -> bytes:
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    lines[3:3] = ["not JSON", ""]  # rejected, and counted as lines
    return ("\n".join(lines) + "\n").encode()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A mixture of formats, cut into several units, trained on by `STARTS`."""
    place = tmp_path_factory.mktemp("provenance")
    texts = [sentences(seed, 150) for seed in range(4)]
    (place / "a.jsonl").write_bytes(lines_of(texts[0]))
    (place / "b.jsonl.gz").write_bytes(gzip.compress(lines_of(texts[1])))
    rows = [None, *texts[2]]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": rows}), place / "c.parquet", row_group_size=40
    )
    (place / "d.txt").write_text("\n".join(texts[3][:5]))
    words = f"prepare --source web={place}/a.jsonl:1 --source web={place}/b.jsonl.gz:1"
    words += f" --source books={place}/c.parquet:3 --source books={place}/d.txt:3"
    words += f" --out {place}/data --vocab_size 600 --val_fraction 0.1 --on_bad_data skip"
    assert minimind([*words.split(), "--shard_bytes", "20000"]) == 0
    found = Recorded(place / "run", open_prepared(place / "data"))
    found.run_dir.mkdir()
    shards = found.prepared.train
    assert shards.weights is not None
    mixture = Mixture(shards.sizes(ROW_TOKENS), shards.weights)
    order = Order(shards.rows(ROW_TOKENS), STARTS[0][1], SEED, mixture=mixture)
    log = []
    for world_size, rows_per_step, micro_batch_rows, last, first in STARTS:
        if rows_per_step != order.rows_per_step:
            origin = order.origin_at(first, is_same_text=True)
            order = Order(order.n_rows, rows_per_step, SEED, origin, mixture)
        layout = {"world_size": world_size, "micro_batch_rows": micro_batch_rows}
        facts = logged_order(order, ROW_TOKENS, found.prepared)
        log.append({"event": "run_start", "step": first, "total_steps": 1250, **layout, **facts})
        device = torch.device("cpu")
        sizes = ROW_TOKENS, micro_batch_rows
        ranks = [
            Batches(shards, order, *sizes, rank, world_size, device) for rank in range(world_size)
        ]
        for step in range(first, last):
            found.read[step + 1] = [[without_padding(b) for b in rank.at(step)] for rank in ranks]
            loss = 1.0 if step % 10 else 5.0
            log.append({"event": "step", "step": step + 1, "loss": loss, "time": float(step)})
        for rank in ranks:
            rank.close()
    text = "".join(json.dumps(line) + "\n" for line in log)
    (found.run_dir / "metrics.jsonl").write_text(text)
    return found


def test_the_rows_of_steps_are_those_that_were_read(recorded: Recorded):
    log = read_run(recorded.run_dir)
    documents = documents_of(log.stretches[0])
    shards, compared = recorded.prepared.train, 0
    edges = {edge for *_, last, first in STARTS for edge in (first, last)} - {0, 1250}
    near = {edge + n for edge in edges for n in (-1, 0, 1, 2)}
    for step in sorted({*range(1, 1250, 4), *near, *range(50, 1251, 50)}):
        rows = rows_at(log.at(step), documents, step, None)
        tokens = [shards.stretch(row.first_token, ROW_TOKENS) for row in rows]
        np.testing.assert_array_equal(np.stack(tokens), recorded.rows(step))
        compared += len(rows)
        if step % 50 == 0:
            for rank, batches in enumerate(recorded.read[step]):
                own = rows_at(log.at(step), documents, step, rank)
                assert own == [row for row in rows if row.rank == rank]
                of_batch = [row.micro_batch for row in own]
                assert of_batch == [n for n, batch in enumerate(batches) for _ in batch]
    assert compared > 3_000
    assert log.at(1250).order.place(1249)[0] >= 2  # of several epochs


def test_ranks_of_a_group_have_read_the_same_rows(recorded: Recorded):
    log = read_run(recorded.run_dir)
    documents, stretch = documents_of(log.stretches[0]), log.stretches[0]
    step, alone = stretch.steps[0], replace(stretch, parallel=ParallelLayout(1))
    rows = [row.row for row in rows_at(alone, documents, step, None)]
    groups = replace(stretch, parallel=ParallelLayout(4, sequence=2))
    assert [row.row for row in rows_at(groups, documents, step, None)] == rows
    assert {row.rank for row in rows_at(groups, documents, step, None)} == {0, 2}
    for rank in range(4):
        own = rows_at(groups, documents, step, rank)
        assert [row.row for row in own] == rows[rank // 2 * len(own) :][: len(rows) // 2]
        assert {row.rank for row in own} == {rank}


def test_a_document_is_at_its_place(recorded: Recorded):
    documents = Documents.of(recorded.prepared)
    assert len(documents.units) > 4  # units
    places = documents.places(range(len(documents.ends)))
    assert len(places) == len(documents.ends)
    assert not documents.faults
    for number, place in places.items():
        path = Path(place.file)
        if path.suffix == ".parquet":
            text = pyarrow.parquet.read_table(path)["text"][place.line - 1].as_py()
        elif path.suffix == ".txt":
            text = path.read_text()
        else:
            content = path.read_bytes()
            content = gzip.decompress(content) if path.suffix == ".gz" else content
            line = content.splitlines(keepends=True)[place.line - 1]
            assert place.byte is not None
            assert content[place.byte :].startswith(line)
            text = json.loads(line)["text"]
        start, stop = documents.tokens(number)
        ids = recorded.prepared.train.stretch(start, stop - start)
        assert ids.tolist() == [
            *recorded.prepared.tokenizer.encode(text),
            recorded.prepared.tokenizer.eos_id,
        ]


def test_the_parts_of_a_row_cover_it_and_name_its_documents(recorded: Recorded):
    log = read_run(recorded.run_dir)
    documents = documents_of(log.stretches[0])
    eos = recorded.prepared.tokenizer.eos_id
    for row in rows_at(log.at(5), documents, 5, None):
        tokens = recorded.prepared.train.stretch(row.first_token, ROW_TOKENS)
        ends = (np.flatnonzero(tokens == eos) + 1).tolist()
        borders = [*ends, ROW_TOKENS] if ends[-1:] != [ROW_TOKENS] else ends
        assert [part.stop for part in row.parts] == borders
        assert [part.start for part in row.parts] == [0, *borders[:-1]]


def test_the_steps_of_a_document_are_those_that_read_it(recorded: Recorded):
    log = read_run(recorded.run_dir)
    documents = documents_of(log.stretches[0])
    expected: dict[int, list[tuple[int, int, int]]] = {}
    for step in range(1, 1251):
        for row in rows_at(log.at(step), documents, step, None):
            for part in row.parts:
                expected.setdefault(part.document, []).append((step, row.rank, row.row))
    for number in range(0, len(documents.ends), 7):
        assert steps_reading(log, documents, number) == sorted(expected.get(number, []))


def test_documents_of_steps_with_a_high_loss(recorded: Recorded):
    log = read_run(recorded.run_dir)
    documents = documents_of(log.stretches[0])
    found, high, logged = suspects(log, documents, range(1, 201))
    assert (high, logged) == ([*range(11, 201, 10)], 200)  # nothing is known before the first
    rows = rows_at(log.at(11), documents, 11, None)
    assert {part.document for row in rows for part in row.parts} <= {s.document for s in found}
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    for one in found:
        expected, spread = one.logged * 19 / 200, (one.logged * 19 / 200 * 181 / 200) ** 0.5
        assert one.score == pytest.approx((one.high - expected) / spread)


def shown(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert minimind(words.split()) == 0
    return capsys.readouterr().out


def test_the_commands(recorded: Recorded, capsys: pytest.CaptureFixture[str]):
    run, place = recorded.run_dir, recorded.run_dir.parent
    text = shown(capsys, f"data at {run} --step 260 --rank 1 --text")
    assert text.startswith("step 260: 4 rows, ")
    assert "rank 1, micro-batch 1, row " in text
    found = json.loads(shown(capsys, f"data at {run} --step 260 --json --text"))
    part = found["rows"][0]["parts"][0]
    assert found["faults"] == {}
    where = f"data where {run} {Path(part['file']).name}:{part['line'] or 1}"
    (reads,) = json.loads(shown(capsys, f"{where} --json"))["texts"]
    assert reads["document"] == part["document"]
    assert reads["split"] == "train"
    assert {"step": 260, "rank": 0, "row": found["rows"][0]["row"]} in reads["reads"]
    assert f"document {part['document']:,}, " in shown(capsys, where)
    assert "it was rejected" in shown(capsys, f"data where {run} {place}/a.jsonl:4")
    assert "it was rejected" in shown(capsys, f"data where {run} c.parquet:1")
    text = shown(capsys, f"data at {run} --steps 1:200 --top 3")
    assert "19 of 200 logged steps" in text
    assert len(text.splitlines()) == 5


@pytest.mark.long
def test_a_document_that_is_held_out_is_read_by_no_step(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
):
    place = recorded.run_dir.parent / "a.jsonl"
    splits = [
        json.loads(shown(capsys, f"data where {recorded.run_dir} {place}:{line} --json"))["texts"][
            0
        ]["split"]
        for line in range(1, 60)
    ]
    assert splits.count("val") > 0
    assert splits[3:5] == [None, None]
    line = splits.index("val") + 1
    assert "held out" in shown(capsys, f"data where {recorded.run_dir} {place}:{line}")


@pytest.mark.parametrize(
    ("words", "report"),
    [
        ("data at RUN --step 1251", "run has steps 1 to 1250; give one of them"),
        ("data at RUN --step 260 --rank 2", "had ranks 0 to 1"),
        ("data at RUN --step 0", "0 must be at least 1"),
        ("data at RUN", "no step was named"),
        ("data at RUN --step 1 --steps 1:2", "--step and --steps cannot"),
        ("data at RUN --steps 2:1", "is not A:B"),
        ("data at RUN --steps 1:2 --text", "--steps and --text cannot"),
        ("data at RUN --step 1 --top 2", "--top has no effect without --steps; add --steps"),
        ("data at RUN --steps 5000:6000", "has steps 1 to 1250"),
        ("data at none --step 1", "there is no such file or directory"),
        ("data where RUN a.jsonl", "is not FILE:LINE"),
        ("data where RUN a.jsonl:0", "is not FILE:LINE"),
        ("data where RUN a.jsonl:9999", "there is no such line"),
        ("data where RUN z.jsonl:1", "is not a file of this text"),
    ],
)
def test_what_is_wrong_is_named(
    recorded: Recorded, capsys: pytest.CaptureFixture[str], words: str, report: str
):
    assert minimind(words.replace("RUN", str(recorded.run_dir)).split()) == 2
    assert report in capsys.readouterr().err


def changed_log(recorded: Recorded, out: Path, **changes: Any) -> Path:
    return copied(out, [{**events_of(recorded)[0], **changes}])


def test_a_log_without_an_order_or_with_other_text_is_refused(recorded: Recorded, tmp_path: Path):
    old = changed_log(recorded, tmp_path / "old", order=None)
    with pytest.raises(UsageError, match=r"a run_start .*order.*; restore the file"):
        read_run(old)
    data = {"directory": str(recorded.prepared.directory), "fingerprint": "x", "renamed": {}}
    with pytest.raises(DataError, match="other text than the run"):
        documents_of(read_run(changed_log(recorded, tmp_path / "other", data=data)).stretches[0])
    data["directory"] = str(tmp_path / "gone")
    gone = read_run(changed_log(recorded, tmp_path / "a", data=data)).stretches[0]
    with pytest.raises(DataError, match=r"has no manifest.json, .* or give --data_path"):
        documents_of(gone)


def test_a_text_that_is_gone_or_changed_is_named_and_the_rest_is_shown(
    recorded: Recorded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    place = recorded.run_dir.parent / "a.jsonl"
    content = place.read_bytes()
    words = f"data at {recorded.run_dir} --steps 1:200 --top 500"
    try:
        place.write_bytes(content.replace(b'{"text": "', b'{"text": "x'))
        text = shown(capsys, words)
        assert f"? {place}: changed since it was prepared" in text
        assert "b.jsonl.gz:" in text
        place.unlink()
        text = shown(capsys, words)
        assert f"? {place}: is gone" in text
    finally:
        place.write_bytes(content)


def copied(out: Path, events: list[dict[str, Any]]) -> Path:
    out.mkdir()
    (out / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return out


def events_of(recorded: Recorded) -> list[dict[str, Any]]:
    lines = (recorded.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_steps_that_are_not_trained_or_not_known_are_refused(recorded: Recorded, tmp_path: Path):
    first, *rest = events_of(recorded)
    run = copied(tmp_path / "a", [first, *rest[:120]])
    with pytest.raises(UsageError, match="has steps 1 to 120; give one"):
        read_run(run).at(121)
    ended = {"event": "exit", "step": 125, "time": 1.0, "code": "PREEMPTED"}
    log = read_run(copied(tmp_path / "b", [first, *rest[:120], ended]))
    assert log.at(125) == log.stretches[0]
    log = read_run(copied(tmp_path / "c", rest))  # the first line is lost
    assert log.at(260).parallel.world_size == 2
    with pytest.raises(UsageError, match=r"step 250: .* has steps 251 to"):
        log.at(250)
    other = {key: value for key, value in first.items() if key != "order"}
    with pytest.raises(UsageError, match=r"a run_start .*order.*; restore the file"):
        read_run(copied(tmp_path / "d", [other, *rest]))


def test_each_text_of_a_run_is_searched(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text = tmp_path / "other.jsonl"
    text.write_bytes(lines_of(sentences(9, 60)).replace(b"not JSON\n\n", b""))
    words = f"prepare {text} --out {tmp_path}/data --vocab_size 600 --val_fraction 0"
    assert minimind(words.split()) == 0
    other = open_prepared(tmp_path / "data")
    before = read_run(recorded.run_dir).at(900).order
    n_rows = other.train.rows(ROW_TOKENS)
    order = Order(n_rows, 8, SEED, before.origin_at(900, is_same_text=False))
    facts = {"step": 900, "world_size": 1, "micro_batch_rows": 8}
    start = {"event": "run_start", **facts, **logged_order(order, ROW_TOKENS, other)}
    kept = [e for e in events_of(recorded) if e["step"] <= 900]
    ended = {"event": "exit", "step": 910, "time": 1.0}
    run = copied(tmp_path / "run", [*kept, start, ended])
    capsys.readouterr()
    (found,) = json.loads(shown(capsys, f"data where {run} other.jsonl:1 --json"))["texts"]
    documents = Documents.of(other)
    assert {read["step"] for read in found["reads"]} <= set(range(901, 911))
    read = {row for step in range(901, 911) for row in order.rows_for(step - 1, 0, 1).tolist()}
    expected = [row for row in other.train.rows_over(*documents.tokens(0), ROW_TOKENS)]
    assert {read["row"] for read in found["reads"]} == read & set(expected)
    (found,) = json.loads(shown(capsys, f"data where {run} a.jsonl:1 --json"))["texts"]
    assert found["reads"]
    assert max(read["step"] for read in found["reads"]) <= 900
    assert minimind(f"data at {run} --steps 890:905".split()) == 2
    assert "the text changed at step 901" in capsys.readouterr().err


def test_lines_of_a_text_file_are_one_document_and_links_name_their_file(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    place, run = recorded.run_dir.parent, recorded.run_dir
    (tmp_path / "link").symlink_to(place)
    for name in (f"{place}/d.txt:1", "d.txt:3", f"{tmp_path}/link/d.txt:2"):
        assert f"{place}/d.txt: document" in shown(capsys, f"data where {run} {name}")


def test_documents_of_a_shortened_file_and_after_a_missing_one_are_named(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
):
    place = recorded.run_dir.parent / "b.jsonl.gz"
    content = place.read_bytes()
    documents = Documents.of(recorded.prepared)
    try:
        lines = gzip.decompress(content).splitlines(keepends=True)
        place.write_bytes(gzip.compress(b"".join(lines[:50])))
        places = documents.places(range(len(documents.ends)))
        assert 0 < len(documents.ends) - len(places) < 150
        assert documents.faults == {str(place): "changed since it was prepared"}
        place.write_bytes(gzip.compress(b"".join([*lines, *lines[:20]])))
        assert minimind(f"data where {recorded.run_dir} {place}:{len(lines) + 1}".split()) == 3
        assert "changed since it was prepared; restore it" in capsys.readouterr().err
        place.unlink()
        documents.faults.clear()
        documents.places(range(len(documents.ends)))
        assert documents.faults[str(place)].startswith("is gone")
        assert minimind(f"data where {recorded.run_dir} {place}:2".split()) == 3
        assert "is gone; restore it" in capsys.readouterr().err
    finally:
        place.write_bytes(content)


def test_a_line_is_found_without_reading_the_units_before_it(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
):
    documents = Documents.of(recorded.prepared)
    path = recorded.run_dir.parent / "a.jsonl"
    read: list[int] = []
    original = Documents._read

    def counting(self: Documents, unit: Any) -> Any:
        read.append(unit.unit.number)
        return original(self, unit)

    monkeypatch.setattr(Documents, "_read", counting)
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    found, _ = documents.find(str(path), len(lines))
    assert json.loads(lines[-1])["text"] == found.text
    assert len(read) == 1 < sum(unit.unit.segments[0].path == path for unit in documents.units)
