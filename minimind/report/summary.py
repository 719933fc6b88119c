"""The figures of a run, its columns in fewer points, and the run as a few lines of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import numpy as np

from minimind.config.run_record import NAME
from minimind.report import formats
from minimind.report.history import PAUSES, PHASES, Run, number, values_by_rank
from minimind.report.placement import placement
from minimind.report.verdict import verdict_of


def downsample(x: np.ndarray, y: np.ndarray, columns: int, span: tuple[float, float]) -> np.ndarray:
    """Ascending indices of the points that draw the same curve in `columns` pixel columns.

    A column keeps its first, least, largest and last point (M4: Jugel et al. 2014), and a gap one
    NaN. `x` must not decrease.
    """
    if len(x) <= 4 * columns:
        return np.arange(len(x))
    known = np.flatnonzero(np.isfinite(y))
    gaps = np.flatnonzero(~np.isfinite(y) & np.r_[True, np.isfinite(y[:-1])])
    gaps = gaps[:: max(1, -(-len(gaps) // columns))]
    column = pixel_columns(x[known], columns, span)
    first = np.flatnonzero(np.diff(column, prepend=-1))
    last = np.flatnonzero(np.diff(column, append=columns))
    group, heights = np.repeat(np.arange(len(first)), last + 1 - first), y[known]
    kept = [first, last]
    for extreme in (np.minimum, np.maximum) if len(first) else ():
        at = np.flatnonzero(heights == extreme.reduceat(heights, first)[group])
        kept.append(at[np.diff(group[at], prepend=-1) > 0])
    return np.union1d(known[np.concatenate(kept)], gaps)


def group_lines(
    begins: np.ndarray, ends: np.ndarray, columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Begin and end of at most `columns` groups of about equal length, and the group of a line."""
    if len(begins) <= columns:
        return begins, ends, np.arange(len(begins))
    column = pixel_columns(ends, columns, (float(begins[0]), float(ends[-1])))
    is_first, is_last = np.diff(column, prepend=-1) != 0, np.diff(column, append=columns) != 0
    return begins[is_first], ends[is_last], np.cumsum(is_first) - 1


def group_means(values: np.ndarray, weights: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Weighted mean of each group; 0 where no value is known."""
    weights = np.where(np.isfinite(values), weights, 0.0)
    size = int(group[-1]) + 1 if len(group) else 0
    total = np.bincount(group, np.nan_to_num(values) * weights, size)
    weight = np.bincount(group, weights, size)
    return np.divide(total, weight, out=np.zeros(size), where=weight > 0)


def smooth(y: np.ndarray, window: int) -> np.ndarray:
    """Centered moving mean that skips NaN; the window shrinks symmetrically at both ends."""
    total = np.concatenate(([0.0], np.cumsum(np.nan_to_num(y))))
    count = np.concatenate(([0], np.cumsum(np.isfinite(y))))
    index = np.arange(len(y))
    half = np.minimum(index, window // 2)
    low, high = index - half, np.minimum(len(y), index + half + 1)
    known = count[high] - count[low]
    return np.where(known > 0, (total[high] - total[low]) / np.maximum(1, known), np.nan)


def pixel_columns(x: np.ndarray, columns: int, span: tuple[float, float]) -> np.ndarray:
    """The column of each x, from 0 to `columns` - 1."""
    scaled = (x - span[0]) / ((span[1] - span[0]) or 1.0) * columns
    return np.clip(scaled, 0, columns - 1).astype(np.int64)


NOUNS = {
    "evaluate": "evaluation",
    "sample": "samples",
    "score": "scores",
    "verify": "checks for corruption",
    "gc": "garbage collection",
}  # of pauses
BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
SPARKLINE_WIDTH = 60
PACE_LINES = 50  # by which the time that is left is estimated
# Values that a profile has of each rank: key, name, format.
RANK_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    *((f"{name}_ms", name, formats.milliseconds) for name in (*PHASES, "step")),
    ("comm_ms", "of it comm.", formats.milliseconds),
    *((f"{name}_ms", NOUNS.get(name, name), formats.milliseconds) for name in PAUSES),
    ("memory_mib", "memory peak", formats.memory),
)
BRIEF = {"forward": "forward", "of it comm.": "comm.", "memory peak": "memory"}


class Summary:
    """The figures of a run at `now` (unix seconds); NaN or None where unknown."""

    def __init__(self, run: Run, now: float) -> None:
        self.run, self.step, starts = run, int(run.last_step), run.starts
        total = number(run.fact("total_steps"))
        self.total_steps = int(total) if math.isfinite(total) else None
        loss, taken = run.column("loss"), run.column("taken")
        known = np.flatnonzero(np.isfinite(loss))
        self.loss, self.mean_loss = _last_finite(loss), _last_finite(smoothed_loss(run))
        self.loss_step = int(run.column("step")[known[-1]]) if len(known) else 0
        self.best, self.best_average = _best(run), _best(run, "ema_")
        self.scores = next(iter(reversed(run.events("scores"))), None)
        self.tokens = _last_finite(run.column("tokens"))
        speed = run.column("tokens_per_second")
        per_token = _weighted_mean(1.0 / np.where(speed > 0, speed, np.nan), taken)
        self.tokens_per_second = 1.0 / per_token if per_token > 0 else math.nan
        self.step_ms = _weighted_mean(run.column("step_ms"), taken)
        self.mfu = _weighted_mean(run.column("mfu"), taken)
        memory = run.column("memory_mib")
        self.memory_mib = float(np.nanmax(memory)) if np.isfinite(memory).any() else math.nan
        self.seconds = sum(start.seconds for start in starts)  # without the time between starts
        times = [start.milliseconds() for start in starts]
        spent = {name: sum(one[name] for one in times) for name in (*PHASES, *PAUSES)}
        whole = sum(spent.values())
        self.shares = {name: ms / whole for name, ms in spent.items()} if whole > 0 else {}
        self.lost_steps = sum(start.lost_steps for start in starts)
        lost = [ms for start in starts for ms in start.milliseconds(only_lost=True).values()]
        self.lost_seconds = sum(lost) / 1e3
        self.skipped = len(run.events("step_skipped"))
        self.spikes = len(run.steps_of("spike_skipped"))
        self.corruptions = len(run.steps_of("corruption"))
        self.starts = sum(not s.is_implied or s.last_step > -math.inf for s in starts)
        self.resumes = sum(start.facts.get("resume_from") is not None for start in starts)
        outcomes = run.outcomes(now) or [("silent", "nothing recorded")]
        self.crashes = sum(kind == "crashed" for kind, _ in outcomes)
        self.rollbacks = sum(kind == "rolled back" for kind, _ in outcomes)
        self.resumes -= self.rollbacks
        self.kind, self.ending = outcomes[-1]
        self.seconds_left = self._seconds_left() if self.kind == "running" else math.nan
        self.verdict, self.placed = verdict_of(run), placement(run)
        self.mirror = _mirror(run)

    def _seconds_left(self) -> float:
        """Seconds to the last step at the pace of the last lines; pauses count."""
        lines = [self.run.starts[-1].column(name)[-PACE_LINES:] for name in ("time", "step")]
        times, steps = (values[-1] - values[0] if len(values) else 0.0 for values in lines)
        if self.total_steps is None or not (times > 0 and steps > 0):
            return math.nan
        return max(0, self.total_steps - self.step) * float(times / steps)

    def description(self) -> str:
        """`2,361,024 parameters, bfloat16, DeepSpeed ZeRO-2 on 2 processes (cpu)`."""
        parameters = number(self.run.fact("parameters"))
        size = f"{parameters:,.0f} parameters" if math.isfinite(parameters) else ""
        names = ("world_size", "backend", "zero_stage", "device", "dtype")
        facts = describe({name: self.run.fact(name) for name in names})
        return ", ".join(filter(None, (size, facts))) or "nothing is known of it"

    def course(self) -> str:
        """`step 160 of 160 after 2 min 5 s: done`."""
        total = f" of {self.total_steps:,}" if self.total_steps is not None else ""
        time = formats.duration(self.seconds)
        return f"step {self.step:,}{total} after {time}: {self.ending}{self.time_left()}"

    def time_left(self) -> str:
        """`, about 3 h 20 min left`; empty where it is unknown, or the run has ended."""
        left = self.seconds_left
        return f", about {formats.duration(left)} left" if math.isfinite(left) else ""

    def setbacks(self) -> str:
        """`1 resume, 1 crash, 16 steps lost (7.1 s)`; empty if there were none."""
        lost = f"{formats.count(self.lost_steps, 'step')} lost"
        parts = (
            (self.resumes, formats.count(self.resumes, "resume")),
            (self.crashes, formats.count(self.crashes, "crash", "crashes")),
            (self.lost_steps, f"{lost} ({formats.duration(self.lost_seconds)})"),
            (self.skipped, f"{formats.count(self.skipped, 'step')} skipped"),
            (self.spikes, f"{formats.count(self.spikes, 'spike')} skipped"),
            (self.rollbacks, formats.count(self.rollbacks, "rollback")),
            (self.corruptions, f"corruption at {formats.count(self.corruptions, 'step')}"),
        )
        return ", ".join(text for times, text in parts if times)

    def figures(self) -> dict[str, tuple[str, str]]:
        """Name -> value and remark of the figures that are known."""
        figures = {}
        if math.isfinite(self.loss):
            remark = f" at step {self.loss_step:,}, {self.mean_loss:.4f} smoothed"
            figures["loss"] = (f"{self.loss:.4f}", remark)
        for name, best in (("validation", self.best), ("average", self.best_average)):
            if best:
                pairs = ((", perplexity", best["val_ppl"]), (", bits per byte", best["val_bpb"]))
                more = "".join(f"{noun} {n:.4g}" for noun, n in pairs if math.isfinite(n))
                remark = f" at step {best['step']:,.0f}, the best{more}"
                figures[name] = (f"{best['val_loss']:.4f}", remark)
        if math.isfinite(self.tokens):
            mfu = f", MFU {formats.percent(self.mfu)}" if math.isfinite(self.mfu) else ""
            remark = f", {formats.figure(self.tokens_per_second)} tokens/s{mfu}"
            figures["tokens"] = (f"{self.tokens:,.0f}", remark)
        if math.isfinite(self.memory_mib):
            figures["memory"] = (formats.memory(self.memory_mib), " at most, of one process")
        if self.mirror:
            figures["mirror"] = self.mirror
        return figures

    def scores_text(self) -> str:
        """`at step 400: cloze 0.4100 (chance 0.25), average 0.2133`; empty without scores."""
        if self.scores is None:
            return ""
        step = number(self.scores["step"])
        return f"at step {step:,.0f}: {formats.scores_line(self.scores)}"

    def as_text(self, has_blocks: bool = True) -> str:
        """The run in 6 to 14 lines, and one per stage, for a terminal.

        ASCII only unless `has_blocks`.
        """
        figures = {name: value + remark for name, (value, remark) in self.figures().items()}
        shares = [(NOUNS.get(name, name), share) for name, share in self.shares.items()]
        lines = {
            "run": self.description(),
            "course": self.course(),
            "stages": f"\n{'':<14}".join(map(", ".join, stage_rows(self.run))),
            "setbacks": self.setbacks(),
            **{name: figures.get(name, "") for name in ("loss", "validation", "average", "tokens")},
            "scores": self.scores_text(),
            "floors": self.placed,
            "time": ", ".join(f"{n} {formats.percent(s)}" for n, s in shares if s >= 0.0005),
            "verdict": self.verdict,
            **{name: figures.get(name, "") for name in ("memory", "mirror")},
            "ranks": ", ".join(
                f"{BRIEF[name]} {least} to {largest} ({rank})"
                for name, least, _, largest, rank in rank_figures(self.run)[1]
                if name in BRIEF
            ),
        }
        if unread := self.run.unread_lines:
            lines["unread"] = f"{formats.count(unread, 'line')} of metrics.jsonl, left out"
        if self.run.config_fault:
            lines["config"] = f"{NAME} {self.run.config_fault}"
        curve = sparkline(smoothed_loss(self.run), BLOCKS if has_blocks else ASCII_BLOCKS)
        shown = [f"  {name:<12}{value}" for name, value in lines.items() if value]
        text = "\n".join([str(self.run.run_dir), *shown, *([f"  {curve}"] if curve else [])])
        return text if has_blocks else text.encode("ascii", "replace").decode()


STAGE_HEAD = ("stage", "steps", "rows", "tokens", "epochs of its sources")


def stage_rows(run: Run) -> list[tuple[str, ...]]:
    """What each stage of the last start reads, a cell per name in `STAGE_HEAD`."""
    stages = run.starts[-1].facts.get("stages") if run.starts else None
    return [_stage_row(one) for one in _objects(stages)]


def _stage_row(stage: Mapping[str, Any]) -> tuple[str, ...]:
    steps = stage.get("steps")
    first, last = map(number, steps) if isinstance(steps, list) and len(steps) == 2 else (0.0, 0.0)
    rows, length, tokens = (
        number(stage.get(name)) for name in ("rows_per_step", "max_seq_len", "tokens")
    )
    read = (
        f"{number(one.get('epochs')):.3g} of {one.get('name')}"
        for one in _objects(stage.get("sources"))
    )
    return (
        str(stage.get("name")),
        f"steps {first:,.0f} to {last:,.0f}",
        f"{rows:,.0f} rows x {length:,.0f}",
        f"{tokens:,.0f} tokens",
        f"epochs: {' + '.join(read)}",
    )


def _objects(values: Any) -> list[dict[str, Any]]:
    """The objects of a list of a metrics.jsonl, which anyone may have written."""
    return [one for one in values if isinstance(one, dict)] if isinstance(values, list) else []


def _best(run: Run, prefix: str = "") -> dict[str, float] | None:
    """The validation of least loss, None without any; of the average of weights with `ema_`."""
    names = ("val_loss", "val_ppl", "val_bpb")
    evals = [
        {"step": number(e["step"]), **{name: number(e.get(prefix + name)) for name in names}}
        for e in run.events("eval")
    ]
    finite = [evaluation for evaluation in evals if math.isfinite(evaluation["val_loss"])]
    return min(finite, key=lambda evaluation: evaluation["val_loss"], default=None)


def _mirror(run: Run) -> tuple[str, str] | None:
    """The newest checkpoint at --mirror, and a remark; None without a mirror."""

    def steps(name: str, is_lost: bool = False) -> list[float]:
        return sorted({number(event["step"]) for event in run.events(name, is_lost)})

    saved, fetched = steps("checkpoint_saved"), steps("checkpoint_fetched")
    # The upload of a lost checkpoint may be logged after the rollback.
    left_behind = {*steps("checkpoint_saved", is_lost=True)}.difference(saved)
    mirrored = [step for step in steps("checkpoint_mirrored") if step not in left_behind]
    failed = [step for step in steps("mirror_failed") if step not in left_behind]
    if not (mirrored or failed or fetched):
        return None
    newest = max([*mirrored, *fetched], default=0.0)
    behind = saved[-1] - newest if saved and saved[-1] > newest else 0
    remarks = (
        (mirrored, f"the newest of {formats.count(len(mirrored), 'checkpoint')} uploaded"),
        (behind, f"{formats.count(int(behind), 'step')} behind out_dir"),
        (failed, f"failed at {formats.count(len(failed), 'step')}"),
        (fetched, f"fetched at {formats.count(len(fetched), 'start')}"),
    )
    value = f"step {newest:,.0f}" if mirrored or fetched else "nothing uploaded"
    return value, "".join(f", {text}" for is_shown, text in remarks if is_shown)


def _weighted_mean(values: np.ndarray, weights: np.ndarray) -> float:
    known = np.isfinite(values) & np.isfinite(weights) & (weights > 0)
    return float(np.average(values[known], weights=weights[known])) if known.any() else math.nan


def _last_finite(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else math.nan


def window_of(lines: int) -> int:
    """Lines in a moving mean."""
    return max(1, min(lines // 3, max(5, lines // 80)))


def smoothed_loss(run: Run) -> np.ndarray:
    """(kept lines,): the moving mean of the loss."""
    loss = run.column("loss")
    return smooth(loss, window_of(len(loss)))


def rank_figures(run: Run) -> tuple[float, list[tuple[str, str, str, str, str]]]:
    """Step of the last profile with several ranks; name, least, median, largest and its rank."""
    for event in reversed(run.events("profile")):
        rows = []
        for key, name, form in RANK_FIGURES:
            values = values_by_rank(event.get("ranks"), key)
            if len(values) > 1:
                figures = (min(values.values()), median(values.values()), max(values.values()))
                rank = max(values, key=lambda one: values[one])
                rows.append((name, *map(form, figures), f"rank {rank}"))
        if rows:
            return number(event.get("step")), rows
    return math.nan, []


def describe(facts: Mapping[str, Any]) -> str:
    """`bfloat16, DeepSpeed ZeRO-2 on 2 processes (cpu)`, from the facts of a run_start."""
    world, backend = number(facts.get("world_size")), str(facts.get("backend") or "")
    names = {"deepspeed": f"DeepSpeed ZeRO-{facts.get('zero_stage')}", "ddp": "DDP"}
    on = f"on {formats.count(int(world), 'process', 'processes')}" if math.isfinite(world) else ""
    device = f"({facts['device']})" if facts.get("device") else ""
    where = " ".join(filter(None, (names.get(backend, backend), on, device)))
    return ", ".join(filter(None, (str(facts.get("dtype") or ""), where)))


def sparkline(values: np.ndarray, blocks: str) -> str:
    """The finite values as at most `SPARKLINE_WIDTH` blocks, then `first to last`."""
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return ""
    means = np.array([p.mean() for p in np.array_split(values, min(SPARKLINE_WIDTH, len(values)))])
    span = float(means.max() - means.min()) or 1.0
    heights = ((means - means.min()) / span * (len(blocks) - 1)).round().astype(int)
    return "".join(blocks[n] for n in heights) + f"  {values[0]:.2f} to {values[-1]:.2f}"
