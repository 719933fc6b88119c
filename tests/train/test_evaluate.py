"""Validation sums against ones computed by hand, for one and for several ranks."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

import minimind.train as training
from minimind.cli.main import main as minimind
from minimind.config.run_config import ParallelLayout
from minimind.engine.loss_of_batch import PADDING
from minimind.train.evaluate import HeldOutRows, evaluate
from tests.distributed.host_reads import counted

train: Any = training  # a package that is called like a function
ROW = 5


class Rows:
    """Held-out rows of consecutive numbers, standing in for token shards."""

    def sizes(self, row_tokens):
        return (9,)

    def read_rows(self, indices, row_tokens):
        return np.asarray(indices)[:, None] * row_tokens + np.arange(row_tokens)


class Ranks:
    """An engine whose loss is the sum of the targets; keeps what each rank added last."""

    def __init__(self, rank, world_size, group_size=1):
        self.rank, self.parallel = rank, ParallelLayout(world_size, sequence=group_size)
        self.data_rank = self.parallel.data_rank(rank)
        self.sums, self.passes = [], 0

    def loss_of(self, rows, by_row):
        assert by_row
        self.passes += 1
        targets = rows[:, 1:]
        is_kept = targets != PADDING
        return (targets * is_kept).sum(1).float(), is_kept.sum(1)

    def sum_over_ranks(self, sums):
        self.sums = sums
        return sums


@pytest.mark.parametrize(("world_size", "group_size"), [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("n_rows", [1, 7, 8, 9])
def test_every_row_counts_once_whatever_the_number_of_ranks(world_size, group_size, n_rows):
    bytes_of = np.full(100, 3, dtype=np.int32)
    held_out = HeldOutRows(Rows(), np.arange(n_rows), ROW, [bytes_of])  # type: ignore[arg-type] (stand-ins)
    ranks = [Ranks(rank, world_size, group_size) for rank in range(world_size)]
    for rank in ranks:
        evaluate(rank, held_out, 2)  # type: ignore[arg-type] (stand-ins)
    loss, tokens, text_bytes, rows, *squares = (
        sum(column) for column in zip(*(r.sums for r in ranks), strict=True)
    )
    losses = np.array([sum(row * ROW + k for k in range(1, ROW)) for row in range(n_rows)])
    assert (loss, tokens, text_bytes, rows) == (losses.sum(), n_rows * 4, n_rows * 4 * 3, n_rows)
    assert squares == [losses @ losses, 4 * losses.sum(), 16 * n_rows]
    assert len({r.passes for r in ranks}) == 1  # a forward pass is collective under ZeRO-3


def test_only_targets_stand_for_bytes_of_text():
    """Tokens that are no targets are negative, and are no places from the end of a table."""

    class Marked(Rows):
        def read_rows(self, indices, row_tokens):
            tokens = super().read_rows(indices, row_tokens)
            return np.where(tokens % 2, tokens, ~tokens)

    held_out = HeldOutRows(Marked(), np.arange(2), ROW, [np.arange(100)])  # type: ignore[arg-type] (stand-ins)
    rank = Ranks(0, 1)
    evaluate(rank, held_out, 2)  # type: ignore[arg-type] (stand-ins)
    assert rank.sums[2] == 1 + 3 + 7 + 9  # not 5, the first of its row


def test_the_sums_of_all_batches_are_read_at_once():
    """On a GPU a read per batch would wait for it, and the next batch would be late."""
    bytes_of = np.full(100, 3, dtype=np.int32)
    held_out = HeldOutRows(Rows(), np.arange(9), ROW, [bytes_of])  # type: ignore[arg-type] (stand-ins)
    rank = Ranks(0, 1)
    with counted() as reads:
        evaluate(rank, held_out, 2)  # type: ignore[arg-type] (stand-ins)
    assert rank.passes == 5
    assert reads["minimind: _sum_loss"] == 2  # losses and counts


def test_perplexity_and_bits_per_byte_follow_from_the_sums():
    bytes_of = np.full(100, 2, dtype=np.int32)
    held_out = HeldOutRows(Rows(), np.arange(1), ROW, [bytes_of])  # type: ignore[arg-type] (stand-ins)
    found = evaluate(Ranks(0, 1), held_out, 2)  # type: ignore[arg-type] (stand-ins)
    assert found["val_loss"] == (1 + 2 + 3 + 4) / 4
    assert found["val_ppl"] == pytest.approx(math.exp(2.5))
    assert found["val_bpb"] == pytest.approx(10 / math.log(2) / 8)
    assert found["tokens"] == 4


class Mixed(Rows):
    """The same of two sources of 5 and 6 rows."""

    def sizes(self, row_tokens):
        return (5, 6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_source_has_its_own_figures_and_they_add_up(world_size):
    bytes_of = np.full(100, 3, dtype=np.int32)
    rows = np.array([0, 2, 3, 5, 6, 8, 10])
    ranks = [Ranks(rank, world_size) for rank in range(world_size)]
    flat, found = [], {}
    for rank in ranks:
        held_out = HeldOutRows(Mixed(), rows, ROW, [bytes_of] * 2, ("a", "b"))  # type: ignore[arg-type] (stand-ins)
        found = evaluate(rank, held_out, 2)  # type: ignore[arg-type] (stand-ins)
        flat.append(rank.sums)
    assert len({r.passes for r in ranks}) == 1
    sums = np.sum(flat, axis=0)
    own = [[row * ROW + k for row in part for k in range(1, ROW)] for part in ((0, 2, 3), rows[3:])]
    assert sums.reshape(2, 7)[:, :4].tolist() == [
        [sum(own[0]), 12, 36, 3],
        [sum(own[1]), 16, 48, 4],
    ]
    if world_size == 1:
        assert list(found["by_source"]) == ["a", "b"]
        assert found["by_source"]["b"]["val_loss"] == sum(own[1]) / 16
        assert found["by_source"]["a"]["tokens"] == 12
        whole = (5 * sum(own[0]) / 12 + 6 * sum(own[1]) / 16) / 11  # by their held-out rows
        assert (found["tokens"], found["rows"]) == (28, 7)
        assert found["val_loss"] == pytest.approx(whole, rel=1e-12)


def test_a_mixture_counts_its_sources_by_their_weights():
    """3 to 1, with more rows held out of the lighter one: 3/4 and 1/4 of the mean losses."""
    bytes_of = np.where(np.arange(100) < 25, 2, 6).astype(np.int32)
    rows = np.array([0, 5, 6, 8, 10])  # one of a, four of b
    means, per_token = [], []
    for own in (rows[:1], rows[1:]):
        targets = [row * ROW + k for row in own for k in range(1, ROW)]
        means.append(sum(targets) / len(targets))
        per_token.append(bytes_of[targets].sum() / len(targets))
    held_out = HeldOutRows(Mixed(), rows, ROW, [bytes_of] * 2, ("a", "b"), (3.0, 1.0))  # type: ignore[arg-type] (stand-ins)
    found = evaluate(Ranks(0, 1), held_out, 2)  # type: ignore[arg-type] (stand-ins)
    loss, text_bytes = (0.75 * a + 0.25 * b for a, b in (means, per_token))
    assert found["val_loss"] == pytest.approx(loss, rel=1e-12)
    assert found["val_bpb"] == pytest.approx(loss / math.log(2) / text_bytes, rel=1e-12)
    assert found["tokens"] == 20
    assert found["by_source"]["a"]["val_loss"] == means[0]


def test_a_source_without_held_out_rows_counts_for_nothing():
    bytes_of = np.full(100, 3, dtype=np.int32)
    rows = np.array([5, 6])
    held_out = HeldOutRows(Mixed(), rows, ROW, [bytes_of] * 2, ("a", "b"), (3.0, 1.0))  # type: ignore[arg-type] (stand-ins)
    found = evaluate(Ranks(0, 1), held_out, 2)  # type: ignore[arg-type] (stand-ins)
    assert found["val_loss"] == pytest.approx(found["by_source"]["b"]["val_loss"], rel=1e-12)
    assert found["unvalidated"] == ["a"]


def test_a_source_that_is_not_validated_is_named(tmp_path, capsys):
    sources = []
    for name, number in (("many", 300), ("few", 6)):
        path = tmp_path / f"{name}.jsonl"
        texts = [f"{name} {n} of the words of a text" for n in range(number)]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources += ["--source", f"{name}={path}:1"]
    words = ["prepare", *sources, "--out", str(tmp_path / "data"), "--vocab_size", "600"]
    assert minimind([*words, "--val_fraction", "0.03"]) == 0
    assert "no document of few is held out" in capsys.readouterr().out
    flags = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 8}
    flags |= {"batch_size": 4, "device": "cpu", "deepspeed_config": "none", "max_steps": 1}
    assert train(flags, data_path=[str(tmp_path / "data")], out_dir=str(tmp_path / "out")) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "warning no row of few is held out: the validation loss is that of the other" in output
    assert "of few (" in output  # how often an epoch reads it
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    events = {event["event"]: event for event in map(json.loads, lines)}
    assert events["eval"]["unvalidated"] == ["few"]
    few = events["token_balance"]["sources"][1]
    assert few["text"] == few["read"] + few["not_read"] + few["tail"] + few["left_out"]
    assert few["epoch"] > few["read"]


def test_a_run_that_is_not_validated_says_so(tmp_path, capsys):
    (tmp_path / "book.txt").write_text("Of the words of a text.\n" * 300)
    flags = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 8}
    flags |= {"batch_size": 4, "device": "cpu", "deepspeed_config": "none", "max_steps": 1}
    flags |= {"vocab_size": 512, "cache_dir": str(tmp_path / "cache")}
    warning = "warning no row of 1 documents is held out, so the run is not validated"
    for fraction, is_said in ((0.01, True), (0.0, False)):
        out_dir = str(tmp_path / f"out-{fraction}")
        words = {"data_path": [str(tmp_path / "book.txt")], "val_fraction": fraction}
        assert train(flags, out_dir=out_dir, **words) == 0
        assert (warning in " ".join(capsys.readouterr().out.split())) is is_said
    words = ["prepare", str(tmp_path / "book.txt"), "--vocab_size", "512"]
    assert minimind([*words, "--out", str(tmp_path / "folder")]) == 0
    assert train(flags, data_path=[str(tmp_path / "folder")], out_dir=str(tmp_path / "out")) == 0
    way_out = "; prepare it with a larger --val_fraction, or a --val_path"  # not by the run's flags
    assert warning + way_out in " ".join(capsys.readouterr().out.split())
