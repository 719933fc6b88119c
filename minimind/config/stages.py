"""The file of --stages: what each stage of a run reads, and which optimizer steps it has."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from minimind.config.names import suggest
from minimind.config.origin import Origin, Rank
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule, plan_schedule, planned_warmup
from minimind.config.yaml_files import WEIGHTS, load_yaml_texts, source_weight
from minimind.errors import UsageError

KEYS = ("stages", "sources", "max_epochs", "decay_from")
STAGE_KEYS = ("name", "until", "weights", "max_seq_len", "batch_size")
MOST_STAGES = 1000
EXAMPLE = "write `until: 2e9` for tokens, `until: 0.8` or `until: 80%` for a share of the run"


@dataclass(frozen=True)
class Until:
    """Where a stage ends: at so many tokens of the run, or at a share of its length."""

    value: Fraction
    is_share: bool
    text: str  # as it is in the file


@dataclass(frozen=True)
class StageText:
    """A stage as the file has it; None: as the run has it, or up to its end."""

    name: str
    until: Until | None
    weights: Mapping[str, float] | None
    max_seq_len: int | None = None
    batch_size: int | None = None


@dataclass(frozen=True)
class StagesFile:
    """The content of a file of --stages."""

    path: str
    stages: tuple[StageText, ...]
    sources: Mapping[str, str]  # prepared folders by name
    max_epochs: Mapping[str, float]  # by name of the source
    decay_from: str | None  # stage with which the decay of wsd begins

    def require_sources(self, names: Sequence[str]) -> None:
        """Raise UsageError for a weight or a cap of a source that is not in `names`."""
        weighted = [name for stage in self.stages for name in stage.weights or ()]
        for name in [*weighted, *self.max_epochs]:
            if name not in names:
                hint = suggest(name, names, f"the sources are {', '.join(names)}")
                raise UsageError(
                    f"--stages {self.path}: {name} is not a source of the text; {hint}"
                )


@dataclass(frozen=True)
class Stage:
    """A stage in optimizer steps, counted from 0; `run` has its row length and batch."""

    name: str
    steps: range
    run: RunConfig
    rows_per_step: int
    weights: Mapping[str, float] | None  # by name of the source; None: those of the sources

    @property
    def rows(self) -> int:
        """Rows of all of its steps."""
        steps = self.steps.stop - self.steps.start  # len() raises above 2**63
        return steps * self.rows_per_step

    @property
    def tokens(self) -> int:
        """Target tokens of all of its steps."""
        return self.rows * self.run.max_seq_len

    def facts(self) -> dict[str, Any]:
        """What records and `stage_text` have of it; the first and last step count from 1."""
        return {
            "name": self.name,
            "steps": [self.steps.start + 1, self.steps.stop],
            "rows_per_step": self.rows_per_step,
            "max_seq_len": self.run.max_seq_len,
            "tokens": self.tokens,
        }


def stage_text(stage: Mapping[str, Any]) -> str:
    """A stage in a line, with the epochs that it reads of its sources where they are known."""
    first, last = stage["steps"]
    text = (
        f"{stage['name']}: steps {first:,} to {last:,} of {stage['rows_per_step']:,} rows x"
        f" {stage['max_seq_len']:,}, {stage['tokens']:,} tokens"
    )
    read = (f"{source['epochs']:.3g} times {source['name']}" for source in stage.get("sources", ()))
    return f"{text} of {', '.join(read)}" if "sources" in stage else text


def read_stages(path: str) -> StagesFile:
    """Read a file of --stages; raise UsageError for the first mistake in it."""
    where = f"--stages {path}"
    content = load_yaml_texts(path, "--stages")
    _require_known(content, KEYS, where)
    given = content.get("stages")
    if not isinstance(given, list) or not given:
        raise UsageError(f"{where}: has no list of stages; write `stages:` and a `-` for each")
    if len(given) > MOST_STAGES:
        raise UsageError(
            f"{where}: has {len(given):,} stages, more than {MOST_STAGES:,}; join some"
        )
    stages = [_stage(one, number, where) for number, one in enumerate(given, 1)]
    names = [stage.name for stage in stages]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{where}: two stages are named {twice}; name them differently")
    _require_rising(stages, where)
    decay_from = content.get("decay_from")
    if decay_from is not None and decay_from not in names:
        hint = suggest(str(decay_from), names, f"give one of {', '.join(names)}")
        raise UsageError(f"{where}: decay_from = {decay_from} is not a stage; {hint}")
    sources = _mapping(content, "sources", where, str, "a folder of `minimind prepare`")
    max_epochs = _mapping(content, "max_epochs", where, _above_zero, "a number of epochs above 0")
    return StagesFile(path, tuple(stages), sources, max_epochs, decay_from)


def _require_known(given: Any, known: Sequence[str], where: str) -> None:
    if not isinstance(given, dict):
        raise UsageError(f"{where}: {given!r} is not a mapping; write `name: value` lines")
    for key in given:
        if key not in known:
            hint = suggest(str(key), known, f"the keys are {', '.join(known)}")
            raise UsageError(f"{where}: unknown key {key!r}; {hint}")


def _stage(given: Any, number: int, where: str) -> StageText:
    place = f"{where}: stage {number}"
    _require_known(given, STAGE_KEYS, place)
    name = given.get("name", f"stage-{number}")
    if not isinstance(name, str):
        raise UsageError(f"{place}: name = {name!r} is not a text; write `name: warm`")
    place = f"{where}: stage {name}"
    weights = None
    if "weights" in given:
        weights = _mapping(given, "weights", place, _weight, f"0, or {WEIGHTS}")
        if not any(weights.values()):
            raise UsageError(f"{place}: all weights are 0; give a source a weight above 0")
    sizes = {
        key: _value(given[key], _size, f"{place}: {key}", "a whole number above 0; give one")
        for key in ("max_seq_len", "batch_size")
        if key in given
    }
    until = _until(given["until"], place) if "until" in given else None
    return StageText(name, until, weights, **sizes)


def _mapping(
    content: Mapping[str, Any], key: str, where: str, convert: Callable[[str], Any], what: str
) -> dict[str, Any]:
    """A mapping from names of sources; raise UsageError for a value that is none of `what`."""
    given = content.get(key, {})
    if not isinstance(given, dict):
        raise UsageError(
            f"{where}: {key} = {given!r} is not a mapping; write `{key}: {{NAME: VALUE}}`"
        )
    place, what = f"{where}: {key}", f"{what}; correct it"
    return {name: _value(text, convert, f"{place}: {name}", what) for name, text in given.items()}


def _value(text: Any, convert: Callable[[str], Any], name: str, what: str) -> Any:
    """The converted text; raise UsageError for a list, a mapping, or what is not `what`."""
    with suppress(ValueError):
        if isinstance(text, str):
            return convert(text)
    raise UsageError(f"{name} = {text!r} is not {what}")


def _weight(text: str) -> float:
    if not float(text) and not re.match("[^eE]*[1-9]", text):  # of 1e-400 float makes 0
        return 0.0
    return source_weight(text)


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def _size(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _until(text: Any, place: str) -> Until:
    is_percent = isinstance(text, str) and text.endswith("%")
    whole = 100 if is_percent else 1
    exact = _value(
        text,
        lambda text: Fraction(repr(_above_zero(text.removesuffix("%")))) / whole,
        f"{place}: until",
        f"a place in the run; {EXAMPLE}",
    )
    if is_percent and exact > 1:
        raise UsageError(f"{place}: until = {text} is after the end of the run; {EXAMPLE}")
    return Until(exact, is_percent or exact < 1, text)


def _require_rising(stages: Sequence[StageText], where: str) -> None:
    """Raise UsageError unless all stages but the last end, each after the one before it."""
    *others, last = stages
    if last.until is not None and not (last.until.is_share and last.until.value == 1):
        raise UsageError(
            f"{where}: stage {last.name}: until = {last.until.text}, but the last stage ends with"
            " the run; remove it"
        )
    name, ended = "", None  # of the stage before
    for stage in others:
        if stage.until is None:
            raise UsageError(
                f"{where}: stage {stage.name} has no until, which only the last stage may omit;"
                f" {EXAMPLE}"
            )
        if stage.until.is_share and stage.until.value == 1:
            raise UsageError(
                f"{where}: stage {stage.name}: until = {stage.until.text} is the end of the run,"
                f" and stages follow; {EXAMPLE}"
            )
        if ended and ended.is_share == stage.until.is_share and ended.value >= stage.until.value:
            raise UsageError(
                f"{where}: stage {stage.name}: until = {stage.until.text} is not after"
                f" {ended.text}, where stage {name} ends; make until rise from stage to"
                " stage"
            )
        name, ended = stage.name, stage.until


def plan_stages(
    run: RunConfig, world_size: int, budgets: Mapping[str, int]
) -> tuple[StagesFile, tuple[Stage, ...], Schedule]:
    """Return the stages of a run in steps, and its schedule.

    `budgets` are the tokens of the run by flag, as `budget_steps` has them of steps of one token.
    Raise UsageError if stages, length and schedule do not fit.
    """
    file = require_stages(run, budgets)
    stages = lay_out(file, run, world_size, min(budgets.values()) if budgets else None)
    total, decay_from = stages[-1].steps.stop, None
    if file.decay_from is not None:
        decay_from = next(one.steps.start for one in stages if one.name == file.decay_from)
        if (warmup := planned_warmup(run, total)) > decay_from:
            raise UsageError(
                f"--stages {file.path}: decay_from = {file.decay_from} begins the decay after step"
                f" {decay_from}, within warmup_steps = {warmup} ({run.sources['warmup_steps']});"
                " lower it, or begin the decay later"
            )
    limits = dict.fromkeys(budgets, total)
    return file, stages, plan_schedule(run, total, limits, decay_from)


def require_stages(run: RunConfig, budgets: Mapping[str, int]) -> StagesFile:
    """Return the file of --stages; raise UsageError for what does not depend on steps.

    `budgets` are of `plan_stages`.
    """
    file = read_stages(run.stages or "")
    for text in file.stages:
        _run_of(text, run, file.path)
        until = text.until
        if budgets and until and not until.is_share and until.value >= min(budgets.values()):
            raise UsageError(
                f"--stages {file.path}: stage {text.name}: until = {until.text} is not before the"
                f" end of the run, {min(budgets.values()):,} tokens; lower it, or train longer"
            )
    if file.decay_from is not None:
        _require_decay(file, run)
    return file


def _require_decay(file: StagesFile, run: RunConfig) -> None:
    """Raise UsageError if the flags have no decay that `decay_from` could begin, or another."""
    where = f"--stages {file.path}: decay_from = {file.decay_from}"
    if run.schedule != "wsd":
        raise UsageError(
            f"{where} has no effect with schedule = {run.schedule} ({run.sources['schedule']}); use"
            " --schedule wsd, or remove decay_from"
        )
    for name in ("decay_steps", "decay_fraction"):
        if getattr(run, name) is not None:
            raise UsageError(
                f"{where} and {name} = {getattr(run, name):g} ({run.sources[name]}) both say"
                " when the decay begins; remove one of them"
            )


def lay_out(
    file: StagesFile, run: RunConfig, world_size: int, tokens: int | None
) -> tuple[Stage, ...]:
    """Return the stages in whole optimizer steps; raise UsageError if one has none.

    `tokens` is the budget of the run, None if only --max_steps limits it. A stage ends with the
    last step within its `until`; a share is one of the tokens, or of the steps without a budget.
    """
    stages: list[Stage] = []
    step, trained = 0, 0
    for text in file.stages:
        own = _run_of(text, run, file.path)
        rows = own.rows_per_step(world_size)
        until, size = text.until, rows * own.max_seq_len
        share = Fraction(1) if until is None else until.value
        if until is not None and not until.is_share:
            steps = (int(until.value) - trained) // size
            left = steps + 1 if tokens is not None else (run.max_steps or 0) - step
            if steps >= left:
                raise UsageError(
                    f"--stages {file.path}: stage {text.name}: until = {until.text} takes all"
                    f" {left:,} steps that are left, of {size:,} tokens, and leaves none to the"
                    " next stage; lower it, or train longer"
                )
        elif tokens is not None:
            steps = (int(share * tokens) - trained) // size
        else:
            assert run.max_steps is not None  # config/checks.py
            steps = int(share * run.max_steps) - step
        if steps < 1:
            end = f"until = {until.text}" if until else "the end of the run"
            raise UsageError(
                f"--stages {file.path}: stage {text.name} has no whole step of {size:,} tokens"
                f" between step {step:,} ({trained:,} tokens) and {end}; change until, train"
                " longer, or leave the stage out"
            )
        stages.append(Stage(text.name, range(step, step + steps), own, rows, text.weights))
        step, trained = step + steps, trained + stages[-1].tokens
    return tuple(stages)


def _run_of(text: StageText, run: RunConfig, path: str) -> RunConfig:
    """The run with the row length and batch of a stage."""
    where = f"stage {text.name} of --stages {path}"
    if text.max_seq_len is not None:
        if text.max_seq_len > run.max_seq_len:
            raise UsageError(
                f"max_seq_len = {text.max_seq_len} ({where}) is more than max_seq_len ="
                f" {run.max_seq_len} ({run.sources['max_seq_len']}) of the model; raise that, or"
                " lower this"
            )
        if text.max_seq_len % run.sequence_parallel:
            raise UsageError(
                f"max_seq_len = {text.max_seq_len} ({where}) is not divisible by"
                f" sequence_parallel = {run.sequence_parallel}"
                f" ({run.sources['sequence_parallel']}); change one of them"
            )
        run = run.with_values(Origin(where, Rank.DATA), max_seq_len=text.max_seq_len)
    if text.batch_size is not None:
        run = run.with_values(Origin(where, Rank.DATA), batch_size=text.batch_size)
    return run
