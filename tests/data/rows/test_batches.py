"""Micro-batches against rows read directly, and one split of a step against another."""

import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from minimind.data.rows import batches as batches_module
from minimind.data.rows.batches import ROWS_AT_ONCE, TOKENS_AT_ONCE, Batches, held_out_rows, spread
from minimind.data.rows.order import Order, Origin
from minimind.data.shards.conversation_shards import PADDING
from minimind.data.shards.token_shards import TokenShards
from minimind.runtime.device import CUDA
from tests.data.made import write
from tools.late_device import DEVICE, LateTensor, Stream, late_device

ROW = 5
CPU = torch.device("cpu")


@pytest.fixture
def shards(tmp_path):
    write(tmp_path, np.arange(503), "<u2", 37)
    return TokenShards(tmp_path, "train")


@pytest.fixture
def batches(shards):
    made = []

    def make(micro_batch_rows, rank=0, world_size=1, reader=shards, workers=1):
        order = Order(shards.rows(ROW), 8, seed=1)
        made.append(Batches(reader, order, ROW, micro_batch_rows, rank, world_size, CPU, workers))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_micro_batches_are_the_rows_of_the_order(shards, batches):
    reader = batches(2)
    for step in (
        0,
        1,
        2,
        7,
        3,
        3,
        30,
        31,
        127,
        128,
        129,
        5000,
        126,
    ):  # read ahead, back, twice, and far away
        micro_batches = reader.at(step)
        assert [tuple(m.shape) for m in micro_batches] == [(2, ROW)] * 4
        assert {m.dtype for m in micro_batches} == {torch.int64}
        direct = shards.read_rows(reader.order.rows_for(step, 0, 1), ROW)
        np.testing.assert_array_equal(torch.cat(micro_batches).numpy(), direct)
    assert reader.tokens_per_step == 8 * (ROW - 1)


def test_one_rank_and_two_ranks_read_the_same_rows(batches):
    alone, two = batches(2), [batches(2, rank, 2) for rank in range(2)]
    for step in range(25):
        shared = [m for reader in two for m in reader.at(step)]
        assert len(shared) == 4
        assert all(map(torch.equal, alone.at(step), shared))


def test_a_failed_read_surfaces_where_a_step_of_its_block_is_requested(shards, batches):
    class Failing:
        def read_rows(self, indices, row_tokens):
            if threading.current_thread() is threading.main_thread() or len(seen) == 1:
                raise OSError("disk gone")
            seen.append(indices)
            return shards.read_rows(indices, row_tokens)

    seen = []
    reader = batches(2, reader=Failing())
    together = TOKENS_AT_ONCE // (8 * ROW)
    for step in range(together):
        reader.at(step)
    with pytest.raises(OSError, match="disk gone"):
        reader.at(together)


@pytest.mark.parametrize("workers", [1, 3])
def test_what_follows_is_read_before_it_is_requested(shards, batches, workers):
    class Counting:
        def read_rows(self, indices, row_tokens):
            found = shards.read_rows(indices, row_tokens)
            read.release()
            return found

    read = threading.Semaphore(0)
    batches(2, reader=Counting(), workers=workers).at(0)
    assert all(read.acquire(timeout=120) for _ in range(1 + workers))
    assert not read.acquire(blocking=False)


def test_steps_read_together_or_alone_and_in_any_order_are_the_same(batches):
    ahead, alone = batches(2), batches(2, workers=0)
    together = TOKENS_AT_ONCE // (8 * ROW)
    assert together > 1
    for step in (0, 1, together - 1, together, 3 * together + 1, 2, 5 * together, 0):
        for one, other in zip(ahead.at(step), alone.at(step), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_places_are_computed_once_though_blocks_take_turns(batches, monkeypatch, workers):
    computed, rows_for = [], Order.rows_for

    def counted(order: Order, step: int, *given: int) -> np.ndarray:
        computed.append(step)
        return rows_for(order, step, *given)

    reader = batches(2, workers=workers)
    monkeypatch.setattr(Order, "rows_for", counted)
    stretch = ROWS_AT_ONCE // 8
    for step in range(stretch):  # as one thread and another, a stretch ahead, ask in turn
        for requested in (step, stretch + step):
            np.testing.assert_array_equal(
                reader._rows_for(requested), rows_for(reader.order, requested, 0, 1)
            )
    assert computed == [0, stretch]


def test_an_order_that_took_over_is_read_from_there_on(shards):
    order = Order(shards.rows(ROW), 8, seed=1, origin=Origin(step=7, rows=56, epoch=0, offset=56))
    reader = Batches(shards, order, ROW, 2, 0, 1, CPU)
    direct = shards.read_rows(order.rows_for(7, 0, 1), ROW)
    np.testing.assert_array_equal(torch.cat(reader.at(7)).numpy(), direct)
    reader.close()


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("micro_batch_rows", "world_size", "filled"),
    [
        (3, 1, [[3, 3, 2]]),
        (2, 3, [[2, 1], [2, 1], [2, 0]]),  # a micro-batch of padding
        (1, 5, [[1, 1], [1, 1], [1, 0], [1, 1], [1, 0]]),
        (1, 9, [[1]] * 8 + [[0]]),  # a rank without a row
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_with_fewer_rows_are_filled_with_padding(
    batches, micro_batch_rows: int, world_size: int, filled: list[list[int]], workers: int
):
    alone = batches(8)
    ranks = [
        batches(micro_batch_rows, rank, world_size, workers=workers) for rank in range(world_size)
    ]
    for step in (0, 1, 5, 300):
        (whole,), rows = alone.at(step), []
        for rank, reader in enumerate(ranks):
            micro_batches = reader.at(step)
            assert {tuple(m.shape) for m in micro_batches} == {(micro_batch_rows, ROW)}
            is_padding = [(m == PADDING).all(1) for m in micro_batches]
            assert [int((~m).sum()) for m in is_padding] == filled[rank]
            assert all(m.int().diff().ge(0).all() for m in is_padding)  # it comes last
            rows += [m[~padding] for m, padding in zip(micro_batches, is_padding, strict=True)]
            for number, batch in enumerate(micro_batches):
                assert torch.equal(ranks[0].micro_batch_of(step, rank, number), batch)
        assert torch.equal(torch.cat(rows), whole)
    assert {reader.tokens_per_step for reader in ranks} == {8 * (ROW - 1)}


@pytest.mark.parametrize("sizes", [(1000, 3, 1, 2000), (0, 1, 500), (4, 4, 4), (1, 10**6, 1, 0)])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 8, 10**4])
def test_every_source_with_held_out_rows_has_one(sizes: tuple[int, ...], n: int):
    class Sizes:
        def sizes(self, row_tokens: int) -> tuple[int, ...]:
            return sizes

    rows = held_out_rows(Sizes(), n, ROW)  # type: ignore[arg-type] (a stand-in)
    used = np.searchsorted(np.cumsum(sizes), rows, side="right")
    assert set(used.tolist()) == ({at for at, size in enumerate(sizes) if size} if n else set())
    assert min(n, sum(sizes)) <= len(rows) <= n + len(sizes)
    assert len(set(rows.tolist())) == len(rows)
    for fewer in range(min(n, 40)):
        few = held_out_rows(Sizes(), fewer, ROW).tolist()  # type: ignore[arg-type] (a stand-in)
        assert few == rows[: len(few)].tolist()


def unevenness(places: np.ndarray, total: int) -> float:
    """Places too many or too few between the begin and any point (the star discrepancy)."""
    at, number = (np.sort(places) + 0.5) / total, np.arange(len(places))
    return float(
        max(abs(number + 1 - len(places) * at).max(), abs(number - len(places) * at).max())
    )


@pytest.mark.parametrize("total", [1, 2, 7, 64, 97, 1000, 1024, 20_341, 10**6])
def test_any_number_of_places_is_spread_over_all(total: int):
    whole = spread(total, total)
    assert sorted(whole.tolist()) == list(range(total))
    for n in {n for n in (*range(1, 70), 100, 255, 256, 512, 4097) if n <= total}:
        places = spread(total, n)
        assert places.tolist() == whole[:n].tolist()
        assert unevenness(places, total) < 4  # of n shuffled places it is about 0.9 sqrt(n)
        for period in (2, 3, 5):  # text that alternates
            counts = np.bincount(places % period, minlength=period)
            assert n < 32 or total < 1000 or np.ptp(counts) <= 3 + n // 16


@pytest.mark.parametrize("weights", [None, (1.0, 3.0, 4.0)])
def test_sources_share_the_rows_by_weight_and_each_is_spread(weights: tuple[float, ...] | None):
    sizes = (4000, 2000, 2000)

    class Sizes:
        def sizes(self, row_tokens: int) -> tuple[int, ...]:
            return sizes

    shares = np.array(weights or sizes) / sum(weights or sizes)
    for n in (16, 64, 512):
        rows = held_out_rows(Sizes(), n, ROW, weights)  # type: ignore[arg-type] (a stand-in)
        for begin, size, share in zip((0, 4000, 6000), sizes, shares, strict=True):
            own = rows[(rows >= begin) & (rows < begin + size)] - begin
            assert abs(len(own) - n * share) <= 2
            assert unevenness(own, size) < 4


def test_few_of_many_rows_take_the_memory_of_few():
    class Sizes:
        def sizes(self, row_tokens: int) -> tuple[int, ...]:
            return (10**8,) * 20

    tracemalloc.start()
    rows = held_out_rows(Sizes(), 64, ROW)  # type: ignore[arg-type] (a stand-in)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (len(rows), most < 2**20) == (64, True)


def test_held_out_rows_are_all_that_there_are(shards):
    assert sorted(held_out_rows(shards, 1000, ROW).tolist()) == list(range(100))


def test_the_thread_that_reads_ahead_uses_the_gpu_of_its_rank(shards, monkeypatch):
    """With a stand-in for CUDA: a new thread would make a context on GPU 0."""
    chosen = []

    def set_device(device: torch.device) -> None:
        chosen.append((threading.current_thread().name, device))

    monkeypatch.setattr(CUDA, "copies", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "set_device_index", set_device)
    device = torch.device("cuda", 3)
    reader = Batches(shards, Order(100, 8, 1), ROW, 2, 0, 1, device)
    reader.at(0)
    reader.close()
    assert chosen == [("read-ahead_0", device)]


def differing_steps(shards: TokenShards, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of which a late device computes with other rows than a CPU reads."""
    monkeypatch.setattr(batches_module, "TOKENS_AT_ONCE", 2 * 8 * ROW)  # so that blocks come and go
    order, copies = Order(100, 8, 1), []
    with late_device():
        reader, plain = (Batches(shards, order, ROW, 2, 0, 1, where) for where in (DEVICE, CPU))
        assert reader._copies is not None
        sending: Any = reader._copies._stream
        sending.is_held = False  # as fast as it can, while what is computed is as late as it can
        for step in range(8):
            copies.append([micro_batch + 0 for micro_batch in reader.at(step)])
        sending.synchronize()
        found = [torch.cat(copy).cpu() for copy in copies]
        direct = [torch.cat(plain.at(step)) for step in range(8)]
        reader.close()
        plain.close()
    return [step for step in range(8) if not torch.equal(found[step], direct[step])]


def test_a_step_waits_for_its_rows_and_keeps_their_memory(shards, monkeypatch):
    assert differing_steps(shards, monkeypatch) == []


def test_memory_of_rows_that_is_not_kept_is_that_of_later_rows(shards, monkeypatch):
    monkeypatch.setattr(LateTensor, "record_stream", lambda rows, stream: None)
    assert differing_steps(shards, monkeypatch)


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_rows_that_are_late_are_waited_for(shards, monkeypatch, is_waited_for):
    if not is_waited_for:
        monkeypatch.setattr(Stream, "wait_event", lambda stream, event: None)
    order = Order(100, 8, 1)
    with late_device():
        reader = Batches(shards, order, ROW, 2, 0, 1, DEVICE)
        sums = [int(micro_batch.sum()) for micro_batch in reader.at(0)]
        reader.close()
    direct = shards.read_rows(order.rows_for(0, 0, 1), ROW).reshape(4, -1).sum(1)
    assert sums == (direct.tolist() if is_waited_for else [0] * 4)  # of what was there before


@pytest.mark.gpu
def test_micro_batches_sent_to_a_gpu_arrive_whole(shards, monkeypatch):
    monkeypatch.setattr(batches_module, "TOKENS_AT_ONCE", 2 * 8 * ROW)  # so that blocks come and go
    order, cuda = Order(100, 8, 1), torch.device("cuda", 0)
    reader, plain = (Batches(shards, order, ROW, 2, 0, 1, where) for where in (cuda, CPU))
    busy = torch.zeros(2048, 2048, device=cuda)
    for step in range(30):
        busy = busy @ busy  # so that copies overtake, or are overtaken by, what is computed
        sent = [micro_batch + 0 for micro_batch in reader.at(step)]
        assert {micro_batch.device for micro_batch in sent} == {cuda}
        assert all(map(torch.equal, (one.cpu() for one in sent), plain.at(step)))
    reader.close()
    plain.close()
