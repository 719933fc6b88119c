"""Every wait for the device: right with it, wrong without it, on a device that is late on purpose.

A run on that device has the losses of a CPU, bit for bit.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import minimind.train as training
from minimind.checkpoint.directory import published_checkpoints
from minimind.engine import build
from minimind.engine.engine import StepResult
from minimind.recovery import corruption
from minimind.recovery.spikes import HeldStep
from minimind.report import trace as trace_module
from minimind.report.trace import Trace
from minimind.runtime.device import KINDS, Accelerator
from tests.checkpoint.weights import load_weights
from tests.conftest import ROOT
from tools.late_device import DEVICE, LATE, NAME, Event, Stream, late_device
from tools.runs import events

train: Any = training  # a package that is called like a function
BASE: dict[str, Any] = {
    **{"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "accumulation_steps": 2, "deepspeed_config": "none"},
    # What a GPU chooses for itself and a CPU does not.
    **{"use_flash_attn": False, "loss": "chunked", "compile": "off"},
    **{"max_steps": 6, "log_interval": 1, "eval_interval": 2, "eval_rows": 8, "keep_last": 9},
    **{"save_interval": 2, "save_minutes": 0},
}
BATCHES, SAVER, CLOCK, FLAT, HERE = (
    f"tests/{name}.py"
    for name in (
        "data/rows/test_batches",
        "checkpoint/test_saver",
        "engine/test_phase_clock",
        "engine/test_flat_partitions_streams",
        "engine/test_waits",
    )
)
# Each wait of the package, and the test that takes it away.
WAITS = {
    "runtime/device.py Copies.receive wait_event": (
        BATCHES,
        "test_rows_that_are_late_are_waited_for",
    ),
    "runtime/device.py Copies.receive record_stream": (
        BATCHES,
        "test_memory_of_rows_that_is_not_kept_is_that_of_later_rows",
    ),
    "runtime/device.py Accelerator.synchronize synchronize": (
        CLOCK,
        "test_phases_that_were_not_waited_for_have_no_time",
    ),
    "engine/clocks.py PhaseClock._drain synchronize": (
        CLOCK,
        "test_phases_that_were_not_waited_for_have_no_time",
    ),
    "engine/flat_partitions.py FlatPartitions._take_on_stream wait_stream": (
        FLAT,
        "test_a_gradient_of_another_stream_is_waited_for",
    ),
    "engine/flat_partitions.py FlatPartitions._take_on_stream record_stream": (
        FLAT,
        "test_memory_of_a_gradient_of_another_stream_is_kept",
    ),
    "checkpoint/tensor_files.py Staging.synchronize synchronize": (
        SAVER,
        "test_a_save_that_does_not_wait_for_its_copies_has_none_of_them",
    ),
    "checkpoint/saver.py Saver._write_own_files synchronize": (
        SAVER,
        "test_a_save_that_does_not_wait_for_its_copies_has_none_of_them",
    ),
    # The thread has waited: this asks how long the copies took.
    "checkpoint/saver.py Saver.poll synchronize": (
        SAVER,
        "test_a_save_beside_the_next_update_has_the_state_before_it",
    ),
    "recovery/spikes.py HeldStep.values synchronize": (
        HERE,
        "test_the_figures_of_a_step_are_waited_for",
    ),
    "recovery/corruption.py CorruptionCheck.check synchronize": (
        HERE,
        "test_a_check_is_not_charged_with_the_steps_before_it",
    ),
    "sweep/step_time.py step_seconds synchronize": (
        "tests/sweep/test_step_time.py",
        "test_a_step_lasts_until_the_device_has_done_it",
    ),
    "report/trace.py Trace.begin synchronize": (
        HERE,
        "test_a_trace_has_nothing_of_the_steps_before_it",
    ),
}


IN_ORDER = "the order of the stream; torch keeps pinned memory until it was read"
# Each copy that the host does not wait for, and what waits for it.
COPIES = {
    "runtime/device.py Copies.send to": "runtime/device.py Copies.receive wait_event",
    "checkpoint/tensor_files.py Staging.copy copy_": (
        "checkpoint/tensor_files.py Staging.synchronize synchronize"
    ),
    "recovery/spikes.py HeldStep.__init__ copy_": "recovery/spikes.py HeldStep.values synchronize",
    "engine/engine.py Engine.step to": IN_ORDER,
    "engine/engine.py Engine._mean_targets to": IN_ORDER,
    "engine/engine.py Engine.loss_of to": IN_ORDER,
}
# Where the host reads what the device has computed, which is a wait too.
READS = {
    "minimind: log_step",  # loss, tokens, norm, skipped steps
    "minimind: _sum_loss",  # of an evaluation
    "minimind: optimizer_step",
    "minimind: check",  # flags, before a save and in a check for corruption
    "minimind: replay",
    "minimind: checksums",
}


def device_calls() -> Iterator[tuple[str, bool]]:
    """Calls of the package that wait for a device, and copies (True) that do not."""
    for path in (ROOT / "minimind").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for group in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
            owner = f"{group.name}." if isinstance(group, ast.ClassDef) else ""
            functions = [node for node in group.body if isinstance(node, ast.FunctionDef)]
            for function in functions:
                place = f"{path.relative_to(ROOT / 'minimind')} {owner}{function.name}"
                for call in ast.walk(function):
                    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                        name = call.func.attr
                        is_copy = any(word.arg == "non_blocking" for word in call.keywords)
                        waits = ("synchronize", "wait_event", "wait_stream", "record_stream")
                        if is_copy or name in waits:
                            yield f"{place} {name}", is_copy


def test_every_wait_is_taken_away_by_a_test():
    calls = [*device_calls()]
    assert sorted(call for call, is_copy in calls if not is_copy) == sorted(WAITS)
    assert sorted(call for call, is_copy in calls if is_copy) == sorted(COPIES)
    assert {*COPIES.values()} <= {*WAITS, IN_ORDER}
    for file, name in WAITS.values():
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


@contextmanager
def trained_late(
    monkeypatch: pytest.MonkeyPatch, holds: bool = True, fresh: int = 0
) -> Iterator[None]:
    """Runs on the late device, which Accelerate cannot know."""
    prepared = SimpleNamespace(device=DEVICE, prepare_model=lambda model: model.to(DEVICE))
    with monkeypatch.context() as patch, late_device(holds, fresh):
        patch.setattr(build, "_accelerator", lambda *given, **options: prepared)
        yield


@pytest.fixture
def run(corpus: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Train into a folder of this name and return the events."""

    def trained(name: str, **flags: Any) -> list[dict[str, Any]]:
        places = {"data_path": [str(corpus)], "cache_dir": str(tmp_path / "cache")}
        assert train({**BASE, **places, **flags, "out_dir": str(tmp_path / name)}) == 0
        return events(tmp_path / name)

    return trained


def figures(events: list[dict[str, Any]]) -> list[Any]:
    """Everything that was computed on the device."""
    names = ("loss", "grad_norm", "skipped", "val_loss", "ema_val_loss", "passed")
    kinds = ("step", "eval", "verified")
    return [[one.get(name) for name in names] for one in events if one["event"] in kinds]


ALL = {"spike_guard": True, "verify_interval": 2, "ema": 0.9, "profile": True, "trace_steps": "3:4"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize(
    "more",
    [{"dtype": "float32"}, {"dtype": "bfloat16"}, pytest.param(ALL, marks=pytest.mark.long)],
    ids=str,
)
def test_a_run_on_a_late_device_is_that_of_a_cpu_bit_for_bit(
    run: Callable[..., list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    holds: bool,
    more: dict[str, Any],
):
    on_cpu = run("cpu", device="cpu", **more)
    with trained_late(monkeypatch, holds):
        late = run("late", **more)
    assert late[0]["device"] == NAME
    profiles = [
        ["host_ms" in one["ranks"] for one in events if one["event"] == "profile"]
        for events in (late, on_cpu)
    ]
    assert profiles == ([[True], [False]] if more is ALL else [[], []])
    assert figures(late) == figures(on_cpu)
    saved, expected = (
        published_checkpoints(tmp_path / name / "checkpoints") for name in ("late", "cpu")
    )
    assert [path.name for path in saved] == [path.name for path in expected]
    assert len(saved) == 3
    for one, other in zip(saved, expected, strict=True):
        weights = load_weights(other)
        assert all(torch.equal(values, weights[name]) for name, values in load_weights(one).items())


def test_every_read_of_a_run_would_find_another_value_without_its_wait(
    run: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
):
    """Memory that was never used holds no zeros there, which a value of 0 would be equal to."""
    once = {"max_steps": 2, "save_interval": 1, "log_interval": 1, "profile": False}
    with trained_late(monkeypatch, fresh=0xA5):
        run("late", **{**ALL, **once, "trace_steps": None})
        assert dict(LATE.reads) == dict.fromkeys(READS, True)


def test_a_run_that_does_not_wait_for_its_rows_has_other_losses(
    run: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
):
    on_cpu = run("cpu", device="cpu")
    with trained_late(monkeypatch):
        monkeypatch.setattr(Stream, "wait_event", lambda stream, event: None)
        late = run("late")
    pairs = zip(figures(late), figures(on_cpu), strict=True)
    assert all(one != other for one, other in pairs)


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_the_figures_of_a_step_are_waited_for(monkeypatch: pytest.MonkeyPatch, is_waited_for: bool):
    with late_device():
        if not is_waited_for:
            monkeypatch.setattr(Event, "synchronize", lambda event: None)
        loss, tokens, norm = (torch.tensor(value).to(DEVICE) for value in (6.5, 4, 0.25))
        held = HeldStep(0, StepResult((loss,), (tokens,), norm, 0.1, 0, False), math.inf)
        assert not LATE.is_done()  # a step later it is
        assert held.values() == ([6.5, 4.0, 0.25] if is_waited_for else [0.0] * 3)


def test_the_figures_of_a_step_need_no_float64(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Accelerator, "has_float64", False)
    with late_device():
        loss, tokens, norm = (torch.tensor(value).to(DEVICE) for value in (6.5, 4, 0.25))
        held = HeldStep(0, StepResult((loss,), (tokens,), norm, 0.1, 0, False), math.inf)
        assert held.values() == [6.5, 4.0, 0.25]
        assert held._values.dtype == torch.float32


@pytest.mark.long
def test_a_check_is_not_charged_with_the_steps_before_it(
    run: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
):
    """The host's clock counts the device's work alone, which is the same in every check."""
    monkeypatch.setattr(corruption, "time", SimpleNamespace(perf_counter=LATE.seconds))
    rare = {"log_interval": 6, "save_interval": 6, "eval_rows": 0, "verify_interval": 3}

    def seconds(name: str) -> list[float]:
        with trained_late(monkeypatch):
            return [one["seconds"] for one in run(name, **rare) if one["event"] == "verified"]

    first, second = seconds("waits")
    assert first == second
    never = SimpleNamespace(synchronize=lambda device: None, has_tf32=False)
    monkeypatch.setattr(corruption, "device_kind", lambda device: never)
    later, _ = seconds("does not")
    assert later > 1.5 * first


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_trace_has_nothing_of_the_steps_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_waited_for: bool
):
    """With a stand-in for the profiler, which records what the device does until it is stopped."""

    class Recorder:
        def __init__(self, **options: Any) -> None: ...

        def start(self) -> None:
            self.begun = LATE.main.clock

        def stop(self) -> None:
            LATE.synchronize()  # as torch/autograd/profiler.py does
            self.recorded = LATE.main.clock - self.begun

    monkeypatch.setattr(trace_module, "profile", Recorder)
    with late_device():
        kind = KINDS[NAME]
        if not is_waited_for:
            monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
        trace = Trace((3, 9), tmp_path, 0, kind)
        values = torch.zeros(2, device=DEVICE)
        for _ in range(3):
            values += 1
        trace.begin(2)
        values += 1
        recorder = trace.stop()
    assert recorder.recorded == (1.0 if is_waited_for else 5.0)  # with the zeros
