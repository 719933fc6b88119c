"""`minimind scaling run`: trains sizes x tokens, and predicts one run from the others.

The runs of SPEC.yaml are trials that are known before the first start; the predicted one is the
last.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from minimind.architecture.shape import flops_per_token, shape_of
from minimind.config.flags import FIRST_EVAL_ROWS, FLAGS
from minimind.config.origin import Origin, Rank
from minimind.config.run_config import RunConfig
from minimind.errors import DataError, NumericError, UsageError, fault_error
from minimind.report import formats
from minimind.runtime.checked_json import shown
from minimind.runtime.terminal import aligned
from minimind.sweep.run import Command, opened
from minimind.sweep.scaling import (
    MUST_MATCH,
    NEAR,
    Answer,
    Point,
    Points,
    answer,
    best_of_each_budget,
    collect,
    measured,
    prediction_of,
    prediction_text,
    require_alike,
    term_of,
)
from minimind.sweep.sweep_file import Checked, flag_faults, read_fields, rehearsed, settings_of
from minimind.sweep.trial import PREFIX, Result, Trial, best_of
from minimind.train.inputs import require_inputs
from minimind.train.start import Plan, rehearse

LADDER = Command(
    "minimind scaling run",
    1,
    "sizes, tokens, tokens_per_param and predict may change",
    "change sizes, or change flags and give another --out_dir",
)
METRIC = "val_loss"
LENGTHS = ("max_tokens", "tokens_per_param", "max_steps", "epochs", "max_flops")
BY_TOKENS = "contradicts tokens or tokens_per_param, which end every run; remove it"


class Predict(Checked):
    """The run that is predicted."""

    size: Any
    tokens: str | None = None
    tokens_per_param: str | None = None


class Spec(Checked):
    """The content of SPEC.yaml."""

    flags: dict[str, Any]
    sizes: list[Any] = Field(min_length=1)
    tokens: list[str] = Field(default=[])
    tokens_per_param: list[str] = Field(default=[])
    predict: Predict | None = None


class Rung(NamedTuple):
    """A run of the ladder."""

    parameters: dict[str, str]  # its size and tokens in words
    own: dict[str, Any]  # flags of its size and tokens
    flags: dict[str, Any]

    @property
    def name(self) -> str:
        return ", ".join(self.parameters.values())


def read_spec(path: str) -> Spec:
    """Read SPEC.yaml; raise a UsageError that lists the faults of its names and values."""
    spec = read_fields(path, "scaling spec", Spec, Predict)
    if faults := [*_faults(spec, path)]:
        raise fault_error(faults)
    return spec


def rungs_of(spec: Spec) -> list[Rung]:
    """Every size with every number of tokens, then the predicted run."""
    runs = [*product(map(_size, spec.sizes), _budgets(spec.tokens, spec.tokens_per_param))]
    if one := spec.predict:
        given = ([value] if value else [] for value in (one.tokens, one.tokens_per_param))
        runs += product([_size(one.size)], _budgets(*given))
    return [
        Rung({"size": size, "tokens": budget}, length, {**spec.flags, **flags, **length})
        for (size, flags), (budget, length) in runs
    ]


Choice = tuple[str, dict[str, Any]]  # name and flags


def _size(given: Any) -> Choice:
    """`26m`, or `dim 128 n_layers 4`."""
    if isinstance(given, str):
        return given, {"model": given}
    return " ".join(f"{name} {value}" for name, value in given.items()), given


def _budgets(tokens: Sequence[str], ratios: Sequence[str]) -> list[Choice]:
    """`2e8`, or `20 per parameter`."""
    named: list[Choice] = [(one, {"max_tokens": one}) for one in tokens]
    return named + [(f"{one} per parameter", {"tokens_per_param": one}) for one in ratios]


def _faults(spec: Spec, path: str) -> Iterator[str]:
    """Yield one sentence per fault, but of the values of flags."""
    yield from _flag_faults(spec.flags, "flags", path)
    sizes = [("sizes", size) for size in spec.sizes]
    if one := spec.predict:
        sizes.append(("predict.size", one.size))
        if (one.tokens is None) == (one.tokens_per_param is None):
            yield f"predict in {path} has to have tokens or tokens_per_param; give one of them"
    for place, size in sizes:
        if size and isinstance(size, dict):
            yield from _flag_faults(size, place, path)
        elif not (size and isinstance(size, str)):
            yield (
                f"{place} of {path} has {shown(size)}, which is neither a preset nor flags; give a"
                " preset such as 26m, or flags such as {dim: 128, n_layers: 4}"
            )
    if not (spec.tokens or spec.tokens_per_param):
        yield f"{path}: has no tokens and no tokens_per_param; add a list of one of them"


def _flag_faults(flags: Mapping[str, Any], place: str, path: str) -> Iterator[str]:
    yield from flag_faults(flags, place, path)
    for name in LENGTHS:
        if name in flags:
            yield f"{place}.{name} in {path} {BY_TOKENS}"


def plan(
    spec: Spec, rungs: Sequence[Rung], path: str, flops: Sequence[float], tokens: Sequence[float]
) -> list[Point]:
    """The runs as points without a loss, as far as they are known before their start.

    Raise UsageError for what cannot be trained, compared or fitted; `flops` and `tokens` are the
    budgets that the law is to answer.
    """
    points: list[Point] = []
    for rung in rungs:
        try:
            run = settings_of(rung.flags, METRIC, path)
            _require_suited(run, rung.own)
            points.append(_planned(rung.name, run, rehearsed(run, METRIC)))
        except (UsageError, DataError) as error:
            raise type(error)(f"{path}: {rung.name}: {error}") from error
    for n, one in enumerate(points):
        require_alike(points[0], one)
        for other in points[:n]:
            if (one.run.seed, one.tokens, one.settings) == (
                other.run.seed,
                other.tokens,
                other.settings,
            ):
                raise UsageError(
                    f"{path}: {other.name} and {one.name} are one run of {one.tokens:,.0f} tokens;"
                    " remove one"
                )
    planned = points[:-1] if spec.predict else points
    used = best_of_each_budget(planned, {})  # the law takes the better of equal budgets
    names = {one.name for one in used}
    reason = "has the parameters and tokens of another run, and only the better one counts"
    fitted = Points(used, {one.name: reason for one in planned if one.name not in names}, [])
    term_of(fitted, flops, tokens)
    if spec.predict:
        _require_predictable(points[-1], fitted, path)
    return points


def _require_suited(run: RunConfig, own: Mapping[str, Any]) -> None:
    """Raise UsageError for a run that the law does not describe, or of a length of its own."""
    for name in LENGTHS:  # a --config file may set them
        if getattr(run, name) is not None and name not in own:
            raise UsageError(f"{name} = {getattr(run, name)} ({run.sources[name]}) {BY_TOKENS}")
    for name, is_other in (
        ("init_from", run.init_from is not None),
        ("teacher", run.teacher is not None),
        ("loss", run.own_loss),
        ("use_moe", run.use_moe),
        ("model", run.hugging_face is not None),
    ):
        if is_other:
            raise UsageError(
                f"{name} = {getattr(run, name)} ({run.sources[name]}), but the law is for the"
                " built-in dense decoder, trained from the start by the cross-entropy; remove it"
            )


def _require_predictable(one: Point, fitted: Points, path: str) -> None:
    """Raise UsageError if a law of one term does not hold for the numbers of the predicted run."""
    term, notes = term_of(fitted, (), ())
    if term == "both":
        return
    x, y = ("parameters", "tokens") if term == "parameters" else ("tokens", "parameters")
    at, of = (np.log([getattr(point, name) for point in fitted.used]) for name in (x, y))
    expected = float(np.exp(np.polyval(np.polyfit(at, of, 1), np.log(getattr(one, x)))))
    given = getattr(one, y)
    if not 1 / NEAR <= given / expected <= NEAR:
        raise UsageError(
            f"predict in {path} has {formats.size(given)} {y}, but {notes[0]}; predict a run of"
            f" about {formats.size(expected)} {y}, or add runs with other numbers"
        )


def _planned(name: str, run: RunConfig, plan: Plan) -> Point:
    """The point of a run that is not trained: tokens are those of its whole steps."""
    known = plan.run
    shape = shape_of(known)
    settings = {name: getattr(known, name) for name in FLAGS if name not in ("seed", *LENGTHS)}
    return Point(
        name,
        run,
        shape.parameters,
        plan.tokens or math.nan,
        math.nan,
        flops_per_token(shape),
        math.nan,
        {field: getattr(known, field) for field in MUST_MATCH},
        str(settings),
    )


def plan_text(
    spec: Spec, rungs: Sequence[Rung], points: Sequence[Point], folders: Sequence[str]
) -> str:
    """The runs for a terminal, a line each, and their sum."""
    flops = [one.tokens * (one.flops_per_token or math.nan) for one in points]
    rows = []
    for folder, rung, one, cost in zip(folders, rungs, points, flops, strict=True):
        remark = "predicted" if spec.predict and one is points[-1] else ""
        sizes = f"{one.parameters:,.0f}", f"{one.tokens:,.0f}", f"{cost:.3g}"
        rows.append([folder, *rung.parameters.values(), *sizes, remark])
    head = ["trial", "size", "tokens", "parameters", "tokens", "FLOPs", ""]
    total = f"{formats.count(len(points), 'run')}, {sum(flops):.3g} FLOPs"
    return f"{aligned([head, *rows], '<<>>>><')}\n\n{total}"


def _folders(rungs: Sequence[Rung], results: Mapping[str, Result]) -> list[str]:
    """Folders of the runs: those that runs of an earlier spec have, and new ones after all."""
    known = {frozenset(one.parameters.items()): folder for folder, one in results.items()}
    new = count(1 + max((int(folder.removeprefix(PREFIX)) for folder in results), default=-1))
    keys = (frozenset(rung.parameters.items()) for rung in rungs)
    return [known.get(key) or f"{PREFIX}{next(new):04d}" for key in keys]


def run_ladder(
    path: str,
    place: Path | None,
    parallel: int | None,
    flops: Sequence[float],
    tokens: Sequence[float],
) -> Answer | int:
    """Run or continue the ladder of SPEC.yaml `path` in the folder `place`.

    Return the answer, or the status if not all runs have ended. Without `place` only the plan is
    printed.
    """
    spec = read_spec(path)
    rungs = rungs_of(spec)
    points = plan(spec, rungs, path, flops, tokens)
    runs = [one.run for one in points]
    if place is None:
        for run in runs:
            require_inputs(run)
        print(plan_text(spec, rungs, points, _folders(rungs, {})))
        return 0
    with opened(LADDER, METRIC, {"flags": spec.flags}, path, place, runs, parallel) as runner:
        folders = _folders(rungs, runner.results)
        print(plan_text(spec, rungs, points, folders), flush=True)
        ladder = [_trial(*each) for each in zip(folders, rungs, runs, strict=True)]
        predicted = [ladder.pop()] if spec.predict else []
        runner.resume(folders.__contains__)
        if status := runner.run(sorted(ladder, key=lambda trial: trial.folder)):
            return status
        fitted = [runner.results[trial.folder] for trial in ladder]
        if not best_of(fitted):
            return runner.without_result(fitted)
        done = _collected(place, fitted)
        result = answer(done, flops, tokens)
        if not predicted:
            return result
        vocabulary = done.used[0].run.vocab_size  # of raw text, which is known now
        origin = Origin("the other runs", Rank.DATA)
        last = runs[-1].with_values(origin, vocab_size=vocabulary)
        one = _planned(points[-1].name, last, rehearse(last))
        _require_predictable(one, done, path)
        prediction = prediction_of(result.fit, one.name, one.parameters, one.tokens)
        print(f"\n{prediction_text(prediction)}\n", flush=True)
        if status := runner.run(predicted):
            return status
        end = runner.results[folders[-1]]
        ended = _collected(place, [end])
        if not ended.used:
            ((name, reason),) = ended.left_out.items()
            print(
                f"{LADDER.name}: no loss to compare: {name} {reason}; change predict, or change"
                " flags and give another --out_dir",
                file=sys.stderr,
            )
            return end.exit_status or NumericError.status
        require_alike(done.used[0], ended.used[0])
        result.found["prediction"] = measured(prediction, ended.used[0].loss)
        return result


def _trial(folder: str, rung: Rung, run: RunConfig) -> Trial:
    rows = {"eval_rows": FIRST_EVAL_ROWS} if run.eval_rows is None else {}
    return Trial(folder, rung.parameters, rung.flags | rows)


def _collected(place: Path, results: Sequence[Result]) -> Points:
    """The points of these trials that are done, with the ends of the others as reasons."""
    points = collect([place / one.folder for one in results if one.state == "done"])
    ended = {one.folder: one.reason for one in results if one.state != "done"}
    return Points(points.used, points.left_out | ended, points.warnings)
