"""`minimind tune` chooses among made-up runs: processes that write steps of known speeds."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml

from minimind.architecture.costs import Layout, Memory, memory
from minimind.architecture.shape import Shape
from minimind.config.flags import FLAGS
from minimind.config.parse import parse_flags
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG, deepspeed_files
from minimind.config.run_record import ALWAYS, HEAD, with_sum
from minimind.runtime.process import StopRequest
from minimind.sweep import run, tune
from minimind.sweep.run import Runner
from minimind.sweep.trial import WARM_UP
from minimind.sweep.tune import METRIC, STEPS, TUNE, Given, Search, trial_flags
from tests.sweep.made import Killed

Flags = Mapping[str, Any]
REFUSAL = Given.refusal  # the real one
TOKENS, ROWS = 1024, 16  # of a step; of a step and process
NUMBERS: dict[str, Any] = {
    **{name: FLAGS[name].default for name in ALWAYS},
    **{"batch_size": 8, "accumulation_steps": 2, "compile": "off"},
    "deepspeed_config": str(DEFAULT_DEEPSPEED_CONFIG),
}
FACTS: dict[str, Any] = {
    **{"world_size": 2, "zero_stage": 2, "device": "cpu", "dtype": "float32"},
    **{"tokens_per_step": TOKENS, "accumulation_steps": 2},
}
WORDS = "--device cpu --dtype float32 --batch_size 8 --accumulation_steps 2".split()
BATCHES = {1: 0.4, 2: 0.7, 4: 1.2, 8: 1.0, 16: 0.9}  # speeds, of 10,000 tokens/s as given
STAGES = {"none": 1.5, 0: 1.1, 1: 1.05, 2: 1.0, 3: 0.8}


def stage_of(flags: Flags) -> Any:
    path = flags.get("deepspeed_config")
    if path in (None, "none"):
        return 2 if path is None else "none"
    file = Path(deepspeed_files().get(str(path), str(path)))
    return json.loads(file.read_text())["zero_optimization"]["stage"]


def speed_of(flags: Flags, environment: Mapping[str, str]) -> float:
    """Tokens/s. Without DeepSpeed, micro-batches of 16 rows are the best."""
    stage, rows = stage_of(flags), int(flags.get("batch_size", 8))
    gain = 1.6 if (stage, rows) == ("none", 16) else BATCHES[rows]
    threads = int(environment.get("OMP_NUM_THREADS", 1))
    compiled = 0.5 if flags.get("compile") == "on" else 1
    return 10_000 * STAGES[stage] * gain * compiled * {1: 1.0, 2: 1.1}.get(threads, 0.3)


class MadeRun:
    """A run of a minute, that is looked at once in it and once after it."""

    now: ClassVar[list[float]] = [0.0]  # the clock
    speed: Callable[..., float] = staticmethod(speed_of)
    noise: Callable[[int], float] = staticmethod(lambda number: 1.0)  # factor, by the start
    loss: Callable[..., float] = staticmethod(lambda flags, step: 7 - step / 100)
    ends: Callable[..., int] = staticmethod(lambda flags: 0)  # the status of a failure
    hangs: Callable[..., bool] = staticmethod(lambda flags: False)  # and hears no signal
    steps: int | None = None  # at which the run ends by itself
    kill_at: int | None = None  # starts until the command is killed
    stop_at: int | None = None  # starts until it gets a SIGTERM
    starts: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    kills: ClassVar[list[str]] = []

    def __init__(self, flags: Flags, environment: Mapping[str, str]) -> None:
        cls, self.place = type(self), Path(flags["out_dir"])
        cls.starts.append((self.place.name, {**flags}))
        self.status: int | None = None
        self.flags, self.environment, self.step = flags, environment, 0
        self.factor = cls.noise(len(cls.starts))
        record = yaml.safe_dump(NUMBERS)
        (self.place / "config.yaml").write_bytes(with_sum(f"{HEAD}\n{record}"))
        (self.place / "checkpoints").mkdir(exist_ok=True)
        self._write(event="run_start", step=0, **FACTS)

    def _write(self, **event: Any) -> None:
        with open(self.place / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"time": 0.0, **event}) + "\n")

    def poll(self) -> int | None:
        cls = type(self)
        cls.now[0] += 30.0
        if self.status is not None or cls.hangs(self.flags):
            return self.status
        if self.step and len(cls.starts) - 1 == cls.kill_at:
            raise Killed
        if (failure := cls.ends(self.flags)) or self.step:
            self.status = failure or (75 if cls.steps is None else 0)
            self._write(event="exit", step=self.step, status=self.status)
        while not failure and self.step < (cls.steps or self.flags["stop_at_step"]):
            self.step += 1
            value = cls.speed(self.flags, self.environment) * self.factor
            value *= 0.01 if self.step <= WARM_UP else 1
            numbers = {"loss": cls.loss(self.flags, self.step), METRIC: value}
            numbers |= {"memory_mib": 500.0, "data_ms": 0.0, "step_ms": 80.0}
            self._write(event="step", step=self.step, **numbers)
        return self.status

    def stop(self) -> None:
        self.status = None if type(self).hangs(self.flags) else 75

    def kill(self) -> None:
        type(self).kills.append(self.place.name)
        self.status = -signal.SIGKILL

    def last_line(self) -> str:
        return "the last line"


def made(**attributes: Any) -> type[MadeRun]:
    """A class of its own, whose starts are counted anew."""
    functions = ("speed", "noise", "loss", "ends", "hangs")
    own = {n: staticmethod(v) if n in functions else v for n, v in attributes.items()}
    return type("Made", (MadeRun,), {"starts": [], "kills": [], **own})


@pytest.fixture(autouse=True)
def _planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No candidate is refused, two cores are there, and each look at a run takes half a minute."""
    monkeypatch.setattr(tune, "usable_cores", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(Given, "refusal", lambda self, flags: "")
    clock = SimpleNamespace(monotonic=lambda: MadeRun.now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(run, "time", clock)


ALL = {"zero": ["none", 0, 1, 2, 3], "batch_size": [1, 2, 4, 8, 16], "threads": [1, 2]}
SOME = {"zero": ["none", 1, 2], "batch_size": [8, 16]}


def tuned(
    place: Path,
    process: type[MadeRun],
    values: Mapping[str, list[Any]] | None = None,
    minutes: float = 600.0,
) -> tuple[Search, int]:
    place.mkdir(parents=True, exist_ok=True)
    stop = StopRequest()

    def start(flags: Flags, environment: Mapping[str, str]) -> MadeRun:
        if len(process.starts) == process.stop_at:
            stop.record_signal(signal.SIGTERM)
        return process(flags, environment)

    runner = Runner(TUNE, METRIC, place, [{}], stop, start)
    search = Search(runner, trial_flags(parse_flags(WORDS)), minutes)
    runner.resume()
    return search, runner.run(search.trials(values))


def faults_of(search: Search) -> dict[str, str]:
    return {name: one.fault for name, one in search.candidates.items() if one.fault}


def test_planted_slow_settings_are_never_chosen(tmp_path: Path):
    process = made()
    search, status = tuned(tmp_path, process)  # all that may differ on a CPU
    assert (status, faults_of(search)) == (0, {})
    assert search.chosen().name == "zero none, batch_size 16, threads 2"
    assert search.chosen().speeds == pytest.approx([26_400.0] * 4)
    names = {name for one in search.candidates.values() for name in one.changes}
    assert names == {"zero", "batch_size", "threads", "compile"}  # the others are DeepSpeed's
    repeated = [one for one in search.candidates.values() if len(one.speeds) == 4]
    assert {one.name for one in repeated} >= {search.chosen().name, "as given"}
    assert len(repeated) == 4
    assert len(process.starts) == len(search.candidates) + 4 * 3


def test_the_batch_and_the_rows_of_a_step_stay_the_same(tmp_path: Path):
    process = made()
    tuned(tmp_path, process, ALL)
    for _, flags in process.starts:
        assert flags["batch_size"] * flags["accumulation_steps"] == ROWS
        assert (flags["eval_rows"], flags["resume"], flags["log_interval"]) == (0, "none", 1)
        assert flags["stop_at_step"] == WARM_UP + STEPS
    assert not [*tmp_path.glob("*/checkpoints")]


def test_a_candidate_that_hangs_is_killed_and_never_chosen(tmp_path: Path):
    process = made(hangs=lambda flags: stage_of(flags) == "none")
    search, status = tuned(tmp_path, process, ALL, minutes=60.0)
    # A tenth of an hour, which is more than three times the minute of the run as given.
    faults = faults_of(search)
    assert all("zero none" in name for name in faults)
    assert {*faults.values()} == {"stopped after 360 s, at step 0"}
    assert (status, process.kills[0], len(process.kills)) == (0, "trial-0001", len(faults))
    assert search.chosen().name == "zero 0, batch_size 4, threads 2"
    found = json.loads((tmp_path / "trial-0001" / "trial.json").read_text())
    assert (found["state"], found["seconds"]) == ("pruned", 450.0)  # with the grace


def test_a_run_as_given_that_hangs_ends_the_command_and_more_minutes_try_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    search, _ = tuned(tmp_path, made(hangs=lambda flags: True), SOME, minutes=5.0)
    assert not search.able
    assert search.runner.without_result([*search.runner.results.values()]) == 2
    assert "trial-0000 stopped after 300 s, at step 0; raise --minutes" in capsys.readouterr().err
    again = made()
    tuned(tmp_path, again, SOME, minutes=5.0)
    assert not again.starts
    search, status = tuned(tmp_path, again, SOME, minutes=600.0)
    assert (status, search.chosen().name) == (0, "zero none, batch_size 16")


def test_refused_and_too_large_candidates_are_told_and_never_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Given, "refusal", REFUSAL)
    monkeypatch.setattr(tune.HOST, "memory", lambda: 2 * 2**20)
    stages: list[int | None] = []

    def counted(shape: Shape, layout: Layout) -> Memory:
        stages.append(layout.stage)
        return memory(shape, layout)

    monkeypatch.setattr(tune, "memory", counted)
    process = made()
    values = {"bucket_size": ["auto", -5], "batch_size": [8, 16]}
    search, status = tuned(tmp_path, process, values)
    faults = faults_of(search)
    assert (status, faults.keys()) == (0, {"bucket_size -5", "batch_size 16"})
    assert faults["bucket_size -5"].startswith("refused: ")
    assert "minimind plan counts" in faults["batch_size 16"]
    assert stages == [2]  # the DeepSpeed JSON as given, which no flag names
    assert {flags["batch_size"] for _, flags in process.starts} == {8}
    assert search.chosen().name == "as given"


def test_a_candidate_with_other_losses_is_named_and_never_chosen(tmp_path: Path):
    def loss(flags: Flags, step: int) -> float:
        off = 1.01 if stage_of(flags) == "none" and step == 7 else 1 + 1e-6
        return off * (7 - step / 100)

    search, status = tuned(tmp_path, made(loss=loss), ALL)
    assert (status, search.chosen().name) == (0, "zero 0, batch_size 4, threads 2")
    assert faults_of(search)["zero none"] == "other loss: 6.9993 at step 7, not 6.93001"
    assert all("none" in name for name in faults_of(search))


def test_a_candidate_that_fails_is_told_and_never_chosen(tmp_path: Path):
    failures = {"none": 10, 0: 7, 3: 2}
    process = made(ends=lambda flags: failures.get(stage_of(flags), 0))
    search, status = tuned(tmp_path, process, {"zero": ["none", 0, 1, 2, 3]})
    assert (status, search.chosen().name) == (0, "zero 1")
    assert faults_of(search) == {
        f"zero {stage}": f"status {status}: the last line" for stage, status in failures.items()
    }


def test_a_run_as_given_that_fails_ends_the_command_with_its_status(tmp_path: Path):
    search, _ = tuned(tmp_path, made(ends=lambda flags: 3))
    assert search.runner.without_result([*search.runner.results.values()]) == 3
    search, status = tuned(tmp_path, made(), SOME)  # once it is corrected
    assert (status, search.chosen().name) == (0, "zero none, batch_size 16")


@pytest.mark.parametrize(("steps", "state"), [(WARM_UP + STEPS, "done"), (8, "pruned")])
def test_a_run_that_ends_by_itself_needs_the_steps_of_a_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, state: str
):
    process = made(steps=steps)
    search, _ = tuned(tmp_path, process, {"zero": [2]})
    results = [*search.runner.results.values()]
    assert [one.state for one in results] == [state]
    if state == "pruned":
        assert search.runner.without_result(results) == 2
        assert "at step 8, and a trial takes 16 steps; raise" in capsys.readouterr().err
        tuned(tmp_path, process, {"zero": [2]})
    assert len(process.starts) == 1  # with these flags it would end so again


def test_one_within_the_spread_of_the_given_settings_does_not_replace_them(tmp_path: Path):
    def speed(flags: Flags, environment: Mapping[str, str]) -> float:
        return 10_300.0 if stage_of(flags) == 1 else 10_000.0

    values = {"zero": [1, 2]}
    noise = made(speed=speed, noise=lambda number: 1.1 if number == 4 else 1.0)
    search, _ = tuned(tmp_path / "noise", noise, values)
    assert max(search.first.speeds) == pytest.approx(11_000.0)
    assert search.chosen() is search.first
    search, _ = tuned(tmp_path / "quiet", made(speed=speed), values)
    assert search.chosen().name == "zero 1"


def test_without_a_repeat_of_the_given_settings_each_trial_has_to_be_faster(tmp_path: Path):
    search, _ = tuned(tmp_path, made(), {"zero": [1, 2]})
    first, other = search.first, search.candidates["zero 1"]
    first.speeds = [10_000.0]
    for speeds, best in ([11_000.0, 10_500.0], other), ([9_000.0, 12_000.0], first):
        other.speeds = speeds
        assert search.chosen() is best


@pytest.mark.parametrize("at", [0, 1, 12])
@pytest.mark.parametrize("how", ["kill_at", "stop_at"])
def test_a_command_that_ended_goes_on_and_measures_nothing_twice(tmp_path: Path, at: int, how: str):
    whole, _ = tuned(tmp_path / "whole", made(), SOME)
    process = made(**{how: at})
    if how == "kill_at":
        with pytest.raises(Killed):
            tuned(tmp_path / "out", process, SOME)
    else:
        assert tuned(tmp_path / "out", process, SOME)[1] == 75
    interrupted, number = process.starts[-1][0], len(process.starts)
    setattr(process, how, None)
    search, status = tuned(tmp_path / "out", process, SOME)
    assert status == 0
    assert [(n, one.speeds) for n, one in search.candidates.items()] == [
        (n, one.speeds) for n, one in whole.candidates.items()
    ]
    names = [name for name, _ in process.starts]
    assert {name for name in names if names.count(name) > 1} == {interrupted}
    assert 0 < whole.remaining - search.remaining <= 60.0  # what the interrupted trial had taken
    tuned(tmp_path / "out", process, SOME)
    assert len(process.starts) == len(names) >= number


@pytest.mark.parametrize("minutes", [2.0, 4.0, 9.0, 15.0])
def test_the_trials_end_in_their_minutes_and_more_minutes_go_on(tmp_path: Path, minutes: float):
    """A trial takes a minute here; two thirds of the minutes are for the search."""
    process = made()
    search, status = tuned(tmp_path, process, ALL, minutes=minutes)
    assert status == 0
    assert search.remaining >= 0
    measured = [one for one in search.candidates.values() if one.speeds]
    assert len(measured) >= 2 * minutes / 3
    repeated = [one for one in measured if len(one.speeds) > 1]
    assert len(process.starts) == sum(len(one.speeds) for one in measured) <= minutes
    assert bool(repeated) == (minutes > 4)
    assert search.chosen() in (repeated or measured)
    before = len(process.starts)
    whole, _ = tuned(tmp_path, process, ALL)
    assert whole.chosen().name == "zero none, batch_size 16, threads 2"
    assert len({name for name, _ in process.starts}) == len(process.starts) > before


def test_the_table_the_command_and_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    process = made(ends=lambda flags: 10 * (stage_of(flags) == 3))
    values = {"zero": [1, 2, 3], "batch_size": [4, 8], "threads": [1, 2], "bucket_size": [500_000]}
    search, _ = tuned(tmp_path, process, values)
    search.conclude(WORDS)
    table, faults, command = capsys.readouterr().out.split("\n\n")[-3:]
    name = "zero 1, batch_size 4, threads 2"
    assert table.splitlines()[1].split("  ")[0] == name
    assert table.splitlines()[1].endswith("chosen")
    assert faults.splitlines()[0] == "zero 3: status 10: the last line"
    assert command.startswith(f"{name}: 1.39 times the speed as given\n")
    assert "NUM_PROCESSES=2 OMP_NUM_THREADS=2" in command
    assert command.endswith(
        "--device cpu --dtype float32 --batch_size 4 --accumulation_steps 4"
        " --deepspeed_config zero1\n"
    )
    found = json.loads((tmp_path / "tune.json").read_text())
    assert found["chosen"] == name
    (best,) = (one for one in found["candidates"] if one["settings"] == name)
    assert best["changes"] == {"zero": 1, "batch_size": 4, "threads": 2}
    assert len(best["speeds"]) == 4


def test_the_rows_of_a_global_batch_are_divided_into_other_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """10 rows on two processes: micro-batches of at most 4 rows are two, of 3 and 2 rows."""
    monkeypatch.setitem(NUMBERS, "global_batch_size", 10)
    monkeypatch.setitem(NUMBERS, "batch_size", 4)
    monkeypatch.setitem(NUMBERS, "accumulation_steps", 1)  # not given
    search, _ = tuned(tmp_path, made(speed=lambda flags, environment: 1e4), {"zero": [2]})
    given = search.given
    assert given
    assert given.values()["batch_size"] == [1, 2, 4, 8]
    assert given.flags_of({"batch_size": 8}, tmp_path / "json") == {"batch_size": 8}


def test_a_file_of_the_user_keeps_what_else_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own = tmp_path / "own.json"
    document = {"zero_optimization": {"stage": 2, "overlap_comm": False}, "train_batch_size": 32}
    own.write_text(json.dumps(document))
    monkeypatch.setitem(NUMBERS, "deepspeed_config", str(own))
    search, _ = tuned(tmp_path / "out", made(speed=lambda flags, environment: 1e4), SOME)
    given = search.given
    assert given
    assert given.values()["zero"] == [0, 1, 2, 3]
    assert given.flags_of({"compile": "on"}, tmp_path / "json") == {"compile": "on"}
    changes = {"zero": 1, "batch_size": 4, "bucket_size": 500_000, "grad_accum_dtype": "fp32"}
    flags = given.flags_of(changes, tmp_path / "json")
    assert flags["deepspeed_config"] == str(tmp_path / "json")
    zero = {"stage": 1, "overlap_comm": False}
    zero |= {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
    split = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert json.loads((tmp_path / "json").read_text()) == {
        **{"zero_optimization": zero, "data_types": {"grad_accum_dtype": "fp32"}},
        **dict.fromkeys(split, "auto"),
    }
