"""The row order against what a shuffle has to be, and world sizes against one another."""

from dataclasses import replace

import numpy as np
import pytest

from minimind.config.parse import parse_flags
from minimind.config.run_config import ParallelLayout
from minimind.data.rows.order import Mixture, Order, Origin, permute, unpermute
from minimind.launch.restart import Host, added_flags, choose
from minimind.runtime.heartbeat import Layout


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4095, 4097, 100_003])
def test_a_permutation_meets_every_row_once(size):
    image = permute(np.arange(size), size, seed=3, epoch=1)
    assert image.dtype == np.int64
    np.testing.assert_array_equal(np.sort(image), np.arange(size))


@pytest.mark.parametrize("size", [10**12, 2**62])
def test_a_permutation_of_a_trillion_is_computed_where_it_is_requested(size):
    positions = np.concatenate([np.arange(5000), size - 1 - np.arange(5000)])
    image = permute(positions, size, seed=0, epoch=0)
    assert len(set(image.tolist())) == 10_000
    assert image.min() >= 0
    assert image.max() < size
    assert 0.45 < image.mean(dtype=np.float64) / size < 0.55
    np.testing.assert_array_equal(image[7:9], permute(positions[7:9], size, 0, 0))


def test_epochs_and_seeds_differ_and_repeat():
    def image(seed, epoch):
        return permute(np.arange(1000), 1000, seed, epoch)

    np.testing.assert_array_equal(image(1, 0), image(1, 0))
    for seed, epoch in [(1, 1), (2, 0), (-1, 0), (2**70, 0)]:
        assert (image(1, 0) == image(seed, epoch)).sum() < 12  # one is expected by chance


def test_a_permutation_looks_random():
    size, epochs = 50, 4000
    images = np.stack([permute(np.arange(size), size, 0, epoch) for epoch in range(epochs)])
    for position in (0, 1, 49):  # where does it land? chi-squared with 49 degrees of freedom
        counts = np.bincount(images[:, position], minlength=size)
        assert ((counts - epochs / size) ** 2 / (epochs / size)).sum() < 100
    neighbours = (np.diff(images, axis=1) == 1).mean()  # 49 of 50 * 49 ordered pairs
    assert 0.018 < neighbours < 0.022
    image = permute(np.arange(10**5), 10**5, 7, 0)
    assert abs(np.corrcoef(np.arange(10**5), image)[0, 1]) < 0.02


def test_positions_outside_are_refused():
    for positions, size in [([5], 5), ([-1], 5), ([0], 0)]:
        with pytest.raises(ValueError, match="range"):
            permute(np.array(positions), size, 0, 0)


@pytest.mark.parametrize("step", [0, 1, 11, 12, 13, 40])
def test_ranks_joined_read_what_one_rank_reads(step):
    order = Order(n_rows=103, rows_per_step=8, seed=5)
    alone = order.rows_for(step, 0, 1)
    assert len(alone) == 8
    for world_size in (2, 4, 8):
        shares = [order.rows_for(step, rank, world_size) for rank in range(world_size)]
        assert {len(share) for share in shares} == {8 // world_size}
        np.testing.assert_array_equal(np.concatenate(shares), alone)


def test_an_epoch_meets_no_row_twice_and_drops_only_its_tail():
    order = Order(n_rows=103, rows_per_step=8, seed=5)
    assert order.steps_per_epoch == 12
    left_over = []
    for epoch in range(3):
        steps = range(epoch * 12, (epoch + 1) * 12)
        rows = np.concatenate([order.rows_for(step, 0, 1) for step in steps])
        assert len(set(rows.tolist())) == 96
        left_over.append(set(range(103)) - set(rows.tolist()))
    assert left_over[0] != left_over[1] != left_over[2]


def test_places_in_the_global_order_follow_one_another():
    order = Order(n_rows=103, rows_per_step=8, seed=5)
    places = [place for step in range(30) for place in order.positions(step)]
    assert places == list(range(240))


def test_a_text_of_less_than_a_step_is_refused():
    with pytest.raises(ValueError, match="no step"):
        Order(n_rows=7, rows_per_step=8, seed=0)


@pytest.mark.parametrize(
    ("rows", "ranks", "sizes"),
    [
        (32, 3, [11, 11, 10]),
        (5, 4, [2, 1, 1, 1]),
        (2, 3, [1, 1, 0]),
        (8, 2, [4, 4]),
        (1000, 7, [143, 143, 143, 143, 143, 143, 142]),
    ],
)
def test_ranks_share_the_rows_of_a_step_as_evenly_as_whole_rows_allow(
    rows: int, ranks: int, sizes: list[int]
):
    order = Order(n_rows=3 * rows + 1, rows_per_step=rows, seed=3)
    shares = [order.share(rank, ranks) for rank in range(ranks)]
    assert sorted(map(len, shares), reverse=True) == sizes
    assert len(shares[0]) == sizes[0]
    assert [place for share in shares for place in share] == [*range(rows)]
    for rank, share in enumerate(shares):
        assert {order.data_rank_of(place, ranks) for place in share} <= {rank}
    for steps in (1, 4):
        of_ranks = [
            order.rows_for(2, rank, ranks, steps).reshape(steps, -1) for rank in range(ranks)
        ]
        whole = order.rows_for(2, 0, 1, steps).reshape(steps, rows)
        np.testing.assert_array_equal(np.concatenate(of_ranks, axis=1), whole)


def test_another_batch_reads_on_where_the_first_stood():
    before = Order(n_rows=103, rows_per_step=8, seed=5)
    after = Order(103, 4, 5, before.origin_at(7, is_same_text=True))
    assert before.positions(6).stop == after.positions(7).start == 56
    assert after.place(7) == (0, 56)
    read = [before.rows_for(step, 0, 1) for step in range(7)]
    read += [after.rows_for(step, 0, 1) for step in range(7, 18)]  # (103 - 56) // 4 steps are left
    assert len(set(np.concatenate(read).tolist())) == 100
    assert after.place(18) == (1, 0)
    assert after.place(18 + after.steps_per_epoch) == (2, 0)
    places = [place for step in range(7, 60) for place in after.positions(step)]
    assert places == list(range(56, 56 + 4 * 53))


def test_an_order_taken_over_twice_continues_as_one_taken_over_once():
    first = Order(103, 8, 5)
    once = Order(103, 4, 5, first.origin_at(20, is_same_text=True))
    twice = Order(103, 4, 5, once.origin_at(31, is_same_text=True))
    for step in range(31, 120):
        assert once.positions(step) == twice.positions(step)
        np.testing.assert_array_equal(once.rows_for(step, 0, 1), twice.rows_for(step, 0, 1))


def test_another_text_is_read_from_its_first_row_and_places_count_on():
    before = Order(n_rows=103, rows_per_step=8, seed=5)
    after = Order(50, 8, 5, before.origin_at(20, is_same_text=False))
    assert after.place(20) == (0, 0)
    assert after.positions(20).start == 160
    np.testing.assert_array_equal(after.rows_for(20, 0, 1), Order(50, 8, 5).rows_for(0, 0, 1))


def test_the_order_of_one_source_is_what_it_always_was():
    assert permute(np.arange(8), 8, 5, 0).tolist() == [6, 0, 5, 3, 4, 7, 2, 1]
    order = Order(103, 8, 5, Origin(4, 30, 2, 9))
    assert order.rows_for(15, 1, 2).tolist() == [72, 53, 76, 75]


def test_epochs_may_differ_from_position_to_position():
    epochs = np.random.default_rng(0).integers(0, 5, 300)
    positions = np.random.default_rng(1).integers(0, 1000, 300)
    image = permute(positions, 1000, 3, epochs)
    for epoch in range(5):
        of_it = epochs == epoch
        np.testing.assert_array_equal(image[of_it], permute(positions[of_it], 1000, 3, epoch))


@pytest.mark.parametrize("mixture", [None, Mixture((40, 3, 60), (1.0, 1.0, 2.0))])
def test_several_steps_at_once_are_the_steps_one_by_one(mixture):
    order = Order(103, 8, 5, Origin(4, 30, 2, 9), mixture)
    one_by_one = [order.rows_for(step, 1, 2) for step in range(4, 50)]
    np.testing.assert_array_equal(order.rows_for(4, 1, 2, 46), np.concatenate(one_by_one))


@pytest.mark.parametrize("size", [1, 2, 5, 103, 1000])
def test_unpermute_inverts_permute(size):
    positions = np.arange(size)
    for source in (None, 2):
        for epoch in (0, 7, np.arange(size) % 3):
            image = permute(positions, size, 9, epoch, source)
            np.testing.assert_array_equal(unpermute(image, size, 9, epoch, source), positions)


@pytest.mark.sample(8)
@pytest.mark.parametrize("mixture", [None, Mixture((40, 3, 60), (1.0, 1.0, 2.0))])
@pytest.mark.parametrize("origin", [Origin(), Origin(4, 30, 2, 9), Origin(4, 30, 2, 100)])
@pytest.mark.parametrize("stop", [3, 4, 5, 40, 90])
def test_the_reads_of_a_row_are_those_of_all_steps(mixture, origin, stop):
    order = Order(103, 8, 5, origin, mixture)
    expected: dict[int, list[tuple[int, int]]] = {row: [] for row in range(103)}
    for step in range(origin.step, stop):
        for at, row in enumerate(order.rows_for(step, 0, 1).tolist()):
            expected[row].append((step, at))
    for row, reads in expected.items():
        assert order.reads_of(row, stop) == reads


@pytest.mark.sample(2)
@pytest.mark.parametrize("world_size", [8, 64, 512, 1024])
@pytest.mark.parametrize("group_size", [1, 8])
def test_many_ranks_read_disjoint_rows_that_make_the_step(world_size: int, group_size: int):
    """In two epochs with rows left out, and of two sources."""
    groups = ParallelLayout(world_size, tensor=group_size)
    numbers = [groups.data_rank(rank) for rank in range(world_size)]
    assert numbers == [n for n in range(groups.data_size) for _ in range(group_size)]
    left_out = ((5, 9),)
    rows_per_step = 2048
    n_rows = 2 * rows_per_step + 57
    mixture = Mixture((n_rows - 1000, 1000), (1.0, 1.0), left_out)
    plain = Order(n_rows, rows_per_step, 3, left_out=left_out)
    mixed = replace(plain, mixture=mixture)
    for order, step in ((plain, 0), (plain, 3), (mixed, 1)):
        alone = order.rows_for(step, 0, 1)
        shares = [order.rows_for(step, n, groups.data_size) for n in range(groups.data_size)]
        # As many rows, and so as many tokens, on every rank.
        assert {len(share) for share in shares} == {rows_per_step // groups.data_size}
        np.testing.assert_array_equal(np.concatenate(shares), alone)
        assert order is mixed or len(np.unique(alone)) == rows_per_step


@pytest.mark.parametrize("split", [False, True])
def test_a_run_of_1024_ranks_continues_on_64_and_on_3(split: bool):
    """As restarts choose it: the same rows in the same order, each once in an epoch."""
    size = "2048 --split_batches" if split else "2"
    flags = f"--batch_size {size} --accumulation_steps 3".split()
    run = parse_flags(flags)
    rows_per_step = run.rows_per_step(1024)
    layout = Layout(
        *("a", "out", 1024, run.micro_batch_rows(1024), 3, run.batch_size, split, "auto", "")
    )
    order = Order(6 * rows_per_step + 5, rows_per_step, 9)
    seen = []
    for step, hosts in ((0, (8,) * 128), (2, (8,) * 8), (4, (3,))):
        choice = choose(layout, [Host(r, "", each) for r, each in enumerate(hosts)], 1024)
        ranks = sum(hosts)
        assert (choice.processes, choice.each) == (ranks, hosts[0])
        added = added_flags(layout, choice, has_checkpoint=True)
        words = [word for name, value in added.items() for word in (f"--{name}", str(value))]
        now = parse_flags([*flags, *words])
        assert now.rows_per_step(ranks) == rows_per_step
        micro = now.micro_batch_rows(ranks)
        for at in (step, step + 1):
            shares = [order.rows_for(at, rank, ranks) for rank in range(ranks)]
            assert {len(share) for share in shares} == {micro * now.accumulation_steps}
            seen += shares
    rows = np.concatenate(seen)
    np.testing.assert_array_equal(rows, np.concatenate([order.rows_for(s, 0, 1) for s in range(6)]))
    assert len(np.unique(rows)) == 6 * rows_per_step
