"""Learning rates and run lengths against the closed forms they promise."""

import math

import pytest

from minimind.config.parse import parse_flags
from minimind.config.schedule import Schedule, budget_steps, plan_schedule
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


@pytest.mark.parametrize(("decay_shape", "half"), [("linear", 0.5), ("1-sqrt", 1 - 0.5**0.5)])
def test_wsd_is_stable_until_its_last_steps_and_ends_at_the_minimum(decay_shape, half):
    s = Schedule("wsd", 1e-3, 0.1, 10, 100, 20, decay_shape)
    assert s.lr_at(4) == pytest.approx(5e-4)
    assert {s.lr_at(i) for i in range(9, 80)} == {1e-3}
    assert s.lr_at(89) == pytest.approx(1e-3 * (0.1 + 0.9 * half))
    assert s.lr_at(99) == pytest.approx(1e-4)
    rates = [s.lr_at(i) for i in range(79, 100)]
    assert rates == sorted(set(rates), reverse=True)


@pytest.mark.parametrize("warmup", [0, 25])
def test_inverse_sqrt_leaves_the_peak_without_a_jump_and_stays_above_the_minimum(warmup):
    s = Schedule("inverse_sqrt", 1e-3, 0.1, warmup, 10_000)
    start = max(1, warmup)
    assert s.lr_at(start - 1) == pytest.approx(1e-3)
    assert s.lr_at(4 * start - 1) == pytest.approx(5e-4)
    assert s.lr_at(9_999_999) == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("line", "total", "warmup", "decay"),
    [
        ("--max_steps 1000", 1000, 50, 200),
        ("--max_steps 1000 --decay_steps 7", 1000, 50, 7),
        ("--max_steps 1000 --decay_fraction 0.5", 1000, 50, 500),
        ("--max_steps 100 --decay_fraction 0.29", 100, 5, 29),  # 28 in floating point
        ("--max_steps 99 --decay_fraction 0.5", 99, 4, 49),
        ("--max_steps 3", 3, 0, 1),
        ("--max_steps 10 --warmup_steps 3 --decay_steps 7", 10, 3, 7),
    ],
)
def test_wsd_decays_in_as_many_steps_as_its_flags_say(line, total, warmup, decay):
    s = planned(f"--schedule wsd {line}", 1000)
    assert (s.total_steps, s.warmup_steps, s.decay_steps, s.decay_shape) == (
        total,
        warmup,
        decay,
        "1-sqrt",
    )


def within(line: str) -> int:
    """Steps of a run of 1,000 steps an epoch, 512 tokens a step, 3,000 weights, 20 kFLOP a token"""
    run = parse_flags(line.split())
    return plan_schedule(run, 1000, budget_steps(run, 512, 3000, 20_000)).total_steps


@pytest.mark.parametrize(
    ("line", "steps"),
    [
        ("--max_tokens 5120", 10),
        ("--max_tokens 5119", 9),
        ("--max_tokens 2e9", 2_000_000_000 // 512),
        ("--max_flops 1e9", 1_000_000_000 // (20_000 * 512)),
        ("--tokens_per_param 20", 117),
        ("--tokens_per_param 0.512", 3),
        ("--tokens_per_param 20 --max_flops 1e9 --max_tokens 1e9", 97),  # the first to end
        ("--max_tokens 5120 --epochs 3", 10),
        ("--max_tokens 2e9 --epochs 3", 3000),
        ("--max_tokens 5120 --max_steps 10", 10),
    ],
)
def test_a_budget_is_exact_in_steps(line, steps):
    assert within(line) == steps


def test_a_decay_that_leaves_no_step_to_warm_up_is_refused():
    with pytest.raises(UsageError, match=r"decay_fraction = 1 \(--decay_fraction\), 100 steps"):
        planned("--max_steps 100 --schedule wsd --decay_fraction 1", 1000)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("--max_tokens 5120 --max_steps 9", "max_tokens"),
        ("--max_tokens 1e6 --tokens_per_param 20 --max_steps 1953", "tokens_per_param"),
    ],
)
def test_a_budget_that_contradicts_is_refused(line, name):
    with pytest.raises(UsageError, match=rf"max_steps = \d+ \(--max_steps\) .* {name} = "):
        within(line)


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
