"""`minimind scaling`: which law the runs determine, and the optimum of each budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minimind.architecture.shape import Shape
from minimind.errors import UsageError
from minimind.model.sizes import feed_forward_width
from minimind.report import formats
from minimind.sweep.law import Fit, Law, Term, constants_of, fit
from minimind.sweep.points import NEAR, Point, Points

LEAST_LEVELS = 3  # different values of a size that a term needs: E, a factor and an exponent
COLLINEAR = 0.999  # correlation of log N and log D from which the terms cannot be told apart
COST = 6.0  # FLOPs per parameter and token, of models whose FLOPs are not known
CONSTANTS = ("E", "A", "alpha", "B", "beta")
# Shapes like the presets: heads of them, dims by a multiple, dims per block.
HEADS, KEY_HEADS, MULTIPLE, WIDEST, ASPECTS = 8, 2, 64, 8192, (32, 64)
FIT_OF_A_SHAPE = 0.15  # distance of log N up to which a shape is proposed

Interval = tuple[float, float, float]  # a value, and the ends of its interval


@dataclass(frozen=True)
class Optimum:
    """The optimum of a budget, or of a number of tokens."""

    budget: str  # "1e18 FLOPs"
    limit: str  # "--max_flops 1e+18", the flag of that budget
    flops: Interval
    parameters: Interval
    tokens: Interval
    loss: Interval
    beyond: float  # how many times the largest size or token count of the runs
    shape: Shape | None


@dataclass(frozen=True)
class Answer:
    """Everything that is printed and drawn."""

    points: Points
    fit: Fit
    cost: float  # FLOPs per parameter and token
    notes: list[str]
    optima: list[Optimum]

    def constants(self) -> dict[str, Interval]:
        """Those that are fitted, and the exponents of the optimum."""
        found = {k: self.of(lambda law, k=k: getattr(law, k)) for k in CONSTANTS}
        if self.fit.term == "both":
            found["a"] = self.of(lambda law: law.beta / (law.alpha + law.beta))
            found["b"] = self.of(lambda law: law.alpha / (law.alpha + law.beta))
        return {name: one for name, one in found.items() if math.isfinite(one[0])}

    def of(self, value_of: Callable[[Law], Any]) -> Interval:
        """A figure of the law with its interval."""
        return interval_of(self.fit, value_of)

    def fitted(self) -> np.ndarray:
        """The law's loss of each run."""
        used = self.points.used
        sizes = np.array([(one.parameters, one.tokens) for one in used]).T
        return self.fit.law.loss(*sizes)


def interval_of(fitted: Fit, value_of: Callable[[Law], Any]) -> Interval:
    """A figure of the law, and the ends of its interval."""
    return (float(value_of(fitted.law)), *fitted.interval(value_of))


def answer(points: Points, flops: Sequence[float], tokens: Sequence[float]) -> Answer:
    """Fit the law that the runs determine, and its optima; raise UsageError if there is none."""
    used = points.used
    term, notes = _term_of(points)
    if (flops or tokens) and term != "both":
        given = "--flops" if flops else "--tokens"
        raise UsageError(f"{given} needs a law over parameters and tokens, but {notes[0]}")
    sizes = [one.parameters for one in used], [one.tokens for one in used]
    fitted = fit(*sizes, [one.loss for one in used], term)
    costs = [one.flops_per_token / one.parameters for one in used if one.flops_per_token]
    is_known = len(costs) == len(used)
    cost = float(np.exp(np.mean(np.log(costs)))) if is_known else COST
    notes += [
        f"{name} ends at a bound of the search: the runs do not determine it"
        for name in fitted.at_bound
    ]
    repeated = [one for one in used if one.epochs > 1]
    if repeated:
        most = max(repeated, key=lambda one: one.epochs)
        runs = formats.count(len(repeated), "run reads", "runs read")
        notes.append(
            f"{runs} text more than once, up to {most.epochs:.1f} times ({most.name}); the law"
            " is of new text"
        )
    optima = [_optimum(fitted, used, cost, flops=one) for one in flops]
    optima += [_optimum(fitted, used, cost, tokens=one) for one in tokens]
    return Answer(points, fitted, cost, notes, optima)


def _term_of(points: Points) -> tuple[Term, list[str]]:
    """The terms that the runs determine, and a sentence where it is only one."""
    used = points.used
    sizes, tokens = ([getattr(p, k) for p in used] for k in ("parameters", "tokens"))
    levels = {"parameters": _levels(sizes), "tokens": _levels(tokens)}
    term: Term = "both"
    notes = []
    if levels["tokens"] == 1 < levels["parameters"]:
        term = "parameters"
        notes = [
            f"all runs have {formats.size(tokens[0])} tokens, so the law is over parameters,"
            " and E holds the term of tokens"
        ]
    elif levels["parameters"] == 1 < levels["tokens"]:
        term = "tokens"
        notes = [
            f"all runs have {formats.size(sizes[0])} parameters, so the law is over tokens,"
            " and E holds the term of parameters"
        ]
    elif min(levels.values()) > 1 and abs(np.corrcoef(np.log([sizes, tokens]))[0, 1]) > COLLINEAR:
        term = "parameters"
        notes = [
            "tokens follow from parameters in all runs, so the two terms cannot be told apart,"
            " and the law is over parameters at these tokens"
        ]
    needed = constants_of(term) + 1
    if len(used) < needed:
        raise UsageError(
            f"{formats.count(len(used), 'run')} can be used, and a law of {needed - 1} constants"
            f" needs {needed} or more{_reasons(points)}; add runs"
        )
    for name, number in levels.items():
        if term in (name, "both") and number < LEAST_LEVELS:
            raise UsageError(
                f"the runs have {number} different numbers of {name}, and their term needs"
                f" {LEAST_LEVELS}{_reasons(points)}; add runs"
            )
    return term, notes


def _reasons(points: Points) -> str:
    left = [f"{name} {reason}" for name, reason in points.left_out.items()]
    more = f", and {len(left) - 3} more" if len(left) > 3 else ""
    return f" (left out: {', '.join(left[:3])}{more})" if left else ""


def _levels(values: Iterable[float]) -> int:
    """Values that differ by more than NEAR."""
    count, last = 0, 0.0
    for value in sorted(values):
        if value > NEAR * last:
            count, last = count + 1, value
    return count


def _optimum(fitted: Fit, used: Sequence[Point], cost: float, **given: float) -> Optimum:
    """The optimum of `flops`, or of `tokens`."""

    def sizes(law: Law) -> tuple[Any, Any]:
        if "flops" in given:
            return law.optimum(given["flops"], cost)
        return law.size_for(given["tokens"]), given["tokens"] + 0 * law.alpha

    parameters = interval_of(fitted, lambda law: sizes(law)[0])
    tokens = interval_of(fitted, lambda law: sizes(law)[1])
    largest = [max(getattr(one, k) for one in used) for k in ("parameters", "tokens")]
    ((kind, value),) = given.items()
    return Optimum(
        f"{value:.3g} {'FLOPs' if kind == 'flops' else 'tokens'}",
        f"--max_{kind} {value:.3g}",
        interval_of(fitted, lambda law: cost * np.multiply(*sizes(law))),
        parameters,
        tokens,
        interval_of(fitted, lambda law: law.loss(*sizes(law))),
        max(parameters[0] / largest[0], tokens[0] / largest[1]),
        nearest_shape(parameters[0], used[0]),
    )


def nearest_shape(parameters: float, like: Point) -> Shape | None:
    """The shape with proportions of the presets that is nearest in size; None if none is near."""
    run, best = like.run, (FIT_OF_A_SHAPE, 0.0)
    found = None
    for dim in range(MULTIPLE, WIDEST + 1, MULTIPLE):
        for layers in range(-(-dim // ASPECTS[1]), dim // ASPECTS[0] + 1):
            sizes = (dim, layers, HEADS, KEY_HEADS, feed_forward_width(dim))
            shape = Shape(*sizes, run.vocab_size, run.max_seq_len, run.tie_word_embeddings)
            distance = abs(math.log(shape.parameters / parameters))
            if (distance, dim) < best:
                best, found = (distance, float(dim)), shape
    return found


def command_of(one: Optimum) -> str:
    """The flags of the proposed shape, with the budget; empty without a shape."""
    shape = one.shape
    if shape is None:
        return ""
    return (
        f"minimind train --dim {shape.dim} --n_layers {shape.n_layers} --n_heads {shape.n_heads}"
        f" --n_kv_heads {shape.n_kv_heads} --max_seq_len {shape.max_seq_len}"
        f" --vocab_size {shape.vocab_size}{'' if shape.is_tied else ' --no-tie_word_embeddings'}"
        f" {one.limit}"
    )
