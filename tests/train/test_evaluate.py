"""Validation sums against ones computed by hand, for one and for several ranks."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minimind.train as training
from minimind.cli.main import main as minimind
from minimind.config.parse import parse_flags
from minimind.config.run_config import ParallelLayout
from minimind.data.rows.batches import held_out_rows
from minimind.data.shards.conversation_shards import PADDING
from minimind.errors import UsageError
from minimind.inference.score import LossSums, standard_error
from minimind.train.evaluate import HeldOutRows, affordable_rows, evaluate
from tests.conftest import SMALL, Trained
from tools.host_reads import counted

train: Any = training  # a package that is called like a function
ROW = 5


class Rows:
    """Held-out rows of consecutive numbers, standing in for token shards."""

    def sizes(self, row_tokens) -> tuple[int, ...]:
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

    def sizes(self, row_tokens) -> tuple[int, ...]:
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
    assert "warning no row of few is held out: the validation loss covers only the other" in output
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
    warning = "warning no validation: no row of the document is held out"
    for fraction, is_said in ((0.01, True), (0.0, False)):
        out_dir = str(tmp_path / f"out-{fraction}")
        words = {"data_path": [str(tmp_path / "book.txt")], "val_fraction": fraction}
        assert train(flags, out_dir=out_dir, **words) == 0
        assert (warning in " ".join(capsys.readouterr().out.split())) is is_said
    lines = [json.dumps({"text": f"Of the words of text {n}."}) + "\n" for n in range(200)]
    (tmp_path / "lines.jsonl").write_text("".join(lines))
    words = {"data_path": [str(tmp_path / "lines.jsonl")], "val_fraction": 1e-6}
    assert train(flags, out_dir=str(tmp_path / "out-few"), **words) == 0
    warning_of_many = warning.replace("the document", "the 200 documents")
    way_out = "; give --val_fraction 0.025, or --val_path"
    assert warning_of_many + way_out in " ".join(capsys.readouterr().out.split())
    words = ["prepare", str(tmp_path / "book.txt"), "--vocab_size", "512"]
    assert minimind([*words, "--out", str(tmp_path / "folder")]) == 0
    assert train(flags, data_path=[str(tmp_path / "folder")], out_dir=str(tmp_path / "out")) == 0
    way_out = "; prepare it with a larger --val_fraction, or a --val_path"  # not by the run's flags
    assert warning + way_out in " ".join(capsys.readouterr().out.split())
    with pytest.raises(
        UsageError, match=r"keep_best = 2 .* has no validation to compare, since no"
    ):
        train(flags, data_path=words[1:2], out_dir=str(tmp_path / "best"), keep_best=2)


def test_the_standard_error_is_that_of_a_mean_of_rows():
    draw = np.random.default_rng(7)
    losses = draw.normal(300, 40, 50)
    sums = LossSums.of_rows(losses, np.full(50, 100.0), 1.0)
    of_means = np.std(losses / 100, ddof=1) / math.sqrt(50)
    assert standard_error([sums], [1.0]) == pytest.approx(of_means, rel=1e-9)
    # Rows of different lengths: the spread of the estimate over many drawn samples.
    tokens = draw.integers(20, 200, size=(4000, 50)).astype(float)
    many = tokens * draw.normal(3, 0.5, tokens.shape) + 10 * draw.normal(size=tokens.shape)
    found = [
        standard_error([LossSums.of_rows(*pair, 1.0)], [1.0]) or 0.0
        for pair in zip(many[:500], tokens[:500], strict=True)
    ]
    spread = np.std(many.sum(1) / tokens.sum(1), ddof=1)
    assert np.mean(found) == pytest.approx(spread, rel=0.03)
    # Sources by their shares; one of a single row spreads as the other does.
    other = LossSums.of_rows(losses[:9] * 2, np.full(9, 100.0), 1.0)
    of_other = np.std(losses[:9] / 50, ddof=1) / 3
    both = math.hypot(0.25 * of_means, 0.75 * of_other)
    assert standard_error([sums, other], [1, 3]) == pytest.approx(both, rel=1e-9)
    one = LossSums.of_rows(losses[:1], np.full(1, 100.0), 1.0)
    both = math.hypot(0.5 * of_means, 0.5 * of_means * math.sqrt(50))
    assert standard_error([sums, one], [1, 1]) == pytest.approx(both, rel=1e-9)
    assert standard_error([one], [1.0]) is None
    assert standard_error([one + one], [1.0]) == 0.0


class Texts(Ranks):
    """Rows of two texts, the second of which is harder by far; a row has its number as tokens."""

    def __init__(self, losses, rank=0, world_size=1):
        super().__init__(rank, world_size)
        self.losses = losses

    def loss_of(self, rows, by_row):
        is_row = rows[:, 1] >= 0
        numbers = torch.where(is_row, rows[:, 1], 0)
        losses = torch.from_numpy(self.losses)[numbers] * is_row
        return 4 * losses, 4 * is_row

    @staticmethod
    def held_out(size, reads, n=None, names=("data",), sizes=None, weights=None):
        class Numbered:
            def sizes(self, row_tokens):
                return sizes or (size,)

            def read_rows(self, indices, row_tokens):
                return np.repeat(np.asarray(indices)[:, None], row_tokens, axis=1)

        rows = held_out_rows(Numbered(), n or size, ROW, weights)  # type: ignore[arg-type] (stand-ins)
        bytes_of = [np.ones(size)] * len(names)
        return HeldOutRows(Numbered(), rows, ROW, bytes_of, names, weights, reads)  # type: ignore[arg-type] (stand-ins)


@pytest.mark.parametrize("share", [0.5, 0.15, 0.97])
@pytest.mark.parametrize("n", [16, 64, 200])
def test_a_text_in_another_order_has_the_same_loss_within_its_error(share: float, n: int):
    """One text after the other, the other first, and line by line in turn."""
    size, draw = 1543, np.random.default_rng(n)
    losses = np.where(np.arange(size) < share * size, 2.0, 5.0) + draw.normal(0, 0.3, size)
    turns = np.argsort(np.argsort(np.arange(size) * 0.7548776662 % 1))
    for ordered in (losses, losses[::-1].copy(), losses[turns]):
        found = evaluate(Texts(ordered), Texts.held_out(size, None, n), 8)  # type: ignore[arg-type] (stand-ins)
        assert found["rows"] == n
        assert abs(found["val_loss"] - losses.mean()) < 3 * found["val_loss_se"]
    # Two texts in a row are read in proportion, much nearer than chance is.
    found = evaluate(Texts(losses), Texts.held_out(size, None, n), 8)  # type: ignore[arg-type] (stand-ins)
    assert abs(found["val_loss"] - losses.mean()) < 4 * 3 / n + 3 * 0.3 / math.sqrt(n)


def test_more_rows_are_read_until_the_error_is_small_enough():
    """The number doubles, stays for the next evaluation, and ends at the most."""
    size, draw = 5000, np.random.default_rng(3)
    losses = draw.normal(3, 0.6, size)
    engine, held_out = Texts(losses), Texts.held_out(size, 64, 4000)
    found = evaluate(engine, held_out, 8)  # type: ignore[arg-type] (stand-ins)
    assert found["rows"] == held_out.reads == 512  # 0.6 / sqrt(400) is 1 % of 3
    assert found["val_loss"] == pytest.approx(losses[held_out.rows[:512]].mean(), rel=1e-6)
    assert found["val_loss_se"] < 0.01 * found["val_loss"]
    engine.losses = draw.normal(3, 0.1, size)
    assert evaluate(engine, held_out, 8)["rows"] == 512  # type: ignore[arg-type] (stand-ins)
    engine.losses = draw.normal(3, 6, size)
    assert evaluate(engine, held_out, 8, grows=False)["rows"] == 512  # type: ignore[arg-type] (stand-ins)
    assert evaluate(engine, held_out, 8)["rows"] == held_out.reads == 4000  # type: ignore[arg-type] (stand-ins)
    assert not held_out.may_grow
    held_out.begin_with(0)
    assert held_out.reads == 64
    held_out.begin_with(10**9)
    assert held_out.reads == 4000


def test_every_source_is_read_and_counts_by_its_weight_or_its_rows():
    sizes, draw = (3000, 40, 1), np.random.default_rng(5)
    means = np.repeat([2.0, 4.0, 6.0], sizes)
    losses = means + draw.normal(0, 0.2, len(means))
    for weights in (None, (1.0, 1.0, 2.0)):
        held_out = Texts.held_out(3041, 64, 600, ("a", "b", "c"), sizes, weights)
        found = evaluate(Texts(losses), held_out, 8)  # type: ignore[arg-type] (stand-ins)
        whole = np.average([2.0, 4.0, 6.0], weights=weights or sizes)
        assert abs(found["val_loss"] - whole) < 3 * found["val_loss_se"]
        assert [*found["by_source"]] == ["a", "b", "c"]
        assert found["rows"] == sum(part["rows"] for part in found["by_source"].values())
        assert found["by_source"]["c"]["val_loss_se"] is None


@pytest.mark.parametrize(
    ("tokens", "steps", "more", "rows"),
    [
        (400 * 16 * 512, 400, {}, 576),  # 0.03 x 3 of 6,400 rows, validated once
        (400 * 16 * 512, 400, {"eval_interval": 100}, 144),
        (400 * 16 * 512, 400, {"eval_interval": 150}, 192),  # after 150, 300 and 400 steps
        (400 * 16 * 512, 400, {"eval_interval": 150, "ema": 0.99}, 96),  # two models
        (400 * 16 * 512, 400, {"max_seq_len": 1024}, 288),
        (10 * 4 * 512, 10, {}, 3),
        (2 * 512, 2, {}, 1),
    ],
)
def test_validations_take_at_most_a_part_of_the_training(tokens, steps, more, rows):
    words = {"max_seq_len": 512, **more}
    run = parse_flags([part for name, value in words.items() for part in (f"--{name}", str(value))])
    assert affordable_rows(run, tokens, steps) == rows


def test_a_resumed_run_reads_as_many_rows_as_one_that_was_not_stopped(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Only the first validation needs more rows, which the later ones read, too."""

    def error(parts: Sequence[LossSums], shares: Sequence[float]) -> float:
        total = sum(parts, LossSums(0.0, 0.0, 0.0))
        return float(total.mean > 6.1 and total.rows < 16)

    monkeypatch.setattr("minimind.train.evaluate.standard_error", error)
    for name, value in (("FIRST_EVAL_ROWS", 2), ("EVAL_TIME", 10.0)):
        monkeypatch.setattr(f"minimind.train.evaluate.{name}", value)
    flags = {**SMALL, "data_path": str(trained.mixed), "cache_dir": str(trained.cache)}
    flags |= {
        "eval_rows": "auto",
        "deepspeed_config": "none",
        "max_steps": 8,
        "eval_interval": 2,
        "dtype": "float32",
    }

    def evals(name: str, *stops: int, **more: Any) -> list[dict[str, Any]]:
        out = {"out_dir": str(tmp_path / name)}
        for step in stops:
            assert train(flags, **out, **more, stop_at_step=step) == 75
        assert train(flags, **out, **more) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found = [line for line in map(json.loads, lines) if line["event"] == "eval"]
        floors = [line["rows"] for line in map(json.loads, lines) if line["event"] == "floors"]
        assert floors[-1] == found[-1]["rows"]  # also if the first validation was to read fewer
        return [{k: v for k, v in event.items() if k not in ("time", "t")} for event in found]

    whole = evals("whole")
    assert [event["rows"] for event in whole] == [16] * 4
    assert whole[1]["val_loss"] < 6.1
    assert (
        evals("broken", 2, 3, 4) == whole
    )  # the checkpoint of step 2 is older than its validation
    fixed = evals("fixed", eval_rows=3)
    assert [event["rows"] for event in fixed] == [3] * 4
    # Losses that are compared are of the same rows from the first validation on.
    best = evals("best", keep_best=1)
    assert [event["rows"] for event in best] == [event["held_out"] for event in whole] != [16] * 4
