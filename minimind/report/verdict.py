"""What holds a run back: one sentence and its figures, from phase times of profiles or steps.

Imports no torch: `minimind report` computes the verdict of runs that recorded none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

from minimind.report.history import PHASES, Run, Start, number, read_configuration, values_by_rank

COMPUTING = ("forward", "backward", "optimizer")
# Pauses that recur; garbage collection and traces do not.
RECURRING = ("checkpoint", "evaluate", "sample", "score", "verify")


class Period:
    """Sums over the profiles of a start; the first, in which steps warm up, only if it is alone."""

    def __init__(self) -> None:
        self.profiles = self.steps = self.last_step = self.all_steps = 0
        self.compiling_ms = self.all_ms = 0.0  # sums over all profiles
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._ranks: dict[str, list[float]] = {}

    def add(self, profile: Mapping[str, Any]) -> None:
        """Add a `profile` event: means of rank 0, pauses in all, medians by rank."""
        if self.profiles == 1:
            self.steps, self._sums, self._ranks = 0, defaultdict(float), {}
        steps, ranks = profile["steps"], profile["ranks"]
        self.profiles += 1
        self.steps += steps
        self.all_steps += steps
        self.last_step = profile["step"]
        means = {name: profile[f"{name}_ms"] for name in ("data", *COMPUTING)}
        pauses = {name: profile.get(f"{name}_ms", 0.0) for name in RECURRING}
        for name, ms in (*((name, mean * steps) for name, mean in means.items()), *pauses.items()):
            self._sums[name] += ms
        for name, values in ranks.items():
            before = self._ranks.get(name, [0.0] * len(values))
            self._ranks[name] = [a + b * steps for a, b in zip(before, values, strict=True)]
        # Medians leave out the step that compiles, means do not.
        usual = ranks.get("forward_ms", [means["forward"]])[0]
        self.compiling_ms += max(0.0, means["forward"] - usual) * steps
        self.all_ms += sum(means.values()) * steps + sum(pauses.values())

    def mean(self, name: str) -> float:
        """Milliseconds per step on rank 0."""
        return self._sums[name] / self.steps

    def by_rank(self, name: str) -> list[float]:
        """Usual milliseconds per step of each rank; empty where they were not recorded."""
        return [ms / self.steps for ms in self._ranks.get(f"{name}_ms", ())]

    def usual(self, name: str) -> float:
        """Usual milliseconds per step on rank 0, without steps that compile or warm up."""
        ranks = self.by_rank(name)
        return ranks[0] if ranks else self.mean(name)

    @property
    def step(self) -> float:
        """Milliseconds of a step: the mean wait for rows and the usual time of the rest.

        Rows of small steps are read in blocks, so that most steps wait for none.
        """
        return self.mean("data") + sum(map(self.usual, COMPUTING))

    @property
    def time(self) -> float:
        """Milliseconds of a step with its part of the pauses."""
        return self.step + sum(map(self.mean, RECURRING))

    def has_due(self, interval: int, total_steps: int) -> bool:
        """Whether a multiple of `interval` lies in the period, besides the last step of the run.

        What is done at the last step does not depend on the interval.
        """
        last = min(self.last_step, total_steps - 1) if total_steps else self.last_step
        return interval > 0 and last // interval > (self.last_step - self.steps) // interval


# Subject and verb of the sentence about a pause, and the flag of its interval.
PAUSE_ADVICE = {
    "checkpoint": ("checkpoints take", "save_interval"),
    "evaluate": ("evaluation takes", "eval_interval"),
    "sample": ("samples take", "sample_interval"),
    "score": ("scores take", "eval_tasks_interval"),
    "verify": ("checks for corruption take", "verify_interval"),
}
# Least shares of the step, or of the time, at which a cause is named. Reading, evaluation and
# checkpoints can be nearly free. A part of communication and of the update is inherent.
WAIT, PAUSE, COMPILE, COMMUNICATION, OPTIMIZER, HOST = 0.1, 0.1, 0.2, 0.3, 0.3, 0.3
SLOW, SPREADS = 0.1, 3.0  # above the median of the other ranks, and above their spread
FAR = 10  # times as long: a share of what is nearly nothing says little
AMORTIZED = 0.5  # share of a cost per update or per reduction that twice the rows save
MOST_WORKERS = 8  # more threads wait for the same disk, and for the interpreter


@dataclass(frozen=True)
class Setting:
    """Layout and flags of a start, which decide what may be advised; 0 or empty where unknown."""

    world_size: int = 1
    zero_stage: int = 0  # also for DDP, which communicates like stage 0
    accumulation_steps: int = 1
    tensor_parallel: int = 1
    sequence_parallel: int = 1
    num_workers: int = -1  # unknown
    total_steps: int = 0
    save_interval: int = 0
    save_minutes: float = 0.0
    eval_interval: int = 0
    eval_rows: int = 0  # also of auto
    sample_interval: int = 0
    eval_tasks_interval: int = 0
    eval_tasks_limit: int = 0
    verify_interval: int = 0
    async_save: bool = True
    device: str = ""
    dtype: str = ""
    compile: str = ""
    use_moe: bool = False
    model: str = ""  # hf:PLACE of one of transformers
    zero_update: str = ""  # who updates under ZeRO, as the start says it
    kernels: int = 0  # that the host launches in a step
    offloads: bool = False

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Setting:
        """The setting in flags, facts of run_start and DeepSpeed keys, as values or as text."""
        known = {
            field.name: _as_type_of(field.default, values[field.name])
            for field in fields(cls)
            if field.name in values
        }
        moved = [v for key, v in values.items() if key.endswith("offload_optimizer.device")]
        return cls(**{**known, "offloads": any("cpu" in str(device) for device in moved)})


def _as_type_of(default: Any, value: Any) -> Any:
    text = str(value)
    if isinstance(default, bool):
        return text.lower() == "true"
    if isinstance(default, str):
        return text
    try:
        return type(default)(float(text))
    except (ValueError, OverflowError):
        return default


@dataclass(frozen=True)
class Verdict:
    """One cause, in a sentence, with the figures that it follows from."""

    kind: str
    text: str
    figures: dict[str, float]
    saved: float = 0.0  # milliseconds per step that a run without the cause would save


class Verdicts:
    """The verdict on a start, profile after profile."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self._period, self._kind = setting, Period(), ""

    def after(self, profile: Mapping[str, Any], is_last: bool) -> Verdict | None:
        """Add a profile; return the verdict if its kind is new or the profile is the last one."""
        self._period.add(profile)
        result = verdict(self._period, self._setting)
        if not is_last and (self._period.profiles == 1 or result.kind == self._kind):
            return None
        self._kind = result.kind
        return result


def verdict(period: Period, setting: Setting) -> Verdict:
    """The cause that costs the most time per step, or `compute` if none is above its threshold."""
    found = [
        *_waiting_for_rows(period, setting),
        *_slow_rank(period, setting),
        *_communication(period, setting),
        *_optimizer(period, setting),
        *_host(period, setting),
        *_pauses(period, setting),
        *_compiling(period, setting),
    ]
    part = period.usual("forward") + period.usual("backward")
    text = f"nothing stands out: forward and backward are {_share(part, period.step, 'the step')}"
    nothing = Verdict("compute", text, _figures(part, period.step))
    return max(found, key=lambda one: one.saved, default=nothing)


def _waiting_for_rows(period: Period, setting: Setting) -> Iterator[Verdict]:
    waits, step = period.by_rank("data"), period.step
    wait = max(period.mean("data"), *waits, 0.0)
    if not _is_large(wait, step, WAIT):
        return
    share, figures = _share(wait, step, "the step"), _figures(wait, step)
    rank = waits.index(max(waits)) if waits else 0
    others = _without(waits, rank)
    # Compare medians: the means of other ranks are unknown.
    if others and _is_large(waits[rank], step, WAIT) and median(others) < WAIT / 2 * step:
        text = f"rank {rank} waits for rows for {share}, the others hardly; look at its disk"
        yield Verdict("data", text, {**figures, "rank": rank}, wait)
        return
    text = f"data-bound: {share} waits for rows; {_more_workers(wait, step, setting)}"
    yield Verdict("data", text, {**figures, "num_workers": setting.num_workers}, wait)


def _more_workers(wait: float, step: float, setting: Setting) -> str:
    """Advice by the number of threads whose reading together takes no longer than the rest."""
    workers = setting.num_workers
    if workers >= MOST_WORKERS:
        return f"the disk of the token files or the CPU is the limit, --num_workers is {workers}"
    if workers < 0:
        return "increase --num_workers"
    # One step is read in workers x step; without threads, in the time that it is waited for.
    reading, rest = workers * step if workers else wait, step - wait
    needed = math.ceil(reading / rest) if rest > 0 else MOST_WORKERS + 1
    if needed > MOST_WORKERS:
        return f"--num_workers {MOST_WORKERS}, and a faster disk for the token files"
    return f"--num_workers {max(needed, workers + 1)}"


def _slow_rank(period: Period, setting: Setting) -> Iterator[Verdict]:
    """A rank that computes longer than the others, which wait for it in collectives.

    Time in collectives is taken off. Without it the forward pass decides, which at stage 3 has
    collectives too.
    """
    forward, comm = period.by_rank("forward"), period.by_rank("comm")
    own = forward
    if comm:
        parts = zip(*map(period.by_rank, COMPUTING), comm, strict=True)
        own = [max(0.0, f + b + o - c) for f, b, o, c in parts]
    if len(own) < 2 or (not comm and setting.zero_stage == 3):
        return
    rank = own.index(max(own))
    usual = median(_without(own, rank))
    excess, spread = own[rank] - usual, median(abs(ms - usual) for ms in _without(own, rank))
    if excess < max(SPREADS * spread, SLOW * usual):
        return
    if not _is_large(excess, period.step, SLOW / 2):
        return
    slow, other, phase = own[rank], usual, "computation"
    of_others = median(_without(forward, rank))
    if setting.zero_stage != 3 and _is_large(forward[rank] - of_others, excess, 0.5):
        slow, other, phase = forward[rank], of_others, "forward"
    than = f"rank {1 - rank}" if len(own) == 2 else "the median of the others"
    on_host = setting.device in ("", "cpu")
    suspects = "its cores" if on_host else "its clock and what else uses its GPU"
    times = f"{slow:.1f} against {other:.1f} ms, of a step of {period.step:.1f} ms"
    slower = f"{_percent(slow - other, other)} slower" if slow < FAR * other else "far slower"
    text = f"rank {rank} is {slower} than {than} in {phase} ({times}); look at {suspects}"
    figures = {"rank": rank, "rank_ms": slow, "others_ms": other}
    yield Verdict("rank", text, {**figures, **_figures(excess, period.step)}, excess)


def _communication(period: Period, setting: Setting) -> Iterator[Verdict]:
    """Collectives as the rank that comes last sees them: the others wait for it in theirs."""
    comm, step = min(period.by_rank("comm"), default=0.0), period.step
    if setting.world_size < 2 or not _is_large(comm, step, COMMUNICATION):
        return
    if setting.tensor_parallel > 1:
        text = (
            f"communication, with that of tensor_parallel = {setting.tensor_parallel} in both"
            f" passes, is {_share(comm, step, 'the step')}; drop --tensor_parallel if a micro-batch"
            " fits without it"
        )
        yield Verdict("communication", text, _figures(comm, step), comm * AMORTIZED)
        return
    stage, micro_batches = setting.zero_stage, setting.accumulation_steps
    saved = comm * AMORTIZED
    if stage >= 2 and micro_batches > 1:
        saved = comm * (1 - 1 / micro_batches)
        advice = f"stage 1, if it fits, reduces gradients once a step, not {micro_batches} times"
    elif stage >= 2:
        advice = "a larger --batch_size"
    else:
        advice = "a larger --batch_size, or more --accumulation_steps"
    # Stage 0 sends less, and is refused with float16 and with offloading.
    is_possible = setting.dtype != "float16" and not setting.offloads
    if stage in (1, 2) and micro_batches == 1 and is_possible:
        advice += ", or stage 0 if the model fits"
    text = f"communication is {_share(comm, step, 'the step')}; {advice}"
    yield Verdict("communication", text, _figures(comm, step), saved)


def _optimizer(period: Period, setting: Setting) -> Iterator[Verdict]:
    """The update, without the collectives that it may have at stages 1 to 3."""
    if setting.tensor_parallel > 1 and setting.zero_stage:
        return  # those of both passes cannot be told from those of the update
    comm = min(period.by_rank("comm"), default=0.0) if setting.zero_stage else 0.0
    update, step = period.usual("optimizer") - comm, period.step
    if not _is_large(update, step, OPTIMIZER):
        return
    advice, saved = "more rows a step: --batch_size or --accumulation_steps", update * AMORTIZED
    if _updates_by_flag(setting):
        advice = f"--zero_update auto, or {advice}"
    if setting.offloads:
        advice, saved = (
            "drop offload_optimizer if the memory suffices, or take more rows a step",
            update,
        )
    text = f"the optimizer takes {_share(update, step, 'the step')}; {advice}"
    yield Verdict("optimizer", text, _figures(update, step), saved)


def _host(period: Period, setting: Setting) -> Iterator[Verdict]:
    """Passes at whose end the GPU has done all that the host has launched."""
    host, step = period.usual("host"), period.step
    if setting.offloads or not _is_large(host, step, HOST):
        return  # what is moved to the host is waited for
    ways = ["a larger --batch_size"]
    if setting.accumulation_steps > 1:
        ways = ["a larger --batch_size with fewer --accumulation_steps"]
    if setting.zero_stage == 3:
        ways.append("a lower ZeRO stage if the model fits")
    if _updates_by_flag(setting):
        ways.insert(0, "--zero_update auto")
    divided = max(setting.tensor_parallel, setting.sequence_parallel) > 1
    is_compilable = not (setting.use_moe or divided or setting.model.startswith("hf:"))
    is_off = setting.compile == "off" and setting.device == "cuda" and setting.zero_stage != 3
    if is_off and is_compilable:
        ways.insert(0, "--compile on")
    launches = f"it launches about {setting.kernels:,} kernels a step, and " * (setting.kernels > 0)
    text = (
        f"the host is the limit: {launches}the GPU waits for it in passes that are"
        f" {_share(host, step, 'the step')}; {', or '.join(ways)}"
    )
    yield Verdict("host", text, _figures(host, step), host * AMORTIZED)


def _updates_by_flag(setting: Setting) -> bool:
    """Whether DeepSpeed's own path updates because --zero_update asks for it."""
    return setting.zero_stage != 3 and setting.zero_update == "by DeepSpeed (--zero_update)"


def _pauses(period: Period, setting: Setting) -> Iterator[Verdict]:
    for name, (verb, flag) in PAUSE_ADVICE.items():
        pause = period.mean(name)
        interval = getattr(setting, flag)
        if not _is_large(pause, period.time, PAUSE):
            continue
        remedies = [f"--{flag} above {interval:,}"]
        if not period.has_due(interval, setting.total_steps):
            minutes = period.time * period.steps / 60e3
            if name != "checkpoint" or not 0 < setting.save_minutes < minutes:
                continue  # only at the end of the run, or at an interval that is not known
            remedies = [f"--save_minutes above {setting.save_minutes:g}"]
        if name == "checkpoint" and not setting.async_save:
            remedies.insert(0, "--async_save")
        if name == "evaluate" and setting.eval_rows > 1:
            remedies.append(f"--eval_rows below {setting.eval_rows:,}")
        if name == "evaluate" and not setting.eval_rows:
            remedies.append("a number of your own for --eval_rows")
        if name == "score" and setting.eval_tasks_limit > 1:
            remedies.append(f"--eval_tasks_limit below {setting.eval_tasks_limit:,}")
        share = _share(
            pause * period.steps / 1e3, period.time * period.steps / 1e3, "the time", "s"
        )
        text = f"{verb} {share}; {' or '.join(remedies)}"
        yield Verdict(name, text, _figures(pause, period.time), pause)


def _compiling(period: Period, setting: Setting) -> Iterator[Verdict]:
    """Compiling is done once, so it is a cause only in a run that is over."""
    is_over = period.last_step >= setting.total_steps > 0
    if setting.compile != "on" or not is_over:
        return
    if _is_large(period.compiling_ms, period.all_ms, COMPILE):
        seconds, whole = period.compiling_ms / 1e3, period.all_ms / 1e3
        text = f"compiling takes {_share(seconds, whole, 'the time', 's')}; --compile off"
        text += f" for a run of {period.all_steps:,} steps"
        figures = _figures(period.compiling_ms, period.all_ms)
        yield Verdict("compile", text, figures, period.compiling_ms / period.all_steps)


def _is_large(part: float, whole: float, threshold: float) -> bool:
    return whole > 0 and part > 0 and part >= threshold * whole


def _share(part: float, whole: float, of: str, unit: str = "ms") -> str:
    """`31 % of the step (12.4 of 40.0 ms)`."""
    return f"{_percent(part, whole)} of {of} ({part:.1f} of {whole:.1f} {unit})"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole > 0 else 0:.0f} %"


def _without(values: list[float], rank: int) -> list[float]:
    return values[:rank] + values[rank + 1 :]


def _figures(part: float, whole: float) -> dict[str, float]:
    return {"part_ms": part, "whole_ms": whole, "share": part / whole if whole > 0 else 0.0}


def verdict_of(run: Run) -> str:
    """The sentence on the last start that has a verdict or a profile; empty without any.

    Without --profile it follows from the step lines of the last start, which name no communication
    and no other rank; so there is none where nothing stands out.
    """
    for start in reversed(run.starts):
        recorded = [e["text"] for e in start.events if e["event"] == "verdict" and "text" in e]
        if recorded:
            return str(recorded[-1])
        if profiles := _profiles(start):
            return _judge(profiles, run, start).text
    if not run.starts or (lines := _step_lines(run.starts[-1])) is None:
        return ""
    result = _judge([lines], run, run.starts[-1])
    return "" if result.kind == "compute" else result.text


def _judge(profiles: Sequence[Mapping[str, Any]], run: Run, start: Start) -> Verdict:
    period, configuration = Period(), read_configuration(run.run_dir)
    for profile in profiles:
        period.add(profile)
    flags = {name: value for name, (value, _) in configuration.flags.items()}
    return verdict(period, Setting.read({**flags, **configuration.deepspeed, **start.facts}))


def _profiles(start: Start) -> list[dict[str, Any]]:
    """The `profile` events with the ranks of the last one; malformed ones are left out."""
    profiles = [_profile(event) for event in start.events if event["event"] == "profile"]
    whole = [profile for profile in profiles if profile is not None]
    shapes = [{name: len(values) for name, values in profile["ranks"].items()} for profile in whole]
    return [profile for profile, shape in zip(whole, shapes, strict=True) if shape == shapes[-1]]


def _profile(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """Its numbers; None if the steps or the time of a phase are missing."""
    step, steps = (number(event.get(name), 0.0) for name in ("step", "steps"))
    means = {f"{name}_ms": number(event.get(f"{name}_ms")) for name in PHASES}
    if steps < 1 or not all(ms >= 0 for ms in means.values()):
        return None
    pauses = {f"{name}_ms": max(0.0, number(event.get(f"{name}_ms"), 0.0)) for name in RECURRING}
    ranks = {
        f"{name}_ms": [
            max(0.0, ms) for ms in values_by_rank(event.get("ranks"), f"{name}_ms").values()
        ]
        for name in (*PHASES, "comm", "host")
    }
    size = max(map(len, ranks.values()))
    if not all(len(ranks[name]) == size for name in means):
        ranks = {}
    ranks = {name: values for name, values in ranks.items() if size and len(values) == size}
    return {"step": int(step), "steps": int(steps), **means, **pauses, "ranks": ranks}


def _step_lines(start: Start) -> dict[str, Any] | None:
    """All step lines as one profile, without communication and ranks; None without lines."""
    steps, spent = start.last_step - start.first_step, start.milliseconds()
    if not (math.isfinite(steps) and steps >= 1 and sum(spent[name] for name in PHASES) > 0):
        return None
    means = {f"{name}_ms": max(0.0, spent[name]) / steps for name in PHASES}
    pauses = {f"{name}_ms": max(0.0, spent[name]) for name in RECURRING}
    return {"step": int(start.last_step), "steps": int(steps), **means, **pauses, "ranks": {}}
