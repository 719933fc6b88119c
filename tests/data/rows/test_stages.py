"""The row order over stages: whole and disjoint over ranks, each source in passes, its inverse."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from minimind.config.parse import build_config
from minimind.config.stages import plan_stages
from minimind.data.rows.order import Ranges
from minimind.data.rows.stages import (
    StagedOrder,
    epochs_of,
    mixture_of,
    orders_from_json,
    orders_json,
    staged_order,
    stages_table,
)
from minimind.errors import DataError, TooFewRows, UsageError

TOKENS = (33 * 210, 33 * 37, 33 * 9)  # of the sources a, b and c
SEED = 3


def order_of(
    folder: Path,
    stages: list[dict[str, Any]],
    steps: int,
    names: tuple[str, ...] = ("a", "b", "c"),
    tokens: tuple[int, ...] = TOKENS,
    weights: tuple[float, ...] | None = None,
    left_out: Ranges = (),
    **more: Any,
) -> StagedOrder:
    path = folder / "stages.yaml"
    path.write_text(yaml.safe_dump({"stages": stages, **more}))
    given = {"stages": str(path), "max_seq_len": 32, "batch_size": 8, "max_steps": steps}
    file, laid_out, _ = plan_stages(build_config(given, "--{name}"), 1, {})
    return staged_order(
        file,
        laid_out,
        names,
        weights,
        lambda row_tokens: tuple(size // row_tokens for size in tokens),
        lambda row_tokens: left_out,
        SEED,
    )


# Sources come and go, rows and batches change, and the first length comes again.
STAGES: list[dict[str, Any]] = [
    {"name": "one", "until": 0.3, "weights": {"a": 1}},
    {"name": "two", "until": 0.5, "weights": {"a": 2, "b": 1.5}, "batch_size": 4},
    {"name": "short", "until": 0.6, "weights": {"a": 1, "c": 1}, "max_seq_len": 10},
    {"name": "last", "weights": {"a": 1, "b": 2, "c": 0.5}, "batch_size": 12},
]


@pytest.fixture
def order(tmp_path: Path) -> StagedOrder:
    return order_of(tmp_path, STAGES, 200)


def sources_of(order: StagedOrder, number: int, rows: np.ndarray) -> np.ndarray:
    """The source of each row of a stage, by its number."""
    row_tokens = order.stages[number].run.max_seq_len + 1
    ends = np.cumsum([size // row_tokens for size in TOKENS])
    return np.searchsorted(ends, rows, side="right")


def test_the_rows_of_all_ranks_are_those_of_the_step_whole_and_once(order: StagedOrder):
    for step in range(200):
        rows = order.rows_for(step, 0, 1)
        assert len(rows) == order.of(step).rows_per_step == len(order.positions(step))
        for world_size in (2, 4):
            shares = [order.rows_for(step, rank, world_size) for rank in range(world_size)]
            np.testing.assert_array_equal(np.concatenate(shares), rows)
    assert [order.positions(step).start for step in (0, 59, 60, 61, 99, 100, 120)] == [
        *(0, 59 * 8, 480, 484, 480 + 39 * 4),
        *(640, 640 + 20 * 8),
    ]


def test_steps_at_once_are_the_steps_one_by_one(order: StagedOrder):
    one_by_one = [order.rows_for(step, 1, 2) for step in range(200)]
    np.testing.assert_array_equal(order.rows_for(0, 1, 2, 200), np.concatenate(one_by_one))


def test_a_stage_reads_of_each_source_what_its_weights_say(order: StagedOrder):
    for number, (stage, part) in enumerate(zip(order.stages, order.parts, strict=True)):
        rows = np.concatenate([order.rows_for(step, 0, 1) for step in stage.steps])
        counts = np.bincount(sources_of(order, number, rows), minlength=3)
        given = np.array([(stage.weights or {}).get(name, 0.0) for name in "abc"])
        expected = len(rows) * given / given.sum()
        epochs = -(-len(rows) // part.mixture.n_rows) if part.mixture else 0
        assert (np.abs(counts - expected) <= epochs).all()
        assert (counts[given == 0] == 0).all()
        assert counts.tolist() == list(mixture_of(part).reads)


def test_a_source_is_read_in_passes_that_later_stages_of_its_length_go_on_with(order: StagedOrder):
    read = defaultdict(list)  # rows by row length, of all stages so far
    for stage, part in zip(order.stages, order.parts, strict=True):
        own = read[row_tokens := stage.run.max_seq_len + 1]
        own += [order.rows_for(step, 0, 1) for step in stage.steps]
        times = np.bincount(np.concatenate(own), minlength=part.n_rows)
        for of_source in np.split(times, np.cumsum([size // row_tokens for size in TOKENS])[:-1]):
            assert of_source.max() - of_source.min() <= 1


def test_within_a_long_stage_passes_follow_one_another(tmp_path: Path):
    order = order_of(tmp_path, [{"weights": {"b": 1}}], 50)
    rows = np.concatenate([order.rows_for(step, 0, 1) for step in range(50)])
    # 37 rows in epochs of 32: a row comes again after the rest of a pass at the earliest.
    first, second = rows[:32], rows[32:64]
    assert len(set(first.tolist())) == 32
    assert len(set(second.tolist())) >= 27
    times = np.bincount(rows, minlength=256)[210:247]
    assert (times.min(), times.max()) == (10, 11)


def test_reads_are_found_again_over_random_stages(tmp_path: Path):
    draw = random.Random(5)
    for _ in range(5):
        names, tokens = ("a", "b", "c"), tuple(33 * draw.randrange(1, 60) for _ in range(3))
        ends = sorted({draw.randrange(1, 60) / 64 for _ in range(draw.randrange(1, 4))})
        stages: list[dict[str, Any]] = [{"until": end} for end in ends] + [{}]
        for stage in stages:
            stage["weights"] = {name: draw.choice((0, 1, 2.5)) for name in names}
            stage["weights"][draw.choice(names)] = 1
            stage["batch_size"] = draw.choice((2, 3, 8))
            stage["max_seq_len"] = draw.choice((9, 32))
        order = order_of(tmp_path, stages, 64, names, tokens)
        read = defaultdict(list)
        for step in range(64):
            for at, row in enumerate(order.rows_for(step, 0, 1).tolist()):
                read[order.number_at(step), row].append((step, at))
        for number, (stage, part) in enumerate(zip(order.stages, order.parts, strict=True)):
            for row in range(part.n_rows):
                assert part.reads_of(row, stage.steps.stop) == read[number, row]
            assert part.reads_of(0, stage.steps.start + 1) == [
                one for one in read[number, 0] if one[0] == stage.steps.start
            ]


def test_the_tokens_of_steps_are_those_of_their_stages(order: StagedOrder):
    steps = order.stages[-1].steps.stop
    stages = [order.stages[order.number_at(step)] for step in range(steps)]
    tokens = [stage.rows_per_step * stage.run.max_seq_len for stage in stages]
    assert len({*tokens}) > 1
    for first in (0, 1, steps // 2, steps):
        assert order.tokens_of(range(first, steps), 32) == sum(tokens[first:])


def test_the_logged_order_is_the_order(order: StagedOrder):
    logged = orders_from_json(orders_json(order, 2, 2), SEED)
    assert tuple(logged) == order.parts
    assert [one["micro_batch_rows"] for one in orders_json(order, 2, 2)] == [2, 1, 2, 3]


def test_an_order_that_cannot_be_is_refused(order: StagedOrder):
    for name, value in (
        ("weights", [0.0, 0.0, 0.0]),
        ("weights", [1.0]),
        ("begun", []),
        ("epoch_rows", 10**9),
        ("stage_rows", 1),
    ):
        logged = orders_json(order, 1, 1)
        logged[0]["mixture"][name] = value
        with pytest.raises(ValueError, match=r"have the weights|can be mixed|no epoch of"):
            orders_from_json(logged, SEED)


def test_rows_left_out_are_not_read_and_the_rest_is_read_as_often(tmp_path: Path):
    left_out = ((0, 50), (211, 213))
    stages = [{"until": 0.5, "weights": {"a": 1}}, {"weights": {"a": 1, "b": 1}}]
    order = order_of(tmp_path, stages, 100, left_out=left_out)
    rows = np.concatenate([order.rows_for(step, 0, 1) for step in range(100)])
    assert not np.isin(rows, [*range(50), 211, 212]).any()
    times = np.bincount(rows)[50:210]
    assert times.max() - times.min() <= 1
    assert order.parts[1].reads_of(211, 100) == []


def test_rows_are_read_ahead_past_the_end_of_a_stage(order: StagedOrder):
    for stage, part in zip(order.stages, order.parts, strict=True):
        ahead = part.rows_for(stage.steps.start, 0, 1, len(stage.steps) + 200)
        assert ahead.min() >= 0
        assert ahead.max() < part.n_rows


def test_weights_that_no_stage_names_are_those_of_the_sources_or_of_their_rows(tmp_path: Path):
    stages: list[dict[str, Any]] = [{}]
    by_rows = order_of(tmp_path, stages, 32)  # 256 rows
    assert mixture_of(by_rows.parts[0]).reads == (210, 37, 9)
    given = order_of(tmp_path, stages, 32, weights=(1.0, 1.0, 2.0))
    assert mixture_of(given.parts[0]).reads == (64, 64, 128)


def test_the_table_has_tokens_and_epochs_of_each_source(order: StagedOrder):
    table = stages_table(order, ["a", "b", "c"])
    assert [stage["steps"] for stage in table] == [[1, 60], [61, 100], [101, 120], [121, 200]]
    assert sum(stage["tokens"] for stage in table) == 32 * (480 + 160 + 960) + 10 * 160
    for stage in table:
        assert sum(source["tokens"] for source in stage["sources"]) == stage["tokens"]
    assert [source["name"] for source in table[2]["sources"]] == ["a", "c"]
    assert table[0]["sources"][0]["epochs"] == pytest.approx(480 / 210)
    assert float(epochs_of(order.parts, 2)) == pytest.approx(
        sum(source["epochs"] for stage in table for source in stage["sources"][1:]
            if source["name"] == "c")
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stages", "more", "message"),
    [
        (
            [{"weights": {"a": 1, "d": 1}}],
            {},
            "d is not a source of the text; the sources are a, b, c",
        ),
        ([{"weights": {"a": 1}}], {"max_epochs": {"e": 1}}, "e is not a source of the text"),
        ([{"weights": {"a": 1e6, "c": 1}}], {}, "source c has weight 1, which rounds to none of"),
        (
            [{"weights": {"c": 1}}],
            {"max_epochs": {"c": 9}},
            r"source c is read 88\.9 times, more than max_epochs = 9; lower its weights, shorten",
        ),
    ],
)
def test_sources_that_cannot_be_read_so(
    tmp_path: Path, stages: list[dict[str, Any]], more: dict[str, Any], message: str
):
    with pytest.raises(UsageError, match=message):
        order_of(tmp_path, stages, 100, **more)


def test_a_cap_counts_rows_over_all_stages(tmp_path: Path):
    stages = [{"until": 0.5, "weights": {"c": 1}}, {"weights": {"c": 1, "a": 1}}]
    order_of(tmp_path, stages, 6, max_epochs={"c": 4})  # 24 + 12 reads of 9 rows
    with pytest.raises(UsageError, match=r"source c is read 4 times, more than max_epochs = 3\.99"):
        order_of(tmp_path, stages, 6, max_epochs={"c": 3.99})


def test_a_stage_whose_step_has_more_rows_than_the_text(tmp_path: Path):
    tokens, stage = (33 * 20, 33 * 4, 33), {"weights": {"b": 1}}
    order_of(tmp_path, [{**stage, "batch_size": 25}], 8, tokens=tokens)
    with pytest.raises(TooFewRows, match=r"stage-1: the text has 25 rows of 33 .* the 26 of one"):
        order_of(tmp_path, [{**stage, "batch_size": 26}], 8, tokens=tokens)
    with pytest.raises(TooFewRows, match=r"stage-1: the text has 21 rows of 33 .* the 22 of one"):
        order_of(tmp_path, [{**stage, "batch_size": 22}], 8, tokens=tokens, left_out=((0, 4),))


def test_a_source_without_a_row_of_the_length(tmp_path: Path):
    tokens = (33 * 20, 20, 33)
    order_of(tmp_path, [{"weights": {"a": 1}}], 8, tokens=tokens)
    order_of(tmp_path, [{"weights": {"b": 1}, "max_seq_len": 9}], 8, tokens=tokens)
    with pytest.raises(DataError, match="stage stage-1: source b has no row of 33 tokens"):
        order_of(tmp_path, [{"weights": {"b": 1}}], 8, tokens=tokens)
    with pytest.raises(DataError, match="stage stage-1: the text has no row of 33 tokens"):
        order_of(tmp_path, [{}], 8, tokens=(20, 20, 20))
    with pytest.raises(
        DataError, match=r"all 9 rows of source 2 are left out \(of the sources a, b"
    ):
        order_of(tmp_path, [{"weights": {"a": 1, "c": 1}}], 8, left_out=((247, 256),))
