"""The phase clock and the metrics file against hand-made marks and torn lines."""

import gc
import json
import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import minimind.train as training
from minimind.data.rows.batches import Batches
from minimind.engine import engine
from minimind.engine.clocks import PHASES, CommunicationClock, PhaseClock, mean_ms, profile_table
from minimind.engine.deepspeed_backend import DeepSpeedBackend
from minimind.engine.plain_backend import PlainBackend
from minimind.errors import UsageError
from minimind.report import history
from minimind.report.run_logger import RunLogger
from minimind.runtime.device import KINDS, Accelerator
from minimind.runtime.durable_files import Metrics
from minimind.train.loop import GC_WARMUP_STEPS
from tools import late_device


def test_the_report_knows_the_same_phases():
    assert PHASES == history.PHASES


class Time:
    """A clock that tests move, so that other load on the machine is no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 1e9
        for name in ("perf_counter", "time"):
            monkeypatch.setattr(time, name, lambda: self.seconds)

    def slowed(self, work: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        """The same, `seconds` later."""

        def late(*given: Any, **named: Any) -> Any:
            self.seconds += seconds
            return work(*given, **named)

        return late


def test_every_moment_of_a_step_is_charged_to_one_phase(monkeypatch):
    passed, clock = Time(monkeypatch), PhaseClock(torch.device("cpu"))
    for _ in range(2):
        passed.seconds += 0.5  # between steps
        clock.begin()
        for number, phase in enumerate(("data", "forward", "backward", "forward", "optimizer")):
            passed.seconds += 0.001 * 2**number
            clock.mark(phase)
    expected = {"data": 1, "forward": 2 + 8, "backward": 4, "optimizer": 16, "step": 31}
    assert clock.take() == [pytest.approx(expected, rel=1e-3)] * 2
    assert clock.take() == []


def phases_on_a_late_device() -> list[dict[str, float]]:
    """Times of three steps. A collective of 4 ms runs beside the last backward pass."""
    device = late_device.DEVICE
    communication = CommunicationClock(device)
    clock = PhaseClock(device, communication)
    values, others = torch.zeros(2, device=device), late_device.Stream(device)
    for _ in range(3):
        clock.begin()
        for phase in ("data", "forward", "backward", "forward", "backward", "optimizer"):
            values += 1  # 1 ms of the device
            clock.mark(phase)
    late_device.LATE.set_stream(others)
    start = communication.now()
    for _ in range(4):
        values += 1
    communication.add(start)
    late_device.LATE.set_stream(late_device.LATE.main)
    return clock.take()


def test_on_a_gpu_phases_are_timed_by_events_and_waited_for_once(monkeypatch: pytest.MonkeyPatch):
    once = {"data": 1.0, "forward": 2.0, "backward": 2.0, "optimizer": 1.0, "step": 6.0}
    with late_device.late_device() as device:
        monkeypatch.setattr(time, "perf_counter", device.seconds)
        waits: list[bool] = []

        def synchronize(which: torch.device | None) -> None:
            waits.append(device.main.is_done())
            device.synchronize()

        monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
        assert phases_on_a_late_device() == [{**once, "comm": 4 / 3, "host": 0.0}] * 3
        assert waits == [False] * 2  # the first one before the steps


@pytest.mark.parametrize("left", ["nothing", "the wait for the current stream"])
def test_phases_that_were_not_waited_for_have_no_time(monkeypatch: pytest.MonkeyPatch, left: str):
    with late_device.late_device() as device:
        wait = device.main.synchronize if left != "nothing" else lambda: None
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda which: wait())
        with pytest.raises(RuntimeError, match="device not ready"):
            phases_on_a_late_device()


class Queue(Accelerator):
    """A device and its host, by a clock of the host's; kernels begin in order, once launched."""

    def __init__(self, passed: Time, launch: float, rate: float, depth: int) -> None:
        """launch: ms of the host per kernel. rate: of the device's clock, by the host's.

        depth: kernels after which the host waits for the first of them.
        """
        super().__init__("lazy")
        self.passed, self.seconds, self.rate = passed, launch / 1e3, rate
        self.ends, self.depth = [passed.seconds], depth

    def launch(self, kernels: int, ms: float) -> None:
        for _ in range(kernels):
            self.passed.seconds += self.seconds
            self.ends.append(max(self.passed.seconds, self.ends[-1]) + ms / 1e3)
            if len(self.ends) > self.depth:
                self.passed.seconds = max(self.passed.seconds, self.ends[-self.depth - 1])

    def moment(self) -> Any:
        reached = max(self.passed.seconds, self.ends[-1]) * self.rate
        return SimpleNamespace(
            reached=reached, elapsed_time=lambda end: (end.reached - reached) * 1e3
        )

    def synchronize(self, device: torch.device | None = None) -> None:
        self.passed.seconds = max(self.passed.seconds, self.ends[-1])


READ, UNREAD = {"reads": True}, {"reads": False}
BOTH, NONE = ("forward", "backward"), ()


@pytest.mark.parametrize("rate", [1.0, 1.003, 0.997])  # clocks drift, though by less
@pytest.mark.parametrize(
    ("forward", "backward", "how", "decided"),
    [
        # ms per kernel of the device in each pass; the host takes 0.2
        (0.1, 0.1, READ, BOTH),
        (0.1, 0.1, UNREAD, BOTH),
        (0.19, 0.19, READ, BOTH),
        (0.19, 0.19, UNREAD, NONE),  # with the update, the device takes longer
        (0.3, 0.3, READ, NONE),
        (0.3, 0.3, UNREAD, NONE),
        (0.3, 0.3, {"reads": False, "depth": 50}, NONE),  # the host waits for a place
        (5.0, 5.0, {"reads": False, "depth": 50}, NONE),
        (0.22, 0.22, READ, NONE),
        (0.1, 0.3, READ, ("forward",)),
        (0.1, 0.3, UNREAD, NONE),  # nor where both passes together do
        (0.3, 0.1, READ, ("backward",)),
        (0.3, 0.1, {"reads": True, "micro_batches": 3}, ("backward",)),
        # A wait ends the backward pass.
        (0.3, 0.3, {"reads": True, "waits": True}, NONE),
        (0.1, 0.1, {"reads": True, "waits": True}, BOTH),
        (0.3, 0.3, {"reads": True, "waits": True, "micro_batches": 3}, NONE),
    ],
)  # fmt: skip
def test_the_passes_that_the_host_decides_are_those_that_the_device_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
    forward: float,
    backward: float,
    how: dict[str, Any],
    decided: tuple[str, ...],
    rate: float,
):
    queue = Queue(Time(monkeypatch), 0.2, rate, how.get("depth", 1000))
    monkeypatch.setitem(KINDS, "lazy", queue)
    device, waits = torch.device("lazy"), how.get("waits", False)
    clock, found = PhaseClock(device, CommunicationClock(device)), []
    for count in (3, 40):
        for _ in range(count):
            clock.begin()
            for micro_batch in range(how.get("micro_batches", 1)):
                queue.launch(1, 0.1)
                clock.mark("data")
                queue.launch(40, forward)
                clock.mark("forward")
                queue.launch(90, backward)
                if waits:
                    queue.synchronize()
                clock.mark("backward")
                if micro_batch == how.get("micro_batches", 1) - 1:
                    queue.launch(2, 1.0)
                    if how["reads"]:
                        queue.synchronize()
                clock.mark("optimizer")
        found += clock.take(waits)
    for step in found[-20:]:  # a queue that was emptied for a report has filled
        assert step["host"] == pytest.approx(sum(step[name] for name in decided), rel=1e-3)


@pytest.mark.parametrize(
    ("partitions", "overlaps", "is_stage_3", "waits"),
    [
        (SimpleNamespace(fault=""), True, False, False),
        (SimpleNamespace(fault="it differed"), True, False, True),
        (SimpleNamespace(fault="it differed"), False, False, False),
        (None, True, False, True),
        (None, False, False, False),
        (None, False, True, True),
    ],
)
def test_a_backward_pass_waits_where_deepspeeds_own_path_does(
    partitions: Any, overlaps: bool, is_stage_3: bool, waits: bool
):
    backend: Any = object.__new__(DeepSpeedBackend)
    backend._partitions = partitions
    backend.optimizer = SimpleNamespace(overlap_comm=overlaps)
    backend.engine = SimpleNamespace(zero_optimization_partition_weights=lambda: is_stage_3)
    assert backend.waits is waits


def test_without_a_profile_the_time_of_the_host_is_not_recorded(monkeypatch: pytest.MonkeyPatch):
    queue = Queue(Time(monkeypatch), 1.0, 1.0, 1000)
    monkeypatch.setitem(KINDS, "lazy", queue)
    for device, communication in (("lazy", None), ("cpu", CommunicationClock(torch.device("cpu")))):
        clock = PhaseClock(torch.device(device), communication)
        clock.begin()
        queue.launch(3, 2.0)
        clock.mark("forward")
        assert "host" not in clock.take()[0]


def test_means_and_table_state_the_same():
    steps = [{**dict.fromkeys(PHASES, float(n)), "step": 4.0 * n} for n in (1, 2, 3)]
    assert mean_ms(steps)["forward_ms"] == 2.0
    table = profile_table(steps, {"checkpoint": 12.5})
    assert "25.0%" in table
    assert "12.5" in table
    assert "host" not in table
    table = profile_table([{**step, "host": 2.0} for step in steps], {})
    assert ["of", "it", "host", "2.0", "2.0", "2.0", "25.0%"] in map(str.split, table.splitlines())


def test_the_shares_of_uneven_steps_add_up_to_the_step():
    fast = {"data": 1.0, "forward": 30.0, "backward": 60.0, "optimizer": 9.0, "step": 100.0}
    slow = {"data": 400.0, "forward": 30.0, "backward": 60.0, "optimizer": 10.0, "step": 500.0}
    rows = map(str.split, profile_table([fast] * 3 + [slow], {}).splitlines()[1:])
    shares = {row[0]: float(row[-1].removesuffix("%")) for row in rows}
    assert shares.pop("step") == 100.0
    assert len(shares) == len(PHASES)
    assert sum(shares.values()) == pytest.approx(100.0, abs=0.1)
    assert shares["data"] == pytest.approx(100 * 403 / 800, abs=0.05)


def write(path: Path, **facts: object) -> None:
    metrics = Metrics(path)
    metrics.write("step", **facts)
    metrics.close()


def test_a_torn_last_line_is_closed_before_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"event": "step", "lo')
    write(path, loss=1.0)
    write(path, loss=2.0)
    lines = path.read_text().splitlines()
    assert lines[0] == '{"event": "step", "lo'
    assert [json.loads(line)["loss"] for line in lines[1:]] == [1.0, 2.0]


def test_numbers_keep_full_precision_and_non_finite_ones_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, loss=0.1 + 0.2, norm=math.nan, rows=[math.inf, 1])
    line = json.loads(path.read_text())
    assert line["loss"] == 0.1 + 0.2
    assert line["norm"] is None
    assert line["rows"] == [None, 1]


def test_a_straggler_shows_by_its_rank(tmp_path, capsys):
    logger = RunLogger(tmp_path, 4, torch.device("cpu"), is_rank_0=True, is_profiling=True)
    steps = [{**dict.fromkeys(PHASES, ms), "step": 4 * ms, "comm": 1.0} for ms in (2.0, 3.0, 9.0)]
    logger.add_phase_times(steps)
    logger.add_pause("checkpoint", 5.0)
    own = logger.medians()
    assert (own["forward_ms"], own["step_ms"], own["comm_ms"]) == (3.0, 12.0, 1.0)
    assert own["memory_mib"] > 0
    late = {**own, "forward_ms": 40.0, "comm_ms": 0.25, "checkpoint_ms": 7.0}
    logger.profile(3, [own, late])
    logger.close()
    shown = capsys.readouterr().out
    row = next(line for line in shown.split("over ranks")[1].splitlines() if "forward" in line)
    assert row.split() == ["forward", "3.0", "21.5", "40.0", "rank", "1"]
    event = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert event["ranks"]["forward_ms"] == [3.0, 40.0]
    assert event["ranks"]["comm_ms"] == [1.0, 0.25]
    assert event["ranks"]["checkpoint_ms"] == [5.0, 7.0]
    assert event["comm_ms"] == 1.0
    assert event["forward_ms"] == pytest.approx(14 / 3)


@pytest.mark.usefixtures("thawed")
def test_the_phases_are_the_time_from_one_line_to_the_next(corpus, tmp_path, monkeypatch):
    """By the clock of metrics.jsonl, which knows of no phase; every part of a step is slow."""
    clock = Time(monkeypatch)
    for owner, name, seconds in (
        (Batches, "at", 0.02),
        (PlainBackend, "begin", 0.01),
        (engine, "text_inputs", 0.02),
        (PlainBackend, "backward", 0.03),
        (PlainBackend, "update", 0.01),
        (gc, "freeze", 0.5),
    ):
        monkeypatch.setattr(owner, name, clock.slowed(getattr(owner, name), seconds))
    train: Any = training  # a package that is called like a function
    shape = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32}
    pace = {"batch_size": 2, "accumulation_steps": 2, "max_steps": 10, "log_interval": 1}
    places = {"data_path": [str(corpus)], "out_dir": str(tmp_path / "out")}
    rest = {"cache_dir": str(tmp_path / "cache"), "vocab_size": 600, "eval_rows": 0}
    fixed = {"device": "cpu", "deepspeed_config": "none", "save_interval": 100}
    assert train({**shape, **pace, **places, **rest, **fixed}, profile=True) == 0
    text = (tmp_path / "out" / "metrics.jsonl").read_text()
    report = [json.loads(line) for line in text.splitlines()]
    lines = [one for one in report if one["event"] == "step"]
    phases = {"data_ms": 30, "forward_ms": 40, "backward_ms": 60, "optimizer_ms": 20}
    for line in lines:
        assert {name: line[name] for name in phases} == pytest.approx(phases, rel=1e-5)
    # What lies between steps is reported by its cause, and tokens/s are those of the steps alone.
    assert [one["step"] for one in lines if one["gc_ms"]] == [GC_WARMUP_STEPS + 1]
    for before, line in pairwise(lines[:-1]):  # the last one is saved too
        lasted = (line["time"] - before["time"]) * 1e3
        assert sum(line[name] for name in phases) + line["gc_ms"] == pytest.approx(lasted, rel=1e-5)
    (start,) = (one for one in report if one["event"] == "run_start")
    speed = pytest.approx(start["tokens_per_step"] / 0.15, rel=1e-5)
    assert [line["tokens_per_second"] for line in lines] == [speed] * len(lines)


def test_what_follows_the_last_line_is_reported_at_the_end_and_a_stop_has_a_profile(
    corpus, tmp_path
):
    train: Any = training  # a package that is called like a function
    shape = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32}
    places = {"data_path": [str(corpus)], "cache_dir": str(tmp_path / "cache")}
    fixed = {"device": "cpu", "deepspeed_config": "none", "vocab_size": 600, "batch_size": 2}
    rest = {"max_steps": 6, "log_interval": 4, "eval_interval": 6, "save_interval": 100}
    run = {
        **shape,
        **places,
        **fixed,
        **rest,
        "profile_interval": 5,
        "out_dir": str(tmp_path / "o"),
    }

    def report(name: str) -> list[dict[str, Any]]:
        lines = map(json.loads, (tmp_path / "o" / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line["event"] == name]

    assert train(run, profile=True, stop_at_step=3) == 75
    assert [(one["step"], one["steps"]) for one in report("profile")] == [(3, 3)]
    assert [one["step"] for one in report("step")] == [3]  # 4 would be the first by the interval
    assert train(run, profile=True) == 0
    assert [one["step"] for one in report("profile")] == [3, 5, 6]
    stopped, done = report("exit")
    assert stopped["checkpoint_ms"] > 0
    assert "evaluate_ms" not in stopped
    assert done["checkpoint_ms"] > 0
    assert done["evaluate_ms"] > 0
    assert all(line["evaluate_ms"] == 0 for line in report("step"))
    with pytest.raises(
        UsageError, match=r"trace_steps = 7:9 \(.*\) begins after the run's last step, 6"
    ):
        train(run, profile=True, trace_steps="7:9", debug=True)
