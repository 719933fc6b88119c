"""What counts as a spike, and when a run has to go back."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import numpy as np
import pytest

from minimind.config.run_config import PATIENCE
from minimind.errors import CheckpointError
from minimind.recovery.spikes import Estimate, Observed, SpikeDetector, SpikeState
from minimind.runtime.checked_json import validate

WINDOW = 17


def steady(detector: SpikeDetector, steps: range, seed: int = 0) -> None:
    """Steps with a noisy loss near 3 and norm near 1, none of them a spike."""
    random = np.random.default_rng(seed)
    for step in steps:
        seen = Observed(step, 3 + 0.1 * random.normal(), 1 + 0.1 * random.normal(), None)
        assert not detector.observe(seen)


def test_the_limit_is_median_and_mad_of_the_window():
    values = np.random.default_rng(1).normal(5, 1, 100).tolist()
    estimate = Estimate(6.0, WINDOW, 0.02)
    for number, value in enumerate(values):
        assert math.isinf(estimate.limit) == (number < WINDOW)
        estimate.add(value)
        if number >= WINDOW - 1:
            last = values[number + 1 - WINDOW : number + 1]
            median = statistics.median(last)
            mad = statistics.median(abs(v - median) for v in last)
            assert estimate.limit == pytest.approx(median + 6 * 1.4826 * mad, rel=1e-12)


def test_equal_values_leave_room_for_rounding():
    assert Estimate(8.0, WINDOW, 0.02, [2.0] * WINDOW).limit == pytest.approx(2 * 1.16)


@pytest.mark.parametrize(
    ("seen", "is_skipped"),
    [
        (Observed(40, 9.0, 1.0, 5.0), False),  # the loss alone
        (Observed(40, 3.0, 9.0, 5.0), True),  # the norm alone
        (Observed(40, None, 1.0, 5.0), False),
        (Observed(40, 3.0, None, 5.0), False),  # skipped by --max_skipped
    ],
)
def test_a_spike_is_not_part_of_the_window(seen: Observed, is_skipped: bool):
    detector = SpikeDetector(8.0, WINDOW)
    steady(detector, range(40))
    before = detector.state(None)
    assert detector.observe(seen)
    after = detector.state(None)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"first", "in_a_row", *(["skipped"] if is_skipped else [])}
    assert (detector.first, detector.in_a_row, detector.skipped) == (40, 1, int(is_skipped))
    steady(detector, range(41, 42))
    assert (detector.first, detector.in_a_row) == (None, 0)


def test_only_spikes_in_a_row_ask_to_go_back():
    detector = SpikeDetector(8.0, WINDOW)
    steady(detector, range(40))
    high = Observed(0, 9.0, 1.0, 5.0)
    for _ in range(PATIENCE - 1):
        detector.observe(high)
        assert not detector.must_go_back
    steady(detector, range(1))
    for _ in range(PATIENCE):
        assert not detector.must_go_back
        detector.observe(high)
    assert detector.must_go_back


def test_no_step_is_a_spike_before_the_window_is_full_unless_it_is_not_finite():
    detector = SpikeDetector(8.0, WINDOW)
    steady(detector, range(WINDOW - 1))
    assert not detector.observe(Observed(16, 1e9, 1e9, None))
    assert detector.observe(Observed(17, None, 1.0, None))


def test_a_steady_fall_and_a_slow_rise_are_no_spikes():
    detector = SpikeDetector(8.0, WINDOW)
    random = np.random.default_rng(2)
    for step in range(2000):
        level = 3 + 5 * math.exp(-step / 50) + 0.001 * max(0, step - 1000)
        seen = Observed(step, level + 0.05 * random.normal(), math.exp(0.3 * random.normal()), None)
        assert not detector.observe(seen), step


def test_a_state_read_back_decides_alike():
    whole, random = SpikeDetector(4.0, WINDOW), np.random.default_rng(3)
    steps = []
    for step in range(300):
        is_spike = step % 50 > 44
        loss, norm = 3 + 0.1 * random.normal(), 1 + 0.1 * random.normal()
        steps.append((loss + 4 * is_spike, norm + 4 * (step % 50 > 46)))
    parts: SpikeDetector | None = None
    for step, (loss, norm) in enumerate(steps):
        limit = whole.norms.limit
        seen = Observed(step, loss, norm, limit if math.isfinite(limit) else None)
        if step % 13 == 0:  # saved and resumed, with this step not yet observed
            state = json.loads(json.dumps((parts or whole).state(seen)))
            validate(SpikeState, state)
            parts, seen = SpikeDetector(4.0, WINDOW, state), Observed(**state["last"])
        assert parts is not None
        assert whole.observe(seen) == parts.observe(seen)
        assert whole.state(None) == parts.state(None)
    assert whole.skipped > 5


@pytest.mark.parametrize(
    "change", [{"losses": [1.0, "x"]}, {"in_a_row": -1}, {"last": {"step": 1}}, {"more": 1}]
)
def test_an_invalid_state_is_refused(change: dict[str, Any]):
    state = {**SpikeDetector(8.0, WINDOW).state(None), **change}
    with pytest.raises(CheckpointError):
        validate(SpikeState, state)
