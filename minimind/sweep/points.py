"""The points of a scaling law: sizes, tokens and final validation losses of finished runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimind.architecture.costs import flops_per_token
from minimind.architecture.shape import shape_of
from minimind.checkpoint.directory import published_checkpoints, read_manifest
from minimind.config.parse import convert, load_yaml_texts
from minimind.config.run_config import FLAGS, RunConfig
from minimind.errors import CheckpointError, UsageError
from minimind.report.records import number
from minimind.report.runs import Run, read_configuration, read_runs

RECORD = "metrics.jsonl"
# Settings by which losses compare, and sizes.
ALIKE = (
    *("max_seq_len", "vocab_size", "val_fraction", "eval_rows", "doc_mask", "tie_word_embeddings"),
    "text_field",
)
PLACES = ("out_dir", "cache_dir", "deepspeed_config", "seed")  # no part of the settings of a run
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


def collect(places: Sequence[Path]) -> Points:
    """Read the runs in `places`, each an out_dir or a folder of them.

    Raise UsageError for a place without runs, a run given twice, and runs of different text.
    """
    used, left_out = [], {}
    for run in read_runs(_run_dirs(places)):
        found = _point(run)
        if isinstance(found, str):
            left_out[run.name] = found
        else:
            used.append(found)
    for one in used[1:]:
        _require_alike(used[0], one)
    kept = _best_of_each_budget(used, left_out)
    return Points(sorted(kept, key=lambda one: (one.parameters, one.tokens)), left_out)


def _run_dirs(places: Iterable[Path]) -> list[Path]:
    seen: dict[Path, Path] = {}
    for given in places:
        place = given.parent if given.name == RECORD else given
        if not place.is_dir():
            raise UsageError(f"{given} is no folder; give out_dirs of runs, or a folder of them")
        own = (place / RECORD).is_file()
        inside = [place] if own else sorted(one.parent for one in place.glob(f"*/{RECORD}"))
        if not inside:
            raise UsageError(f"{given} holds no run; give out_dirs, or a folder of them")
        for run_dir in inside:
            if (known := run_dir.resolve()) in seen:
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
    elif not config.is_file():
        reason = "has no config.yaml"
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
    return Point(
        run.name,
        config,
        parameters,
        tokens,
        number(evaluation["val_loss"]),
        float(flops_per_token(shape)) if is_ours else None,
        tokens / epoch if epoch > 0 else math.nan,
        {**_hashes(run.run_dir), **{name: getattr(config, name) for name in ALIKE}},
        str([*((k, v) for k, v in flags.items() if k not in PLACES), _deepspeed(run.run_dir)]),
    )


def _deepspeed(run_dir: Path) -> list[tuple[str, str]]:
    return [*read_configuration(run_dir).deepspeed.items()]


def _hashes(run_dir: Path) -> dict[str, str]:
    """Identity of text and tokenizer in the newest checkpoint; empty without a readable one."""
    try:
        identity = read_manifest(published_checkpoints(run_dir / "checkpoints")[0])["identity"]
    except (CheckpointError, IndexError):
        return {}
    return {name: str(identity[name]["sha256"])[:12] for name in ("data", "tokenizer")}


def _require_alike(one: Point, other: Point) -> None:
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


def _best_of_each_budget(points: Sequence[Point], left_out: dict[str, str]) -> list[Point]:
    """Of runs of one size and equal tokens, the settings with the least mean loss over seeds.

    The law is of well-tuned runs: a sweep over learning rates has many others.
    """
    kept: list[Point] = []
    for group in _budgets(points):
        settings: dict[str, list[Point]] = {}
        seeds: dict[str, Point] = {}
        for one in group:
            key, whole = one.settings, f"{one.run.seed} {one.settings}"
            if whole in seeds:
                left_out[one.name] = f"has the flags of {seeds[whole].name}"
                continue
            seeds[whole] = one
            settings.setdefault(key, []).append(one)
        best = min(settings.values(), key=lambda some: sum(p.loss for p in some) / len(some))
        for one in (one for some in settings.values() if some is not best for one in some):
            better = f"{best[0].name}, {best[0].loss:.4f}"
            left_out[one.name] = f"loss {one.loss:.4f}; of its size and tokens the best is {better}"
        kept += best
    return kept


def _budgets(points: Iterable[Point]) -> list[list[Point]]:
    groups: list[list[Point]] = []
    for one in sorted(points, key=lambda one: (one.parameters, one.tokens)):
        first = groups[-1][0] if groups else None
        if first and one.parameters == first.parameters and one.tokens <= NEAR * first.tokens:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups
