"""`minimind scaling`: which law the runs determine, and the optimum of each budget.

The points are sizes, tokens and losses of finished runs; the output is text, JSON or a page.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from minimind.config.names import no_such_file
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
        if not disk.lexists(folder):
            raise UsageError(no_such_file(folder))
        if not disk.is_dir(folder):
            raise UsageError(f"{given} is not a folder; give out_dirs of runs, or a folder of them")
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
    elif run.own_loss:
        reason = f"trains with another loss ({run.own_loss})"
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
        return "is a mixture of experts, and the law is for dense models"
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
                f"loss {point.loss:.4f}; another run of this size and these tokens is better:"
                f" {better}"
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


@dataclass(frozen=True)
class Answer:
    """What is printed and drawn: `found` is the object of --json, from which all forms are made."""

    points: Points
    fit: Fit
    found: dict[str, Any]


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
            f"{runs} text more than once, up to {most.epochs:.1f} times ({most.name}); the law is"
            " for new text"
        )
    values: dict[str, Callable[[Law], Any]] = {name: attrgetter(name) for name in CONSTANTS}
    if term == "both":
        values["a"] = lambda law: law.beta / (law.alpha + law.beta)
        values["b"] = lambda law: law.alpha / (law.alpha + law.beta)
    constants = {name: interval_of(fitted, value_of) for name, value_of in values.items()}
    losses = fitted.law.loss(*np.array(sizes))
    found = {
        "law": FORMULAS[term],
        "terms": term,
        "level": LEVEL,
        "constants": {k: one for k, one in constants.items() if math.isfinite(one["value"])},
        "flops_per_parameter_and_token": cost,
        "notes": notes,
        "runs": [
            {"run": one.name, "parameters": one.parameters, "tokens": one.tokens, "loss": one.loss}
            | {"law": float(loss), "log_error": float(error)}
            for one, loss, error in zip(used, losses, fitted.residuals, strict=True)
        ],
        "left_out": points.left_out,
        "optima": [
            *(_optimum(fitted, used, cost, flops=one) for one in flops),
            *(_optimum(fitted, used, cost, tokens=one) for one in tokens),
        ],
    }
    return Answer(points, fitted, found)


def interval_of(fitted: Fit, value_of: Callable[[Law], Any]) -> dict[str, float]:
    """A figure of the law, and the ends of its interval."""
    return _interval(float(value_of(fitted.law)), *fitted.interval(value_of))


def _interval(value: float, low: float, high: float) -> dict[str, float]:
    return {"value": value, "low": low, "high": high}


def prediction_of(fitted: Fit, name: str, parameters: float, tokens: float) -> dict[str, Any]:
    """The loss of one run that is not in the fit; it is measured later."""
    sizes = {"run": name, "parameters": parameters, "tokens": tokens}
    loss = _interval(*fitted.prediction(parameters, tokens))
    return {**sizes, "loss": loss, "measured": None, "is_within": None}


def measured(prediction: Mapping[str, Any], loss: float) -> dict[str, Any]:
    """The prediction with the loss that the run reached."""
    is_within = prediction["loss"]["low"] <= loss <= prediction["loss"]["high"]
    return {**prediction, "measured": loss, "is_within": is_within}


def prediction_text(one: Mapping[str, Any]) -> str:
    """What was predicted, and what was measured."""
    size, tokens, loss = formats.size(one["parameters"]), formats.size(one["tokens"]), one["loss"]
    text = (
        f"prediction for {one['run']} ({size} parameters, {tokens} tokens) from the other runs:"
        f" loss {loss['value']:.4f}, {LEVEL:.0%} interval {loss['low']:.4f} to {loss['high']:.4f}"
    )
    if one["measured"] is None:
        return text
    place = "within" if one["is_within"] else "outside"
    error = 100 * (one["measured"] / loss["value"] - 1)
    return f"{text}\nmeasured: loss {one['measured']:.4f}, {place} the interval, {error:+.2f}%"


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


def _optimum(fitted: Fit, used: Sequence[Point], cost: float, **given: float) -> dict[str, Any]:
    """The optimum of `flops`, or of `tokens`."""
    ((kind, value),) = given.items()

    def sizes(law: Law) -> tuple[Any, Any]:
        if kind == "flops":
            return law.optimum(value, cost)
        return law.size_for(value), value + 0 * law.alpha

    figures = {
        "flops": interval_of(fitted, lambda law: cost * np.multiply(*sizes(law))),
        "parameters": interval_of(fitted, lambda law: sizes(law)[0]),
        "tokens": interval_of(fitted, lambda law: sizes(law)[1]),
        "loss": interval_of(fitted, lambda law: law.loss(*sizes(law))),
    }
    reach = [
        figures[name]["value"] / max(getattr(one, name) for one in used)
        for name in ("parameters", "tokens")
    ]
    shape, command = nearest_shape(figures["parameters"]["value"], used[0]), ""
    if shape:
        command = (
            f"minimind train --dim {shape.dim} --n_layers {shape.n_layers} --n_heads"
            f" {shape.n_heads} --n_kv_heads {shape.n_kv_heads} --max_seq_len {shape.max_seq_len}"
            f" --vocab_size {shape.vocab_size}"
            f"{'' if shape.tie_word_embeddings else ' --no-tie_word_embeddings'}"
            f" --max_{kind} {value:.3g}"
        )
    budget = f"{value:.3g} {'FLOPs' if kind == 'flops' else 'tokens'}"
    proposal = {"command": command, "command_parameters": shape and shape.parameters}
    return {"budget": budget, "times_beyond_the_runs": max(reach), **proposal, **figures}


def nearest_shape(parameters: float, like: Point) -> Shape | None:
    """The shape with proportions of the presets that is nearest in size; None if none is near."""
    run, best = like.run, (FIT_OF_A_SHAPE, 0.0)
    nearest = None
    for dim in range(MULTIPLE, WIDEST + 1, MULTIPLE):
        sizes = (HEADS, KEY_HEADS, feed_forward_width(dim))
        more = (*sizes, run.vocab_size, run.max_seq_len, run.tie_word_embeddings)
        # A shape lists the weights of every layer, and all layers have as many parameters.
        first, second = (Shape(dim, layers, *more).parameters for layers in (1, 2))
        for layers in range(-(-dim // ASPECTS[1]), dim // ASPECTS[0] + 1):
            count = first + (layers - 1) * (second - first)
            distance = abs(math.log(count / parameters))
            if (distance, dim) < best:
                best, nearest = (distance, float(dim)), Shape(dim, layers, *more)
    return nearest


def sections(found: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Titles, each with lines or with the rows of a table: for a terminal and for the page."""
    runs = [
        [
            one["run"],
            *(f"{one[name]:,.0f}" for name in ("parameters", "tokens")),
            *(f"{one[name]:.4f}" for name in ("loss", "law")),
            f"{100 * one['log_error']:+.2f}%",
        ]
        for one in found["runs"]
    ]
    yield "", [["run", "parameters", "tokens", "loss", "law", "error"], *runs]
    if left := found["left_out"]:
        yield "left out", [f"  {name}: {reason}" for name, reason in left.items()]
    yield "", [f"{found['law']}: {UNITS}"]
    constants = []
    for name, one in found["constants"].items():
        value, low, high = map(formats.figure, one.values())
        constants.append([LABELS.get(name, name), value, f"{low} to {high}"])
    yield "", [["constant", "value", f"{LEVEL:.0%} interval"], *constants]
    if found["notes"]:
        yield "", [f"note: {one}" for one in found["notes"]]
    if found["optima"]:
        head = ["budget", "parameters", "tokens", "tokens/parameter", "FLOPs", "loss", "reach"]
        cost = found["flops_per_parameter_and_token"]
        title = f"compute-optimal, where a run takes {cost:.3g} N D FLOPs"
        yield title, [head, *map(_optimum_cells, found["optima"])]
    for one in found["optima"]:
        if one["command"]:
            size = formats.size(one["command_parameters"])
            yield f"{one['budget']}, a shape of {size}", [one["command"]]
    if one := found.get("prediction"):
        yield "", prediction_text(one).split("\n")


def _optimum_cells(one: Mapping[str, Any]) -> list[str]:
    ratio, loss = one["tokens"]["value"] / one["parameters"]["value"], one["loss"]
    beyond, cells = one["times_beyond_the_runs"], [one["budget"]]
    for name in ("parameters", "tokens"):
        value, low, high = map(formats.size, one[name].values())
        cells.append(value if low == high else f"{value} ({low} to {high})")
    return [
        *cells,
        f"{ratio:.3g}",
        f"{one['flops']['value']:.3g}",
        f"{loss['value']:.4f} ({loss['low']:.4f} to {loss['high']:.4f})",
        f"{beyond:.3g}x the runs" if beyond > 1 else "within the runs",
    ]


def as_text(answer: Answer) -> str:
    """The answer for a terminal."""
    return "\n\n".join(
        (f"{title}:\n" if title else "")
        + (aligned(rows, "<>") if isinstance(rows[0], list) else "\n".join(rows))
        for title, rows in sections(answer.found)
    )


def render(answer: Answer) -> str:
    """The HTML of the page."""
    charts = [draw(answer)]
    used = formats.count(len(answer.points.used), "run")
    parts = ["<h1>Scaling law</h1>", f'<p class="lead">Fitted to {used}.</p>']
    parts.append(plots(charts, is_single=True))
    for title, rows in sections(answer.found):
        parts.append(f"<h2>{escape(title[0].upper() + title[1:])}</h2>" if title else "")
        if isinstance(rows[0], list):
            parts.append(html_table(rows[0], rows[1:], "ranks"))
        else:
            parts += [f"<p>{escape(line)}</p>" for line in rows]
    parts.append(f"<footer>Written {formats.timestamp(time.time())} by minimind scaling</footer>")
    return fill_page("Scaling law", "\n".join(parts), charts, is_linked=False)


def draw(answer: Answer) -> Chart:
    """The runs and the law over tokens, a curve for each size; of a law over sizes, over these."""
    used, term, one = answer.points.used, answer.fit.term, answer.found.get("prediction")
    name, other = ("parameters", "tokens") if term == "parameters" else ("tokens", "parameters")
    values = [getattr(point, name) for point in used] + ([one[name]] if one else [])
    x = np.geomspace(min(values) / MARGIN, max(values) * MARGIN, CURVE)
    others = sorted({getattr(point, other) for point in used})[: None if term == "both" else 1]
    some = np.linspace(0, len(others) - 1, min(len(others), MOST_CURVES))
    shown = [others[round(n)] for n in some]
    traces: list[Any] = []

    def add_curve(label: str, value: float, color: str, dash: str) -> None:
        sizes = {name: x, other: value}
        y = answer.fit.law.loss(sizes["parameters"], sizes["tokens"])
        line = {"color": color, "width": 1.5, "dash": dash}
        hidden = {"hoverinfo": "skip", "showlegend": False}
        traces.append(go.Scatter(x=x, y=y, name=f"law, {label}", mode="lines", line=line, **hidden))

    def add_dots(label: str, dots: list[tuple[str, float, float]], **look: Any) -> None:
        names, at, losses = zip(*dots, strict=True)
        texts = [escape(f"{who}: {y:.4f}") for who, y in zip(names, losses, strict=True)]
        look = {"mode": "markers", "text": texts, "hoverinfo": "text", **look}
        traces.append(go.Scatter(name=label, x=at, y=losses, **look))

    for n, value in enumerate(shown):
        tone, dash = run_style(n)
        label = f"{formats.size(value)} {other}" if term == "both" else "runs"
        add_curve(label, value, LIGHT[tone], dash)
        near = [
            (point.name, getattr(point, name), point.loss)
            for point in used
            if min(shown, key=lambda one: abs(math.log(one / getattr(point, other)))) == value
        ]
        add_dots(label, near, marker={"color": LIGHT[tone], "size": 9})
    if one:
        loss, ink = one["loss"], LIGHT["ink"]
        add_curve("prediction", one[other], ink, "dot")
        bar = {"type": "data", "symmetric": False, "array": [loss["high"] - loss["value"]]}
        bar |= {"arrayminus": [loss["value"] - loss["low"]], "color": ink}
        look = {"color": ink, "size": 11, "line": {"width": 2}}
        at = (f"{one['run']}, predicted", one[name], loss["value"])
        add_dots("predicted", [at], marker=look | {"symbol": "diamond-open"}, error_y=bar)
        if one["measured"] is not None:
            at = (f"{one['run']}, measured", one[name], one["measured"])
            add_dots("measured", [at], marker=look | {"symbol": "x-thin-open"})
    ticks = formats.log_ticks(x[0], x[-1])
    labels = {"tickvals": ticks, "ticktext": [*map(formats.size, ticks)], "automargin": True}
    layout = {
        "template": TEMPLATE,
        "hovermode": "closest",
        "xaxis": {"title": name, "type": "log", **labels},
        "yaxis": {"title": "loss"},
        "showlegend": len(shown) > 1 or one is not None,
    }
    unit = "nats per token; points are runs, curves the law"
    return Chart("loss", f"Loss over {name}", unit, go.Figure(traces, layout).to_dict())
