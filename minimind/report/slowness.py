"""What holds a run back: the cause that costs the most time, from phase times of profiles or steps.

Imports no torch: `minimind report` computes the verdict of runs that recorded none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

from minimind.report.formats import PHASES, RECURRING
from minimind.report.history import Run, Start, read_configuration

COMPUTING = ("forward", "backward", "optimizer")
# Least shares of the step, or of the time, at which a cause is named. Reading, evaluation and
# checkpoints can be nearly free. A part of communication and of the update is inherent.
WAIT, PAUSE, COMPILE, COMMUNICATION, OPTIMIZER, HOST = 0.1, 0.1, 0.2, 0.3, 0.3, 0.3
SLOW, SPREADS = 0.1, 3.0  # above the median of the other ranks, and above their spread
FAR = 10  # times as long: a share of what is nearly nothing says little
AMORTIZED = 0.5  # share of a cost per update or per reduction that twice the rows save
MOST_WORKERS = 8  # more threads wait for the same disk, and for the interpreter


@dataclass(frozen=True)
class Finding:
    """What stands out: a kind, by which it is known to programs, and its sentences."""

    kind: str
    seen: str
    advice: str
    sure: str = "certain"
    figures: dict[str, float] = field(default_factory=dict)  # that a cause of slowness follows from
    saved: float = 0.0  # milliseconds per step that a run without that cause would save

    @property
    def text(self) -> str:
        """What is seen and what to do."""
        return "; ".join(filter(None, (self.seen, self.advice)))

    @property
    def counts(self) -> bool:
        """Whether it is more than possible."""
        return self.sure != "possible"


class Times:
    """Sums over the profiles of a start; the first, in which steps warm up, only if it is alone."""

    def __init__(self, profiles: Sequence[Mapping[str, Any]] = ()) -> None:
        self.profiles = self.steps = self.last_step = self.all_steps = 0
        self.compiling_ms = self.all_ms = 0.0  # sums over all profiles
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._ranks: defaultdict[str, list[float]] = defaultdict(list)
        for profile in profiles:
            self.add(profile)

    def add(self, profile: Mapping[str, Any]) -> None:
        """Add a `profile` event: means of rank 0, pauses in all, medians by rank."""
        if self.profiles == 1:
            self.steps, self._sums, self._ranks = 0, defaultdict(float), defaultdict(list)
        steps, ranks = int(profile["steps"]), profile["ranks"]
        self.profiles, self.last_step = self.profiles + 1, profile["step"]
        self.steps, self.all_steps = self.steps + steps, self.all_steps + steps
        spent = {name: profile[f"{name}_ms"] * steps for name in PHASES}
        spent |= {name: profile.get(f"{name}_ms", 0.0) for name in RECURRING}
        for name, ms in spent.items():
            self._sums[name] += ms
        for name, values in ranks.items():
            sums = self._ranks[name] or [0.0] * len(values)
            self._ranks[name] = [a + b * steps for a, b in zip(sums, values, strict=False)]
        # Medians leave out the step that compiles, means do not.
        usual = next(iter(ranks.get("forward_ms", ())), profile["forward_ms"])
        self.compiling_ms += max(0.0, profile["forward_ms"] - usual) * steps
        self.all_ms += sum(spent.values())

    def mean(self, name: str) -> float:
        """Milliseconds per step on rank 0."""
        return self._sums[name] / self.steps

    def by_rank(self, name: str) -> list[float]:
        """Usual milliseconds per step of each rank; empty where they were not recorded."""
        return [ms / self.steps for ms in self._ranks[f"{name}_ms"]]

    def usual(self, name: str) -> float:
        """Usual milliseconds per step on rank 0, without steps that compile or warm up."""
        return next(iter(self.by_rank(name)), self.mean(name))

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


@dataclass(frozen=True)
class Setting:
    """Layout and flags of a start, which decide what may be advised; 0 or empty where unknown."""

    world_size: int = 1
    zero_stage: int = 0  # also for DDP, which communicates like stage 0
    accumulation_steps: int = 1
    global_batch_size: int = 0  # rows of a step by that flag, which decides the accumulation
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
    fingerprints: int = 0
    async_save: bool = True
    device: str = ""
    dtype: str = ""
    compile: str = ""
    use_moe: bool = False
    model: str = ""  # hf:PLACE of one of transformers
    zero_update: str = ""  # who updates under ZeRO, as the start says it
    kernels: int = 0  # that the host launches in a step
    offloads: bool = False

    @property
    def updates_by_flag(self) -> bool:
        """Whether DeepSpeed's own path updates because --zero_update asks for it."""
        return self.zero_stage != 3 and self.zero_update == "by DeepSpeed (--zero_update)"

    @property
    def larger_micro_batches(self) -> str:
        """What gives a micro-batch more rows."""
        is_whole = self.global_batch_size and self.accumulation_steps == 1  # a process's share
        return "a larger --batch_size" + " and --global_batch_size" * bool(is_whole)

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


def slowest(times: Times, setting: Setting) -> Finding:
    """The cause that costs the most time per step, or `compute` if none is above its threshold."""
    found = [one for cause in CAUSES for one in cause(times, setting)]
    part = times.usual("forward") + times.usual("backward")
    seen = f"nothing stands out: forward and backward are {_share(part, times.step, 'the step')}"
    nothing = _cause("compute", part, times.step, 0.0, seen, "")
    return max(found, key=lambda one: one.saved, default=nothing)


class Verdicts:
    """The verdict on a start, profile after profile."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self._times, self._kind = setting, Times(), ""

    def after(self, profile: Mapping[str, Any], is_last: bool) -> Finding | None:
        """Add a profile; return the verdict if its kind is new or the profile is the last one."""
        self._times.add(profile)
        found = slowest(self._times, self._setting)
        if not is_last and (self._times.profiles == 1 or found.kind == self._kind):
            return None
        self._kind = found.kind
        return found


def verdict_of(run: Run) -> str:
    """The sentence on the last start that has a verdict or a profile; empty without any.

    Without --profile it follows from the step lines of the last start, which name no communication
    and no other rank; so there is none where nothing stands out.
    """
    for start in reversed(run.starts):
        if recorded := [e["text"] for e in start.events if e["event"] == "verdict"]:
            return recorded[-1]
        if profiles := [e for e in start.events if e["event"] == "profile" and _has_times(e)]:
            return slowest(Times(profiles), _setting_of(run, start)).text
    if not run.starts or (profile := _lines_as_profile(run)) is None:
        return ""
    found = slowest(Times([profile]), _setting_of(run, run.starts[-1]))
    return "" if found.kind == "compute" else found.text


def _has_times(profile: Mapping[str, Any]) -> bool:
    whole = sum(profile[f"{name}_ms"] for name in PHASES)
    return profile.get("step") is not None and profile["steps"] >= 1 and whole > 0


def _setting_of(run: Run, start: Start) -> Setting:
    configuration = read_configuration(run.run_dir)
    flags = {name: value for name, (value, _) in configuration.flags.items()}
    return Setting.read({**flags, **configuration.deepspeed, **start.facts})


def _lines_as_profile(run: Run) -> dict[str, Any] | None:
    """All step lines of the last start, without communication and ranks; None without lines."""
    start = run.starts[-1]
    steps, spent = start.last_step - start.first_step, run.spent([start])
    if not (start.lines and steps >= 1 and sum(spent[name] for name in PHASES) > 0):
        return None
    times = {f"{name}_ms": ms / steps if name in PHASES else ms for name, ms in spent.items()}
    return {"step": int(start.last_step), "steps": steps, **times, "ranks": {}}


def _waiting_for_rows(times: Times, setting: Setting) -> Iterator[Finding]:
    waits, step = times.by_rank("data"), times.step
    wait = max(times.mean("data"), *waits, 0.0)
    if not _is_large(wait, step, WAIT):
        return
    share, rank = _share(wait, step, "the step"), waits.index(max(waits)) if waits else 0
    others, workers = _without(waits, rank), setting.num_workers
    # Compare medians: the means of other ranks are unknown.
    if others and _is_large(waits[rank], step, WAIT) and median(others) < WAIT / 2 * step:
        seen = f"rank {rank} waits for rows for {share}, the others hardly"
        yield _cause("data", wait, step, wait, seen, "look at its disk", rank=rank)
        return
    seen = f"data-bound: {share} waits for rows"
    advice = _more_workers(wait, step, workers)
    yield _cause("data", wait, step, wait, seen, advice, num_workers=workers)


def _more_workers(wait: float, step: float, workers: int) -> str:
    """Advice by the number of threads whose reading together takes no longer than the rest."""
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


def _slow_rank(times: Times, setting: Setting) -> Iterator[Finding]:
    """A rank that computes longer than the others, which wait for it in collectives.

    Time in collectives is taken off. Without it the forward pass decides, which at stage 3 has
    collectives too.
    """
    own = forward = times.by_rank("forward")
    if comm := times.by_rank("comm"):
        parts = zip(*map(times.by_rank, COMPUTING), comm, strict=False)
        own = [max(0.0, f + b + o - c) for f, b, o, c in parts]
    if len(own) < 2 or (not comm and setting.zero_stage == 3):
        return
    rank = own.index(max(own))
    usual = median(_without(own, rank))
    excess, spread = own[rank] - usual, median(abs(ms - usual) for ms in _without(own, rank))
    if excess < max(SPREADS * spread, SLOW * usual):
        return
    if not _is_large(excess, times.step, SLOW / 2):
        return
    slow, other, phase = own[rank], usual, "computation"
    of_others = median(_without(forward, rank))
    if setting.zero_stage != 3 and _is_large(forward[rank] - of_others, excess, 0.5):
        slow, other, phase = forward[rank], of_others, "forward"
    than = f"rank {1 - rank}" if len(own) == 2 else "the median of the others"
    on_host = setting.device in ("", "cpu")
    advice = f"look at {'its cores' if on_host else 'its clock and what else uses its GPU'}"
    slower = f"{_percent(slow - other, other)} slower" if slow < FAR * other else "far slower"
    seen = f"rank {rank} is {slower} than {than} in {phase} ({slow:.1f} against {other:.1f} ms, of"
    seen += f" a step of {times.step:.1f} ms)"
    figures = {"rank": rank, "rank_ms": slow, "others_ms": other}
    yield _cause("rank", excess, times.step, excess, seen, advice, **figures)


def _communication(times: Times, setting: Setting) -> Iterator[Finding]:
    """Collectives as the rank that comes last sees them: the others wait for it in theirs."""
    comm, step = min(times.by_rank("comm"), default=0.0), times.step
    if setting.world_size < 2 or not _is_large(comm, step, COMMUNICATION):
        return
    share, saved = _share(comm, step, "the step"), comm * AMORTIZED
    seen = f"communication is {share}"
    stage, micro_batches = setting.zero_stage, setting.accumulation_steps
    # Stage 0 sends less, and is refused with float16 and with offloading.
    is_possible = setting.dtype != "float16" and not setting.offloads
    if setting.tensor_parallel > 1:
        seen = "communication, including both passes of tensor_parallel ="
        seen += f" {setting.tensor_parallel}, is {share}"
        advice = "remove --tensor_parallel if a micro-batch fits without it"
    elif stage >= 2 and micro_batches > 1:
        saved = comm * (1 - 1 / micro_batches)
        advice = f"stage 1, if it fits: it reduces gradients once a step, not {micro_batches} times"
    else:
        advice = setting.larger_micro_batches + ", or more --accumulation_steps" * (stage < 2)
        if setting.global_batch_size and stage < 2:
            advice = "a larger --global_batch_size"
        if stage in (1, 2) and micro_batches == 1 and is_possible:
            advice += ", or stage 0 if the model fits"
    yield _cause("communication", comm, step, saved, seen, advice)


def _optimizer(times: Times, setting: Setting) -> Iterator[Finding]:
    """The update, without the collectives that it may have at stages 1 to 3."""
    if setting.tensor_parallel > 1 and setting.zero_stage:
        return  # those of both passes cannot be told from those of the update
    comm = min(times.by_rank("comm"), default=0.0) if setting.zero_stage else 0.0
    update, step = times.usual("optimizer") - comm, times.step
    if not _is_large(update, step, OPTIMIZER):
        return
    flags = "--global_batch_size" if setting.global_batch_size else "--batch_size"
    flags += " or --accumulation_steps" * (not setting.global_batch_size)
    advice, saved = f"more rows a step: {flags}", update * AMORTIZED
    if setting.updates_by_flag:
        advice = f"--zero_update auto, or {advice}"
    if setting.offloads:
        advice = "remove offload_optimizer if the memory suffices, or take more rows a step"
        saved = update
    seen = f"the optimizer takes {_share(update, step, 'the step')}"
    yield _cause("optimizer", update, step, saved, seen, advice)


def _host(times: Times, setting: Setting) -> Iterator[Finding]:
    """Passes at whose end the GPU has done all that the host has launched."""
    host, step = times.usual("host"), times.step
    if setting.offloads or not _is_large(host, step, HOST):
        return  # what is moved to the host is waited for
    ways = [setting.larger_micro_batches]
    if setting.accumulation_steps > 1 and not setting.global_batch_size:
        ways = ["a larger --batch_size with fewer --accumulation_steps"]
    if setting.zero_stage == 3:
        ways.append("a lower ZeRO stage if the model fits")
    if setting.updates_by_flag:
        ways.insert(0, "--zero_update auto")
    divided = max(setting.tensor_parallel, setting.sequence_parallel) > 1
    is_compilable = not (setting.use_moe or divided or setting.model.startswith("hf:"))
    is_off = setting.compile == "off" and setting.device == "cuda" and setting.zero_stage != 3
    if is_off and is_compilable:
        ways.insert(0, "--compile on")
    launches = f"it launches about {setting.kernels:,} kernels a step, and " * (setting.kernels > 0)
    seen = f"the host is the limit: {launches}the GPU waits for it in passes that are"
    seen += f" {_share(host, step, 'the step')}"
    yield _cause("host", host, step, host * AMORTIZED, seen, ", or ".join(ways))


def _pauses(times: Times, setting: Setting) -> Iterator[Finding]:
    for name, (_, _, _, verb, flag) in RECURRING.items():
        pause, interval = times.mean(name), getattr(setting, flag)
        if not _is_large(pause, times.time, PAUSE):
            continue
        remedies = [f"--{flag} above {interval:,}"]
        if not times.has_due(interval, setting.total_steps):
            minutes = times.time * times.steps / 60e3
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
        seconds, whole = (ms * times.steps / 1e3 for ms in (pause, times.time))
        seen = f"{verb} {_share(seconds, whole, 'the time', 's')}"
        yield _cause(name, pause, times.time, pause, seen, " or ".join(remedies))


def _compiling(times: Times, setting: Setting) -> Iterator[Finding]:
    """Compiling is done once, so it is a cause only in a run that is over."""
    part, whole, steps = times.compiling_ms, times.all_ms, times.all_steps
    is_over = times.last_step >= setting.total_steps > 0
    if setting.compile == "on" and is_over and _is_large(part, whole, COMPILE):
        seen = f"compiling takes {_share(part / 1e3, whole / 1e3, 'the time', 's')}"
        advice = f"--compile off for a run of {steps:,} steps"
        yield _cause("compile", part, whole, part / steps, seen, advice)


CAUSES = (_waiting_for_rows, _slow_rank, _communication, _optimizer, _host, _pauses, _compiling)


def _cause(
    kind: str, part: float, whole: float, saved: float, seen: str, advice: str, **more: float
) -> Finding:
    figures = {"part_ms": part, "whole_ms": whole, "share": part / whole if whole > 0 else 0.0}
    return Finding(kind, seen, advice, figures=figures | more, saved=saved)


def _is_large(part: float, whole: float, threshold: float) -> bool:
    return whole > 0 and part > 0 and part >= threshold * whole


def _share(part: float, whole: float, of: str, unit: str = "ms") -> str:
    """`31 % of the step (12.4 of 40.0 ms)`."""
    return f"{_percent(part, whole)} of {of} ({part:.1f} of {whole:.1f} {unit})"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole > 0 else 0:.0f} %"


def _without(values: list[float], rank: int) -> list[float]:
    return values[:rank] + values[rank + 1 :]
