"""The token balance against every token of an epoch, marked where it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minimind.train as training
from minimind.cli.main import main as minimind
from minimind.config.parse import parse_flags
from minimind.data.prepare.prepared import Prepared, open_prepared
from minimind.data.rows.order import Mixture, Order
from minimind.recovery.step_rows import documents_of, read_run, rows_at
from minimind.recovery.token_balance import sentence, token_balance
from minimind.train.what_next import what_next
from tests.conftest import sentences

train: Any = training  # a package that is called like a function


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    place = tmp_path_factory.mktemp("balance")
    sources = []
    for number in range(3):
        path = place / f"{number}.jsonl"
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in sentences(number, 40)))
        sources += ["--source", f"source{number}={path}"]
    words = f"prepare --out {place}/data --vocab_size 600 --val_fraction 0.1"
    assert minimind([*words.split(), *sources]) == 0
    return open_prepared(place / "data")


@pytest.mark.parametrize(("row_tokens", "rows_per_step"), [(33, 8), (65, 7), (17, 1), (129, 16)])
def test_every_token_is_counted_where_it_goes(
    prepared: Prepared, row_tokens: int, rows_per_step: int
):
    train = prepared.train
    left_out = ((2, 5), (7, 8))
    order = Order(train.rows(row_tokens), rows_per_step, seed=3, left_out=left_out)
    times = np.zeros(len(train), dtype=int)
    for step in range(order.steps_per_epoch):
        for start in train.row_starts(order.rows_for(step, 0, 1), row_tokens).tolist():
            times[start : start + row_tokens] += 1
    rows = train.row_starts(np.arange(order.n_rows), row_tokens)
    in_rows = np.zeros(len(train), dtype=bool)
    for start in rows.tolist():
        in_rows[start : start + row_tokens] = True
    found = token_balance(prepared, order, row_tokens)
    assert times.max() == 1
    assert found["trained"] == times.sum()
    assert found["first_of_row"] == order.steps_per_epoch * rows_per_step
    assert found["left_out"] == 4 * row_tokens
    assert found["tail_of_epoch"] + found["left_out"] == (in_rows & (times == 0)).sum()
    assert found["tail_of_source"] == (~in_rows).sum() > 0
    assert found["held_out"] == len(prepared.val)
    used = found["held_out"] + found["trained"] + found["tail_of_epoch"] + found["tail_of_source"]
    assert (
        used + found["left_out"]
        == found["text"]
        == sum(sum(s["tokens"].values()) for s in prepared.manifest["sources"])
    )
    assert sentence(found).startswith(
        f"{found['text']:,} in the text: {found['trained']:,} trained on per epoch,"
        f" {found['held_out']:,} held out, "
    )


@pytest.mark.parametrize("weights", [(1, 1, 1), (5, 1, 1), (0.2, 7, 1), (1, 30, 60)])
@pytest.mark.parametrize("left_out", [(), ((2, 5), (40, 41))])
def test_a_weighted_mixture_adds_up_by_source(
    prepared: Prepared, weights: tuple[float, ...], left_out: Any
):
    train, row_tokens = prepared.train, 17
    mixture = Mixture(train.sizes(row_tokens), weights, left_out)
    n_rows = train.rows(row_tokens)
    order = Order(n_rows, 7, seed=3, mixture=mixture, left_out=left_out)
    found = token_balance(prepared, order, row_tokens)
    places = np.arange(mixture.n_rows)
    rows = mixture.rows_at(places, 3, np.zeros_like(places))
    ends = np.cumsum(mixture.sizes)
    for number, one in enumerate(found["sources"]):
        own = rows[np.searchsorted(ends, rows, side="right") == number]
        assert one["epoch"] == len(own) * row_tokens
        assert one["read"] == len(set(own.tolist())) * row_tokens
        assert one["text"] == prepared.manifest["sources"][number]["tokens"]["train"]
        assert one["text"] == one["read"] + one["not_read"] + one["left_out"] + one["tail"]
        assert one["name"] in sentence(found)
    assert (
        sum(one["epoch"] for one in found["sources"]) == found["trained"] + found["tail_of_epoch"]
    )
    assert found["text"] == found["held_out"] + sum(one["text"] for one in found["sources"])
    assert sum(one["left_out"] for one in found["sources"]) == found["left_out"]
    assert sum(one["tail"] for one in found["sources"]) == found["tail_of_source"]
    text, epoch = sentence(found).split("; an epoch by weight: ")
    for sides, between in ((text.split(" in the text: "), ", "), (epoch.split(" = "), " + ")):
        totals = {
            sum(int(item.split(" ")[0].replace(",", "")) for item in side.split(between))
            for side in sides
        }
        assert len(totals) == 1, sentence(found)


def test_the_conversations_of_each_part_are_counted():
    counts: dict[str, Any] = {
        "text": 9_700,
        "held_out": 500,
        "held_out_cut": 0,
        "held_out_dropped": 0,
    }
    counts |= {"in_rows": 9_000, "targets": 4_000, "cut_off": 200, "conversations": 95}
    counts |= {"held_out_conversations": 5, "cut": 2, "dropped": 1, "padding": 1_000, "sources": []}
    line = (
        "9,700 in 100 conversations: 9,000 in the rows (94), 500 held out (5), 200 lost (2 cut at"
        " the end of a turn and 1 dropped, as nothing to train on ends within a row); 4,000 are"
        " targets; 10% of the rows is padding"
    )
    assert sentence(counts) == line
    shares = [("a", 40, 30), ("b", 60, 70)]
    counts["sources"] = [dict(zip(("name", "rows", "epoch"), one, strict=True)) for one in shares]
    of_sources = "30 rows of a (0.75 times) + 70 rows of b (1.17 times)"
    assert sentence(counts) == f"{line}; an epoch by weight: {of_sources}"


def test_a_run_logs_the_balance(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    flags: dict[str, Any] = {
        "dim": 16,
        "n_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 1,
        "max_seq_len": 32,
    }
    flags |= {"vocab_size": 600, "batch_size": 32, "device": "cpu", "deepspeed_config": "none"}
    flags |= {"data_path": [str(corpus)], "cache_dir": str(tmp_path / "cache"), "epochs": 2}
    assert train(flags, out_dir=str(out), eval_rows=0, log_interval=100) == 0
    said = "".join(capsys.readouterr())
    assert f"tokens; next\n{what_next(parse_flags(['--out_dir', str(out)]))}\n" in said
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    start, balance = (
        next(e for e in events if e["event"] == name) for name in ("run_start", "token_balance")
    )
    last = [event for event in events if event["event"] == "step"][-1]
    log = read_run(out)  # of a real run, as `minimind data at` reads it
    stretch = log.at(last["step"])
    assert (stretch.parallel.world_size, stretch.micro_batch_rows, stretch.row_tokens) == (
        1,
        32,
        33,
    )
    rows = rows_at(stretch, documents_of(stretch), last["step"], None)
    assert [row.position for row in rows] == [*range(*last["rows"])]
    assert 2 * (balance["trained"] - balance["first_of_row"]) == last["tokens"]
    parts = ("held_out", "trained", "tail_of_epoch", "tail_of_source")
    assert sum(balance[name] for name in parts) == balance["text"]
    assert balance["trained"] + balance["tail_of_epoch"] == start["rows_per_epoch"] * 33
