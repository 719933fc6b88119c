"""Learning rates and run lengths against the closed forms they promise."""

import math

import pytest

from minimind.checkpoint.train_state import TrainState, is_due
from minimind.config.parse import parse_flags
from minimind.config.schedule import Schedule, plan_schedule
from minimind.errors import UsageError


def planned(line: str, steps_per_epoch: int) -> Schedule:
    return plan_schedule(parse_flags(line.split()), steps_per_epoch)


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_the_rate_climbs_to_the_peak_and_ends_at_the_minimum(shape):
    s = Schedule(shape, 1e-3, 0.1, 10, 100)
    assert s.lr_at(0) == pytest.approx(1e-4)
    assert s.lr_at(9) == pytest.approx(1e-3)
    assert s.lr_at(10) == pytest.approx(1e-3)
    assert s.lr_at(99) == pytest.approx(1e-4)
    rates = [s.lr_at(i) for i in range(10, 100)]
    assert rates == sorted(rates, reverse=True)


def test_cosine_is_the_closed_form():
    s = Schedule("cosine", 2.0, 0.5, 0, 11)
    for i in range(11):
        assert s.lr_at(i) == pytest.approx(1.0 + 0.5 * (1 + math.cos(math.pi * i / 10)))


def test_constant_stays():
    assert {Schedule("constant", 3e-4, 0.1, 0, 50).lr_at(i) for i in range(50)} == {3e-4}


@pytest.mark.parametrize(
    ("line", "steps_per_epoch", "total", "warmup"),
    [
        ("", 1000, 1000, 50),
        ("", 10_000, 10_000, 100),
        ("--epochs 3", 1000, 3000, 100),
        ("--max_steps 40", 1000, 40, 2),
        ("--max_steps 4000", 1000, 4000, 100),
        ("--max_steps 4000 --epochs 2", 1000, 2000, 100),
        ("--max_steps 400 --epochs 2", 1000, 400, 20),
        ("--warmup_steps 7", 1000, 1000, 7),
        ("--warmup_steps 0", 1000, 1000, 0),
    ],
)
def test_length_and_warm_up_follow_the_flags(line, steps_per_epoch, total, warmup):
    s = planned(line, steps_per_epoch)
    assert (s.total_steps, s.warmup_steps) == (total, warmup)


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(UsageError, match="warmup_steps = 60"):
        planned("--warmup_steps 60 --max_steps 50", 1000)


def test_state_counts_and_the_last_step_is_always_due():
    assert TrainState().after(512).after(512) == TrainState(2, 1024)
    assert [s for s in range(1, 8) if is_due(s, 3, 7)] == [3, 6, 7]
