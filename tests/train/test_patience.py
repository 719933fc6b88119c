"""--patience: runs that end early, also killed and resumed, and on two processes; RUN/best."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import minimind.train as training
from minimind.checkpoint.directory import (
    Difference,
    published_checkpoints,
    read_manifest,
    step_directory,
    step_of,
)
from minimind.checkpoint.resume import Resumed, TrainState
from minimind.checkpoint.retention import record_validation, saved_in
from minimind.checkpoint.saver import Saver
from minimind.cli.compare import Compare
from minimind.cli.generate import Generate
from minimind.cli.main import main
from minimind.config.parse import parse_flags
from minimind.config.schedule import Schedule
from minimind.errors import CheckpointError
from minimind.report.findings import diagnose
from minimind.report.history import read_runs
from minimind.report.run_logger import RunLogger
from minimind.sweep.trial import Progress, end_of
from minimind.train import loop
from minimind.train.patience import Patience
from tests.alone import Alone
from tests.conftest import Launcher
from tools.runs import events

train: Any = training  # a package that is called like a function
FLAGS: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "device": "cpu", "dtype": "float32", "eval_rows": 8},
    **{"max_steps": 24, "save_minutes": 0, "val_fraction": 0.1, "learning_rate": 0.1},
    **{
        "accumulation_steps": 1,
        "warmup_steps": 0,
        "log_interval": 1,
        "eval_interval": 2,
        "keep_last": 9,
        "keep_best": 1,
    },
    # The validations of steps 8 and 10 are less than this better than that of step 6.
    **{"patience": 2, "min_delta": 0.2},
}
SHAPES: dict[str, dict[str, Any]] = {
    "constant": {"schedule": "constant"},
    "wsd": {"schedule": "wsd", "decay_steps": 5},
}
REASON = "ended early, as val_loss did not improve by 0.2 in 2 validations"


class Told(SimpleNamespace):
    """The part of a RunLogger that patience calls."""

    def __init__(self) -> None:
        self.total, self.events = 0, list[dict[str, Any]]()

    def end_at(self, total: int) -> None:
        self.total = total

    def event(self, name: str, **fields: Any) -> None:
        self.events.append({"event": name, **fields})

    def print(self, text: str) -> None:
        self.text = text


def patience(words: str, planned: Schedule) -> Patience:
    given = ["--dtype", "float32", "--keep_best", "1", *words.split()]
    return Patience(parse_flags(given), planned, Told())  # pyright: ignore[reportArgumentType]


CONSTANT = Schedule("constant", 1e-3, 0.1, 0, 100)
WSD = Schedule("wsd", 1e-3, 0.1, 20, 100, 30)


@pytest.mark.parametrize(
    ("words", "values", "ran_out"),
    [
        ("--patience 1", [3, 2, 2], 30),  # an equal value is none that is better
        ("--patience 2", [3, 2, 2.5, 1.9, 2, 2], 60),
        ("--patience 2", [3, 2.9, 2.8, 2.7, 2.6], None),
        ("--patience 2 --min_delta 0.25", [3, 2.9, 2.8, 2.7, 2.6], 30),
        # Slow progress adds up: it is compared with the last value that was an improvement.
        ("--patience 3 --min_delta 0.25", [3, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4, 2.3], None),
        ("--patience 2 --min_delta 0.5", [3, 2.5, 2, 1.5], None),  # as large as it is enough
        ("--patience 2", [math.nan, math.inf], 20),
        ("--patience 2", [math.nan, 3, math.nan, 2], None),
        ("--patience 1", [-0.25, -0.5, -0.4], 30),  # a score
        ("--patience 1", [3] * 11, 20),
        ("--patience 9", [3] * 10, None),  # the run is over
    ],
)
def test_validations_without_an_improvement_are_counted(
    words: str, values: list[float], ran_out: int | None
):
    found = patience(words, CONSTANT)
    told: Any = found.logger
    found.observe(0, -9.0)  # of --eval_at_start: no checkpoint has this step
    for number, value in enumerate(values, 1):
        found.observe(10 * number, value)
        found.observe(10 * number, value)  # as after a resume
    assert found.ran_out == ran_out
    assert found.schedule.total_steps == ran_out or found.planned is found.schedule
    assert [event["step"] for event in told.events] == [ran_out] * bool(ran_out)


@pytest.mark.parametrize(
    ("steps", "total"),
    [
        ((30, 40, 50), 50 + 30),  # the decay is as long as it was planned
        ((5, 10, 15), 20 + 30),  # not before the warm-up has ended
        ((50, 60, 70), 100),  # it decays already
        ((70, 80, 90, 100), 100),
    ],
)
def test_wsd_decays_when_patience_runs_out(steps: tuple[int, ...], total: int):
    found = patience("--patience 2", WSD)
    for step in steps:
        found.observe(step, 3.0)
    schedule = found.schedule
    assert schedule.total_steps == total
    start = total - 30
    before, after = schedule.lr_at(start - 1), schedule.lr_at(start)
    assert before == WSD.peak > after
    assert [schedule.lr_at(start + n) for n in range(30)] == [WSD.lr_at(70 + n) for n in range(30)]


def resumed(state: dict[str, Any] | None, changed: str = "") -> Resumed:
    changes = [Difference(changed, "x", 1, 2)] if changed else []
    manifest = {} if state is None else {"patience": state}
    return Resumed(TrainState(40), None, [], manifest, changes)


def test_a_checkpoint_has_what_a_resume_needs():
    found = patience("--patience 2", WSD)
    for step in (30, 40):
        found.observe(step, 3.0)
    state = found.state()
    again = found.restored(resumed(state), Alone())  # pyright: ignore[reportArgumentType]
    assert again == replace(found, value=again.value)
    again.observe(50, 3.0)
    told: Any = again.logger
    assert again.schedule.total_steps == told.total == 80
    # After a change it counts anew; a decay that has begun ends only with another schedule.
    ran_out, anew = {**state, "step": 40, "ran_out": 40}, (None, 0, None)
    told_again = (3.0, state["waited"], 40)
    for before, group, expected in (
        *((state, "batch", anew), (state, "schedule", anew)),
        *((ran_out, "batch", told_again), (ran_out, "schedule", anew)),
    ):
        after: Patience = found.restored(resumed(before, group), Alone())  # pyright: ignore[reportArgumentType]
        assert (after.best, after.waited, after.ran_out) == expected
    for wrong in ({"step": 41}, {"ran_out": 41}, {"waited": -1}, {"best": "x"}, {"more": 1}):
        with pytest.raises(CheckpointError, match="patience"):
            found.restored(resumed(state | wrong), Alone())  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def runs(
    cached: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Path]:
    """Unbroken runs by schedule and --save_interval."""
    found: dict[tuple[str, int], Path] = {}

    def run(shape: str, save_interval: int) -> Path:
        if (shape, save_interval) not in found:
            out_dir = found[shape, save_interval] = tmp_path_factory.mktemp(shape)
            assert train(flags(cached, shape, save_interval), out_dir=str(out_dir)) == 0
        return found[shape, save_interval]

    return run


def flags(cached: dict[str, Any], shape: str, save_interval: int, **more: Any) -> dict[str, Any]:
    own = {"deepspeed_config": "none", "save_interval": save_interval}
    return {**FLAGS, **SHAPES[shape], **own, **cached, **more}


def course(out_dir: Path) -> tuple[Any, ...]:
    """What a run did: lines, validations, the decision, its end, and the bytes of checkpoints."""
    lines = {e["step"]: (e["loss"], e["lr"], e["grad_norm"]) for e in events(out_dir, "step")}
    losses = {e["step"]: e["val_loss"] for e in events(out_dir, "eval")}
    end = events(out_dir, "exit")[-1]
    root = out_dir / "checkpoints"
    manifests = {step_of(path): read_manifest(path) for path in published_checkpoints(root)}
    files = {
        step: [one["sha256"] for one in manifest["files"] if "safetensors" in one["name"]]
        for step, manifest in manifests.items()
    }
    states = {step: manifest["patience"] for step, manifest in manifests.items()}
    return lines, losses, (end["step"], end["reason"]), files, states, saved_in(root)


def test_a_run_ends_when_patience_runs_out_and_keeps_the_best(
    runs: Callable[[str, int], Path],
    cached: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    end = (10, REASON)
    early = flags(cached, "constant", 4, log_interval=4, sample_interval=7)
    assert train(early, out_dir=str(tmp_path)) == 0
    out = capsys.readouterr().out
    (ran_out,) = events(tmp_path, "patience_ran_out")
    losses = {event["step"]: event["val_loss"] for event in events(tmp_path, "eval")}
    assert [*losses] == [2, 4, 6, 8, 10]
    facts = {"step": 10, "best": losses[6], "validations": 2, "total_steps": 10}
    assert ran_out.items() >= facts.items()
    # What is due at the last step is done at this one.
    assert [event["step"] for event in events(tmp_path, "step")] == [4, 8, 10]
    assert [event["step"] for event in events(tmp_path, "sample")] == [7, 10]
    saved = {one.step: one.val_loss for one in saved_in(tmp_path / "checkpoints")}
    assert saved == {10: losses[10], 8: losses[8], 4: losses[4]}
    (ended,) = events(tmp_path, "exit")
    assert (ended["status"], ended["step"], ended["reason"]) == (0, *end)
    assert REASON in out
    # Other commands tell it.
    (run,) = read_runs([tmp_path])
    assert run.outcomes(0.0) == [("done", REASON)]
    assert [one.kind for one in diagnose(run, 0.0)].count("ended_early") == 1
    assert end_of(0, Progress(tmp_path, "val_loss"), str) == {
        **{"state": "done", "reason": REASON, "exit_status": 0}
    }
    # The same command again has nothing to do.
    assert train(early, out_dir=str(tmp_path)) == 0
    assert [event["reason"] for event in events(tmp_path, "exit")] == [REASON, REASON]
    assert len(events(tmp_path, "step")) == 3
    # A longer schedule goes on, and counts anew.
    more = {**early, "allow_change": "schedule", "patience": 3}
    assert train(more, out_dir=str(tmp_path)) == 0
    assert events(tmp_path, "exit")[-1]["step"] == 18


def test_wsd_decays_before_the_end(runs: Callable[[str, int], Path], cached: dict[str, Any]):
    lines, losses, end, files, states, _ = course(runs("wsd", 4))
    assert end == (15, REASON)
    assert [*lines] == [*range(1, 16)]
    assert [lines[step][1] for step in (1, 10)] == [0.1, 0.1]
    assert [lines[step][1] for step in range(10, 16)] == sorted(
        (lines[step][1] for step in range(10, 16)), reverse=True
    )
    assert lines[15][1] == pytest.approx(0.01)
    assert [*losses] == [2, 4, 6, 8, 10, 12, 14, 15]
    assert [*files] == [15, 12, 8, 4]
    assert [states[step]["ran_out"] for step in (15, 12, 8, 4)] == [10, 10, None, None]


class Killed(BaseException):
    """As if the process had ended here."""


KILLS = [
    ("constant", 4, "eval", 4),  # the checkpoint of step 4 is saved, its validation is not known
    ("constant", 4, "validated", 8),  # it is logged, and not recorded
    ("constant", 4, "validated", 10),  # patience has run out, and the last step is not saved
    ("constant", 4, "saved", 10),
    ("constant", 4, "exit", 10),
    ("constant", 2, "eval", 10),  # the last step is saved before its validation
    ("constant", 2, "validated", 10),
    ("constant", 2, "compared", 10),  # the validation is recorded, and the run has not ended
    ("wsd", 4, "validated", 8),
    ("wsd", 4, "validated", 10),
    ("wsd", 4, "step", 13),  # in the decay
    ("wsd", 4, "eval", 15),
    ("wsd", 2, "eval", 10),
    ("wsd", 2, "validated", 10),
    ("wsd", 2, "step", 11),
    ("wsd", 2, "exit", 15),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("shape", "save_interval", "moment", "step"), KILLS)
def test_killed_and_resumed_it_ends_alike(
    shape: str,
    save_interval: int,
    moment: str,
    step: int,
    runs: Callable[[str, int], Path],
    cached: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    unbroken = runs(shape, save_interval)
    given = flags(cached, shape, save_interval, async_save=False)
    log, validated, compare = RunLogger.event, Saver.validated, loop.compare

    def event(self: RunLogger, name: str, **fields: Any) -> None:
        if (moment, step) == (name.removeprefix("checkpoint_"), fields.get("step")):
            raise Killed
        log(self, name, **fields)

    def recorded(self: Saver, at: int, value: float) -> None:
        if (moment, at) == ("validated", step):
            raise Killed
        validated(self, at, value)

    def compared(context: loop.RunContext, state: TrainState, value: float) -> None:
        compare(context, state, value)
        if (moment, state.step) == ("compared", step):
            context.saver.wait_for_validations()
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RunLogger, "event", event)
        patch.setattr(Saver, "validated", recorded)
        patch.setattr(loop, "compare", compared)
        with pytest.raises(Killed):
            train(given, out_dir=str(tmp_path))
    assert train(given, out_dir=str(tmp_path)) == 0
    assert course(tmp_path) == course(unbroken)


def test_begun_on_two_processes_and_ended_on_one(
    forked: Launcher, tmp_path: Path, runs: Callable[[str, int], Path]
):
    """The decision and the decay are those of one process from the start."""
    given = {**FLAGS, **SHAPES["wsd"], "save_interval": 4}
    words = " ".join(f"--{name} {value}" for name, value in {**given, "batch_size": 1}.items())
    first = forked.run(tmp_path, f"{words} --stop_at_step 12")
    assert first.status == 75, first.stderr
    (ran_out,) = events(tmp_path, "patience_ran_out")
    places = {"data_path": str(forked.corpus), "cache_dir": str(forked.cache)}
    assert train({**given, "deepspeed_config": "none", **places}, out_dir=str(tmp_path)) == 0
    found, one = course(tmp_path), course(runs("wsd", 4))
    assert found[2] == one[2]
    assert ran_out["step"] == 10
    for steps, expected in zip(found[:2], one[:2], strict=True):
        assert steps.keys() == expected.keys()
        for step, values in steps.items():
            assert values == pytest.approx(expected[step], rel=1e-3)


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize("stop", [7, 10, 13])
def test_stopped_on_two_processes_it_ends_alike(stop: int, forked: Launcher, tmp_path: Path):
    given = {**FLAGS, **SHAPES["wsd"], "save_interval": 4, "batch_size": 1}
    words = " ".join(f"--{name} {value}" for name, value in given.items())
    assert forked.run(tmp_path / "one", words).status == 0
    assert forked.run(tmp_path / "two", f"{words} --stop_at_step {stop}").status == 75
    assert forked.run(tmp_path / "two", words).status == 0
    unbroken, broken = course(tmp_path / "one"), course(tmp_path / "two")
    assert broken[:3] == unbroken[:3]
    assert broken[3][15] == unbroken[3][15]


def test_a_score_ends_a_run_whose_last_step_is_validated(
    cached: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    scored = {"eval_tasks": "bits_per_byte", "eval_tasks_interval": 2, "eval_tasks_limit": 4}
    more = {"keep_best_by": "bits_per_byte", "eval_interval": 5, "min_delta": 9.0, **scored}
    assert train(flags(cached, "constant", 2, **more), out_dir=str(tmp_path)) == 0
    scores = {e["step"]: e["tasks"]["bits_per_byte"]["value"] for e in events(tmp_path, "scores")}
    assert [*scores] == [2, 4, 6]
    assert [event["step"] for event in events(tmp_path, "eval")] == [5, 6]
    best = min(scores, key=lambda step: scores[step])
    newest, *_ = saved_in(tmp_path / "checkpoints")
    assert (newest.step, newest.value) == (6, scores[6])
    line = f"best: step {best}, bits_per_byte {scores[best]:.4f}"
    assert (line in capsys.readouterr().out) == (best != 6)


def test_the_best_of_a_run_is_exported_and_trained_on(
    runs: Callable[[str, int], Path],
    cached: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    out_dir = runs("constant", 2)
    root, best = out_dir / "checkpoints", str(out_dir / "best")
    one = flags(cached, "constant", 2)
    # The one that is the best is not the last.
    path = step_directory(root, 6)
    values = {place.step: place.val_loss or math.nan for place in saved_in(root)}
    record_validation(path, 4.0)
    try:
        more = {**one, "max_steps": 1, "patience": None, "min_delta": 0.0}
        assert train(more, init_from=best, out_dir=str(tmp_path / "tuned")) == 0
        (start,) = events(tmp_path / "tuned", "run_start")
        assert start["init_from"]["place"] == str(path)
        again = {**one, "max_steps": 7, "allow_change": "schedule"}
        capsys.readouterr()
        assert train(again, resume=best, out_dir=str(tmp_path / "again")) == 0
        (start,) = events(tmp_path / "again", "run_start")
        assert (start["step"], start["resume_from"]) == (6, str(path))
        words = ["--format", "minimind", "--out", str(tmp_path / "export")]
        assert main(["export", "--checkpoint", best, *words]) == 0
        assert str(path) in capsys.readouterr().out
        # A run that has nothing to do still says which is the best.
        assert train(one, out_dir=str(out_dir)) == 0
        line = f"best: step 6, validation loss 4.0000, {values[10] - 4:.4f} below the last"
        assert f"{line}; --checkpoint {best}" in capsys.readouterr().out
    finally:
        record_validation(path, values[6])


def test_places_that_are_not_the_best_of_a_run_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("best").mkdir()  # a folder of one's own
    places = ["s3://bucket/run/best", "out//a", "best", "absent/best", "hf:user/best"]
    assert Compare(place=places).checkpoint == places
    assert Generate(place=places[0]).checkpoint == places[0]
