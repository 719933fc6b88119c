"""Several sources by weight: quotas, passes, proportions, world sizes and memory."""

import random
import tracemalloc

import numpy as np
import pytest

from minimind.data.rows.order import Mixture, Order, Origin, permute

SIZES, WEIGHTS = (1000, 70, 3), (0.5, 0.3, 0.2)


def mixed(rows_per_step=1, seed=5, sizes=SIZES, weights=WEIGHTS):
    return Order(sum(sizes), rows_per_step, seed, mixture=Mixture(sizes, weights))


def source_and_row(rows, sizes=SIZES):
    starts = np.cumsum((0, *sizes))
    source = np.searchsorted(starts, rows, side="right") - 1
    return source, rows - starts[source]


def test_quotas_are_whole_shares_of_an_epoch():
    assert Mixture(SIZES, WEIGHTS).quotas == (536, 322, 215)  # of 1073: 536.5, 321.9, 214.6
    assert Mixture((5, 5, 1), (1.0, 1.0, 1.0)).quotas == (4, 4, 3)
    assert Mixture((7,), (0.001,)).quotas == (7,)
    draw = random.Random(1)
    for _ in range(200):
        sizes = tuple(draw.randrange(1000, 10**12) for _ in range(draw.randrange(1, 9)))
        weights = tuple(draw.uniform(0.1, 9) for _ in sizes)
        quotas = Mixture(sizes, weights).quotas
        assert sum(quotas) == sum(sizes)
        for quota, weight in zip(quotas, weights, strict=True):
            assert abs(quota - sum(sizes) * weight / sum(weights)) < 1 + 1e-12 * sum(sizes)
        assert Mixture(sizes, tuple(4 * weight for weight in weights)).quotas == quotas


def test_an_epoch_reads_each_source_as_often_as_its_quota():
    order = mixed()
    for epoch in range(3):
        source, _ = source_and_row(order.rows_for(epoch * 1073, 0, 1, 1073))
        assert np.bincount(source).tolist() == [536, 322, 215]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_every_pass_over_a_source_meets_each_of_its_rows_once(number):
    order, epochs = mixed(), 4
    quotas, size = Mixture(SIZES, WEIGHTS).quotas, SIZES[number]
    stream = []  # what the source gives, in the order of its own passes
    for epoch in range(epochs):
        dealt = permute(np.arange(1073), 1073, 5, epoch)
        at = np.argsort(dealt)[sum(quotas[:number]) :][: quotas[number]]
        source, row = source_and_row(order.rows_for(epoch * 1073, 0, 1, 1073)[at])
        assert set(source.tolist()) == {number}
        stream += row.tolist()
    passes = len(stream) // size
    assert passes == {0: 2, 1: 18, 2: 286}[number]
    for done in range(passes):
        assert sorted(stream[done * size : (done + 1) * size]) == list(range(size))
    started = stream[passes * size :]
    assert len(set(started)) == len(started)
    same_place = np.equal(stream[:size], stream[size : 2 * size]).sum()
    assert size == 3 or same_place < 8  # shuffled anew; one is expected by chance


def test_weights_that_are_the_sizes_read_every_row_once_an_epoch():
    order = mixed(weights=tuple(map(float, SIZES)))
    for epoch in range(2):
        rows = order.rows_for(epoch * 1073, 0, 1, 1073)
        np.testing.assert_array_equal(np.sort(rows), np.arange(1073))


def test_every_step_is_mixed_about_as_the_weights_say():
    sizes, rows_per_step = (50_000, 2_000, 300_000), 500
    shares = np.array([0.6, 0.3, 0.1])
    order = mixed(rows_per_step, 3, sizes, tuple(shares.tolist()))
    expected = rows_per_step * shares
    chi_squared = []
    for step in range(200):
        source, _ = source_and_row(order.rows_for(step, 0, 1), sizes)
        counts = np.bincount(source, minlength=3)
        assert (np.abs(counts - expected) < 4.5 * np.sqrt(expected * (1 - shares))).all()
        chi_squared.append(((counts - expected) ** 2 / expected).sum())
    assert 1.5 < np.mean(chi_squared) < 2.5  # two degrees of freedom: neither lumped nor combed


@pytest.mark.long
def test_no_row_of_a_source_is_favoured_where_an_epoch_begins():
    order = mixed(8, 0, (50, 50), (3.0, 1.0))
    first = [order.rows_for(epoch * order.steps_per_epoch, 0, 1) for epoch in range(4000)]
    counts = np.bincount(np.concatenate(first), minlength=100)
    for of_source, expected in [(counts[:50], 24_000 / 50), (counts[50:], 8_000 / 50)]:
        assert ((of_source - expected) ** 2 / expected).sum() < 100  # 49 degrees of freedom


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_two_epochs_on_changing_ranks_read_what_one_rank_reads(weights):
    order = Order(1073, 8, 5, mixture=weights and Mixture(SIZES, weights))
    draw, step, read = random.Random(7), 0, []
    steps = 2 * order.steps_per_epoch
    while step < steps:
        world_size, until = draw.choice((1, 2, 4, 8)), min(steps, step + draw.randrange(1, 20))
        for now in range(step, until):
            read += [order.rows_for(now, rank, world_size) for rank in range(world_size)]
        step = until
    rows = np.concatenate(read)
    np.testing.assert_array_equal(rows, order.rows_for(0, 0, 1, steps))
    if weights is None:
        for epoch in np.split(rows, 2):
            assert (len(epoch), len(set(epoch.tolist()))) == (1072, 1072)
        return
    source, row = source_and_row(rows)
    for number, (size, quota) in enumerate(zip(SIZES, Mixture(SIZES, weights).quotas, strict=True)):
        times_read = np.bincount(row[source == number], minlength=size)
        passes = 2 * quota / size
        assert times_read.max() <= np.ceil(passes)
        assert times_read.min() >= np.floor(passes) - 2  # each epoch drops one row


def test_a_batch_that_is_changed_in_a_mixture_reads_on():
    before = mixed(8)
    after = Order(1073, 4, 5, before.origin_at(70, is_same_text=True), before.mixture)
    both = [before.rows_for(0, 0, 1, 70), after.rows_for(70, 0, 1, 128)]
    np.testing.assert_array_equal(np.concatenate(both), mixed(1).rows_for(0, 0, 1, 1072))


@pytest.mark.parametrize("weights", [None, (1.0, 1e-3, 5.0)])
def test_a_trillion_rows_take_no_memory(weights):
    mixture = weights and Mixture((10**12 - 10**9 - 7, 7, 10**9), weights)
    order = Order(10**12, 512, 1, Origin(0, 0, 10**6, 0), mixture)
    for step in (0, 10**9, 10**12):
        order.rows_for(step, 3, 8)
        tracemalloc.start()
        rows = order.rows_for(step, 3, 8)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100_000
        assert len(rows) == 64
        assert (rows.min() >= 0, rows.max() < 10**12) == (True, True)


@pytest.mark.parametrize(
    ("sizes", "weights", "report"),
    [
        ((5, 0), (1.0, 1.0), "source 1 has 0 rows"),
        ((5, 5), (1.0, 0.0), "source 1 has the weight 0"),
        ((5, 5), (-1.0, 1.0), "source 0 has the weight -1"),
        ((5, 5), (float("inf"), 1.0), "source 0 has the weight inf"),
        ((5, 5), (float("nan"), 1.0), "source 0 has the weight nan"),
        ((5, 5), (1.0, 0.01), "none of the 10 rows"),
        ((5, 5), (1.0,), "2 sources have 1 weights"),
        ((), (), "0 sources"),
        ((1,) * 10_001, (1.0,) * 10_001, "at most 10,000"),
    ],
)
def test_a_mixture_that_leaves_a_source_unread_is_refused(sizes, weights, report):
    with pytest.raises(ValueError, match=report):
        Mixture(sizes, weights)


def test_a_mixture_of_other_rows_than_the_order_is_refused():
    with pytest.raises(ValueError, match="have 10 rows, not 11"):
        Order(11, 1, 0, mixture=Mixture((5, 5), (1.0, 1.0)))
