"""The scaling law L(N, D) = E + A/N^alpha + B/D^beta: its fit, intervals and optimum.

Approach 3 of Hoffmann et al. (2022): the Huber loss of log L, minimized by L-BFGS from the best of
a grid of starts. This module alone imports scipy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.optimize import minimize

Term = Literal["both", "parameters", "tokens"]

CONSTANTS = {"parameters": ("A", "alpha"), "tokens": ("B", "beta")}  # of each term
HUBER = 1e-3  # threshold for log L, as in the paper
EXPONENTS = np.geomspace(0.05, 2.0, 14)  # exponents of the starts
BOUNDS = (0.01, 4.0)  # bounds of alpha and beta
STARTS = 6  # points of the grid at which the fit of the runs begins
MIN_TERM = 1e-9  # nats; keeps the log of a term finite
NEGLIGIBLE = 1e-6  # nats, below which E and terms at the mean size make no difference
RESAMPLES = 400
LEVEL = 0.95
PRECISION = {"maxiter": 2000, "maxfun": 20000, "ftol": 1e-13, "gtol": 1e-9}


@dataclass(frozen=True)
class Law:
    """Constants of one or both terms; NaN for a term that is not fitted.

    A field is a number, or an array of one for each resample. `E` of a law of one term includes the
    other term, which its runs have in common.
    """

    E: Any
    A: Any
    alpha: Any
    B: Any
    beta: Any

    def loss(self, parameters: np.ndarray | float, tokens: np.ndarray | float) -> np.ndarray:
        """Nats per token."""
        terms = [self.E]
        if not np.isnan(self.alpha).all():
            terms.append(self.A * np.asarray(parameters, float) ** -self.alpha)
        if not np.isnan(self.beta).all():
            terms.append(self.B * np.asarray(tokens, float) ** -self.beta)
        return sum(terms[1:], np.asarray(terms[0]))

    def optimum(self, flops: np.ndarray | float, cost: float) -> tuple[np.ndarray, np.ndarray]:
        """Parameters and tokens of the lowest loss where `cost` N D = `flops`."""
        product = np.asarray(flops, float) / cost
        total = self.alpha + self.beta
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / total)
        parameters = scale * product ** (self.beta / total)
        return parameters, product / parameters

    def size_for(self, tokens: np.ndarray | float) -> np.ndarray:
        """Parameters of the budget whose optimum has so many tokens."""
        power = np.asarray(tokens, float) ** self.beta
        return (self.alpha * self.A * power / (self.beta * self.B)) ** (1 / self.alpha)


@dataclass(frozen=True)
class Fit:
    """A law, and its fits to resampled losses, which give the intervals."""

    term: Term
    law: Law
    resampled: Law  # its fields are arrays (resamples,)
    residuals: np.ndarray  # (runs,), of log L
    noise: np.ndarray  # (resamples,), of log L: that of one more run
    at_bound: list[str]  # constants that end at a bound of the search: the runs leave them open

    def interval(self, value_of: Callable[[Law], np.ndarray | float]) -> tuple[float, float]:
        """The ends of the interval of LEVEL of a figure of the law."""
        low, high = np.quantile(value_of(self.resampled), ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
        return float(low), float(high)

    def prediction(self, parameters: float, tokens: float) -> tuple[float, float, float]:
        """The loss of one more run, and the ends of its interval: that of the law and of a run."""
        losses = self.resampled.loss(parameters, tokens) * np.exp(self.noise)
        return (float(self.law.loss(parameters, tokens)), *self.interval(lambda _: losses))


class _Problem:
    """Centered log sizes of the runs: centering decorrelates the fitted constants.

    A solution is log E, then for each term its log at the mean size and its exponent.
    """

    def __init__(
        self, parameters: np.ndarray, tokens: np.ndarray, log_loss: np.ndarray, term: Term
    ) -> None:
        sizes = {"parameters": parameters, "tokens": tokens}
        self.names = [name for name in sizes if term in (name, "both")]
        logs = np.log(np.stack([sizes[name] for name in self.names]))  # (terms, runs)
        self.centers = logs.mean(axis=1)
        self.x = logs - self.centers[:, None]
        grid = np.meshgrid(*[EXPONENTS] * len(self.names), indexing="ij")
        self._exponents = np.stack([one.ravel() for one in grid], axis=1)  # (starts, terms)
        terms = np.exp(-self._exponents[:, :, None] * self.x)
        columns = np.concatenate([np.ones_like(terms[:, :1]), terms], axis=1).swapaxes(1, 2)
        self._weights = np.exp(-log_loss)  # least squares of relative errors
        self._inverses = np.linalg.pinv(columns * self._weights[:, None])

    def fit(self, log_loss: np.ndarray, starts: int, *near: np.ndarray) -> np.ndarray:
        """The best solution of several starts: the best of the grid, and `near`."""
        candidates = [*self._starts(log_loss)[:starts], *near]
        solutions = [self._descend(log_loss, start) for start in candidates]
        return min(solutions, key=lambda one: one[0])[1]

    def _starts(self, log_loss: np.ndarray) -> np.ndarray:
        """For each exponent of the grid the constants of least squares, the best first."""
        logs = np.log(np.maximum(self._inverses @ (np.exp(log_loss) * self._weights), MIN_TERM))
        starts = np.empty((len(logs), 1 + 2 * len(self.names)))
        starts[:, 0], starts[:, 1::2], starts[:, 2::2] = logs[:, 0], logs[:, 1:], self._exponents
        error = np.abs(self.predict(starts) - log_loss)
        return starts[np.argsort(np.where(error < HUBER, error**2 / HUBER, error).sum(axis=1))]

    def _descend(self, log_loss: np.ndarray, start: np.ndarray) -> tuple[float, np.ndarray]:
        bounds = [(np.log(MIN_TERM), None)] + [(np.log(MIN_TERM), None), BOUNDS] * len(self.names)
        done = minimize(
            self._objective,
            start,
            args=(log_loss,),
            method="L-BFGS-B",
            jac=True,
            bounds=bounds,
            options=PRECISION,
        )
        return float(done.fun), done.x

    def _objective(self, theta: np.ndarray, log_loss: np.ndarray) -> tuple[float, np.ndarray]:
        """The sum of the Huber losses of errors in units of HUBER, and its gradient."""
        parts = self._parts(theta)
        predicted = np.logaddexp.reduce(parts)
        shares = np.exp(parts - predicted)
        error = (predicted - log_loss) / HUBER
        slope = np.clip(error, -1, 1)
        gradient = np.empty_like(theta)
        gradient[0] = shares[0] @ slope
        gradient[1::2] = shares[1:] @ slope
        gradient[2::2] = -(shares[1:] * self.x) @ slope
        return float(slope @ (error - slope / 2)), gradient / HUBER

    def _parts(self, theta: np.ndarray) -> np.ndarray:
        """Logs of E and of each term, (..., 1 + terms, runs)."""
        terms = theta[..., 1::2, None] - theta[..., 2::2, None] * self.x
        constant = np.broadcast_to(theta[..., :1, None], (*theta.shape[:-1], 1, self.x.shape[1]))
        return np.concatenate([constant, terms], axis=-2)

    def predict(self, theta: np.ndarray) -> np.ndarray:
        """log L of the runs, (..., runs)."""
        return np.logaddexp.reduce(self._parts(theta), axis=-2)

    def at_bound(self, theta: np.ndarray) -> list[str]:
        """Constants of a solution at a bound: E and factors of next to nothing, and exponents."""
        found = ["E"] * bool(theta[0] < np.log(NEGLIGIBLE))
        for n, name in enumerate(self.names):
            factor, exponent = CONSTANTS[name]
            found += [factor] * bool(theta[1 + 2 * n] < np.log(NEGLIGIBLE))
            found += [exponent] * bool(np.isclose(theta[2 + 2 * n], BOUNDS, rtol=1e-3).any())
        return found

    def law(self, theta: np.ndarray) -> Law:
        """The law of solutions (..., constants) in parameters and tokens."""
        values: dict[str, Any] = {"A": np.nan, "alpha": np.nan, "B": np.nan, "beta": np.nan}
        for n, name in enumerate(self.names):
            factor, exponent = CONSTANTS[name]
            log, power = theta[..., 1 + 2 * n], theta[..., 2 + 2 * n]
            values |= {factor: np.exp(log + power * self.centers[n]), exponent: power}
        return Law(np.exp(theta[..., 0]), **values)


def constants_of(term: Term) -> int:
    """The number of constants of the law."""
    return 5 if term == "both" else 3


def fit(
    parameters: Sequence[float],
    tokens: Sequence[float],
    losses: Sequence[float],
    term: Term,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Fit:
    """Fit the law; there must be more runs than constants.

    Intervals are of a parametric bootstrap: the law is fitted again to its own losses with noise of
    the residuals' variance. That is an estimate, so each resample draws it, as in Student's t.
    """
    log_loss = np.log(np.asarray(losses, float))
    sizes = np.asarray(parameters, float), np.asarray(tokens, float)
    problem = _Problem(*sizes, log_loss, term)
    best = problem.fit(log_loss, STARTS)
    predicted = problem.predict(best)
    residuals = log_loss - predicted
    freedom = len(residuals) - constants_of(term)
    random = np.random.default_rng(seed)
    spread = np.sqrt(np.sum(residuals**2) / random.chisquare(freedom, (resamples, 1)))
    noise = spread * random.standard_normal((resamples, len(residuals)))
    resampled = np.stack([problem.fit(one, 1, best) for one in predicted + noise])
    noise = spread[:, 0] * random.standard_normal(resamples)
    return Fit(
        term, problem.law(best), problem.law(resampled), residuals, noise, problem.at_bound(best)
    )
