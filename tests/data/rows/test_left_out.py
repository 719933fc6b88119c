"""Rows that are left out, and jumps over rows: what an order reads then."""

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minimind.checkpoint.validation import validate_order
from minimind.config.flags import MOST_LEFT_OUT
from minimind.data.rows.order import Mixture, Order, Origin
from minimind.data.rows.skip_rows import read_skip_rows, skip_rows_text
from minimind.errors import CheckpointError, UsageError

OUT = ((0, 1), (17, 20), (55, 56), (102, 103))
FINGERPRINT = "0123456789abcdef"


def rows_from(order: Order, epoch: int) -> list[int]:
    """All complete steps of an epoch of a fresh order."""
    first = epoch * order.steps_per_epoch
    return order.rows_for(first, 0, 1, order.steps_per_epoch).tolist()


def test_the_others_keep_their_order():
    whole, order = Order(103, 1, 5), Order(103, 1, 5, left_out=OUT)
    out = {0, 17, 18, 19, 55, 102}
    assert (order.rows_per_epoch, order.steps_per_epoch) == (97, 97)
    for epoch in range(4):
        expected = [row for row in rows_from(whole, epoch) if row not in out]
        assert rows_from(order, epoch) == expected


@pytest.mark.parametrize("rows_per_step", [1, 8])
def test_a_mixture_reads_none_of_them_and_its_passes_are_whole(rows_per_step: int):
    mixture = Mixture((40, 3, 60), (1.0, 1.0, 2.0), OUT)
    assert mixture.n_rows == 97
    order = Order(103, rows_per_step, 5, mixture=mixture, left_out=OUT)
    rows = order.rows_for(0, 0, 1, 40 * order.steps_per_epoch)
    read = np.bincount(rows, minlength=103)
    assert not read[[0, 17, 18, 19, 55, 102]].any()
    if rows_per_step == 1:
        for source in (read[1:17], read[40:43]):
            assert source.max() - source.min() <= 1


@pytest.mark.parametrize("sizes", [None, (40, 3, 60)])
def test_reads_of_inverts_them(sizes: tuple[int, ...] | None):
    mixture = None if sizes is None else Mixture(sizes, (1.0, 1.0, 2.0), OUT)
    order = Order(103, 8, 5, Origin(4, 30, 2, 9), mixture, OUT).jumping(20, 29).jumping(40, 47)
    expected: dict[int, list[tuple[int, int]]] = {row: [] for row in range(103)}
    for step in range(4, 90):
        for at, row in enumerate(order.rows_for(step, 0, 1).tolist()):
            expected[row].append((step, at))
    assert not expected[18]
    assert {row: order.reads_of(row, 90) for row in range(103)} == expected
    assert order.reads_of(7, 22) == [read for read in expected[7] if read[0] < 22]


def test_a_jump_reads_on_from_its_place():
    order = Order(103, 8, 5)
    after = order.jumping(10, 15)
    same = [order.rows_for(step, 0, 1).tolist() for step in range(60)]
    seen = [after.rows_for(step, 0, 1).tolist() for step in range(50)]
    assert seen == [*same[:10], *same[15:55]]
    assert after.positions(9).stop == 80
    assert after.positions(10).start == 120
    again = after.jumping(20, 21)  # counted in steps of the order that jumps
    assert again.rows_for(20, 0, 1).tolist() == same[26]
    assert after.jumping(5, 6).jumps == (Origin(5, 48, 0, 48),)  # what lay later is gone


def test_rows_left_out_from_a_step_on_leave_the_rest_of_its_epoch_in_order():
    before = Order(103, 4, 5)
    origin = before.origin_at(10, is_same_text=True, left_out=OUT)
    after = Order(103, 4, 5, origin, left_out=OUT)
    rest = [
        row for row in rows_from(Order(103, 1, 5), 0)[40:] if row not in {0, 17, 18, 19, 55, 102}
    ]
    count = len(rest) // 4
    assert after.rows_for(10, 0, 1, count).tolist() == rest[: 4 * count]
    # All rows again: from the row on that would have been next.
    back = Order(103, 4, 5, after.origin_at(13, is_same_text=True, left_out=()))
    whole = rows_from(Order(103, 1, 5), 0)
    at = whole.index(rest[12])
    assert back.rows_for(13, 0, 1).tolist() == whole[at : at + 4]


def test_a_new_origin_is_behind_a_jump_that_lies_ahead():
    order = Order(103, 8, 5).jumping(6, 9)
    origin = order.origin_at(4, is_same_text=True)
    assert (origin.step, origin.offset) == (4, 72)


@pytest.mark.parametrize("mixture", [None, Mixture((40, 63), (1.0, 2.0), OUT)])
def test_it_is_stored_as_json(mixture: Mixture | None):
    order = Order(103, 8, 5, Origin(4, 30, 2, 9), mixture, OUT).jumping(20, 29)
    start = order.start_json()
    validate_order(103, start)
    assert Order.from_json(103, 8, 5, start, order.mixture_json()) == order
    assert set(Order(103, 8, 5).start_json()) == {"step", "rows", "epoch", "offset"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"left_out": [[5, 5]]}, "left_out"),
        ({"left_out": [[5, 7], [6, 8]]}, "left_out"),
        ({"left_out": [[100, 104]]}, "left_out"),
        ({"jumps": [{"step": 3, "rows": 0, "epoch": 0, "offset": 0}]}, "jump at step 3"),
        ({"jumps": [{"step": 9, "rows": 0, "epoch": 0, "offset": 104}]}, "offset"),
        ({"jumps": [{"step": 9, "rows": 0, "epoch": 2**50, "offset": 0}]}, "epoch"),
    ],
)
def test_an_impossible_start_is_refused(change: dict[str, object], words: str):
    start = {**Origin(4, 30, 2, 9).__dict__, **change}
    with pytest.raises(CheckpointError, match=words):
        validate_order(103, start)


def test_an_order_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no step"):
        Order(103, 8, 5, left_out=((0, 96),))
    with pytest.raises(ValueError, match="source 0 are left out"):
        Mixture((40, 63), (1.0, 2.0), ((0, 41),))
    with pytest.raises(ValueError, match="at most"):
        Order(10**9, 8, 5, left_out=((0, MOST_LEFT_OUT + 1),))
    with pytest.raises(ValueError, match="different rows"):
        replace(Order(103, 8, 5, mixture=Mixture((40, 63), (1.0, 2.0))), left_out=OUT)


def test_a_file_of_rows_is_read_back(tmp_path: Path):
    file = tmp_path / "skip.txt"
    rows = [0, 17, 18, 19, 55, 102]
    file.write_text(skip_rows_text(rows, 257, FINGERPRINT))
    assert file.read_text().splitlines()[1:] == ["0", "17:19", "55", "102"]
    assert read_skip_rows(file, 103, 257, FINGERPRINT) == OUT
    odd = '{"step": 3, "reason": "gradient"}'  # a line of nonfinite_rows.jsonl without a row
    file.write_text(f'# by hand\n\n 17 \n{{"row": 18, "tokens": [1, 2]}}\n3:5\n4\n{odd}\n')
    assert read_skip_rows(file, 103, 2, FINGERPRINT) == ((3, 6), (17, 19))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("17\nx\n", ":2: 'x' is not a row"),
        ("5:3\n", ":1: '5:3' is not in rows 0 to 102"),
        ("103\n", "is not in rows 0 to 102"),
        ("-1\n", "is not a row"),
        ('{"line": 1}\n', "is not a row"),
        ('{"row": true}\n', "is not a row"),
        ('{"row": -1}\n', "is not in rows"),
        ('{"row": 1, "tokens": [1, 2, 3]}\n', "a row of 3 tokens"),
        ("# nothing\n", "has no rows"),
        (skip_rows_text([1], 513, FINGERPRINT), "rows of 513 tokens"),
        (skip_rows_text([1], 257, "ffffffff"), "text ffffffff"),
    ],
)
def test_a_file_that_names_no_rows_is_refused(tmp_path: Path, text: str, words: str):
    file = tmp_path / "skip.txt"
    file.write_text(text)
    with pytest.raises(UsageError, match="--skip_rows") as error:
        read_skip_rows(file, 103, 257, FINGERPRINT)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("lines", "ranges"),
    [
        ([f"{2 * row}" for row in range(100_000)], 100_000),
        (["7"] * 300_000, 1),
        (["0:90000"] * 100_000, 1),
        ([f"{row}:{row + 50_000}" for row in range(40_000)], 1),
        (['{"row": 3}'] * 20_000, 1),
    ],
)
def test_long_files_are_read_in_a_time_of_their_length(
    tmp_path: Path, lines: list[str], ranges: int
):
    file = tmp_path / "skip.txt"
    file.write_text("\n".join(lines))
    began = time.process_time()
    assert len(read_skip_rows(file, 10**9, 257, FINGERPRINT)) == ranges
    assert time.process_time() - began < 5  # half a second; minutes, if every line takes all rows


def test_what_is_no_file_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path):
        with pytest.raises(UsageError, match=r"--skip_rows .*; correct the path"):
            read_skip_rows(path, 103, 257, FINGERPRINT)


def test_too_many_rows_are_refused(tmp_path: Path):
    file = tmp_path / "skip.txt"
    file.write_text(f"0:{MOST_LEFT_OUT}\n")
    with pytest.raises(UsageError, match="take their documents out"):
        read_skip_rows(file, 10**9, 257, FINGERPRINT)


def test_a_row_of_a_source_that_a_stage_does_not_read_is_read_at_no_step():
    left_out = ((3, 5),)
    sizes, weights, unread = (10, 8), (1.0, 0.0), (0, 0)
    mixture = Mixture(sizes, weights, left_out, stage_rows=16, epoch_rows=8, begun=unread)
    order = Order(18, 4, 5, mixture=mixture, left_out=left_out)
    assert order.reads_of(12, 4) == []
