"""Rows, documents and places of steps, against a recorder of the rows that are read."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from minimind.cli.main import main as minimind
from minimind.data.loader.batches import Batches
from minimind.data.loader.row_order import Mixture, Order
from minimind.data.prepare.prepare import Prepared, open_prepared
from minimind.errors import DataError, UsageError
from minimind.provenance.documents import Documents
from minimind.provenance.step_rows import (
    documents_of,
    logged_order,
    read_run,
    rows_at,
    steps_reading,
    stretch_of,
    suspects,
)
from tests.conftest import sentences

ROW_TOKENS = 33
SEED = 7
# World size, rows per step, micro-batch rows, steps until which a start trains, step it resumes
# from: a resume on another world size, a crash whose steps are trained again, another batch size.
STARTS = [(1, 8, 4, 300, 0), (2, 8, 2, 700, 250), (4, 8, 1, 1000, 700), (2, 16, 8, 1250, 1000)]


@dataclass
class Recorded:
    """A run, and the rows that every rank read at each step that counts, as tokens."""

    run_dir: Path
    prepared: Prepared
    read: dict[int, list[list[np.ndarray]]] = field(default_factory=dict)  # by step, rank

    def rows(self, step: int) -> np.ndarray:
        return np.concatenate([batch for rank in self.read[step] for batch in rank])


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
            found.read[step + 1] = [[b.numpy() for b in rank.at(step)] for rank in ranks]
            loss = 1.0 if step % 10 else 5.0
            log.append({"event": "step", "step": step + 1, "loss": loss, "time": float(step)})
        for rank in ranks:
            rank.close()
    text = "".join(json.dumps(line) + "\n" for line in log)
    (found.run_dir / "metrics.jsonl").write_text(text)
    return found


def test_the_rows_of_every_step_are_those_that_were_read(recorded: Recorded):
    stretches = read_run(recorded.run_dir)
    documents = documents_of(stretches[0])
    shards, compared = recorded.prepared.train, 0
    for step in range(1, 1251):
        rows = rows_at(stretch_of(stretches, step), documents, step, None)
        tokens = [shards.stretch(row.first_token, ROW_TOKENS) for row in rows]
        np.testing.assert_array_equal(np.stack(tokens), recorded.rows(step))
        compared += len(rows)
        if step % 50 == 0:
            for rank, batches in enumerate(recorded.read[step]):
                own = rows_at(stretch_of(stretches, step), documents, step, rank)
                assert own == [row for row in rows if row.rank == rank]
                of_batch = [row.micro_batch for row in own]
                assert of_batch == [n for n, batch in enumerate(batches) for _ in batch]
    assert compared > 10_000
    assert stretch_of(stretches, 1250).order.place(1249)[0] >= 2  # of several epochs


def test_a_document_is_at_its_place(recorded: Recorded):
    documents = Documents.of(recorded.prepared)
    assert len(documents.first) > 4  # units
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
    stretches = read_run(recorded.run_dir)
    documents = documents_of(stretches[0])
    eos = recorded.prepared.tokenizer.eos_id
    for row in rows_at(stretch_of(stretches, 5), documents, 5, None):
        tokens = recorded.prepared.train.stretch(row.first_token, ROW_TOKENS)
        ends = (np.flatnonzero(tokens == eos) + 1).tolist()
        borders = [*ends, ROW_TOKENS] if ends[-1:] != [ROW_TOKENS] else ends
        assert [part.stop for part in row.parts] == borders
        assert [part.start for part in row.parts] == [0, *borders[:-1]]


def test_the_steps_of_a_document_are_those_that_read_it(recorded: Recorded):
    stretches = read_run(recorded.run_dir)
    documents = documents_of(stretches[0])
    expected: dict[int, list[tuple[int, int, int]]] = {}
    for step in range(1, 1251):
        for row in rows_at(stretch_of(stretches, step), documents, step, None):
            for part in row.parts:
                expected.setdefault(part.document, []).append((step, row.rank, row.row))
    for number in range(0, len(documents.ends), 7):
        assert steps_reading(stretches, documents, number) == sorted(expected.get(number, []))


def test_documents_of_steps_with_a_high_loss(recorded: Recorded):
    stretches = read_run(recorded.run_dir)
    documents = documents_of(stretches[0])
    found, high, logged = suspects(recorded.run_dir, stretches, documents, range(1, 201))
    assert (high, logged) == ([*range(11, 201, 10)], 200)  # nothing is known before the first
    rows = rows_at(stretch_of(stretches, 11), documents, 11, None)
    assert {part.document for row in rows for part in row.parts} <= {s.document for s in found}
    assert found[0].above == max(one.above for one in found) <= found[0].logged


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
    where = f"data where {run} {Path(part['file']).name}:{part['line']}"
    reads = json.loads(shown(capsys, f"{where} --json"))
    assert reads["document"] == part["document"]
    assert reads["split"] == "train"
    assert {"step": 260, "rank": 0, "row": found["rows"][0]["row"]} in reads["reads"]
    assert f"document {part['document']:,}, " in shown(capsys, where)
    assert "it was rejected" in shown(capsys, f"data where {run} {place}/a.jsonl:4")
    assert "it was rejected" in shown(capsys, f"data where {run} c.parquet:1")
    text = shown(capsys, f"data at {run} --steps 1:200 --top 3")
    assert "19 of 200 logged steps" in text
    assert len(text.splitlines()) == 5


def test_a_document_that_is_held_out_is_read_by_no_step(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
):
    place = recorded.run_dir.parent / "a.jsonl"
    splits = [
        json.loads(shown(capsys, f"data where {recorded.run_dir} {place}:{line} --json"))["split"]
        for line in range(1, 60)
    ]
    assert splits.count("val") > 0
    assert splits[3:5] == [None, None]
    line = splits.index("val") + 1
    assert "held out" in shown(capsys, f"data where {recorded.run_dir} {place}:{line}")


@pytest.mark.parametrize(
    ("words", "report"),
    [
        ("data at RUN --step 1251", "the run has steps 1 to 1250; give one of them"),
        ("data at RUN --step 260 --rank 2", "had ranks 0 to 1"),
        ("data at RUN --step 0", "0 is below 1"),
        ("data at RUN", "neither was given"),
        ("data at RUN --step 1 --steps 1:2", "both were given"),
        ("data at RUN --steps 2:1", "is no A:B"),
        ("data at RUN --steps 1:2 --text", "drop --rank and --text"),
        ("data at none --step 1", "is no folder"),
        ("data where RUN a.jsonl", "is no FILE:LINE"),
        ("data where RUN a.jsonl:0", "is no FILE:LINE"),
        ("data where RUN a.jsonl:9999", "there is no such line"),
        ("data where RUN z.jsonl:1", "is no file of this text"),
    ],
)
def test_what_is_wrong_is_named(
    recorded: Recorded, capsys: pytest.CaptureFixture[str], words: str, report: str
):
    assert minimind(words.replace("RUN", str(recorded.run_dir)).split()) == 2
    assert report in capsys.readouterr().err


def changed_log(recorded: Recorded, out: Path, **changes: Any) -> Path:
    out.mkdir()
    lines = (recorded.run_dir / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    starts = [{**e, **changes} for e in events if e["event"] == "run_start"]
    text = "".join(json.dumps(line) + "\n" for line in starts[:1])
    (out / "metrics.jsonl").write_text(text)
    return out


def test_a_log_without_an_order_or_with_other_text_is_refused(recorded: Recorded, tmp_path: Path):
    old = changed_log(recorded, tmp_path / "old", order=None)
    with pytest.raises(UsageError, match="written by an earlier version"):
        read_run(old)
    data = {"directory": str(recorded.prepared.directory), "fingerprint": "x", "renamed": {}}
    with pytest.raises(DataError, match="other text than the run"):
        documents_of(read_run(changed_log(recorded, tmp_path / "other", data=data))[0])


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
        assert f"? {place}: cannot be read (No such file or directory)" in text
    finally:
        place.write_bytes(content)
