"""`minimind scaling`: which law the runs determine, and the optimum of each budget.

The points are sizes, tokens and losses of finished runs; the output is text, JSON or a page.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from minimind.architecture.shape import Shape, flops_per_token, shape_of
from minimind.checkpoint.directory import published_checkpoints, read_manifest
from minimind.config.flags import FLAGS
from minimind.config.parse import convert
from minimind.config.run_config import RunConfig
from minimind.config.yaml_files import load_yaml_texts
from minimind.errors import CheckpointError, UsageError
from minimind.model.sizes import feed_forward_width
from minimind.report import formats
from minimind.report.charts import TEMPLATE, Chart, run_style
from minimind.report.formats import LIGHT
from minimind.report.history import Run, number, read_configuration, read_runs
from minimind.report.page import fill_page, html_table, plots
from minimind.runtime import disk
from minimind.runtime.terminal import aligned
from minimind.sweep.law import LEVEL, Fit, Law, Term, constants_of, fit

RECORD = "metrics.jsonl"
# Settings by which losses compare, and sizes.
MUST_MATCH = (
    *("max_seq_len", "vocab_size", "val_fraction", "eval_rows", "doc_mask", "tie_word_embeddings"),
    *("val_path", "text_field"),
)
# Flags by which the settings of two runs do not differ.
IGNORED_FLAGS = ("out_dir", "cache_dir", "deepspeed_config", "seed")
NEAR = 1.02  # ratio of tokens: steps are whole, so runs of one budget differ a little


@dataclass(frozen=True)
class Point:
    """A finished run."""

    name: str
    run: RunConfig
    parameters: float  # all; a tied embedding counts once
    tokens: float  # trained on
    loss: float  # last validation, nats per token
    flops_per_token: float | None  # None for a model of transformers
    epochs: float
    identity: Mapping[str, Any]
    settings: str  # everything but seed and places


@dataclass(frozen=True)
class Points:
    """What the runs give: points, and the reason by name for each run that is left out."""

    used: list[Point]
    left_out: dict[str, str]
    warnings: list[str]  # damage of their records


def collect(places: Sequence[Path]) -> Points:
    """Read the runs in `places`, each an out_dir or a folder of them.

    Raise UsageError for a place without runs, a run given twice, and runs of different text.
    """
    used, left_out, warnings = [], {}, []
    for run in read_runs(_run_dirs(places)):
        warnings += run.warnings
        point = _point(run)
        if isinstance(point, str):
            left_out[run.name] = point
        else:
            used.append(point)
    for one in used[1:]:
        require_alike(used[0], one)
    kept = best_of_each_budget(used, left_out)
    return Points(sorted(kept, key=lambda one: (one.parameters, one.tokens)), left_out, warnings)


def _run_dirs(places: Iterable[Path]) -> list[Path]:
    seen: dict[Path, Path] = {}
    for given in places:
        folder = given.parent if given.name == RECORD else given
        if not disk.is_dir(folder):
            raise UsageError(f"{given} is no folder; give out_dirs of runs, or a folder of them")
        own = disk.is_file(folder / RECORD)
        inside = (
            [folder] if own else sorted(one.parent for one in disk.matching(folder, f"*/{RECORD}"))
        )
        if not inside:
            raise UsageError(f"{given} holds no run; give out_dirs, or a folder of them")
        for run_dir in inside:
            if (known := disk.resolve(run_dir)) in seen:
                raise UsageError(f"the run {run_dir} is given twice; name each run once")
            seen[known] = run_dir
    return [*seen.values()]


def _point(run: Run) -> Point | str:
    """The point of a run, or the reason why it has none."""
    kind, sentence = (run.outcomes(time.time()) or [("", "nothing is recorded")])[-1]
    end = (run.starts[-1].end if run.starts else None) or {}
    evals, steps = run.events("eval"), number(end.get("step"))
    config = run.run_dir / "config.yaml"
    reason = ""
    if kind != "done":
        reason = f"not finished: {sentence}"
    elif not evals:
        reason = "has no validation"
    elif (step := number(evals[-1].get("step"))) != steps:
        reason = f"its last validation is at step {step:,.0f} of {steps:,.0f}"
    elif not number(evals[-1].get("val_loss")) > 0:
        reason = "its last validation has no finite loss"
    elif not number(run.fact("parameters")) > 0:
        reason = "its number of parameters is not recorded"
    elif run.fact("init_from") is not None:
        reason = "begins with trained weights (--init_from)"
    elif not disk.is_file(config):
        reason = "has no config.yaml"
    elif fault := run.config_fault:
        reason = f"its config.yaml {fault}"
    return reason or _of_finished(run, evals[-1])


def _of_finished(run: Run, evaluation: Mapping[str, Any]) -> Point | str:
    path = run.run_dir / "config.yaml"
    texts = load_yaml_texts(str(path), "run")
    flags = {name: convert(name, text, str(path)) for name, text in texts.items() if name in FLAGS}
    config = RunConfig(**flags)
    if config.use_moe:
        return "is a mixture of experts, and the law is of dense models"
    step = number(evaluation["step"])
    tokens = float(run.tokens_at(step))  # pyright: ignore[reportArgumentType] (a number)
    if not tokens > 0:
        return "its number of tokens is not recorded"
    parameters = number(run.fact("parameters"))
    shape = shape_of(config)
    is_ours = config.hugging_face is None and shape.parameters == parameters
    epoch = number(run.fact("rows_per_epoch")) * config.max_seq_len
    deepspeed = [*read_configuration(run.run_dir).deepspeed.items()]
    return Point(
        run.name,
        config,
        parameters,
        tokens,
        number(evaluation["val_loss"]),
        float(flops_per_token(shape)) if is_ours else None,
        tokens / epoch if epoch > 0 else math.nan,
        {**_hashes(run.run_dir), **{name: getattr(config, name) for name in MUST_MATCH}},
        str([*((k, v) for k, v in flags.items() if k not in IGNORED_FLAGS), deepspeed]),
    )


def _hashes(run_dir: Path) -> dict[str, str]:
    """Identity of text and tokenizer in the newest checkpoint; empty without a readable one."""
    try:
        identity = read_manifest(published_checkpoints(run_dir / "checkpoints")[0])["identity"]
    except (CheckpointError, IndexError):
        return {}
    return {name: str(identity[name]["sha256"])[:12] for name in ("data", "tokenizer")}


def require_alike(one: Point, other: Point) -> None:
    """Raise UsageError for runs whose losses do not compare."""
    a, b = ({**point.identity} for point in (one, other))
    if not ("data" in a and "data" in b):  # no checkpoint tells
        a["data_path"], b["data_path"] = one.run.data_path, other.run.data_path
    for name in a:
        if name in b and a[name] != b[name]:
            raise UsageError(
                f"{name} is {a[name]} in {one.name} and {b[name]} in {other.name}, so their losses"
                " do not compare; leave one of them out"
            )


def best_of_each_budget(points: Sequence[Point], left_out: dict[str, str]) -> list[Point]:
    """The settings with the least mean loss over seeds, for each size and number of tokens.

    The law is of well-tuned runs: a sweep over learning rates has many others.
    """
    kept: list[Point] = []
    for group in _budgets(points):
        settings: dict[str, list[Point]] = {}
        seeds: dict[str, Point] = {}
        for point in group:
            key, whole = point.settings, f"{point.run.seed} {point.settings}"
            if whole in seeds:
                left_out[point.name] = f"has the flags of {seeds[whole].name}"
                continue
            seeds[whole] = point
            settings.setdefault(key, []).append(point)
        best = min(settings.values(), key=lambda some: sum(p.loss for p in some) / len(some))
        for point in (point for some in settings.values() if some is not best for point in some):
            better = f"{best[0].name}, {best[0].loss:.4f}"
            left_out[point.name] = (
                f"loss {point.loss:.4f}; of its size and tokens the best is {better}"
            )
        kept += best
    return kept


def _budgets(points: Iterable[Point]) -> list[list[Point]]:
    groups: list[list[Point]] = []
    for point in sorted(points, key=lambda point: (point.parameters, point.tokens)):
        first = groups[-1][0] if groups else None
        if first and point.parameters == first.parameters and point.tokens <= NEAR * first.tokens:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


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
class Prediction:
    """The loss of a run that is not in the fit, by the law of the others."""

    name: str
    parameters: float
    tokens: float
    loss: Interval  # of one run
    measured: float | None = None

    def as_text(self) -> str:
        """What was predicted, and what was measured."""
        size, tokens = formats.size(self.parameters), formats.size(self.tokens)
        value, low, high = self.loss
        text = (
            f"prediction for {self.name} ({size} parameters, {tokens} tokens) from the other runs:"
            f" loss {value:.4f}, {LEVEL:.0%} interval {low:.4f} to {high:.4f}"
        )
        if self.measured is None:
            return text
        place = "within" if self.is_within else "outside"
        error = 100 * (self.measured / value - 1)
        return f"{text}\nmeasured: loss {self.measured:.4f}, {place} the interval, {error:+.2f}%"

    @property
    def is_within(self) -> bool | None:
        """Whether the interval has the measured loss; None before it is measured."""
        _, low, high = self.loss
        return None if self.measured is None else low <= self.measured <= high


@dataclass(frozen=True)
class Answer:
    """Everything that is printed and drawn."""

    points: Points
    fit: Fit
    cost: float  # FLOPs per parameter and token
    notes: list[str]
    optima: list[Optimum]
    prediction: Prediction | None = None

    def constants(self) -> dict[str, Interval]:
        """The fitted constants, and the exponents of the optimum."""
        values: dict[str, Callable[[Law], Any]] = {k: attrgetter(k) for k in CONSTANTS}
        if self.fit.term == "both":
            values["a"] = lambda law: law.beta / (law.alpha + law.beta)
            values["b"] = lambda law: law.alpha / (law.alpha + law.beta)
        constants = {name: interval_of(self.fit, value_of) for name, value_of in values.items()}
        return {name: one for name, one in constants.items() if math.isfinite(one[0])}

    def fitted(self) -> np.ndarray:
        """The law's loss of each run."""
        used = self.points.used
        sizes = np.array([(point.parameters, point.tokens) for point in used]).T
        return self.fit.law.loss(*sizes)


def interval_of(fitted: Fit, value_of: Callable[[Law], Any]) -> Interval:
    """A figure of the law, and the ends of its interval."""
    return (float(value_of(fitted.law)), *fitted.interval(value_of))


def answer(points: Points, flops: Sequence[float], tokens: Sequence[float]) -> Answer:
    """Fit the law that the runs determine, and its optima; raise UsageError if there is none."""
    used = points.used
    term, notes = term_of(points, flops, tokens)
    sizes = [one.parameters for one in used], [one.tokens for one in used]
    fitted = fit(*sizes, [one.loss for one in used], term)
    costs = [one.flops_per_token / one.parameters for one in used if one.flops_per_token]
    is_known = len(costs) == len(used)
    cost = float(np.exp(np.mean(np.log(costs)))) if is_known else COST
    notes += points.warnings
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


def term_of(
    points: Points, flops: Sequence[float], tokens_to_find: Sequence[float]
) -> tuple[Term, list[str]]:
    """The terms that the runs determine, and a sentence where it is only one.

    Raise UsageError for too few runs, and for budgets that need both terms.
    """
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
    for name, count in levels.items():
        if term in (name, "both") and count < LEAST_LEVELS:
            raise UsageError(
                f"the runs have {count} different numbers of {name}, and their term needs"
                f" {LEAST_LEVELS}{_reasons(points)}; add runs"
            )
    if (flops or tokens_to_find) and term != "both":
        given = "--flops" if flops else "--tokens"
        raise UsageError(f"{given} needs a law over parameters and tokens, but {notes[0]}")
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
    nearest = None
    for dim in range(MULTIPLE, WIDEST + 1, MULTIPLE):
        for layers in range(-(-dim // ASPECTS[1]), dim // ASPECTS[0] + 1):
            sizes = (dim, layers, HEADS, KEY_HEADS, feed_forward_width(dim))
            shape = Shape(*sizes, run.vocab_size, run.max_seq_len, run.tie_word_embeddings)
            distance = abs(math.log(shape.parameters / parameters))
            if (distance, dim) < best:
                best, nearest = (distance, float(dim)), shape
    return nearest


def command_of(optimum: Optimum) -> str:
    """The flags of the proposed shape, with the budget; empty without a shape."""
    shape = optimum.shape
    if shape is None:
        return ""
    return (
        f"minimind train --dim {shape.dim} --n_layers {shape.n_layers} --n_heads {shape.n_heads}"
        f" --n_kv_heads {shape.n_kv_heads} --max_seq_len {shape.max_seq_len}"
        f" --vocab_size {shape.vocab_size}"
        f"{'' if shape.tie_word_embeddings else ' --no-tie_word_embeddings'}"
        f" {optimum.limit}"
    )


FORMULAS = {
    "both": "L(N, D) = E + A / N^alpha + B / D^beta",
    "parameters": "L(N) = E + A / N^alpha",
    "tokens": "L(D) = E + B / D^beta",
}
UNITS = "L nats per token, N parameters (all of them; a tied embedding counts once), D tokens"
LABELS = {"a": "a of N ~ C^a", "b": "b of D ~ C^b"}  # sizes of the optimum of C FLOPs
CURVE = 80  # points of a curve
MARGIN = 1.5  # factor by which curves go beyond the runs
MOST_CURVES = 8


def constants_cells(answer: Answer) -> list[list[str]]:
    """Names of the columns, and a row per constant."""
    rows = [
        [
            LABELS.get(name, name),
            formats.figure(value),
            f"{formats.figure(low)} to {formats.figure(high)}",
        ]
        for name, (value, low, high) in answer.constants().items()
    ]
    return [["constant", "value", f"{LEVEL:.0%} interval"], *rows]


def optima_cells(answer: Answer) -> list[list[str]]:
    """Names of the columns, and a row per budget."""
    head = ["budget", "parameters", "tokens", "tokens/parameter", "FLOPs", "loss", "reach"]
    rows = [
        [
            optimum.budget,
            *(_ranged(value) for value in (optimum.parameters, optimum.tokens)),
            f"{optimum.tokens[0] / optimum.parameters[0]:.3g}",
            f"{optimum.flops[0]:.3g}",
            f"{optimum.loss[0]:.4f} ({optimum.loss[1]:.4f} to {optimum.loss[2]:.4f})",
            f"{optimum.beyond:.3g}x the runs" if optimum.beyond > 1 else "within the runs",
        ]
        for optimum in answer.optima
    ]
    return [head, *rows]


def runs_cells(answer: Answer) -> list[list[str]]:
    """Names of the columns, and a row per run."""
    rows = [
        [
            one.name,
            f"{one.parameters:,.0f}",
            f"{one.tokens:,.0f}",
            *(f"{value:.4f}" for value in (one.loss, fitted)),
            f"{100 * error:+.2f}%",
        ]
        for one, fitted, error in zip(
            answer.points.used, answer.fitted(), answer.fit.residuals, strict=True
        )
    ]
    return [["run", "parameters", "tokens", "loss", "law", "error"], *rows]


def _ranged(interval: Interval) -> str:
    value, low, high = map(formats.size, interval)
    return value if low == high else f"{value} ({low} to {high})"


def as_text(answer: Answer) -> str:
    """The answer for a terminal."""
    parts = [aligned(runs_cells(answer), "<>")]
    if left := [f"  {name}: {reason}" for name, reason in answer.points.left_out.items()]:
        parts.append("\n".join(["left out:", *left]))
    parts.append(f"{FORMULAS[answer.fit.term]}: {UNITS}")
    parts.append(aligned(constants_cells(answer), "<>"))
    if answer.notes:
        parts.append("\n".join(f"note: {one}" for one in answer.notes))
    if answer.optima:
        parts.append(f"{_optima_title(answer)}\n{aligned(optima_cells(answer), '<>')}")
        parts += filter(None, map(_proposal, answer.optima))
    if answer.prediction:
        parts.append(answer.prediction.as_text())
    return "\n\n".join(parts)


def _optima_title(answer: Answer) -> str:
    return f"compute-optimal, where a run takes {answer.cost:.3g} N D FLOPs:"


def _proposal(optimum: Optimum) -> str:
    if optimum.shape is None:
        return ""
    size = formats.size(optimum.shape.parameters)
    return f"{optimum.budget}, a shape of {size}:\n{command_of(optimum)}"


def as_object(answer: Answer) -> dict[str, Any]:
    """The answer for --json."""
    errors = answer.fit.residuals
    return {
        "law": FORMULAS[answer.fit.term],
        "terms": answer.fit.term,
        "level": LEVEL,
        "constants": {k: _listed(v) for k, v in answer.constants().items()},
        "flops_per_parameter_and_token": answer.cost,
        "notes": answer.notes,
        "runs": [
            {"run": one.name, "parameters": one.parameters, "tokens": one.tokens, "loss": one.loss}
            | {"law": float(loss), "log_error": float(error)}
            for one, loss, error in zip(answer.points.used, answer.fitted(), errors, strict=True)
        ],
        "left_out": answer.points.left_out,
        "optima": [
            {"budget": one.budget, "times_beyond_the_runs": one.beyond, "command": command_of(one)}
            | {k: _listed(getattr(one, k)) for k in ("flops", "parameters", "tokens", "loss")}
            for one in answer.optima
        ],
        **_predicted(answer.prediction),
    }


def _predicted(one: Prediction | None) -> dict[str, Any]:
    if one is None:
        return {}
    values = {"run": one.name, "parameters": one.parameters, "tokens": one.tokens}
    values |= {"loss": _listed(one.loss), "measured": one.measured, "is_within": one.is_within}
    return {"prediction": values}


def _listed(interval: Interval) -> dict[str, float]:
    return dict(zip(("value", "low", "high"), interval, strict=True))


def render(answer: Answer) -> str:
    """The HTML of the page."""
    charts = [draw(answer)]
    used = formats.count(len(answer.points.used), "run")
    parts = ["<h1>Scaling law</h1>", f'<p class="lead">{escape(FORMULAS[answer.fit.term])}</p>']
    parts.append(f'<p class="quiet">Fitted to {used}; {escape(UNITS)}.</p>')
    parts += [f"<p>Note: {escape(one)}.</p>" for one in answer.notes]
    parts.append(_table(constants_cells(answer)))
    if answer.optima:
        title = _optima_title(answer).rstrip(":")
        parts.append(f"<h2>Budgets</h2><p>{title[0].upper()}{title[1:]}.</p>")
        parts.append(_table(optima_cells(answer)))
        for one in filter(command_of, answer.optima):
            label, code = escape(one.budget), escape(command_of(one))
            parts.append(f'<p class="pairs"><b>{label}</b> <code>{code}</code></p>')
    if answer.prediction:
        lines = "".join(f"<p>{escape(one)}.</p>" for one in answer.prediction.as_text().split("\n"))
        parts.append(f"<h2>Prediction</h2>{lines}")
    parts += ["<h2>Plot</h2>", plots(charts, is_single=True)]
    parts.append(f"<h2>Runs</h2>{_table(runs_cells(answer))}")
    if answer.points.left_out:
        rows = [*answer.points.left_out.items()]
        parts.append(f"<h2>Left out</h2>{html_table(('run', 'reason'), rows, 'final')}")
    parts.append(f"<footer>Written {formats.timestamp(time.time())} by minimind scaling</footer>")
    return fill_page("Scaling law", "\n".join(parts), charts, is_linked=False)


def _table(cells: list[list[str]]) -> str:
    head, *rows = cells
    return html_table(head, rows, "ranks")


def draw(answer: Answer) -> Chart:
    """The runs and the law over tokens, a curve for each size; of a law over sizes, over these."""
    used, term = answer.points.used, answer.fit.term
    name, other = ("parameters", "tokens") if term == "parameters" else ("tokens", "parameters")
    one = answer.prediction
    drawn = [*used, one] if one else used
    values = np.array([getattr(point, name) for point in drawn])
    low, high = float(values.min() / MARGIN), float(values.max() * MARGIN)
    x = np.geomspace(low, high, CURVE)
    others = sorted({getattr(point, other) for point in used})
    if term != "both":
        others = others[:1]
    shown = [
        others[round(n)] for n in np.linspace(0, len(others) - 1, min(len(others), MOST_CURVES))
    ]
    traces: list[Any] = []
    for n, value in enumerate(shown):
        tone, dash = run_style(n)
        near = [point for point in used if _nearest(shown, getattr(point, other)) == value]
        label = f"{formats.size(value)} {other}" if term == "both" else "runs"
        sizes = {name: x, other: value}
        y = answer.fit.law.loss(sizes["parameters"], sizes["tokens"])
        line = {"color": LIGHT[tone], "width": 1.5, "dash": dash}
        curve = {"mode": "lines", "line": line, "hoverinfo": "skip", "showlegend": False}
        traces.append(go.Scatter(x=x, y=y, name=f"law, {label}", **curve))
        texts = [escape(f"{point.name}: {point.loss:.4f}") for point in near]
        marker = {"color": LIGHT[tone], "size": 9}
        dots = {"mode": "markers", "marker": marker, "text": texts, "hoverinfo": "text"}
        xy = {"x": [getattr(point, name) for point in near], "y": [point.loss for point in near]}
        traces.append(go.Scatter(name=label, **xy, **dots))
    if one:
        loss, bottom, top = one.loss
        sizes = {name: x, other: getattr(one, other)}
        y = answer.fit.law.loss(sizes["parameters"], sizes["tokens"])
        line = {"color": LIGHT["ink"], "width": 1.5, "dash": "dot"}
        curve = {"mode": "lines", "line": line, "hoverinfo": "skip", "showlegend": False}
        traces.append(go.Scatter(x=x, y=y, name="law, prediction", **curve))
        bar = {"type": "data", "symmetric": False, "array": [top - loss]}
        bar |= {"arrayminus": [loss - bottom], "color": LIGHT["ink"]}
        for label, value, symbol in (
            ("predicted", loss, "diamond-open"),
            ("measured", one.measured, "x-thin-open"),
        ):
            if value is None:
                continue
            marker = {"color": LIGHT["ink"], "size": 11, "symbol": symbol, "line": {"width": 2}}
            text = escape(f"{one.name}, {label}: {value:.4f}")
            dots = {"mode": "markers", "marker": marker, "text": [text], "hoverinfo": "text"}
            error = {"error_y": bar} if label == "predicted" else {}
            traces.append(
                go.Scatter(name=label, x=[getattr(one, name)], y=[value], **dots, **error)
            )
    ticks = formats.log_ticks(low, high)
    ticks = [tick for tick in ticks if low <= tick <= high] or ticks
    layout = {
        "template": TEMPLATE,
        "hovermode": "closest",
        "xaxis": {
            **{"title": name, "type": "log", "range": [math.log10(low), math.log10(high)]},
            **{"tickvals": ticks, "ticktext": [formats.size(tick) for tick in ticks]},
        },
        "yaxis": {"title": "loss"},
        "showlegend": len(shown) > 1 or one is not None,
    }
    unit = "nats per token; points are runs, curves the law"
    return Chart("loss", f"Loss over {name}", unit, go.Figure(traces, layout))


def _nearest(values: Sequence[float], value: float) -> float:
    return min(values, key=lambda candidate: abs(np.log(candidate / value)))
