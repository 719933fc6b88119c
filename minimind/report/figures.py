"""The figures of a run, each written once, and the run as a few lines of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from minimind.config.run_record import NAME
from minimind.report import formats
from minimind.report.formats import NOUNS, PAUSES, PHASES
from minimind.report.history import Run
from minimind.report.placement import placement
from minimind.report.slowness import verdict_of

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
SPARKLINE_WIDTH = 60
PACE_LINES = 50  # by which the time that is left is estimated
# Values that a profile has of each rank: key, name, format.
RANK_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    *((f"{name}_ms", name, formats.milliseconds) for name in (*PHASES, "step")),
    ("comm_ms", "of it comm.", formats.milliseconds),
    *((f"{name}_ms", NOUNS[name], formats.milliseconds) for name in PAUSES),
    ("memory_mib", "memory peak", formats.memory),
)
BRIEF = {"forward": "forward", "of it comm.": "comm.", "memory peak": "memory"}
STAGE_HEAD = ("stage", "steps", "rows", "tokens", "epochs of its sources")
# Where figures are shown: in lines and tiles those that are known, and setbacks that happened.
LINES = ("loss", "validation", "average", "tokens", "memory", "mirror")
TILES = (*LINES, "time", "step")
SETBACKS = ("resumes", "crashes", "lost", "skipped", "spikes", "rollbacks", "corruptions")
COLUMNS = {
    **{"steps": "steps", "validation": "best validation", "bits": "in bits per byte"},
    **{"smoothed": "loss, smoothed", "tokens": "tokens", "tokens/s": "tokens/s", "step": "step"},
    **{name: name for name in ("memory", "time", "resumes", "crashes")},
}


class Figure(NamedTuple):
    """A value, NaN where it is not known, its text, and what a line or a tile says behind it."""

    value: float
    text: str
    remark: str = ""


class Summary:
    """The figures of a run at `now` (unix seconds), and its sentences."""

    def __init__(self, run: Run, now: float) -> None:
        self.run = run
        self.kind, self.ending = (run.outcomes(now) or [("silent", "nothing recorded")])[-1]
        self.total_steps = run.fact("total_steps")
        spent = run.spent(run.starts)
        whole = sum(spent.values())
        self.shares = {name: ms / whole for name, ms in spent.items()} if whole > 0 else {}
        self.scores = next(iter(reversed(run.events("scores"))), None)
        self.verdict, self.placed = verdict_of(run), placement(run)
        self.figures = _figures(run, now)

    def description(self) -> str:
        """`2,361,024 parameters, bfloat16, DeepSpeed ZeRO-2 on 2 processes (cpu)`."""
        parameters = self.run.fact("parameters")
        names = ("world_size", "backend", "zero_stage", "device", "dtype")
        facts = describe({name: self.run.fact(name) for name in names})
        size = f"{parameters:,} parameters" if parameters is not None else ""
        return ", ".join(filter(None, (size, facts))) or "nothing is known of it"

    def course(self) -> str:
        """`step 160 of 160 after 2 min 5 s: done`."""
        total = f" of {self.total_steps:,}" if self.total_steps is not None else ""
        step, time = self.figures["steps"].text, self.figures["time"].text
        return f"step {step}{total} after {time}: {self.ending}{self.time_left()}"

    def time_left(self) -> str:
        """`, about 3 h 20 min left`, at the pace of the last lines; empty without one."""
        rows = slice(-min(PACE_LINES, self.run.starts[-1].lines) if self.run.starts else 0, None)
        lines = [self.run.lines(name)[rows] for name in ("time", "step")]
        times, steps = (float(one[-1] - one[0]) if len(one) else 0.0 for one in lines)
        if self.kind != "running" or self.total_steps is None or not (times > 0 and steps > 0):
            return ""
        left = max(0.0, self.total_steps - self.figures["steps"].value) * times / steps
        return f", about {formats.duration(left)} left"

    def shown_shares(self) -> dict[str, float]:
        """The shares of the measured time by phase and pause, of those that can be seen."""
        return {name: share for name, share in self.shares.items() if share >= 0.0005}

    def setbacks(self) -> str:
        """`1 resume, 1 crash, 16 steps lost (7.1 s)`; empty if there were none."""
        found = [self.figures[name] for name in SETBACKS]
        return ", ".join(one.text + one.remark for one in found if one.value)

    def shown(self, names: tuple[str, ...]) -> dict[str, Figure]:
        """The figures of these names that are finite, by name."""
        found = {name: self.figures[name] for name in names}
        return {name: one for name, one in found.items() if math.isfinite(one.value)}

    def as_text(self, has_blocks: bool = True) -> str:
        """The run in 6 to 14 lines, and one per stage, for a terminal.

        ASCII only unless `has_blocks`.
        """
        scores, unread, fault = self.scores, self.run.unread_lines, self.run.config_fault
        lines = {
            "run": self.description(),
            "course": self.course(),
            "stages": f"\n{'':<14}".join(map(", ".join, stage_rows(self.run))),
            "starts": self.setbacks(),
            **{name: one.text + one.remark for name, one in self.shown(LINES).items()},
            "scores": f"at step {scores['step']:,}: {formats.scores_line(scores)}"
            if scores
            else "",
            "floors": self.placed,
            "time": ", ".join(
                f"{NOUNS[n]} {formats.percent(s)}" for n, s in self.shown_shares().items()
            ),
            "verdict": self.verdict,
            "ranks": ", ".join(
                f"{BRIEF[name]} {least} to {largest} ({rank})"
                for name, least, _, largest, rank in rank_figures(self.run)[1]
                if name in BRIEF
            ),
            "unread": f"{formats.count(unread, 'line')} of metrics.jsonl, left out" * bool(unread),
            "config": f"{NAME} {fault}" if fault else "",
        }
        curve = sparkline(smoothed_loss(self.run), BLOCKS if has_blocks else ASCII_BLOCKS)
        shown = [f"  {name:<12}{value}" for name, value in lines.items() if value]
        text = "\n".join([str(self.run.run_dir), *shown, *([f"  {curve}"] if curve else [])])
        return text if has_blocks else text.encode("ascii", "replace").decode()


def _figures(run: Run, now: float) -> dict[str, Figure]:
    starts, taken, loss = run.starts, run.column("taken"), run.column("loss")
    last, mean, tokens = map(_last, (loss, smoothed_loss(run), run.column("tokens")))
    known = np.flatnonzero(np.isfinite(loss))
    at = f" at step {run.column('step')[known[-1]]:,.0f}" if len(known) else ""
    # After a crash a line is of fewer steps than there are since the line before.
    steps, weights = (np.diff(run.column(name), prepend=0.0) for name in ("step", "tokens"))
    weights = weights / np.where(steps > 0, steps, np.nan) * taken
    speed = run.column("tokens_per_second")
    speed = 1 / _mean(1 / np.where(speed > 0, speed, np.nan), weights)
    mfu, step_ms = _mean(run.column("mfu"), taken), _mean(run.column("step_ms"), taken)
    pace = f", {formats.figure(speed)} tokens/s"
    pace += f", MFU {formats.percent(mfu)}" if math.isfinite(mfu) else ""
    memory = float(np.fmax.reduce(run.column("memory_mib"), initial=math.nan))
    seconds = sum(start.seconds for start in starts)  # without the time between starts
    begun = sum(not start.is_implied or start.lines > 0 for start in starts)
    lost = sum(start.lost_steps for start in starts)
    lost_ms = sum(run.spent(starts, is_lost=True).values())
    of_starts = f" in {formats.count(begun, 'start')}"
    of_starts += f", {formats.count(lost, 'step')} lost" if lost else ""
    kinds = [kind for kind, _ in run.outcomes(now)]
    back = kinds.count("rolled back")
    resumes = sum(start.facts.get("resume_from") is not None for start in starts) - back
    corrupted = len(run.steps_of("corruption"))

    def counted(value: int, noun: str, more: str = "", plural: str = "") -> Figure:
        text, _, noun = formats.count(value, noun, plural).partition(" ")
        return Figure(value, text, f" {noun}{more}")

    return {
        "steps": Figure(int(run.last_step), f"{int(run.last_step):,}"),
        "loss": Figure(last, f"{last:.4f}", f"{at}, {mean:.4f} smoothed"),
        "smoothed": Figure(mean, formats.figure(mean)),
        "validation": _best(run, ""),
        "bits": _best(run, "", "val_bpb"),
        "average": _best(run, "ema_"),
        "tokens": Figure(tokens, f"{tokens:,.0f}" if tokens >= 0 else formats.DASH, pace),
        "tokens/s": Figure(speed, formats.figure(speed)),
        "step": Figure(step_ms, formats.milliseconds(step_ms), " on average"),
        "memory": Figure(memory, formats.memory(memory), " at most, of one process"),
        "mirror": _mirror(run),
        "time": Figure(seconds, formats.duration(seconds), of_starts),
        "resumes": counted(resumes, "resume"),
        "crashes": counted(kinds.count("crashed"), "crash", plural="crashes"),
        "lost": counted(lost, "step", f" lost ({formats.duration(lost_ms / 1e3)})"),
        "skipped": counted(len(run.events("step_skipped")), "step", " skipped"),
        "spikes": counted(len(run.steps_of("spike_skipped")), "spike", " skipped"),
        "rollbacks": counted(back, "rollback"),
        "corruptions": Figure(corrupted, f"corruption at {formats.count(corrupted, 'step')}"),
    }


def _best(run: Run, prefix: str, shown: str = "val_loss") -> Figure:
    """The validation of least loss; of the average of weights with `ema_`."""
    key = f"{prefix}val_loss"
    evals = [e for e in run.events("eval") if math.isfinite(e.get(key, math.nan))]
    best = min(evals, key=lambda one: one[key], default={})
    value = best.get(prefix + shown, math.nan)
    if not math.isfinite(value):
        return Figure(math.nan, formats.DASH)
    remark = f" at step {best['step']:,}, the best"
    for noun, name in (("perplexity", "val_ppl"), ("bits per byte", "val_bpb")):
        other = best.get(prefix + name, math.nan)
        remark += f", {noun} {other:.4g}" if math.isfinite(other) else ""
    return Figure(value, f"{value:.4f}", remark)


def nats_of_a_bit(run: Run) -> tuple[float, float]:
    """Nats per token of one bit per byte: of the training text, and of the held-out one.

    NaN where bytes per token are not recorded. Without those of the training text the held-out one
    stands for it.
    """
    held_out = trained = math.nan
    for event in run.events("eval")[-1:]:
        if event["val_bpb"] > 0:
            trained = held_out = event["val_loss"] / event["val_bpb"]
    for event in run.events("floors")[-1:]:
        if event["bytes_per_token"] > 0:
            trained = event["bytes_per_token"] * math.log(2)
    return trained, held_out


def other_text(runs: Sequence[Run]) -> bool:
    """Whether the runs read different texts or cut them into different tokens."""
    floors = [[event.get("text") for event in run.events("floors")[-1:]] for run in runs]
    facts = [[run.fact("text"), run.fact("vocabulary")] for run in runs]
    return len({*map(str, floors if all(floors) else facts)}) > 1


def _mirror(run: Run) -> Figure:
    """The newest checkpoint at --mirror; NaN without a mirror."""
    saved, fetched, mirrored, failed = (
        sorted({event["step"] for event in run.events(name)})
        for name in (
            *("checkpoint_saved", "checkpoint_fetched"),
            *("checkpoint_mirrored", "mirror_failed"),
        )
    )
    # The upload of a lost checkpoint may be logged after the rollback.
    left_behind = {e["step"] for e in run.events("checkpoint_saved", is_lost=True)} - {*saved}
    mirrored, failed = ([s for s in ones if s not in left_behind] for ones in (mirrored, failed))
    if not (mirrored or failed or fetched):
        return Figure(math.nan, "")
    newest = max([*mirrored, *fetched], default=0)
    behind = max(0, saved[-1] - newest) if saved else 0
    remarks = (
        (mirrored, f"the newest of {formats.count(len(mirrored), 'checkpoint')} uploaded"),
        (behind, f"{formats.count(behind, 'step')} behind out_dir"),
        (failed, f"failed at {formats.count(len(failed), 'step')}"),
        (fetched, f"fetched at {formats.count(len(fetched), 'start')}"),
    )
    text = f"step {newest:,}" if mirrored or fetched else "nothing uploaded"
    return Figure(newest, text, "".join(f", {one}" for is_shown, one in remarks if is_shown))


def stage_rows(run: Run) -> list[tuple[str, ...]]:
    """What each stage of the last start reads, a cell per name in `STAGE_HEAD`."""
    stages = run.starts[-1].facts.get("stages", []) if run.starts else []
    return [
        (
            one["name"],
            "steps {:,.0f} to {:,.0f}".format(*one["steps"]),
            f"{one['rows_per_step']:,.0f} rows x {one['max_seq_len']:,.0f}",
            f"{one['tokens']:,.0f} tokens",
            "epochs: " + " + ".join(f"{s['epochs']:.3g} of {s['name']}" for s in one["sources"]),
        )
        for one in stages
    ]


def _last(values: np.ndarray) -> float:
    return float(next(iter(values[np.isfinite(values)][::-1]), math.nan))


def _mean(values: np.ndarray, weights: np.ndarray) -> float:
    known = np.isfinite(values) & (weights > 0)
    return float(np.average(values[known], weights=weights[known])) if known.any() else math.nan


def smooth(y: np.ndarray, window: int) -> np.ndarray:
    """Centered moving mean that skips NaN; the window shrinks symmetrically at both ends."""
    total = np.concatenate(([0.0], np.cumsum(np.nan_to_num(y))))
    count = np.concatenate(([0], np.cumsum(np.isfinite(y))))
    index = np.arange(len(y))
    half = np.minimum(index, window // 2)
    low, high = index - half, np.minimum(len(y), index + half + 1)
    known = count[high] - count[low]
    return np.where(known > 0, (total[high] - total[low]) / np.maximum(1, known), np.nan)


def window_of(lines: int) -> int:
    """Lines in a moving mean."""
    return max(1, min(lines // 3, max(5, lines // 80)))


def smoothed_loss(run: Run) -> np.ndarray:
    """(kept lines,): the moving mean of the loss."""
    loss = run.column("loss")
    return smooth(loss, window_of(len(loss)))


def rank_figures(run: Run) -> tuple[int, list[tuple[str, str, str, str, str]]]:
    """Step of the last profile with several ranks; name, least, median, largest and its rank."""
    for event in reversed(run.events("profile")):
        rows = []
        for key, name, form in RANK_FIGURES:
            values = event["ranks"].get(key, [])
            if len(values) > 1:
                figures = map(form, (min(values), median(values), max(values)))
                rows.append((name, *figures, f"rank {values.index(max(values))}"))
        if rows:
            return event["step"], rows
    return 0, []


def describe(facts: Mapping[str, Any]) -> str:
    """`bfloat16, DeepSpeed ZeRO-2 on 2 processes (cpu)`, from the facts of a run_start."""
    world, backend, device = (facts.get(name) for name in ("world_size", "backend", "device"))
    names = {"deepspeed": f"DeepSpeed ZeRO-{facts.get('zero_stage')}", "ddp": "DDP"}
    on = f"on {formats.count(world, 'process', 'processes')}" if world is not None else ""
    where = (names.get(backend or "", backend), on, f"({device})" if device else "")
    return ", ".join(filter(None, (facts.get("dtype"), " ".join(filter(None, where)))))


def sparkline(values: np.ndarray, blocks: str) -> str:
    """The finite values as at most `SPARKLINE_WIDTH` blocks, then `first to last`."""
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return ""
    means = np.array([p.mean() for p in np.array_split(values, min(SPARKLINE_WIDTH, len(values)))])
    span = float(means.max() - means.min()) or 1.0
    heights = ((means - means.min()) / span * (len(blocks) - 1)).round().astype(int)
    return "".join(blocks[n] for n in heights) + f"  {values[0]:.2f} to {values[-1]:.2f}"
