"""Scores while training: those of `minimind eval --tasks`, and a run that is otherwise the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minimind.train as training
from minimind.checkpoint.directory import published_checkpoints, step_of
from minimind.checkpoint.retention import saved_in
from minimind.cli.main import main
from minimind.config.tasks import OWN_TASKS
from minimind.errors import UsageError
from minimind.inference.own_tasks import repeated_share
from minimind.inference.scores import Score, Shares, StoppedError, average_of
from tests.conftest import ROOT, SMALL, Trained
from tools.runs import events

train: Any = training  # a package that is called like a function
TASK = str(ROOT / "examples" / "lm_eval" / "python_code")
ALL = ",".join([*OWN_TASKS, TASK])
LIMIT = 6  # questions of a task
SCORED: dict[str, Any] = {
    **{"eval_tasks": ALL, "eval_tasks_interval": 2, "eval_tasks_limit": LIMIT},
    **{"save_interval": 2, "keep_last": 9, "keep_best": 1, "keep_best_by": "average"},
}


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
            patch.setenv(name, "1")
        patch.chdir(ROOT)  # from which the path of the task's data counts
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hf")))
        yield


def flags_of(trained: Trained, **more: Any) -> dict[str, Any]:
    places = {"data_path": str(trained.mixed), "cache_dir": str(trained.cache)}
    shape = {**SMALL, "dtype": "float32", "log_interval": 1, "deepspeed_config": "none"}
    return {**shape, **places, **more}


def curve(out_dir: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "lr", "grad_norm", "tokens", "rows")
    return [tuple(line[name] for name in names) for line in events(out_dir, "step")]


def asked_again(capsys: pytest.CaptureFixture[str], path: Path, *more: str) -> dict[str, Any]:
    words = ["--device", "cpu", "--limit", str(LIMIT), "--json", "--tasks", *OWN_TASKS, TASK, *more]
    capsys.readouterr()
    assert main(["eval", "--checkpoint", str(path), *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def scored(trained: Trained, tmp_path_factory: pytest.TempPathFactory, offline: Any) -> Path:
    out_dir = tmp_path_factory.mktemp("scored") / "out"
    assert train(flags_of(trained, **SCORED), out_dir=str(out_dir)) == 0
    return out_dir


def test_the_scores_of_a_step_are_those_of_its_checkpoint(
    scored: Path, capsys: pytest.CaptureFixture[str]
):
    found = {event["step"]: event for event in events(scored, "scores")}
    assert [*found] == [2, 4, 6]
    names = [*OWN_TASKS, "python_code", "bits_per_byte/a", "bits_per_byte/b"]
    for path in published_checkpoints(scored / "checkpoints"):
        event, again = found[step_of(path)], asked_again(capsys, path)
        assert sorted(event["tasks"]) == sorted(names)
        assert again["tasks"] == event["tasks"]
        assert again["average"] == event["average"]
        assert event["seconds"] > 0


def test_a_scored_run_trains_as_one_without_also_after_a_stop(
    scored: Path, trained: Trained, tmp_path: Path
):
    assert train(flags_of(trained), out_dir=str(tmp_path / "plain")) == 0
    assert curve(scored) == curve(tmp_path / "plain")
    broken = str(tmp_path / "broken")
    assert train(flags_of(trained, **SCORED), out_dir=broken, stop_at_step=3) == 75
    assert train(flags_of(trained, **SCORED), out_dir=broken) == 0
    assert curve(tmp_path / "broken") == curve(scored)
    one, other = (
        [(e["step"], e["tasks"]) for e in events(place, "scores")]
        for place in (tmp_path / "broken", scored)
    )
    assert one == other


def test_scores_cut_off_by_a_kill_are_made_up_at_the_next_start(
    scored: Path, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from minimind.train.scores import Scores

    def killed(*_: Any) -> None:
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(Scores, "compute", killed)
        with pytest.raises(InterruptedError):
            train(flags_of(trained, **SCORED), out_dir=str(tmp_path / "out"), async_save=False)
    assert train(flags_of(trained, **SCORED), out_dir=str(tmp_path / "out")) == 0
    one, other = (
        [(e["step"], e["tasks"]) for e in events(place, "scores")]
        for place in (tmp_path / "out", scored)
    )
    assert one == other
    assert saved_in(tmp_path / "out" / "checkpoints") == saved_in(scored / "checkpoints")


def scores_of(out_dir: Path) -> list[tuple[Any, ...]]:
    return [(event["step"], event["tasks"]) for event in events(out_dir, "scores")]


def test_a_stop_during_scores_ends_the_run_at_their_step(
    scored: Path, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from minimind.train.scores import Scores

    stopped, flags = str(tmp_path / "out"), flags_of(trained, **SCORED | {"save_interval": 6})
    with monkeypatch.context() as patch:
        patch.setattr(Scores, "shares", lambda *_: Shares(is_stopping=lambda: True))
        for _ in range(2):  # also while they are made up for
            assert train(flags, out_dir=stopped) == 75
            assert [*map(step_of, published_checkpoints(tmp_path / "out" / "checkpoints"))] == [2]
    assert events(tmp_path / "out", "scores") == []
    assert [line["step"] for line in events(tmp_path / "out", "step")] == [1, 2]
    assert train(flags, out_dir=stopped) == 0
    assert scores_of(tmp_path / "out") == scores_of(scored)
    assert curve(tmp_path / "out") == curve(scored)


def test_scores_of_an_abandoned_run_are_no_scores_of_this_one(trained: Trained, tmp_path: Path):
    flags = flags_of(trained, **SCORED | {"eval_tasks": "arithmetic", "keep_best": 0})
    flags |= {"keep_best_by": "val_loss", "out_dir": str(tmp_path / "out"), "stop_at_step": 2}
    assert train(flags) == 75
    assert train({**flags, "resume": "none", "seed": 7, "eval_tasks_interval": 3}) == 75
    assert len(scores_of(tmp_path / "out")) == 1
    assert train({**flags, "seed": 7, "stop_at_step": 3}) == 75
    assert [step for step, _ in scores_of(tmp_path / "out")] == [2, 2]


def test_keep_best_by_may_change_at_a_resume(trained: Trained, tmp_path: Path):
    flags = flags_of(trained, **SCORED | {"eval_tasks": "arithmetic", "eval_interval": 2})
    flags["out_dir"] = str(tmp_path / "out")
    assert train({**flags, "keep_best_by": "val_loss", "stop_at_step": 2}) == 75
    assert train({**flags, "keep_best_by": "arithmetic"}) == 0
    saved = {one.step: one.by for one in saved_in(tmp_path / "out" / "checkpoints")}
    assert saved == {2: "arithmetic", 4: "arithmetic", 6: "arithmetic"}


def test_the_checkpoint_of_the_best_average_is_kept(scored: Path, trained: Trained, tmp_path: Path):
    averages = {event["step"]: event["average"] for event in events(scored, "scores")}
    recorded = {saved.step: saved for saved in saved_in(scored / "checkpoints")}
    assert {step: (saved.value, saved.by) for step, saved in recorded.items()} == {
        step: (-average, "average") for step, average in averages.items()
    }
    changes = {**SCORED, "keep_last": 1, "keep_best_by": "bits_per_byte"}
    assert train(flags_of(trained, **changes), out_dir=str(tmp_path / "out")) == 0
    tasks = {e["step"]: e["tasks"]["bits_per_byte"]["value"] for e in events(scored, "scores")}
    best = min(tasks, key=lambda step: tasks[step])
    kept = {step_of(path) for path in published_checkpoints(tmp_path / "out" / "checkpoints")}
    assert kept == {best, 6}


@pytest.mark.long
def test_a_moving_average_has_its_own_scores(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    changes = {**SCORED, "eval_tasks_interval": 6, "ema": 0.5, "keep_best": 0}
    changes["keep_best_by"] = "val_loss"
    assert train(flags_of(trained, **changes), out_dir=str(tmp_path / "out")) == 0
    (event,) = events(tmp_path / "out", "scores")
    assert asked_again(capsys, tmp_path / "out")["tasks"] == event["tasks"]
    of_average = asked_again(capsys, tmp_path / "out", "--weights", "ema")
    assert of_average["tasks"] == event["ema_tasks"] != event["tasks"]
    assert of_average["average"] == event["ema_average"]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "bf16-mixed"])
def test_in_bfloat16_the_same_precision_gives_the_same_scores(
    dtype: str, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    changes = {"dtype": dtype, "eval_tasks": ALL, "eval_tasks_interval": 6}
    changes |= {"eval_tasks_limit": LIMIT, "mup_base_dim": 16}
    assert train(flags_of(trained, **changes), out_dir=str(tmp_path / "out")) == 0
    (event,) = events(tmp_path / "out", "scores")
    again = asked_again(capsys, tmp_path / "out", "--dtype", dtype)
    assert again["tasks"] == event["tasks"]


@pytest.mark.parametrize(
    ("given", "message"),
    [({"eval_tasks": f"{TASK}:chat"}, "python_code asks in a chat template, and a run of task")],
)
def test_a_mistake_is_told_at_the_start(
    given: dict[str, Any], message: str, trained: Trained, tmp_path: Path
):
    with pytest.raises(UsageError) as caught:
        train(flags_of(trained, **{**SCORED, **given}), out_dir=str(tmp_path / "out"))
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_bits_per_byte_without_held_out_text_is_refused(trained: Trained, tmp_path: Path):
    flags = flags_of(trained, eval_tasks="bits_per_byte", eval_tasks_interval=2)
    flags |= {"data_path": str(trained.texts["a"]), "vocab_size": 600, "val_fraction": 0.0}
    with pytest.raises(UsageError, match="bits_per_byte needs held-out text, and there is none"):
        train(flags, out_dir=str(tmp_path / "out"))


def test_one_question_of_each_task(trained: Trained, tmp_path: Path):
    changes = {"eval_tasks": ",".join(OWN_TASKS), "eval_tasks_interval": 6, "eval_tasks_limit": 1}
    assert train(flags_of(trained, **changes), out_dir=str(tmp_path / "out")) == 0
    (event,) = events(tmp_path / "out", "scores")
    assert {event["tasks"][name]["questions"] for name in ("cloze", "needle", "arithmetic")} == {1}


def test_a_group_has_the_scores_of_its_tasks(trained: Trained, tmp_path: Path):
    task = (ROOT / "examples" / "lm_eval" / "python_code.yaml").read_text()
    for name in ("one", "other"):
        (tmp_path / f"{name}.yaml").write_text(task.replace("task: python_code", f"task: {name}"))
    (tmp_path / "both.yaml").write_text("group: both\ntask: [one, other]\n")
    changes = {**SCORED, "eval_tasks": str(tmp_path / "both"), "eval_tasks_interval": 6}
    with pytest.raises(UsageError, match=r"keep_best_by = both .* scores; .*one, other"):
        train(flags_of(trained, **changes | {"keep_best_by": "both"}), out_dir=str(tmp_path / "no"))
    flags = flags_of(trained, **changes | {"keep_best_by": "other"})
    assert train(flags, out_dir=str(tmp_path / "out")) == 0
    (event,) = events(tmp_path / "out", "scores")
    assert [*event["tasks"]] == ["one", "other"]


def test_without_lm_eval_its_tasks_are_refused(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("minimind.config.tasks.LM_EVAL", "not_there")
    with pytest.raises(UsageError, match=r"did you mean cloze.*not_there, which is not installed"):
        train(flags_of(trained, **SCORED | {"eval_tasks": "clozee"}), out_dir=str(tmp_path / "out"))
    flags = flags_of(trained, **SCORED | {"eval_tasks": "arithmetic"})
    assert train(flags, out_dir=str(tmp_path / "own")) == 0


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_batches_are_the_same_on_any_number_of_ranks(size: int):
    batches = [[1, 2, 3], [4], [5, 6], [7]]
    parts, calls = [], []
    for group in range(size):
        own: list[int] = []

        def compute(batch: Any, own: list[int] = own) -> list[float]:
            own.append(len(batch))
            return [float(10 * number) for number in batch]

        parts.append(Shares(group, size).numbers(compute, batches))
        calls.append(len(own))
    assert np.sum(parts, axis=0).tolist() == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0]
    assert {*calls} == {-(-len(batches) // size)}
    with pytest.raises(StoppedError):
        Shares(is_stopping=lambda: True).numbers(lambda batch: [0.0], batches)


def test_the_average_is_zero_by_chance_and_one_if_all_is_right():
    scores = {"a": Score(0.25, 0.25, None, 9), "b": Score(1.0, 0.5, None, 9)}
    assert average_of(scores) == 0.5
    assert average_of({**scores, "c": Score(7.0, None, None, 9)}) == 0.5
    assert average_of({"c": Score(7.0, None, None, 9)}) is None


def test_a_repeated_run_counts_from_its_second_time():
    assert repeated_share([1, 2, 3, 4]) == 0
    assert repeated_share([1] * 7) == 0.75
    assert repeated_share([*range(4), *range(4)]) == 1 - 4 / 5


def test_the_report_draws_scores_and_lists_the_last_ones(scored: Path, tmp_path: Path):
    from minimind.report.charts import draw
    from minimind.report.figures import Summary
    from minimind.report.history import read_runs
    from minimind.report.trackers import tracker_values

    (run,) = read_runs([scored])
    charts: dict[str, Any] = {chart.key: chart.figure for chart in draw([run], [1.0], 0.0)}
    average = {trace["name"]: trace for trace in charts["scores"]["data"]}["average"]
    expected = [event["average"] for event in events(scored, "scores")]
    assert [*average["x"]] == [2, 4, 6]
    assert [*average["y"]] == expected
    others = {trace["name"] for trace in charts["other_scores"]["data"]}
    assert {"bits_per_byte", "repetition"} <= others
    summary = Summary(run, 0.0)
    assert f"at step 6: cloze {events(scored, 'scores')[-1]['tasks']['cloze']['value']:.4f}" in (
        summary.as_text()
    )
    assert summary.shares["score"] > 0
    values = tracker_values("scores", events(scored, "scores")[-1])
    assert values["scores/average"] == expected[-1]
    assert main(["report", str(scored), "--out", str(tmp_path / "page.html")]) == 0
    assert "<h2>Scores at step 6</h2>" in (tmp_path / "page.html").read_text()
