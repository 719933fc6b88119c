"""SWEEP.yaml: fixed flags, dimensions and the length of a sweep, checked by the flags' own parser.

Every scalar is kept as text, as in `--config` files, and converted by the flag it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from minimind.config.flags import AUTO, FLAGS
from minimind.config.names import suggest
from minimind.config.parse import (
    build_config,
    convert,
    in_template,
    stands_for_auto,
    stands_for_epoch,
    unknown_keys,
)
from minimind.config.run_config import RunConfig
from minimind.config.yaml_files import load_yaml_texts
from minimind.errors import UsageError, fault_error
from minimind.runtime.checked_json import describe_fault

if TYPE_CHECKING:
    from minimind.train.start import Plan

# Flags that a sweep sets for its trials, or that would end one before its last step.
OWNED = ("out_dir", "resume", "dry_run", "stop_at_step", "max_minutes", "local_rank")
MAX_TRIALS = 10_000
NUMERIC = ("int", "float")
TAGS = ("list", "range")  # pydantic puts them into the path of a fault


class Checked(BaseModel):
    """Content of a YAML file: known fields only."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Model = TypeVar("Model", bound=Checked)


class Range(Checked):
    """Numbers from `low` to `high`, both included."""

    low: str
    high: str
    log: bool = False
    step: str | None = None


Choices = Annotated[list[str], Field(min_length=1), Tag("list")]
Dimension = Annotated[
    Choices | Annotated[Range, Tag("range")],
    Discriminator(lambda value: "range" if isinstance(value, dict | Range) else "list"),
]


class Sweep(Checked):
    """The content of SWEEP.yaml. Loss and bits per byte are minimized."""

    flags: dict[str, Any]
    dimensions: dict[str, Dimension] = Field(min_length=1)
    trials: int | None = Field(default=None, ge=1, le=MAX_TRIALS)
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    metric: Literal["val_bpb", "val_loss"] = "val_bpb"
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    pruner: Literal["median", "none"] = "median"
    pruner_startup_trials: int = Field(default=4, ge=1)
    pruner_warmup_steps: int = Field(default=0, ge=0)

    @property
    def total(self) -> int:
        """Number of trials; of a grid without `trials`, all of its points."""
        return self.trials or len(self.grid())

    def grid(self) -> list[dict[str, Any]]:
        """Every combination of the dimensions' points, the last dimension changing first."""
        axes = [points(name, dimension) for name, dimension in self.dimensions.items()]
        return [dict(zip(self.dimensions, values, strict=True)) for values in product(*axes)]

    def flags_of(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.flags, **parameters}


def read_sweep(path: str) -> Sweep:
    """Read and check SWEEP.yaml; raise a UsageError that lists the faults."""
    sweep = read_fields(path, "sweep file", Sweep, Range)
    if faults := [*_faults(sweep, path)]:
        raise fault_error(faults)
    _check_length(sweep, path)
    return sweep


def read_fields(path: str, noun: str, model: type[Model], inner: type[Checked]) -> Model:
    """Read the fields of `model`, with those of `inner` in them; raise a UsageError."""
    document = load_yaml_texts(path, noun)
    try:
        return model.model_validate(document)
    except ValidationError as error:
        faults = [_sentence(one, path, model, inner) for one in error.errors()]
        raise fault_error(faults) from error


def _sentence(fault: Any, path: str, model: type[Checked], inner: type[Checked]) -> str:
    location = [part for part in fault["loc"] if part not in TAGS]
    remedy = "correct it"
    if fault["type"] == "extra_forbidden":
        known = inner if len(location) > 1 else model
        remedy = suggest(str(location[-1]), [*known.model_fields], "remove it")
    elif fault["type"] == "missing":
        remedy = "add it"
    return f"{path}: {describe_fault({**fault, 'loc': location})}; {remedy}"


def _faults(sweep: Sweep, path: str) -> Iterator[str]:
    """Yield one sentence per fault of a name or a value."""
    for section in ("flags", "dimensions"):
        yield from flag_faults(getattr(sweep, section), section, path)
    for name in sweep.flags:
        if name in sweep.dimensions:
            yield f"{name} is in flags and in dimensions of {path}; remove one of them"
    for name, dimension in sweep.dimensions.items():
        if name in FLAGS:
            try:
                _check_dimension(name, dimension, sweep.sampler, path)
            except UsageError as error:
                yield str(error)
    if sweep.trials is None and sweep.sampler != "grid":
        yield f"{path}: has no trials, which {sweep.sampler} needs; add trials: N"


def flag_faults(given: Mapping[str, Any], section: str, path: str) -> Iterator[str]:
    """Yield a sentence for each name that is no flag, and each flag in OWNED."""
    yield from unknown_keys(given, f"{section} of {path}")
    for name in OWNED:
        if name in given:
            yield f"{section}.{name} in {path} is set for every trial; remove it"


def _check_length(sweep: Sweep, path: str) -> None:
    """Raise UsageError for more trials than a grid has points, or for too large a grid."""
    if sweep.sampler != "grid":
        return
    size = prod(len(points(*item)) for item in sweep.dimensions.items())
    if size > MAX_TRIALS:
        raise UsageError(
            f"the grid of {path} has {size:,} points, more than {MAX_TRIALS:,}; use another sampler"
        )
    if sweep.trials and sweep.trials > size:
        raise UsageError(
            f"trials = {sweep.trials} ({path}) is more than the {size} points of the grid; lower it"
        )


def _check_dimension(name: str, dimension: list[str] | Range, sampler: str, path: str) -> None:
    """Raise UsageError for a value that the flag refuses, or an invalid range."""
    where = f"dimensions of {path}"
    if name == "loss_weight":
        raise UsageError(
            f"{name} ({where}) also weighs the validation loss, by which trials are compared; give"
            " it in flags"
        )
    if not isinstance(dimension, Range):
        values = [
            text
            if stands_for_auto(name, text) or stands_for_epoch(name, text)
            else convert(name, text, where)
            for text in dimension
        ]
        if len(set(values)) < len(values):
            raise UsageError(f"{name} = {dimension} ({where}) has a value twice; remove one")
        return
    if FLAGS[name].type not in NUMERIC:
        raise UsageError(f"{name} ({where}) is not a number; list its values instead of a range")
    if AUTO in (dimension.low, dimension.high):
        raise UsageError(f"{name} ({where}) has {AUTO} at an end of its range; list its values")
    low, high = (convert(name, text, where) for text in (dimension.low, dimension.high))
    if low >= high:
        raise UsageError(f"{name}.low = {low} ({where}) is not below high = {high}; change one")
    if dimension.log and (low <= 0 or dimension.step is not None):
        problem = "with a step" if low > 0 else f"from low = {low}"
        raise UsageError(f"{name} ({where}) is log {problem}; remove log, or change the other")
    if dimension.step is not None:
        if (high - low) / step_of(name, dimension, where) >= MAX_TRIALS:
            raise UsageError(
                f"{name}.step = {dimension.step} ({where}) makes more than {MAX_TRIALS:,} values;"
                " raise it, or remove it"
            )
    elif sampler == "grid":
        raise UsageError(
            f"{name} ({where}) is a range without step, and sampler is grid; list values, or give"
            " step"
        )


def step_of(name: str, dimension: Range, where: str = "dimensions") -> float:
    """The step of a range as a number of the flag's type; raise UsageError if it is not above 0."""
    number_type = int if FLAGS[name].type == "int" else float
    try:
        step = number_type(dimension.step or "")
    except ValueError:
        step = 0
    if not 0 < step < float("inf"):
        noun = "whole number" if number_type is int else "number"
        raise UsageError(
            f"{name}.step = {dimension.step} ({where}) is not a {noun} above 0; change it"
        )
    return step


def points(name: str, dimension: list[str] | Range) -> list[Any]:
    """The choices as texts; of a range with step its numbers, of another one its two ends."""
    if not isinstance(dimension, Range):
        return list(dimension)
    low, high = (convert(name, text, "dimensions") for text in (dimension.low, dimension.high))
    if dimension.step is None:
        return [low, high]
    step = step_of(name, dimension)
    count = int((high - low) / step * (1 + 1e-12)) + 1  # 0.1 + 2 * 0.1 is above 0.3
    return [min(low + n * step, high) for n in range(count)]


def settings_of(flags: Mapping[str, Any], metric: str, path: str) -> RunConfig:
    """The settings of a trial; raise UsageError for what no trial can have."""
    run = build_config(flags, f"{in_template(path)}: {{name}}")
    for name in OWNED:  # a --config file may set them; the out_dir of a trial precedes it
        value = getattr(run, name)
        if name != "out_dir" and value != FLAGS[name].default:
            raise UsageError(
                f"{name} = {value} ({run.sources[name]}) is not a setting of a trial, which this"
                " command starts, stops and continues itself; remove it"
            )
    if run.eval_rows == 0 or (run.val_fraction == 0 and run.val_path is None):
        name = "eval_rows" if run.eval_rows == 0 else "val_fraction"
        raise UsageError(
            f"{name} = 0 ({run.sources[name]}) leaves no {metric} to compare trials by; raise it"
        )
    return run


def rehearsed(run: RunConfig, metric: str) -> Plan:
    """What the start of a trial decides; raise what it would raise before its long work.

    A combination that cannot be trained is a UsageError, or TooFewRows.
    """
    from minimind.train.start import rehearse  # torch

    plan = rehearse(run)
    if plan.held_out == 0:
        raise UsageError(
            f"{plan.text} holds no row of {run.max_seq_len} tokens out, and so has no"
            f" {metric} to compare trials by; prepare it again with a larger --val_fraction"
        )
    return plan


def first_config(sweep: Sweep, path: str) -> RunConfig:
    """The settings of the first point of every dimension; raise what their start would raise.

    A combination that cannot be trained otherwise is refused at its turn.
    """
    first = {name: points(name, dimension)[0] for name, dimension in sweep.dimensions.items()}
    run = settings_of(sweep.flags_of(first), sweep.metric, path)
    rehearsed(run, sweep.metric)
    return run


def changed_fields(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the fields that differ, as `dimensions.dim`; `trials` may have grown."""
    changed = []
    for name, value in now.items():
        old = before.get(name)
        if name == "trials":
            changed += [name] * bool(old and value and value < old)
        elif isinstance(value, dict) and isinstance(old, dict):
            keys = [key for key in {**old, **value} if old.get(key) != value.get(key)]
            changed += [f"{name}.{key}" for key in keys]
        elif value != old:
            changed.append(name)
    return changed
