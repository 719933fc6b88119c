"""`minimind tune`: measure which settings train the same run fastest on this machine.

A candidate is the run with some settings changed, such as {"zero": 1, "batch_size": 4}. The trials
are those of a sweep: the first steps of the run, each in a launch of its own, one at a time. One
setting is changed at a time from the best candidate so far, until no change is faster. The fastest
are repeated in turns, so that the result has a spread.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from minimind.architecture.costs import known_gpu, memory
from minimind.architecture.plan import GIB, fits, layout_of
from minimind.architecture.shape import shape_of
from minimind.config.deepspeed.adopt import is_shipped
from minimind.config.deepspeed.document import AUTO, MISSING, get, put, read_deepspeed_json
from minimind.config.deepspeed.keys import ACCUMULATION, BATCH, KEYS, MICRO_BATCH
from minimind.config.flags import ALONE, FLAGS
from minimind.config.launcher_env import Launch
from minimind.config.parse import build_config, build_parser, parse_flags, words_of
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG, RunConfig, deepspeed_files
from minimind.config.run_record import NAME, read_record
from minimind.errors import PREEMPTED, PeerError, TooFewRows, UsageError
from minimind.report.history import Run
from minimind.runtime.device import HOST, accelerator
from minimind.runtime.durable_files import write_whole
from minimind.runtime.environment import usable_cores
from minimind.runtime.terminal import aligned
from minimind.runtime.urls import masked
from minimind.sweep.run import Command, Runner, opened
from minimind.sweep.sweep_file import OWNED
from minimind.sweep.trial import DIVERGED, FAILED, PREFIX, WARM_UP, Progress, Result, Trial

METRIC = "tokens_per_second"
STEPS = 12  # measured ones of a trial, after the warm-up
LINE = 4  # steps of a step line on a device with a queue, which a line waits for
GAIN = 1.02  # a change that gains less is not kept
FINALISTS, REPEATS = 3, 3
SEARCH = 2 / 3  # of the time, after which only the fastest are repeated
SLOWEST, SHARE = 3.0, 0.1  # of the time of the run as given, and of all time: limit of a trial
WAITS = 0.02  # share of a step spent on waiting for rows from which num_workers is tried
NONE = "none"  # of zero: without DeepSpeed
# Settings of the DeepSpeed JSON, with the keys that get the value.
KEYS_OF = {
    "bucket_size": tuple(f"zero_optimization.{n}_bucket_size" for n in ("reduce", "allgather")),
    "grad_accum_dtype": ("data_types.grad_accum_dtype",),
}
# In the order in which they are tried: the first ones matter most.
SETTINGS = ("zero", "batch_size", "threads", "compile", "gradient_checkpointing", "num_workers")
SETTINGS += tuple(KEYS_OF)
ENVIRONMENT = ("NUM_PROCESSES", "CONFIG_FILE", "OMP_NUM_THREADS")  # of the launcher
Changes = dict[str, Any]


class Given:
    """The run that is tuned, as its first trial recorded it."""

    def __init__(self, flags: Mapping[str, Any], run_dir: Path) -> None:
        """flags: of every trial."""
        run = Run(run_dir)
        run.read()
        self.flags, self.facts = flags, run.starts[-1].facts
        self.numbers = read_record(run_dir / NAME)  # what was given, and what the start decided
        self.waits = run.column("data_ms").sum() > WAITS * run.column("step_ms").sum()  # for rows
        path = self.numbers.get("deepspeed_config", NONE)
        path = str(DEFAULT_DEEPSPEED_CONFIG) if path == NONE else path
        self.document, self.is_own = read_deepspeed_json(path), not is_shipped(path)
        # Rows of a step on the processes that --batch_size is for.
        self.rows = self.value("batch_size") * self.facts["accumulation_steps"]

    def value(self, name: str) -> Any:
        """The value as given; None for a key that the DeepSpeed JSON does not have."""
        if name in KEYS_OF:
            written = get(self.document, KEYS_OF[name][0])
            return None if written is MISSING else written
        if name == "threads":
            each = usable_cores() // self.facts["world_size"]
            return int(os.environ.get("OMP_NUM_THREADS") or max(1, each))
        if name == "zero":
            return NONE if self.facts["zero_stage"] is None else self.facts["zero_stage"]
        return self.numbers.get(name, FLAGS[name].default)

    def values(self) -> dict[str, list[Any]]:
        """The values that are tried of each setting: none where it makes no difference."""
        size, cores, now = self.facts["world_size"], usable_cores(), self.value("batch_size")
        on_cpu, is_half = self.facts["device"] == HOST.name, self.facts["dtype"] != "float32"
        divisors = (n for n in range(1, self.rows + 1) if self.rows % n == 0)
        # Without a JSON of the user's own, its optimizer and schedule would be lost.
        stages = [*([] if self.is_own else [NONE]), 0, 1, 2, 3]
        return {
            "zero": [] if self.facts["device"] in ALONE else stages,
            "batch_size": [n for n in divisors if max(n, now) / min(n, now) in (1, 2, 4, 8)],
            "threads": [1, max(1, cores // size), cores] if on_cpu else [],
            "compile": ["off", "on"],
            "gradient_checkpointing": [False] if on_cpu else [False, True],  # it saves memory only
            "num_workers": [0, 1, 2, 4] if self.waits else [],
            "bucket_size": [AUTO, 500_000, 500_000_000] if size > 1 else [],
            "grad_accum_dtype": ["fp32"] if is_half else [],  # a wider type loses nothing
        }

    def reduced(self, changes: Changes) -> Changes:
        """The changes that have an effect, in the order of the settings."""
        stage = str(changes.get("zero", self.value("zero")))
        return {
            name: changes[name]
            for name in SETTINGS
            if name in changes and changes[name] != self.value(name)
            if name not in KEYS_OF or stage in KEYS[KEYS_OF[name][0]].stages
        }

    def flags_of(self, changes: Changes, path: Path) -> dict[str, Any]:
        """The flags that are changed; a DeepSpeed JSON that is not shipped is written at `path`."""
        flags = {name: value for name, value in changes.items() if name in FLAGS}
        if "batch_size" in flags and self.value("global_batch_size") is None:
            flags["accumulation_steps"] = self.rows // flags["batch_size"]
        stage, document = changes.get("zero", self.value("zero")), deepcopy(self.document)
        if stage == NONE:
            return flags | ({"deepspeed_config": NONE} if "zero" in changes else {})
        put(document, "zero_optimization.stage", stage)
        for key in (BATCH, MICRO_BATCH, ACCUMULATION) if "batch_size" in changes else ():
            put(document, key, AUTO)  # the flags say it
        for name in changes.keys() & KEYS_OF.keys():
            for key in KEYS_OF[name]:
                put(document, key, changes[name])
        if "zero" not in changes and document == self.document:
            return flags
        shipped = {n for n, p in deepspeed_files().items() if read_deepspeed_json(p) == document}
        if not shipped:
            if not self.is_own and "optimizer" in self.flags:  # a shipped block gives way to it
                document.pop("optimizer", None)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, f"{json.dumps(document, indent=2)}\n".encode())
        return flags | {"deepspeed_config": min(shipped, default=str(path))}

    def refusal(self, flags: Mapping[str, Any]) -> str:
        """Why a candidate is not measured: what its start refuses, or what does not fit."""
        from minimind.train.start import rehearse  # torch

        size, device = self.facts["world_size"], self.facts["device"]
        try:
            named = {"deepspeed_config": self.numbers.get("deepspeed_config", NONE)}  # perhaps in
            run = build_config({**named, **flags}, "--{name}")  # the YAML of accelerate
            plan = rehearse(run, Launch(world_size=size, local_world_size=size))
        except (UsageError, TooFewRows) as error:
            return f"refused: {error}"
        gpu = known_gpu(str(self.facts.get("hardware", "")))
        room = HOST.memory() // size if device == HOST.name else gpu.memory * GIB if gpu else 0
        if not room or plan.run.hugging_face is not None:  # which plan does not count
            return ""
        needed = memory(shape_of(plan.run), layout_of(plan.run, size, plan.resolved.config, device))
        counted = f"{needed.total / GIB:.1f} of {room / GIB:.1f} GiB"
        return "" if fits(needed, room) else f"does not fit: minimind plan counts {counted}"


@dataclass(eq=False)
class Candidate:
    """Changed settings, and the measurements of their trials."""

    changes: Changes
    speeds: list[float] = field(default_factory=list)  # tokens/s: of the search, of the repeats
    mib: float = 0.0  # most of a process
    fault: str = ""  # why it cannot be chosen
    seconds: float = 0.0  # of its first trial

    @property
    def name(self) -> str:
        """`zero 1, batch_size 4`."""
        return ", ".join(f"{name} {value}" for name, value in self.changes.items()) or "as given"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the launcher."""
        threads = self.changes.get("threads")
        return {"OMP_NUM_THREADS": str(threads)} if threads else {}

    @property
    def speed(self) -> float:
        """Median of the repeats; only without any that by which the search chose the fastest."""
        return median(self.speeds[1:] or self.speeds)


class Search:
    """Which trials are run, in which order, and what they measured."""

    def __init__(self, runner: Runner, flags: Mapping[str, Any], minutes: float) -> None:
        self.runner, self.flags, self.seconds = runner, flags, 60 * minutes
        self.given: Given | None = None  # once the run as given has been measured
        self.first = Candidate({})  # as given
        self.candidates = {self.first.name: self.first}
        self.losses: dict[float, float] = {}  # that every candidate has to have, by step
        self._folders = {(*one.parameters.values(),): name for name, one in runner.results.items()}

    @property
    def able(self) -> list[Candidate]:
        """The candidates that can be chosen."""
        return [one for one in self.candidates.values() if one.speeds and not one.fault]

    @property
    def remaining(self) -> float:
        """Seconds."""
        return self.seconds - sum(one.seconds for one in self.runner.results.values())

    def trials(self, values: Mapping[str, Sequence[Any]] | None = None) -> Iterator[Trial]:
        """The trials that are not over, each when it is asked for.

        values: those that are tried of each setting, in place of all that may differ here.
        """
        yield from self.measure(self.first, 0)
        if not self.able:
            return
        given = self.given = Given(self.flags, self.runner.place / f"{PREFIX}0000")
        best, before = self.first, None
        while best is not before:
            before = best
            for name, every in (values or given.values()).items():
                for value in dict.fromkeys([given.value(name), *every]):
                    one = Candidate(given.reduced({**best.changes, name: value}))
                    yield from self.measure(self.candidates.setdefault(one.name, one), 0)
                fastest = max(self.able, key=lambda one: one.speed)
                best = fastest if fastest.speed > GAIN * best.speed else best
        ranked = sorted(self.able, key=lambda one: (one is not best, -one.speed))
        finalists = [*dict.fromkeys([*ranked[:FINALISTS], self.first])]
        for turn in range(1, REPEATS + 1) if len(finalists) > 1 else ():
            for one in finalists[:: 1 if turn % 2 else -1]:  # so that a drift is no difference
                yield from self.measure(one, turn)

    def measure(self, one: Candidate, turn: int) -> Iterator[Trial]:
        """Run the trial of a candidate, unless it is over or no time is left, and read it."""
        if one.fault or len(one.speeds) > turn:
            return
        key, limit, flags, refusal = (one.name, turn), self.remaining, {**self.flags}, ""
        if one.changes:
            limit = min(limit, max(SLOWEST * self.first.seconds, SHARE * self.seconds))
        found = self.runner.results.get(self._folders.get(key, ""))
        is_cut = found and found.state == "pruned" and found.seconds >= limit
        if not (is_cut or (found and found.is_over)):
            kept = self.seconds * (1 - SEARCH) if one.changes and not turn else one.seconds
            if self.remaining <= kept:
                return
            folder = self._folders.setdefault(key, f"{PREFIX}{len(self._folders):04d}")
            if self.given and one.changes:
                json_file = self.runner.place / folder / "deepspeed.json"
                flags |= self.given.flags_of(one.changes, json_file)
                refusal = "" if turn else self.given.refusal(flags)
            shown = {"settings": one.name, "turn": turn}
            yield Trial(
                folder, shown, flags, refusal, {"NUM_MACHINES": "1", **one.variables}, limit
            )
        self._read(one, turn, self.runner.results[self._folders[key]])

    def _read(self, one: Candidate, turn: int, result: Result) -> None:
        """Take over what a trial measured, or why it did not; its checkpoint is removed."""
        run = Run(self.runner.place / result.folder)
        shutil.rmtree(run.run_dir / "checkpoints", ignore_errors=True)
        one.seconds = one.seconds or result.seconds
        if result.state != "done":
            # A repeat that the end of all time cut off is no fault of the candidate.
            one.fault = result.reason if not turn or self.remaining > 0 else ""
            return
        run.read()
        one.speeds.append(result.metric)
        one.mib = max(one.mib, float(run.column("memory_mib")[-1]))
        is_exact = run.starts[-1].facts["dtype"] == "float32" and not self.flags.get("tf32")
        steps, losses = (run.column(name).tolist() for name in ("step", "loss"))
        for step, loss in zip(steps, losses, strict=True):
            wanted, rounding = self.losses.setdefault(step, loss), 1e-4 if is_exact else 5e-3
            if not abs(loss - wanted) <= rounding * abs(wanted):
                one.fault = f"other loss: {loss:.6g} at step {step:g}, not {wanted:.6g}"
                return

    def chosen(self) -> Candidate:
        """The fastest candidate; the run as given, unless all of its own trials were slower.

        One trial of the run as given has no spread: each of the other's has to be faster then.
        """
        best = max(self.able, key=lambda one: (len(one.speeds) > 1, one.speed))
        speed = best.speed if len(self.first.speeds) > 1 else min(best.speeds)
        return best if self.first.fault or speed > max(self.first.speeds) else self.first

    def conclude(self, argv: Sequence[str]) -> None:
        """Print the table and the command line to use; write tune.json and deepspeed.json."""
        place, given, best = self.runner.place, self.given, self.chosen()
        assert given is not None
        tokens = given.facts["tokens_per_step"]
        measured = [one for one in self.candidates.values() if one.speeds]
        measured.sort(key=lambda one: (bool(one.fault), -len(one.speeds[:2]), -one.speed))
        rows = [["settings", "ms/step", "tokens/s", "lowest", "highest", "trials", "MiB", ""]]
        for one in measured:
            figures = one.speed, min(one.speeds), max(one.speeds), len(one.speeds), one.mib
            cells = [f"{1e3 * tokens / one.speed:,.1f}", *(f"{value:,.0f}" for value in figures)]
            rows.append([one.name, *cells, "chosen" if one is best else "out" * bool(one.fault)])
        flags = vars(build_parser().parse_args(argv))
        flags |= given.flags_of(best.changes, place / "deepspeed.json")
        variables = {"NUM_PROCESSES": given.facts["world_size"], **best.variables}
        words = [*(f"{name}={value}" for name, value in variables.items()), "minimind launch"]
        command = f"{' '.join(words)} {shlex.join(map(masked, words_of(flags)))}"
        print(f"\n{aligned(rows, '<>>>>>><')}\n")
        faults = [one for one in self.candidates.values() if one.fault]
        print(*(f"{one.name}: {one.fault}\n" for one in faults), sep="", end="\n" * bool(faults))
        gain = best.speed / self.first.speed
        print(f"{best.name}: {gain:.2f} times the speed as given\n  {command}")
        if left := sum(not (one.speeds or one.fault) for one in self.candidates.values()):
            print(f"No time was left for {left} candidates; raise --minutes to continue.")
        known = [{"settings": one.name, **asdict(one)} for one in self.candidates.values()]
        content = {"chosen": best.name, "command": command, "candidates": known}
        write_whole(place / "tune.json", f"{json.dumps(content, indent=1)}\n".encode())


def trial_flags(run: RunConfig) -> dict[str, Any]:
    """The flags of every trial; raise UsageError for a run that cannot be tuned."""
    for name in (*OWNED, "stages"):
        if name not in ("out_dir", "resume") and getattr(run, name) != FLAGS[name].default:
            raise UsageError(
                f"{name} = {getattr(run, name)} ({run.sources[name]}): minimind tune measures the"
                " first steps of a run, all of one batch; remove it"
            )
    dropped = {name for name, flag in FLAGS.items() if flag.group == "output"}
    dropped |= {"config", "verify_interval", "on_corruption"}
    names = [name for name in FLAGS if run.is_explicit(name) and name not in dropped]
    line = LINE if run.device != HOST.name and accelerator().count() else 1
    return {
        **{name: getattr(run, name) for name in names},
        **{"resume": NONE, "async_save": False, "save_minutes": 0, "save_interval": 10**9},
        **{"eval_rows": 0, "log_interval": line, "stop_at_step": WARM_UP + STEPS},
    }


def end_of(status: int, progress: Progress, last_line: Callable[[], str]) -> dict[str, Any] | None:
    """The fields of a Result; None if the end does not depend on the flags.

    A crash may be for lack of memory.
    """
    if status in (0, PREEMPTED) and progress.steps >= WARM_UP + STEPS:
        return {"state": "done", "reason": "done"}
    if status == 0:
        text = f"ended at step {progress.steps}, and a trial takes {WARM_UP + STEPS} steps"
        return {"state": "pruned", "reason": text}
    if status not in (*FAILED, *DIVERGED, PeerError.status):
        return None
    return {"state": "failed", "reason": f"status {status}: {last_line()}", "exit_status": status}


TUNE = Command(
    "minimind tune",
    10**9,  # a candidate that fails is an answer
    "only --minutes may change",
    "raise --minutes, which count that time too, or change flags and give another --out_dir",
    is_launched=True,
    end_of=end_of,
)


def tune(argv: Sequence[str], place: Path, minutes: float) -> int:
    """Tune the run of the flags `argv` in the folder `place`; return the status."""
    run = parse_flags(argv)
    flags = trial_flags(run)
    environment = {name: os.environ.get(name) for name in ENVIRONMENT}
    common = {"flags": json.loads(json.dumps(flags)), "environment": environment}
    with opened(TUNE, METRIC, common, "the command", place, [run], 1) as runner:
        search = Search(runner, flags, minutes)
        runner.resume()
        status = runner.run(search.trials())
        if status == PREEMPTED or not search.able:
            return status or runner.without_result([*runner.results.values()])
        search.conclude(argv)
        return status
