"""Trackers log all that metrics.jsonl holds, and no tracker stops a run."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import minimind.train as training
from minimind.checkpoint.directory import published_checkpoints, step_of
from minimind.cli.main import main as cli_main
from minimind.config.flags import TRACKERS
from minimind.config.parse import parse_flags
from minimind.errors import DataError, UsageError
from minimind.report import trackers
from minimind.report.trackers import Tracker, tracker_values
from tests.conftest import SMALL, Trained
from tools.forking import Nursery
from tools.runs import events

train: Any = training  # a package that is called like a function
BLOCK, HEADER = 32768, 7  # of a .wandb file, which is a log as LevelDB has it


def flags(trained: Trained, **more: Any) -> dict[str, Any]:
    places = {"data_path": str(trained.mixed), "cache_dir": str(trained.cache)}
    return {**SMALL, **places, "sample_interval": 3, **more}


def values_by_step(out_dir: Path) -> dict[int, dict[str, Any]]:
    """The figures in metrics.jsonl by step, under the names that trackers log."""
    found: dict[int, dict[str, Any]] = {}
    for event in events(out_dir):
        kind = {"step": "train", "eval": "eval", "sample": "sample"}.get(event["event"])
        if kind:
            facts = {key: event[key] for key in event if key not in ("event", "time")}
            found.setdefault(event["step"], {}).update(tracker_values(kind, facts))
    return found


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file."""
    from wandb.proto import wandb_internal_pb2

    kind_of_record: Any = vars(wandb_internal_pb2)["Record"]  # made when it is imported
    content, at, whole = path.read_bytes(), HEADER, b""
    assert content.startswith(b":W&B")
    while at + HEADER <= len(content):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + HEADER])
        whole += content[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield kind_of_record.FromString(whole)
            whole = b""


def wandb_history(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(step, figures) of each history record in a .wandb file."""
    for record in wandb_records(path):
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            own = {key: value for key, value in items.items() if not key.startswith("_")}
            yield record.history.step.num, own


def test_what_is_nested_is_reported_by_its_path():
    facts = {
        **{"step": 7, "loss": 2.5, "clipped": True, "rows": [8, 16], "stage": "a"},
        "comm_ms": None,
        **{"by_source": {"a": {"val_loss": 3.0}}},
    }
    assert tracker_values("train", facts) == {
        **{"train/loss": 2.5, "train/clipped": 1},
        **{"train/a/val_loss": 3.0},
    }


def test_wandb_and_tensorboard_hold_what_metrics_jsonl_holds_over_a_resume(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    secret = "https://place/a.jsonl?X-Amz-Signature=c4n4ry"
    words = ["--chat_template_kwargs", '{"api_key": "c4n4ry"}', "--data_path", secret]
    monkeypatch.setattr("sys.argv", ["train_pretrain.py", *words, f"--val_path={secret}"])
    requested = flags(trained, report_to="wandb,tensorboard", out_dir=str(tmp_path / "run"))
    assert train(requested, stop_at_step=3) == 75
    own_id = json.loads((tmp_path / "run" / "trackers.json").read_text())["wandb"]
    assert train(requested) == 0
    expected = values_by_step(tmp_path / "run")
    assert {2, 3, 4, 6} <= expected.keys()
    assert {"train/loss", "train/lr"} <= expected[6].keys()
    assert {"eval/val_loss", "eval/b/val_bpb", "sample/0"} <= expected[6].keys()
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.name for path in files] == [f"run-{own_id}.wandb"] * 2
    assert b"--chat_template_kwargs" in files[0].read_bytes()  # wandb stores the command line
    everything = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in everything if b"c4n4ry" in path.read_bytes()]
    history = [record for path in files for record in wandb_history(path)]
    assert [values.pop("step") for _, values in history] == [step for step, _ in history]
    assert dict(history) == expected
    assert train(requested) == 0  # nothing is left to do or to log
    assert sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")) == files
    assert "| max_steps | `6` |" in configuration(tmp_path / "run" / "tensorboard")
    assert scalars(tmp_path / "run" / "tensorboard") == {
        (step, name): np.float32(value)
        for step, values in expected.items()
        for name, value in values.items()
        if not isinstance(value, str)
    }


def test_a_process_that_ends_has_written_all(trained: Trained, nursery: Nursery, tmp_path: Path):
    """What background threads and other processes write: trackers, checkpoints, the mirror."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    given = flags(trained, max_steps=2, log_interval=1, eval_interval=2, sample_interval=2)
    given |= {"mirror": f"file://{copy}", "save_interval": 1}
    given |= {"report_to": "wandb,tensorboard", "out_dir": str(run)}
    words = ["--profile", "--async_save", *(f"--{name}={value}" for name, value in given.items())]
    offline = ([], {"WANDB_MODE": "offline"})
    (status,), out, err = nursery.run("train_pretrain", words, run, 1, of_last=offline)
    assert status == 0, err
    assert "done: 2 steps" in out
    expected = values_by_step(run)
    (path,) = (run / "wandb").glob("offline-run-*/*.wandb")
    assert dict(wandb_history(path)) == {
        step: {**values, "step": step} for step, values in expected.items()
    }
    (end,) = (r.exit for r in wandb_records(path) if r.WhichOneof("record_type") == "exit")
    assert end.exit_code == 0
    assert {step for step, _ in scalars(run / "tensorboard")} == {1, 2}
    for place in (run, copy):
        assert [*map(step_of, published_checkpoints(place / "checkpoints"))] == [2, 1]
        assert cli_main(["checkpoint", "verify", str(place)]) == 0


def configuration(folder: Path) -> str:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload().Tensors("configuration/text_summary")
    return found[0].tensor_proto.string_val[0].decode()


def scalars(folder: Path) -> dict[tuple[int, str], np.float32]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    found = {}
    for path in sorted(folder.iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    found[event.step, value.tag] = np.float32(make_ndarray(value.tensor).item())
    return found


def test_tensorboard_purges_steps_after_the_checkpoint_on_resume(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = parse_flags(["--report_to", "tensorboard", "--out_dir", str(tmp_path)])
    # Of another run; killed at step 5; resumed from the checkpoint of step 3.
    for first, last in ((0, 7), (0, 5), (3, 6)):
        opened = trackers.open_trackers(run, first, {})
        for step in range(first + 1, last + 1):
            opened.event("step", {"step": step, "loss": float(10 * first + step)})
        opened.close(60)
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [(one.step, one.value) for one in found] == [
        *((1, 1.0), (2, 2.0), (3, 3.0)),
        *((4, 34.0), (5, 35.0), (6, 36.0)),
    ]


@pytest.mark.parametrize("newest", [0, 8])  # the server's last step of a run that resumes
def test_wandb_gets_every_step_once_it_has_gone_back_under_a_step_above_its_last(
    newest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lines: list[tuple[int, int]] = []
    metrics: list[tuple[str, str]] = []
    run = SimpleNamespace(
        starting_step=newest + 1 if newest else 0,
        define_metric=lambda name, step_metric: metrics.append((name, step_metric)),
    )

    def log(values: dict[str, Any], step: int) -> None:
        lines.append((step, values["step"]))

    opened = SimpleNamespace(run=run, log=log, finish=lambda: None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(trackers, "open_tracker", lambda *_: opened)
    given = parse_flags(["--report_to", "wandb", "--out_dir", str(tmp_path)])
    logged = trackers.open_trackers(given, 4, {})
    for last in (7, 9):  # goes back from 7 to 4, and does not from 9 on
        for step in range(5, last + 1):
            logged.event("step", {"step": step, "loss": 1.0})
            logged.event("eval", {"step": step, "val_loss": 1.0})
        logged.go_back(4)
    logged.close(60)
    assert metrics == [("*", "step")]
    steps = [5, 6, 7, 5, 6, 7, 8, 9]
    assert [step for _, step in lines] == [step for step in steps for _ in range(2)]
    own = [step for step, _ in lines[::2]]
    assert own == [step for step, _ in lines[1::2]]  # one record of a step
    assert own == list(range(max(5, newest + 1), max(5, newest + 1) + len(steps)))


@pytest.mark.parametrize("name", [name for name in TRACKERS if name != "wandb"])
def test_after_going_back_other_trackers_are_opened_as_by_a_run_that_resumes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[Any] = []

    class Opened(Broken):
        def log(self, values: dict[str, Any], step: int) -> None:
            calls.append(step)

        def finish(self) -> None:
            calls.append("finish")

    def open_tracker(kind: str, project: str, folder: str, options: dict[str, Any]) -> Any:
        calls.append(options)
        return Opened()

    monkeypatch.setattr(trackers, "open_tracker", open_tracker)
    monkeypatch.setattr(trackers, "_import_error", lambda name: None)
    run = parse_flags(["--report_to", name, "--out_dir", str(tmp_path)])
    logged = trackers.open_trackers(run, 0, {})
    for first, last in ((1, 4), (3, 5)):
        for step in range(first, last + 1):
            logged.event("step", {"step": step, "loss": 1.0})
        if first == 1:
            logged.go_back(2)
    logged.close(60)
    own = {"tensorboard": "purge_step", "dvclive": "resume"}.get(name)
    values = {"tensorboard": (0, 3), "dvclive": (False, True)}.get(name, (0, 0))
    first, second = ({own: value} if own else {} for value in values)
    assert calls == [first, 1, 2, 3, 4, "finish", second, 3, 4, 5, "finish"]


def test_wandb_knows_a_resumed_run_as_itself_and_a_new_one_in_the_same_folder_as_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ids: list[str] = []

    def open_tracker(name: str, project: str, folder: str, options: dict[str, Any]) -> Any:
        ids.append(options["id"])
        run = SimpleNamespace(starting_step=0, define_metric=lambda name, step_metric: None)
        return SimpleNamespace(run=run, finish=lambda: None)

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(trackers, "open_tracker", open_tracker)
    run = parse_flags(["--report_to", "wandb", "--out_dir", str(tmp_path)])
    for step in (0, 3, 0, 5):
        trackers.open_trackers(run, step, {}).close(60)
    assert ids[0] == ids[1]
    assert ids[2] == ids[3]
    assert ids[0] != ids[2]


class Broken:
    """A tracker that breaks at its second line."""

    writer = SimpleNamespace(add_text=lambda *text: None)

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, Any]]] = []

    def log(self, values: dict[str, Any], step: int) -> None:
        if self.lines:
            raise ConnectionError("the other end\nis gone")
        self.lines.append((step, values))

    def finish(self) -> None:
        raise AssertionError("it is left alone once it broke")


def test_a_failing_tracker_warns_once_and_the_run_continues(
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    opened: dict[str, Any] = {}

    def open_tracker(name: str, *_: Any) -> Any:
        if name == "mlflow":
            raise ModuleNotFoundError("No module named 'mlflow'")
        return opened.setdefault(name, Broken())

    monkeypatch.setattr(trackers, "open_tracker", open_tracker)
    requested = flags(trained, report_to="mlflow,tensorboard", out_dir=str(tmp_path / "run"))
    assert train(requested) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert sorted(warnings) == [
        f"warning: tracker {reason}; training continues without it, and metrics.jsonl has"
        " everything"
        for reason in ("mlflow: No module named 'mlflow'", "tensorboard: the other end is gone")
    ]
    assert [step for step, _ in opened["tensorboard"].lines] == [2]
    assert values_by_step(tmp_path / "run").keys() == {2, 3, 4, 6}


def test_without_a_key_wandb_asks_no_one_and_is_left_out(
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def no_key() -> None:
        raise ConnectionError("has no API key (run `wandb login`, or set WANDB_MODE=offline)")

    monkeypatch.setattr(trackers, "_require_key", no_key)
    requested = flags(trained, report_to="wandb", max_steps=1, out_dir=str(tmp_path / "run"))
    assert train(requested) == 0
    assert "warning: tracker wandb: has no API key" in capsys.readouterr().err


def test_a_tracker_that_hangs_is_not_waited_for(capsys: pytest.CaptureFixture[str]):
    from threading import Event

    never = Event()

    class Hangs(Broken):
        def log(self, values: dict[str, Any], step: int) -> None:
            never.wait(60)

    tracker = Tracker("slow", lambda step: Hangs(), 0)
    tracker.log({"loss": 1.0}, 1)
    tracker.close(0.05)
    never.set()
    tracker.log({"loss": 1.0}, 2)
    assert capsys.readouterr().err.count("warning: tracker slow: did not finish in 0.05 s") == 1


@pytest.mark.parametrize("requested", ["none,wandb", "wandb, none", "none,none"])
def test_none_beside_trackers_is_refused(requested: str):
    with pytest.raises(
        UsageError,
        match=r"report_to = .*none cannot be combined with other trackers; remove it, or them$",
    ):
        parse_flags(["--report_to", requested])
    assert parse_flags(["--report_to", "none"]).trackers() == ()


def curve(out_dir: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "lr", "grad_norm", "rows")
    return [tuple(line[n] for n in names) for line in events(out_dir, "step")]


def test_samples_are_written_and_change_nothing(trained: Trained, tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "曉處"}\n{"prompt": "a b"}\n', encoding="utf-8")
    with_samples, without = tmp_path / "with", tmp_path / "without"
    requested = flags(trained, sample_interval=2, sample_prompts=str(prompts), log_interval=1)
    assert train(requested, out_dir=str(with_samples)) == 0
    requested = flags(trained, sample_interval=0, log_interval=1)
    assert train(requested, out_dir=str(without)) == 0
    assert curve(with_samples) == curve(without)
    samples = events(with_samples, "sample")
    found = [(one["step"], one["number"], one["prompt"]) for one in samples]
    assert found == [(step, n, p) for step in (2, 4, 6) for n, p in enumerate(("曉處", "a b"))]
    assert any(one["text"] for one in samples)


def test_samples_draw_on_random_numbers_of_their_own(trained: Trained):
    import torch

    from minimind.inference.load_model import load_checkpoint
    from minimind.inference.text import Sampling
    from minimind.train.evaluate import Samples, draw

    model, tokenizer, _ = load_checkpoint(str(trained.run))

    class Engine:
        device, world_size = torch.device("cpu"), 1
        resolved = type("", (), {"zero_stage": None})
        backend = type("", (), {"forward": model})

        def __init__(self) -> None:
            self.model = model

    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    engine: Any = Engine()
    texts = draw(engine, Samples(("a",), tokenizer, Sampling(8)))
    assert torch.equal(torch.rand(4), expected)
    assert texts == draw(engine, Samples(("a",), tokenizer, Sampling(8)))


@pytest.mark.parametrize(
    ("requested", "error", "words"),
    [
        ({"sample_prompts": "nowhere.txt"}, DataError, "--sample_prompts nowhere.txt: No such"),
        ({"sample_prompts": "LONG"}, UsageError, r"prompt 1 has \d+ tokens, and max_seq_len is 64"),
        ({"sample_prompts": "LONG", "sample_interval": 0}, UsageError, "sample_interval = 0"),
    ],
)
def test_prompts_that_cannot_be_used_are_reported_before_training(
    trained: Trained, tmp_path: Path, requested: dict[str, Any], error: type[Exception], words: str
):
    (tmp_path / "LONG").write_text("abc " * 60)
    prompts = {"sample_prompts": str(tmp_path / "LONG")} if "LONG" in requested.values() else {}
    with pytest.raises(error, match=words):
        train(flags(trained, **{**requested, **prompts}), out_dir=str(tmp_path / "run"))
