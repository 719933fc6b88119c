"""Trials are proposed, pruned, recorded and continued; processes are stand-ins."""

from __future__ import annotations

import json
import os
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from minimind.checkpoint.run_folder import lock_out_dir
from minimind.cli.main import main
from minimind.config.run_config import RunConfig
from minimind.errors import StorageError
from minimind.runtime.drafts import draft_of
from minimind.runtime.process import StopRequest
from minimind.sweep import run
from minimind.sweep.trial import Result, best_of, read_results
from tests.sweep.made import CONTENT, Killed, made_process, sweep_in, write_sweep

GRID: dict[str, Any] = {
    "sampler": "grid",
    "trials": None,
    "dimensions": {
        "learning_rate": ["1e-3", "1e-2"],
        "batch_size": {"low": 2, "high": 7, "step": 2},
    },
}


def test_every_trial_is_a_run_in_a_folder_and_the_lowest_metric_is_the_best(tmp_path: Path):
    process = made_process()
    status, rows = sweep_in(tmp_path / "out", process, pruner="none")
    assert status == 0
    assert [row.folder for row in rows] == [f"trial-{n:04d}" for n in range(6)]
    assert process.starts == [row.folder for row in rows]
    assert {row.state for row in rows} == {"done"}
    best = best_of(rows)
    assert best
    assert best.metric == min(row.metric for row in rows)
    assert [*best.curve] == [10, 20, 30, 40]
    assert best.curve[40] == best.metric


@pytest.mark.long
def test_bad_trials_are_stopped_by_the_median_of_the_others(tmp_path: Path):
    status, rows = sweep_in(tmp_path / "out", made_process(), trials=12, sampler="random")
    assert status == 0
    pruned = [row for row in rows if row.state == "pruned"]
    assert pruned
    for row in pruned:
        assert row.steps == max(row.curve) < 40
        finished = [one.curve for one in rows if one.state == "done" and one.folder < row.folder]
        values = sorted(curve[row.steps] for curve in finished)
        assert row.metric > values[(len(values) - 1) // 2]
    assert all(row.folder >= "trial-0004" for row in pruned)  # pruner_startup_trials


def test_the_pruner_waits_for_its_first_trials_and_steps(tmp_path: Path):
    limits: dict[str, Any] = {"pruner_startup_trials": 2, "pruner_warmup_steps": 30}
    _, rows = sweep_in(tmp_path / "out", made_process(), trials=8, sampler="random", **limits)
    pruned = [row for row in rows if row.state == "pruned"]
    assert pruned
    assert {row.steps for row in pruned} <= {30, 40}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("sampler", "looks"), [("tpe", 1), ("tpe", 44), ("random", 12), ("grid", 12), ("grid", 28)]
)
def test_a_killed_sweep_goes_on_with_the_same_trials(tmp_path: Path, sampler: str, looks: int):
    # More trials than the 10 that TPE draws at random.
    changes = GRID if sampler == "grid" else {"sampler": sampler, "trials": 13}
    _, whole = sweep_in(tmp_path / "whole", made_process(), **changes)
    process = made_process(kill_at=looks)
    with pytest.raises(Killed):
        sweep_in(tmp_path / "out", process, **changes)
    interrupted = process.starts[-1]
    process.kill_at = None
    status, rows = sweep_in(tmp_path / "out", process, **changes)
    assert status == 0
    assert process.starts.count(interrupted) == 2
    assert len(process.starts) == len(whole) + 1
    # One that was killed as it was to be pruned may get to its next validation.
    assert [row for row in rows if row.folder != interrupted or row.state == "done"] == [
        row for row in whole if row.folder != interrupted or row.state == "done"
    ]
    assert [(row.folder, row.parameters, row.state) for row in rows] == [
        (row.folder, row.parameters, row.state) for row in whole
    ]


def test_a_trial_that_ended_before_it_could_be_recorded_is_not_started_again(tmp_path: Path):
    process = made_process(kill_at=8)
    with pytest.raises(Killed):
        sweep_in(tmp_path / "out", process, pruner="none")
    log = tmp_path / "out" / "trial-0001" / "metrics.jsonl"
    last = {"event": "eval", "step": 40, "val_bpb": 1.5}, {"event": "exit", "step": 40, "status": 0}
    with open(log, "a") as file:
        file.writelines(f"{json.dumps(event)}\n" for event in last)
    process.kill_at = None
    status, rows = sweep_in(tmp_path / "out", process, pruner="none")
    assert (status, rows[1].state, rows[1].metric) == (0, "done", 1.5)
    assert process.starts == [f"trial-{n:04d}" for n in range(6)]


def test_a_kill_between_two_files_loses_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """At each write of trial.json, before it and after it."""
    _, whole = sweep_in(tmp_path / "whole", made_process(), trials=3)
    write, out = Result.write, tmp_path / "out"
    for at in range(6):
        for is_written in (False, True):
            calls = count()

            def killed(one: Result, place: Path, at=at, is_written=is_written, calls=calls) -> None:
                is_now = next(calls) == at
                if is_written or not is_now:
                    write(one, place)
                if is_now:
                    raise Killed

            process = made_process()
            with monkeypatch.context() as patch:
                patch.setattr(Result, "write", killed)
                with pytest.raises(Killed):
                    sweep_in(out, process, trials=3)
            assert sweep_in(out, process, trials=3) == (0, whole)
            assert len(process.starts) <= 4
            shutil.rmtree(out)


def test_a_sweep_that_is_done_starts_nothing_and_may_grow(tmp_path: Path):
    process = made_process()
    _, rows = sweep_in(tmp_path / "out", process, trials=3)
    assert sweep_in(tmp_path / "out", process, trials=3) == (0, rows)
    status, more = sweep_in(tmp_path / "out", process, trials=5)
    assert status == 0
    assert more[:3] == rows
    assert len(process.starts) == len(more) == 5


@pytest.mark.parametrize("sampler", ["random", "grid"])
def test_a_range_whose_step_leaves_one_value_has_that_value(tmp_path: Path, sampler: str):
    one = {"weight_decay": {"low": 0.1, "high": 0.2, "step": 0.5}, "learning_rate": ["1e-2"]}
    changes = {"sampler": sampler, "trials": 1, "dimensions": one}
    status, (row,) = sweep_in(tmp_path / "out", made_process(), **changes)
    assert (status, row.parameters["weight_decay"]) == (0, 0.1)


def test_a_grid_is_every_combination_once(tmp_path: Path):
    _, rows = sweep_in(tmp_path / "out", made_process(), pruner="none", **GRID)
    found = [(row.parameters["learning_rate"], row.parameters["batch_size"]) for row in rows]
    assert found == [(rate, size) for rate in ("1e-3", "1e-2") for size in (2, 4, 6)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("stop_status", [75, -15, 130])
def test_a_stop_asks_every_trial_to_save_and_the_next_start_goes_on(
    tmp_path: Path, stop_status: int
):
    process = made_process(kill_at=3, stop_status=stop_status)
    with pytest.raises(Killed):
        sweep_in(tmp_path / "out", process, parallel=2)
    process.kill_at, process.now = None, 0
    stop = StopRequest()
    process.stop_after = stop
    status, rows = sweep_in(tmp_path / "out", process, parallel=2, stop=stop)
    assert status == 75
    assert [row.state for row in rows] == ["interrupted", "interrupted"]
    process.stop_after, process.stop_status = None, 75
    status, rows = sweep_in(tmp_path / "out", process, parallel=2)
    assert status == 0
    assert len(rows) == 6
    assert {row.state for row in rows} <= {"done", "pruned"}


def test_a_trial_that_is_pruned_before_it_listens_to_signals_is_pruned(tmp_path: Path):
    process = made_process(stop_status=-15)
    status, rows = sweep_in(tmp_path / "out", process, trials=12, sampler="random")
    assert status == 0
    assert {row.state for row in rows} == {"done", "pruned"}


def flags_of(text: Path) -> dict[str, Any]:
    return {**CONTENT["flags"], "data_path": str(text)}


def test_a_second_sweep_in_the_folder_is_refused(tmp_path: Path, corpus: Path, capsys: Any):
    path, out = write_sweep(tmp_path, flags=flags_of(corpus)), tmp_path / "out"
    with lock_out_dir(out):
        assert main(["sweep", str(path), "--out_dir", str(out)]) == 8
    assert f"out_dir {out} is in use by process {os.getpid()}" in capsys.readouterr().err


def test_a_folder_in_which_a_sweep_has_just_begun_is_in_use_and_not_foreign(
    tmp_path: Path, corpus: Path, capsys: Any
):
    path, out = write_sweep(tmp_path, flags=flags_of(corpus)), tmp_path / "out"
    with lock_out_dir(out, "--out_dir"):
        draft_of(out / run.ACCEPTED).touch()
        assert main(["sweep", str(path), "--out_dir", str(out)]) == 8
    assert "is in use by process" in capsys.readouterr().err


def test_a_text_that_is_not_there_is_named_before_the_first_trial(tmp_path: Path, capsys: Any):
    missing, out = tmp_path / "no.jsonl", tmp_path / "out"
    path = write_sweep(tmp_path, flags=flags_of(missing))
    assert main(["sweep", str(path), "--out_dir", str(out)]) == 3
    assert f"{missing}: there is no such file" in capsys.readouterr().err
    assert not out.exists()


def test_a_combination_that_its_start_would_refuse_is_not_started(tmp_path: Path, capsys: Any):
    flags = {"max_tokens": "1e4", "eval_interval": 10, "device": "cpu"}
    dimensions = {"learning_rate": ["1e-2"], "batch_size": ["4", "400", "40", "8"]}
    process = made_process()
    grid = {"sampler": "grid", "trials": None}
    status, rows = sweep_in(tmp_path / "out", process, flags=flags, dimensions=dimensions, **grid)
    assert status == 0
    assert process.starts == ["trial-0000", "trial-0003"]
    assert [row.state for row in rows] == ["done", "failed", "failed", "done"]
    assert "refused: max_tokens = 10000" in rows[1].reason
    assert "trial-0001: refused: max_tokens = 10000" in capsys.readouterr().out


@pytest.mark.parametrize("rows", [["400000", "8"], ["8", "400000"]])
def test_more_rows_than_the_text_has_end_only_their_trial(
    tmp_path: Path, prepared: Path, rows: list[str]
):
    process = made_process()
    changes = {"flags": flags_of(prepared), "sampler": "grid", "trials": None}
    dimensions = {"learning_rate": ["1e-2"], "batch_size": rows}
    status, found = sweep_in(tmp_path / "out", process, dimensions=dimensions, **changes)
    assert status == 0
    assert [row.state for row in found] == ["failed" if n == "400000" else "done" for n in rows]
    assert len(process.starts) == 1


def test_a_trial_whose_folder_is_cut_is_started_and_may_be_tried_again(
    tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
):
    data = tmp_path / "data"
    shutil.copytree(prepared, data)
    shard = next(data.glob("train-*.bin"))
    out = tmp_path / "out"
    process = made_process(statuses={"trial-0000": 3})
    monkeypatch.setattr(run, "TrialProcess", process)
    monkeypatch.setattr(StopRequest, "listen", lambda _: None)
    path = write_sweep(tmp_path, trials=1, flags=flags_of(data), metric="val_bpb")
    shard.write_bytes(b"")
    monkeypatch.setattr(run, "first_config", lambda *_: RunConfig(data_path=(str(data),)))
    words = ["sweep", str(path), "--out_dir", str(out)]
    assert (main(words), process.starts) == (3, ["trial-0000"])
    reasons = [row.reason for row in read_results(out, "val_bpb").values()]
    assert reasons == ["status 3: the last line of trial-0000"]
    process.statuses = {}
    assert main(words) == 0
    assert [row.state for row in read_results(out, "val_bpb").values()] == ["done"]


PARAMETERS = (  # of trial.json, that no trial of CONTENT has
    *({}, {"learning_rate": 0.01}, {"learning_rate": 0.01, "batch_size": "2", "dim": "8"}),
    *({"learning_rate": 5.0, "batch_size": "2"}, {"learning_rate": 0.01, "batch_size": 2}),
    {"learning_rate": [0.01], "batch_size": "2"},
)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"parameters": 1}', "\x00" * 80),
        *(json.dumps({"parameters": one, "state": "interrupted"}) for one in PARAMETERS),
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, content: str):
    sweep_in(tmp_path / "out", made_process(), trials=1)
    path = tmp_path / "out" / "trial-0000" / "trial.json"
    path.write_text(content)
    with pytest.raises(StorageError, match=rf"^{path}: .*; remove {path.parent}, and the trial is"):
        sweep_in(tmp_path / "out", made_process(), trials=1)


@pytest.mark.parametrize("lost", ["trial.json", "metrics.jsonl"])
def test_a_trial_without_one_of_its_two_files_is_named(tmp_path: Path, lost: str):
    out, trial = tmp_path / "out", tmp_path / "out" / "trial-0001"
    sweep_in(out, made_process(), trials=3)
    (trial / lost).unlink()
    with pytest.raises(StorageError, match=rf"^{trial / lost}: .*; remove {trial}, and the trial"):
        sweep_in(out, made_process(), trials=4)


def test_a_copy_of_a_trial_is_no_trial(tmp_path: Path):
    out = tmp_path / "out"
    _, rows = sweep_in(out, made_process(), trials=2)
    shutil.copytree(out / "trial-0001", out / "trial-0001-before")
    assert [*read_results(out, "val_bpb")] == [row.folder for row in rows]


def test_a_trial_whose_folder_is_removed_is_run_again(tmp_path: Path):
    _, rows = sweep_in(tmp_path / "out", made_process(), trials=3)
    shutil.rmtree(tmp_path / "out" / "trial-0001")
    process = made_process()
    assert sweep_in(tmp_path / "out", process, trials=3)[0] == 0
    assert process.starts == ["trial-0001"]
    found = read_results(tmp_path / "out", "val_bpb")
    assert [*found] == [row.folder for row in rows]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["a?b", "a%41b", "a#b", "a{b}", "a @:x", "ü&=;", "?", "%(x)s"])
def test_a_sweep_in_a_folder_of_any_name_goes_on(tmp_path: Path, name: str):
    out = tmp_path / name
    with pytest.raises(Killed):
        sweep_in(out, made_process(kill_at=3), pruner="none", trials=2)
    status, rows = sweep_in(out, made_process(), pruner="none", trials=2)
    assert (status, [row.state for row in rows]) == (0, ["done", "done"])
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_a_trial_that_someone_else_stops_is_continued(tmp_path: Path):
    process = made_process(stops_itself=["trial-0001"])
    status, rows = sweep_in(tmp_path / "out", process, pruner="none")
    assert status == 0
    assert process.starts.count("trial-0001") == 2
    assert {row.state for row in rows} == {"done"}


def test_trials_run_side_by_side_in_environments_of_their_own(tmp_path: Path):
    process = made_process()
    status, rows = sweep_in(tmp_path / "out", process, parallel=3)
    assert (status, len(rows), process.most) == (0, 6, 3)
    assert process.environments[:3] == [{"SLOT": "0"}, {"SLOT": "1"}, {"SLOT": "2"}]


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (6, "pruned", "diverged by step 20"),
        (0, "pruned", "diverged by step 40"),
        (10, "pruned", "out of memory"),
        (3, "failed", "status 3: the last line of trial-0001"),
    ],
)
def test_how_a_trial_ended_is_recorded(tmp_path: Path, status: int, kind: str, text: str):
    process = made_process(statuses={"trial-0001": status})
    found, rows = sweep_in(tmp_path / "out", process, pruner="none")
    assert (found, rows[1].state, rows[1].reason) == (0, kind, text)
    assert {row.state for row in rows if row.folder != "trial-0001"} == {"done"}


BY_NO_FLAG = [1, 4, 5, 7, 8, 9, 11, 75, 130, 137, 143, -1, -2, -6, -9, -11, -15]


@pytest.mark.sample(6)
@pytest.mark.parametrize("status", BY_NO_FLAG)
def test_an_end_that_says_nothing_of_the_flags_is_no_result(tmp_path: Path, status: int):
    process = made_process(statuses={"trial-0001": status})
    found, rows = sweep_in(tmp_path / "out", process, pruner="none", trials=3)
    assert (found, [row.state for row in rows]) == (0, ["done"] * 3)
    assert process.starts == ["trial-0000", "trial-0001", "trial-0001", "trial-0002"]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("status", "expected", "how"),
    [
        (8, 8, "ended with status 8 (the last line of trial-0001)"),
        (1, 1, "ended with status 1 ("),
        (-9, 7, "died: killed by SIGKILL, perhaps for lack of memory"),
        (137, 7, "died: killed by SIGKILL, perhaps for lack of memory"),
        (-11, 7, "died: crashed by SIGSEGV"),
        (-15, 75, "was stopped by SIGTERM while it started"),
        (75, 75, "stopped"),
    ],
)
def test_an_end_without_a_result_that_comes_again_ends_the_sweep(
    tmp_path: Path, capsys: Any, status: int, expected: int, how: str
):
    process = made_process(refuses={"trial-0001": status})
    found, rows = sweep_in(tmp_path / "out", process, pruner="none", trials=3, parallel=2)
    assert (found, rows[1].state) == (expected, "interrupted")
    assert process.starts.count("trial-0001") == 2
    error = capsys.readouterr().err
    assert f"minimind sweep: trial-0001 {how}" in error
    assert f" at step 0, as before, which says nothing of its flags; see {tmp_path}" in error
    process.refuses = {}
    found, rows = sweep_in(tmp_path / "out", process, pruner="none", trials=3, parallel=2)
    assert (found, [row.state for row in rows]) == (0, ["done"] * 3)


def test_the_others_are_run_before_a_killed_trial_ends_the_sweep(tmp_path: Path, capsys: Any):
    process = made_process(refuses={"trial-0001": -9})
    found, rows = sweep_in(tmp_path / "out", process, pruner="none", trials=5)
    assert (found, rows[1].state) == (7, "interrupted")
    assert process.starts == [f"trial-{n:04d}" for n in (0, 1, 1, 2, 3, 4)]
    assert [row.state for row in rows].count("done") == 4
    assert capsys.readouterr().err.count("trial-0001 died: killed by SIGKILL") == 1
    process.refuses = {}
    found, rows = sweep_in(tmp_path / "out", process, pruner="none", trials=5)
    assert (found, [row.state for row in rows]) == (0, ["done"] * 5)


def test_three_killed_trials_end_the_sweep(tmp_path: Path):
    process = made_process(refuses={f"trial-{n:04d}": -11 for n in range(6)})
    assert sweep_in(tmp_path / "out", process, pruner="none", trials=6)[0] == 7
    assert process.starts == [f"trial-{n:04d}" for n in (0, 0, 1, 1, 2, 2)]


def test_a_pruned_trial_is_pruned_however_it_ends(tmp_path: Path):
    process = made_process(stop_status=-9)
    status, rows = sweep_in(tmp_path / "out", process, trials=12, sampler="random")
    assert (status, {row.state for row in rows}) == (0, {"done", "pruned"})


def test_three_failures_in_a_row_end_the_sweep_and_are_tried_again(tmp_path: Path, capsys: Any):
    names = [f"trial-{n:04d}" for n in (1, 2, 3)]
    process = made_process(statuses=dict.fromkeys(names, 3))
    status, rows = sweep_in(tmp_path / "out", process, pruner="none")
    assert (status, len(rows)) == (3, 4)
    assert f"{tmp_path / 'out' / 'trial-0003' / 'log.txt'}" in capsys.readouterr().err
    process.statuses = {}
    status, rows = sweep_in(tmp_path / "out", process, pruner="none")
    assert status == 0
    assert [row.state for row in rows] == ["done"] * 6


@pytest.mark.parametrize(
    ("statuses", "expected", "sentence", "retried"),
    [
        ((2, 2), 2, "trial-0001 failed; correct what {log} says, and run the same", [0, 1]),
        ((3, 6), 3, "trial-0000 failed; correct what {log} says, and run the same", [0]),
        ((6, 10), 10, "trial-0001 out of memory; change flags or dimensions, and give an", []),
        ((10, 0), 6, "trial-0001 diverged by step 40; change flags or dimensions, and", []),
        ((70, 6), 70, "trial-0000 failed; correct what {log} says, and run the same", [0]),
    ],
)
def test_without_a_finished_trial_the_status_tells_why(
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    corpus: Path,
    statuses: tuple[int, int],
    expected: int,
    sentence: str,
    retried: list[int],
):
    process = made_process(statuses={f"trial-{n:04d}": one for n, one in enumerate(statuses)})
    monkeypatch.setattr(run, "TrialProcess", process)
    monkeypatch.setattr(StopRequest, "listen", lambda _: None)
    out = tmp_path / "out"
    path = write_sweep(tmp_path, trials=2, flags=flags_of(corpus))
    words = ["sweep", str(path), "--out_dir", str(out)]
    assert main(words) == expected
    sentence = sentence.format(log=out / sentence.split()[0] / "log.txt")
    assert f"minimind sweep: no trial finished with a val_bpb: {sentence}" in (
        capsys.readouterr().err
    )
    process.starts.clear()
    assert main(words) == (0 if retried else expected)  # the second start of the stand-in ends well
    assert process.starts == [f"trial-{n:04d}" for n in retried]


def test_a_sweep_of_refused_trials_has_their_status(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, corpus: Path
):
    config, process, out = tmp_path / "base.yaml", made_process(), tmp_path / "out"
    monkeypatch.setattr(run, "TrialProcess", process)
    monkeypatch.setattr(StopRequest, "listen", lambda _: None)
    monkeypatch.setattr(run, "first_config", lambda *_: RunConfig(data_path=(str(corpus),)))
    flags = {"config": str(config), "eval_interval": 10, "device": "cpu"}
    dimensions = {"learning_rate": ["1e-2"], "batch_size": ["400"]}
    grid = {"sampler": "grid", "trials": None, "dimensions": dimensions}
    words = ["sweep", str(write_sweep(tmp_path, flags=flags, **grid)), "--out_dir", str(out)]
    config.write_text("max_tokens: 1e4\n")
    for _ in range(2):
        assert main(words) == 2
        sentence = "no trial finished with a val_bpb: trial-0000 was refused: max_tokens = 10000"
        assert sentence in capsys.readouterr().err
    assert process.starts == []
    config.write_text("max_tokens: 1e8\n")
    assert main(words) == 0
    assert [row.state for row in read_results(out, "val_bpb").values()] == ["done"]


def test_a_combination_that_cannot_be_trained_is_refused_without_a_start(tmp_path: Path):
    process = made_process()
    dimensions = {"learning_rate": ["1e-2"], "dim": ["64", "96"], "n_heads": ["4", "6"]}
    changes = {"sampler": "grid", "trials": None, "pruner": "none", "dimensions": dimensions}
    flags = {"n_kv_heads": 2, "device": "cpu"}
    status, rows = sweep_in(tmp_path / "out", process, flags=flags, **changes)
    assert status == 0
    assert [row.state for row in rows] == ["done", "failed", "done", "done"]
    assert "dim = 64" in rows[1].reason
    assert "trial-0001" not in process.starts
