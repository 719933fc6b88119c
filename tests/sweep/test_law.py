"""The fit of a scaling law against known constants, and its optimum against a search."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from minimind.sweep import law as laws
from minimind.sweep.law import Fit, Law, Term, fit
from tests.sweep.made_runs import LAW

SIZES = np.geomspace(2e6, 1e8, 4)
TOKENS = np.geomspace(4e7, 4e9, 4)
GRID = tuple(np.ravel(one) for one in np.meshgrid(SIZES, TOKENS))
CONSTANTS = ("E", "A", "alpha", "B", "beta")


def noisy_fit(sigma: float, seed: int, term: Term = "both", resamples: int = 40) -> Fit:
    """Of the grid, or of its runs of the largest other size."""
    n, d = GRID
    if term != "both":
        line = np.geomspace(2e6, 1e9, 10)
        n, d = (line, np.full(10, 1e9)) if term == "parameters" else (np.full(10, 1e7), line)
    noise = sigma * np.random.default_rng(seed).standard_normal(len(n))
    return fit(n.tolist(), d.tolist(), (LAW.loss(n, d) * np.exp(noise)).tolist(), term, resamples)


@pytest.mark.parametrize(
    "law", [LAW, Law(2.5, 90.0, 0.25, 4000.0, 0.45), Law(0.4, 20, 0.2, 5, 0.1)]
)
def test_constants_of_exact_losses_are_recovered(law: Law):
    n, d = GRID
    found = fit(n.tolist(), d.tolist(), law.loss(n, d).tolist(), "both", resamples=2).law
    for name in CONSTANTS:
        assert getattr(found, name) == pytest.approx(getattr(law, name), rel=1e-3), name


def test_one_outlier_does_not_move_the_law():
    n, d = GRID
    losses = LAW.loss(n, d)
    losses[5] *= 1.1
    found = fit(n.tolist(), d.tolist(), losses.tolist(), "both", resamples=2)
    assert found.law.alpha == pytest.approx(LAW.alpha, rel=0.01)
    assert found.residuals[5] == pytest.approx(np.log(1.1), rel=0.01)


@pytest.mark.parametrize(("term", "factor"), [("parameters", "A"), ("tokens", "B")])
def test_a_law_of_one_term_holds_the_other_in_its_constant(term: Term, factor: str):
    found = noisy_fit(0.0, 0, term, resamples=2).law
    assert getattr(found, factor) == pytest.approx(getattr(LAW, factor), rel=1e-3)
    rest = LAW.B * 1e9**-LAW.beta if term == "parameters" else LAW.A * 1e7**-LAW.alpha
    assert pytest.approx(LAW.E + rest, rel=1e-4) == found.E
    assert np.isnan(found.beta if term == "parameters" else found.alpha)


@pytest.mark.parametrize("flops", [1e16, 1e18, 1e21])
@pytest.mark.parametrize("cost", [6.0, 7.3])
def test_the_optimum_is_the_least_loss_of_its_budget(flops: float, cost: float):
    def loss(log_n: float) -> float:
        return float(LAW.loss(np.exp(log_n), flops / cost / np.exp(log_n)))

    best: Any = minimize_scalar(loss, bounds=(np.log(1e4), np.log(1e13)), options={"xatol": 1e-9})
    n, d = LAW.optimum(flops, cost)
    assert n == pytest.approx(np.exp(best.x), rel=1e-4)
    assert cost * n * d == pytest.approx(flops)
    assert LAW.size_for(d) == pytest.approx(n)


def test_noise_widens_every_interval_and_a_seed_repeats_it():
    def widths(found: Fit) -> list[float]:
        ends = (found.interval(partial(_constant, name)) for name in CONSTANTS)
        return [high - low for low, high in ends]

    quiet, loud = (noisy_fit(sigma, 3) for sigma in (0.001, 0.004))
    assert all(2 * a < b for a, b in zip(widths(quiet), widths(loud), strict=True))
    assert widths(noisy_fit(0.004, 3)) == widths(loud)
    assert widths(noisy_fit(0.0, 3))[2] < 1e-3


def test_the_interval_of_a_run_has_its_own_noise_beside_that_of_the_law():
    found = noisy_fit(0.004, 3, resamples=200)
    value, low, high = found.prediction(3e7, 3e8)  # among the runs
    of_the_law = found.interval(lambda law: law.loss(3e7, 3e8))
    assert value == found.law.loss(3e7, 3e8)
    spread = np.sqrt(np.sum(found.residuals**2) / 11)
    assert of_the_law[1] - of_the_law[0] < (high - low) / 1.5
    assert (high - low) / value == pytest.approx(2 * 2.2 * spread, rel=0.35)  # Student's t of 11


@pytest.mark.long
def test_intervals_of_one_term_contain_the_truth_as_often_as_they_say():
    """40 replicas: 95 % is 38; below 33 has a probability of 0.3 %."""
    hits = dict.fromkeys(("E", "A", "alpha"), 0)
    for seed in range(40):
        found = noisy_fit(0.003, 100 + seed, "parameters", resamples=100)
        truth = {"E": LAW.E + LAW.B * 1e9**-LAW.beta, "A": LAW.A, "alpha": LAW.alpha}
        for name in hits:
            low, high = found.interval(partial(_constant, name))
            hits[name] += bool(low <= truth[name] <= high)
    assert min(hits.values()) >= 33, hits


@pytest.mark.long
def test_intervals_of_the_whole_law_contain_the_truth_as_often_as_they_say():
    hits = dict.fromkeys((*CONSTANTS, "optimum", "a run"), 0)
    for seed in range(40):
        found = noisy_fit(0.005, 200 + seed, resamples=100)
        run = LAW.loss(4e8, 1e10) * np.exp(0.005 * np.random.default_rng(seed).standard_normal())
        _, low, high = found.prediction(4e8, 1e10)
        hits["a run"] += bool(low <= run <= high)
        for name in CONSTANTS:
            low, high = found.interval(partial(_constant, name))
            hits[name] += bool(low <= getattr(LAW, name) <= high)
        low, high = found.interval(lambda law: law.optimum(1e18, 6.0)[0])
        hits["optimum"] += bool(low <= LAW.optimum(1e18, 6.0)[0] <= high)
    assert min(hits.values()) >= 33, hits


def _constant(name: str, law: Law) -> float:
    return getattr(law, name)


def test_an_exponent_at_the_bound_is_named():
    steep = Law(1.0, 1e60, 9.0, 400.0, 0.28)
    n, d = GRID
    found = fit(n.tolist(), d.tolist(), steep.loss(n / 1e6, d).tolist(), "both", resamples=2)
    assert steep.alpha > laws.BOUNDS[1]
    assert "alpha" in found.at_bound


@pytest.mark.parametrize("limit", [-0.1, 0.0])
def test_a_limit_of_nothing_is_named(limit: float):
    n, d = GRID
    losses = Law(limit, 400.0, 0.34, 400.0, 0.28).loss(n, d)
    found = fit(n.tolist(), d.tolist(), losses.tolist(), "both", resamples=2)
    assert found.at_bound == ["E"]


def test_a_term_of_nothing_is_named():
    n, d = GRID
    losses = Law(1.7, 0.0, 0.34, 400.0, 0.28).loss(n, d)
    assert "A" in fit(n.tolist(), d.tolist(), losses.tolist(), "both", resamples=2).at_bound
