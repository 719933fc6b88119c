"""The choice of a size: more text or more time never gives a smaller one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from minimind.architecture.choice import LADDER, MOST_EPOCHS, Choice, Size, Text, choose
from minimind.architecture.shape import flops_per_token
from minimind.errors import DataError, UsageError

CPU, GPU = 4e10, 3e14  # FLOPs a second that are reached
NAMES = [size.name for size in LADDER]


def chosen(text_bytes: float, hours: float, speed: float = CPU, room: float = 1e12) -> Choice:
    def speed_of(size: Size, _: float) -> float:
        return speed / flops_per_token(size.shape())

    def has_room(size: Size) -> bool:
        return 16 * size.shape().parameters < room

    return choose(Text(text_bytes, lambda vocab_size: 3.5), hours, 30, speed_of, has_room)


@pytest.mark.parametrize(
    ("text_bytes", "hours", "speed", "name", "limit"),
    [
        (4e6, 0.1, CPU, "0.3m", "the time"),
        (4e6, 2, CPU, "1m", "the time"),
        (4e6, 1000, CPU, "tiny", "the text"),
        (1e9, 2, GPU, "104m", "the time"),
        (1e11, 1000, GPU, "0.4b", "the ladder"),
    ],
)
def test_the_choice(text_bytes: float, hours: float, speed: float, name: str, limit: str):
    choice = chosen(text_bytes, hours, speed)
    assert (choice.size.name, choice.limit) == (name, limit)
    assert choice.epochs <= MOST_EPOCHS + 1e-9
    assert choice.hours <= hours + 1e-9


@pytest.mark.parametrize("speed", [CPU, GPU])
def test_more_never_gives_a_smaller_model(speed: float):
    texts, times = [2e5 * 4**n for n in range(9)], [0.1 * 3**n for n in range(8)]
    table = [[NAMES.index(chosen(t, h, speed).size.name) for h in times] for t in texts]
    for row in (*table, *zip(*table, strict=True)):
        assert all(a <= b for a, b in pairwise(row))


def test_text_that_is_held_out_trains_nothing():
    """With --val_path of `minimind prepare` it may be most of the text."""
    text = Text(4e7, lambda vocab_size: 3.5, held_out=0.9)
    choice = choose(text, 1000, 30, lambda size, _: 1e9)
    assert (choice.size.name, choice.limit) == (chosen(4e6, 1000).size.name, "the text")


def test_what_has_no_room_is_not_chosen():
    choice = chosen(1e11, 1000, GPU, room=2**30)
    assert choice.limit == "the memory"
    assert 16 * choice.shape.parameters < 2**30


def test_too_little_text_or_time():
    with pytest.raises(DataError, match="needs 100,000"):
        chosen(5000, 1)
    with pytest.raises(UsageError, match="or more") as refused:
        chosen(4e6, 0.001)
    least = float(str(refused.value).split("--hours ")[-1].split()[0])
    assert chosen(4e6, least).tokens >= 100 * 512


def test_a_time_that_ends_before_the_first_step_is_refused_before_anything_is_measured():
    with pytest.raises(
        UsageError,
        match=r"first step, which starts after about 60 seconds; give --hours 0.034 or more",
    ):
        choose(
            Text(4e6, lambda vocab_size: 3.5), 0.01, 60, lambda size, seconds: pytest.fail("asked")
        )
