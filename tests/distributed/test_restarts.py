"""MAX_RESTARTS: which processes go on after status 7, with which flags, as the same run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minimind.config.deepspeed.resolve import resolve
from minimind.config.launcher_env import Launch
from minimind.config.origin import DEFAULT
from minimind.config.parse import parse_flags
from minimind.config.run_config import RunConfig
from minimind.errors import PeerError, Stopped
from minimind.launch import restart
from minimind.launch.restart import (
    Host,
    Launched,
    Meeting,
    added_flags,
    back_off,
    choose,
    meeting_of,
    own_address,
    this_host,
    variables,
    what_was_lost,
)
from minimind.runtime.heartbeat import Layout, read_layout
from minimind.train.pretrain import record_for_restart
from tests.conftest import ROOT, Launcher, Run
from tests.distributed.conftest import BF16, FP32, LONGER, STEPS
from tests.distributed.test_launchers import environment
from tools.forking import free_port
from tools.runs import kill_all, left_over, wait_for, workers

LAYOUT = Layout("a1", "out", 4, 2, 2, 2, split_batches=False, resume="auto", fixed_by="")


def hosts_of(*processes: int) -> list[Host]:
    return [Host(rank, f"10.0.0.{rank}", number) for rank, number in enumerate(processes)]


@pytest.mark.parametrize(
    ("left", "ranks", "each", "accumulation"),
    [
        ((4,), [0], 4, 2),  # one host: as before
        ((3,), [0], 2, 4),  # a GPU less: 8 micro-batches are not divided by 3
        ((1,), [0], 1, 8),
        ((2, 2), [0, 1], 2, 2),
        ((2, 1), [0, 1], 1, 4),  # the same number on every host
        ((1, 1), [0, 1], 1, 4),
        ((1, 1, 1), [0, 1], 1, 4),  # one is left out
        ((1, 2, 1), [0, 1], 1, 4),  # of as many processes, the more hosts
        ((1, 1, 1, 1), [0, 1, 2, 3], 1, 2),
    ],
)
def test_the_most_processes_that_divide_the_batch_go_on(left, ranks, each, accumulation):
    choice = choose(LAYOUT, hosts_of(*left), 4)
    assert [host.rank for host in choice.hosts] == ranks
    assert (choice.each, choice.accumulation) == (each, accumulation)
    assert choice.processes * (choice.accumulation or 0) == 8


@pytest.mark.parametrize(
    ("left", "each", "accumulation"),
    [((4,), 4, 2), ((3,), 2, 4), ((2, 2), 2, 2), ((2, 1), 1, 4), ((1, 1, 1, 1), 1, 2)],
)
def test_groups_that_share_rows_go_on_whole(left, each, accumulation):
    layout = replace(LAYOUT, group_size=2, split_batches=True, batch_size=4)
    choice = choose(layout, hosts_of(*left), 4)
    assert (choice.each, choice.accumulation) == (each, accumulation)
    assert choice.processes // 2 * (choice.accumulation or 0) == 4
    flags = added_flags(layout, choice, has_checkpoint=False)
    assert flags.get("batch_size", 4) == choice.processes // 2 * layout.micro_batch_rows
    with pytest.raises(PeerError, match="makes whole groups of the 2 that share a row"):
        choose(layout, hosts_of(1), 4)


@pytest.mark.parametrize(
    ("left", "each", "times"), [((4,), 4, 1), ((3,), 2, 2), ((2, 1), 1, 2), ((1,), 1, 4)]
)
def test_stages_with_a_batch_over_all_processes_go_on_in_larger_micro_batches(
    left: tuple[int, ...], each: int, times: int
):
    """No flag changes the batch_size of a stage, and so none of the batch is changed."""
    layout = replace(LAYOUT, split_batches=True, batch_size=8, split_unit=4)
    choice = choose(layout, hosts_of(*left), 4)
    assert (choice.each, choice.accumulation) == (each, 2)
    assert added_flags(layout, choice, has_checkpoint=False) == {}
    assert 4 == choice.processes * times
    with pytest.raises(PeerError, match="whole groups of the 2 that share a row"):
        choose(replace(layout, group_size=2), hosts_of(1), 4)


def recorded(run: RunConfig, place: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """What one of two workers records of its run."""
    resolved: Any = SimpleNamespace(sources={}, path="ds.json")
    engine: Any = SimpleNamespace(
        rank=0, world_size=2, resolved=resolved, from_rank_0=lambda value: value
    )
    monkeypatch.setenv("MINIMIND_STATUS_FILE", str(place / "status"))
    record_for_restart(cast(Any, SimpleNamespace(run=run)), engine)
    layout = read_layout(place)
    assert layout
    return layout


@pytest.mark.parametrize(
    ("stages", "flags", "unit"),
    [
        ("{until: 50%, batch_size: 12}, {name: b}", "--split_batches --batch_size 8", 4),
        ("{until: 50%, batch_size: 6}, {name: b, batch_size: 12}", "--split_batches", 6),
        ("{until: 50%}, {name: b}", "--split_batches --batch_size 8", 0),
        ("{until: 50%, batch_size: 12}, {name: b}", "--batch_size 8", 0),
    ],
)
def test_a_worker_records_what_divides_the_batches_of_stages(
    stages: str, flags: str, unit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "stages.yaml"
    path.write_text(f"stages: [{stages}]\n")
    run = parse_flags([*flags.split(), "--stages", str(path), "--max_steps", "8"])
    assert recorded(run, tmp_path, monkeypatch).split_unit == unit


@pytest.mark.parametrize(
    ("left", "ranks", "each"),
    [
        ((3,), [0], 3),
        ((1, 1, 1), [0, 1, 2], 1),
        ((3, 2), [0, 1], 2),
        ((9,), [0], 7),  # more than rows
    ],
)
def test_any_number_of_processes_divides_a_global_batch(left, ranks, each):
    layout = replace(LAYOUT, global_batch_size=7)
    choice = choose(layout, hosts_of(*left), 9)
    assert ([host.rank for host in choice.hosts], choice.each) == (ranks, each)
    assert added_flags(layout, choice, has_checkpoint=False) == {}
    in_groups = replace(layout, group_size=2)
    assert choose(in_groups, hosts_of(7), 9).each == 6
    fixed = replace(layout, world_size=9, fixed_by="ds.json")
    with pytest.raises(PeerError, match=r"ds\.json fixes gradient_accumulation_steps"):
        choose(fixed, hosts_of(*left[:1]), 10)


@pytest.mark.parametrize(
    ("layout", "left", "words"),
    [
        (replace(LAYOUT, paddable_rows=16), 3, "; 3 could continue with --global_batch_size 16"),
        (replace(LAYOUT, paddable_rows=16), 2, ""),  # none is idle
        (LAYOUT, 3, ""),  # the flag is refused, as with experts
        (replace(LAYOUT, global_batch_size=16), 3, ""),
    ],
)
def test_a_restart_that_leaves_processes_idle_names_the_flag_that_takes_them(
    layout: Layout,
    left: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    for name, value in {"MAX_RESTARTS": "1", "RESTART_WAIT": "0"}.items():
        monkeypatch.setenv(name, value)
    launched = Launched(4, 1, 0, "", 0)
    layout = replace(layout, out_dir=str(tmp_path))
    restart._prepare(1, launched, layout, hosts_of(left)[0], None, "rank 3 was lost (status 7)")
    printed = capsys.readouterr().err
    assert printed.endswith(f"{words}\n")
    assert ("--global_batch_size" in printed) is bool(words)


@pytest.mark.parametrize(
    ("flags", "rows"),
    [("", 32), ("--use_moe", 0), ("--split_batches", 0), ("--global_batch_size 9", 0)],
)
def test_a_worker_records_the_rows_that_padding_could_fill(
    flags: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = parse_flags(["--batch_size", "8", *flags.split()])
    run = run if "global" in flags else run.with_values(DEFAULT, accumulation_steps=2)
    assert recorded(run, tmp_path, monkeypatch).paddable_rows == rows


def test_without_a_step_only_the_same_processes_go_on():
    assert choose(None, hosts_of(2), 2).accumulation is None
    with pytest.raises(PeerError, match="1 of 2 processes are left, and the rows per step are not"):
        choose(None, hosts_of(1), 2)


def test_a_file_that_fixes_the_accumulation_allows_the_same_processes_only():
    fixed = replace(LAYOUT, fixed_by="ds.json")
    assert choose(fixed, hosts_of(4), 4).accumulation == 2
    with pytest.raises(PeerError, match=r'ds.json fixes .* = 2; write "auto" there, and run'):
        choose(fixed, hosts_of(2), 4)


@pytest.mark.parametrize(
    ("layout", "left", "has_checkpoint", "flags"),
    [
        (LAYOUT, 4, True, {}),
        (LAYOUT, 2, True, {"accumulation_steps": 4}),
        # Nothing is saved of a batch that "auto" decides by the processes.
        (LAYOUT, 2, False, {"accumulation_steps": 4, "batch_size": 2}),
        (replace(LAYOUT, resume="none"), 4, True, {"resume": "auto"}),
        (replace(LAYOUT, resume="none"), 4, False, {}),  # there is nothing else to begin from
        (
            replace(LAYOUT, split_batches=True, batch_size=8),
            2,
            False,
            {"accumulation_steps": 4, "batch_size": 4},
        ),
    ],
)
def test_flags_are_appended_so_that_the_rows_of_a_step_stay(layout, left, has_checkpoint, flags):
    choice = choose(layout, hosts_of(left), 4)
    assert added_flags(layout, choice, has_checkpoint) == flags
    given = ["--resume", layout.resume, "--accumulation_steps", "2"]
    given += ["--batch_size", str(layout.batch_size)]
    given += ["--split_batches"] if layout.split_batches else []
    added = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    run = parse_flags([*given, *added])  # the last value counts
    in_step = run.micro_batch_rows(choice.processes) * run.accumulation_steps * choice.processes
    assert in_step == 16
    assert run.resume == ("auto" if has_checkpoint else layout.resume)


def test_the_wait_doubles_to_five_minutes():
    assert [back_off(number, 5) for number in range(1, 9)] == [5, 10, 20, 40, 80, 160, 300, 300]
    assert back_off(10_000, 1) == 300


def test_the_hosts_that_are_left_are_counted_anew():
    launched = Launched(4, 4, 2, "10.0.0.0", 29500)
    left = [Host(1, "b", 1), Host(2, "c", 1)]
    choice = choose(LAYOUT, left, 4)
    assert variables(launched, choice, left[1]) == {
        "NUM_PROCESSES": 2,
        "NUM_MACHINES": 2,
        "MACHINE_RANK": 1,
        "MAIN_IP": "b",
    }
    alone = choose(LAYOUT, left[1:], 4)
    found = variables(launched, alone, left[1])
    assert (found["NUM_MACHINES"], found["MACHINE_RANK"], found["MAIN_PORT"]) == (1, 0, 0)
    with pytest.raises(PeerError, match="host 1 is left out of the restart: 1 hosts with 1"):
        variables(launched, alone, left[0])
    (me,) = hosts_of(4)  # one host, all of its processes: nothing changes
    assert variables(Launched(4, 1, 0, "", 29500), choose(LAYOUT, [me], 4), me) == {}


def test_what_was_lost_is_named(tmp_path: Path):
    status = tmp_path / "status"
    assert what_was_lost(status, Launched(4, 2, 0, "", 0)).startswith("the launcher was lost")
    status.write_text("7 3\n")
    assert what_was_lost(status, Launched(4, 2, 0, "", 0)) == "rank 3 on host 1 was lost (status 7)"
    assert what_was_lost(status, Launched(4, 1, 0, "", 0)) == "rank 3 was lost (status 7)"


def test_several_hosts_meet_only_after_a_step():
    launched, (me, _) = Launched(2, 2, 0, "", 0), hosts_of(1, 1)
    assert meeting_of(None, Launched(2, 1, 0, "", 0), me, 1) is None
    with pytest.raises(PeerError, match="the hosts were not connected yet"):
        meeting_of(None, launched, me, 1)
    first, second = (meeting_of(LAYOUT, launched, me, number) for number in (1, 2))
    assert first
    assert second
    assert first.folder != second.folder


@pytest.mark.parametrize(("gpus", "processes"), [(9, 4), (3, 3)])
def test_a_gpu_that_disappeared_is_a_process_less(
    gpus: int, processes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(restart, "count_gpus", lambda visible: gpus)
    assert this_host(Launched(8, 2, 0, "a", 0)) == Host(0, "a", processes)
    monkeypatch.setattr(restart, "count_gpus", lambda visible: 0)
    with pytest.raises(PeerError, match="no GPU of this host is left"):
        this_host(Launched(8, 2, 0, "a", 0))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert this_host(Launched(8, 2, 0, "a", 0)).processes == 4


@pytest.mark.parametrize(
    ("flags", "document", "yaml", "fixed_by"),
    [
        ("--accumulation_steps 2", {}, {}, ""),
        ("--accumulation_steps 2", {"gradient_accumulation_steps": "auto"}, {}, ""),
        ("", {"train_batch_size": 32}, {}, ""),  # the same rows with more micro-batches
        ("", {"gradient_accumulation_steps": 2}, {}, "ds.json"),
        ("--accumulation_steps 2", {"gradient_accumulation_steps": 2}, {}, "ds.json"),
        ("", {}, {"accumulation_steps": ("2", "gradient_accumulation_steps")}, "a.yaml"),
    ],
)
def test_a_worker_records_the_rows_of_a_step_and_the_file_that_fixes_them(
    flags, document, yaml, fixed_by, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    launched = Launch(world_size=2, flags=yaml, source="a.yaml")
    document = {"zero_optimization": {"stage": 2}, **document}
    resolved = resolve(document, "ds.json", parse_flags(flags.split()), 2, "cpu", launch=launched)
    engine: Any = SimpleNamespace(
        rank=1, world_size=2, resolved=resolved, from_rank_0=lambda value: value
    )
    monkeypatch.setenv("MINIMIND_STATUS_FILE", str(tmp_path / "status"))
    assert read_layout(tmp_path) is None
    setup = SimpleNamespace(launch=launched)
    record_for_restart(cast(Any, SimpleNamespace(run=resolved.run, setup=setup)), engine)
    layout = read_layout(tmp_path)
    assert layout
    assert (layout.world_size, layout.micro_batch_rows, layout.accumulation_steps) == (2, 8, 2)
    assert (layout.fixed_by, layout.resume) == (fixed_by, "auto")


def test_the_address_is_the_one_towards_host_0():
    assert own_address("127.0.0.1", 29500) == "127.0.0.1"
    with pytest.raises(PeerError, match=r"MAIN_IP = no such host: .*; run the same command"):
        own_address("no such host", 29500)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "POLL", 0.01)


@pytest.mark.usefixtures("quick")
def test_hosts_agree_without_the_one_that_is_lost(tmp_path: Path):
    earlier = tmp_path / "a0-1"
    earlier.mkdir()
    left = hosts_of(1, 1, 1)[1:]
    agreed: list[list[Host]] = []

    def come(host: Host, after: float) -> None:
        time.sleep(after)
        agreed.append(Meeting(tmp_path / "a1-1", host, 3).agree(settle=1.5))

    threads = [threading.Thread(target=come, args=(h, 0.3 * n)) for n, h in enumerate(left)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert agreed == [left, left]
    assert not earlier.exists()
    with pytest.raises(PeerError, match="the other hosts restarted without host 0, which came"):
        Meeting(tmp_path / "a1-1", hosts_of(1)[0], 3).agree(settle=0.5)


@pytest.mark.usefixtures("quick")
def test_with_every_host_there_none_is_waited_for(tmp_path: Path):
    both = [Meeting(tmp_path / "a1-1", host, 2) for host in hosts_of(1, 1)]
    tmp_path.joinpath("a1-1").mkdir()
    both[1].check()
    began = time.monotonic()
    assert both[0].agree(settle=60) == both[1].agree(settle=60) == hosts_of(1, 1)
    assert time.monotonic() - began < 30


def test_one_host_reads_what_all_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Host 0 has announced itself and is lost: the next one decides."""
    monkeypatch.setattr(restart, "POLL", 0.2)
    hosts, reads, read_text = hosts_of(*[8] * 16), Counter[str](), Path.read_text

    def counting(path: Path, *given: Any, **options: Any) -> str:
        reads[path.name] += 1
        return read_text(path, *given, **options)

    meetings = [Meeting(tmp_path / "a1-1", host, len(hosts)) for host in hosts]
    tmp_path.joinpath("a1-1").mkdir()
    meetings[0].check()
    monkeypatch.setattr(Path, "read_text", counting)
    with ThreadPoolExecutor(len(hosts)) as pool:
        found = list(pool.map(lambda meeting: meeting.agree(settle=60), meetings[1:]))
    assert found == [hosts] * 15
    assert reads.pop("decision") == 15
    assert reads.total() <= 2 * len(hosts)  # one host, or two if the first of them was slow


@pytest.mark.usefixtures("quick")
def test_a_host_that_is_stopped_stops_the_others(tmp_path: Path):
    one, other = (Meeting(tmp_path / "a1-1", host, 2) for host in hosts_of(1, 1))
    one.stop()  # before it has announced itself: nobody knows of it
    tmp_path.joinpath("a1-1").mkdir()
    other.check()
    one.stop()
    with pytest.raises(Stopped, match="another host was stopped"):
        other.wait(60)
    with pytest.raises(Stopped):
        other.agree(settle=60)


# The script, with a launcher that ends with the statuses given.


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start run_accelerate.sh; the flags of each launch are a line of `tmp_path / "started"`."""
    (tmp_path / "bin").mkdir()
    stub = tmp_path / "bin" / "python"
    stub.write_text(
        f'#!/bin/sh\n[ "${{1##*/}}" = accelerate_launch.py ] || exec "{sys.executable}" "$@"\n'
        "shift 8\n"
        f'echo "$@" >>"{tmp_path}/started"\n'
        f'set -- $STATUSES "" $(wc -l <"{tmp_path}/started")\n'
        "for last; do :; done\n"
        'shift $((last - 1)); echo "$1 1" >"$MINIMIND_STATUS_FILE"\n'
        '[ -z "$LAYOUT" ] || echo "$LAYOUT" >"${MINIMIND_STATUS_FILE%/*}/layout-0"\n'
    )
    stub.chmod(0o755)

    def start(statuses: str, **more: str) -> subprocess.Popen[str]:
        waits = {"RESTART_WAIT": "1", "CUDA_VISIBLE_DEVICES": "", "NUM_PROCESSES": "2"}
        return subprocess.Popen(
            ["bash", str(ROOT / "run_accelerate.sh"), "--dry_run", "--seed", "1"],
            env=environment(**{**waits, "PYTHON": str(stub), "STATUSES": statuses, **more}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )

    return start


@pytest.fixture
def script(begin, tmp_path: Path) -> Callable[..., tuple[Run, list[str]]]:
    """The end of run_accelerate.sh, and the flags of each launch."""

    def run(statuses: str, **more: str) -> tuple[Run, list[str]]:
        started = begin(statuses, **more)
        output, report = started.communicate(timeout=300)
        path = tmp_path / "started"
        lines = path.read_text().splitlines() if path.exists() else []
        return Run(tmp_path, started.returncode, output, report), lines

    return run


@pytest.mark.sample(2)
@pytest.mark.parametrize("status", [0, 2, 3, 4, 5, 6, 8, 9, 10, 70, 75])
def test_any_other_end_is_final(script, status: int):
    run, started = script(str(status), MAX_RESTARTS="3")
    assert run.status == status
    assert len(started) == 1
    assert "restart " not in run.stderr


def test_without_the_variable_7_is_final(script):
    run, started = script("7")
    assert (run.status, len(started)) == (7, 1)
    assert "restart " not in run.stderr


def test_it_is_started_again_after_7_until_no_restart_is_left(script, tmp_path: Path):
    layout = asdict(replace(LAYOUT, world_size=2, resume="none", out_dir=str(tmp_path)))
    (tmp_path / "checkpoints" / "step_00000006").mkdir(parents=True)
    run, started = script("7 7 7", MAX_RESTARTS="2", LAYOUT=json.dumps(layout))
    assert run.status == 7
    assert [line.partition("--seed")[2] for line in started] == [" 1", *[" 1 --resume auto"] * 2]
    said = [line for line in run.stderr.splitlines() if "restart " in line]
    of = "on 2 of 2 processes, --resume auto instead of none"
    assert said == [
        f"run_accelerate.sh: rank 1 was lost (status 7); restart 1 of 2 in 1 s {of}",
        f"run_accelerate.sh: rank 1 was lost (status 7); restart 2 of 2 in 2 s {of}",
        "run_accelerate.sh: no restart is left of MAX_RESTARTS=2; run the same command again",
    ]


def test_a_restart_ends_as_the_run_then_does(script):
    run, started = script("7 3", MAX_RESTARTS="5")
    assert (run.status, len(started)) == (3, 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("variable", "value"), [("MAX_RESTARTS", "-1"), ("MAX_RESTARTS", "two"), ("RESTART_WAIT", "0")]
)
def test_a_variable_that_is_no_number_is_refused(script, variable: str, value: str):
    run, started = script("0", **{variable: value})
    assert (run.status, started) == (2, [])
    (line,) = run.stderr.splitlines()
    assert f"{variable} is {value}, not a whole number from " in line


def test_a_stop_in_the_wait_is_75(begin, tmp_path: Path):
    started = begin("7", MAX_RESTARTS="1", RESTART_WAIT="300")
    assert any("restart 1 of 1 in 300 s" in line for line in started.stderr)
    started.send_signal(signal.SIGTERM)
    _, report = started.communicate(timeout=300)
    assert started.returncode == 75
    assert report.endswith("stopped on SIGTERM before restart 1; run it again to continue\n")
    assert len((tmp_path / "started").read_text().splitlines()) == 1


# Real runs.

Start = Callable[..., list[subprocess.Popen[str]]]
RESTARTING = {"MAX_RESTARTS": "1", "RESTART_WAIT": "1"}


@pytest.fixture
def start_hosts(launch: Launcher, tmp_path: Path) -> Iterator[Start]:
    """run_accelerate.sh as on each of several hosts, with one process each."""
    started: list[subprocess.Popen[str]] = []

    def start(
        flags: str, machines: int, wait: int = 1, restarts: int = 1
    ) -> list[subprocess.Popen[str]]:
        shared = {"NUM_MACHINES": str(machines), "NUM_PROCESSES": str(machines)}
        shared |= {"MAIN_IP": "127.0.0.1", "MAIN_PORT": str(free_port())}
        shared |= {"MAX_RESTARTS": str(restarts), "RESTART_WAIT": str(wait)}
        for rank in range(machines):
            started.append(
                subprocess.Popen(
                    launch.command(tmp_path / "out", flags),
                    env=environment(**shared, MACHINE_RANK=str(rank)),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        return started

    yield start
    for one in started:
        if one.poll() is None:
            kill_all(one)


@pytest.fixture(scope="module")
def longer_fp32(forked: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return forked.run(tmp_path_factory.mktemp("longer") / "out", f"{FP32} {LONGER}")


def largest_difference(run: Run, unbroken: Run) -> float:
    """Of a loss to the one of the same step, over all steps that were taken, some of them twice."""
    expected = {step["step"]: step for step in unbroken.events("step")}
    taken = run.events("step")
    assert {step["step"] for step in taken} == {*expected}
    assert [step["rows"] for step in taken] == [expected[step["step"]]["rows"] for step in taken]
    return max(abs(step["loss"] - expected[step["step"]]["loss"]) for step in taken)


@pytest.mark.long  # above hosts agree on who is left
@pytest.mark.launch
@pytest.mark.parametrize("lost", [0, 1])
def test_after_a_host_is_killed_for_good_the_other_finishes_the_same_run(
    lost: int, start_hosts: Start, longer_fp32: Run, tmp_path: Path
):
    hosts = start_hosts(f"{FP32} {LONGER}", 2)
    for words in ('"step": 8,', "checkpoint_saved"):
        wait_for(hosts[lost], tmp_path / "out", words)
    kill_all(hosts[lost])
    _, report = hosts[1 - lost].communicate(timeout=300)
    run = Run(tmp_path / "out", hosts[1 - lost].returncode, "", report)
    assert run.status == 0, report
    assert left_over(tmp_path / "out") == []
    first, second = run.events("run_start")
    assert (first["world_size"], second["world_size"]) == (2, 1)
    assert second["step"] in range(6, STEPS, 6)
    named = f"run_accelerate.sh: rank {lost} on host {lost} was lost (status 7); "
    assert f"{named}waiting for the other hosts, up to 6 s for each\n" in report
    choice = "restart 1 of 1 in 1 s on 1 of 2 processes, --accumulation_steps 4 instead of 2\n"
    assert f"{named}{choice}" in report
    assert run.curve()[:8] == longer_fp32.curve()[:8]  # of both hosts
    difference = largest_difference(run, longer_fp32)
    print(f"{report}\nlargest difference of a loss: {difference:.1e}")
    assert difference <= 2e-6


@pytest.mark.long
@pytest.mark.launch
def test_two_hosts_of_three_go_on_with_another_host_0(
    start_hosts: Start, forked: Launcher, tmp_path: Path
):
    # One notices the loss some seconds after the other.
    hosts = start_hosts(f"{FP32} {LONGER}", 3, wait=3)
    flags = f"{FP32} {LONGER} --accumulation_steps 6"
    wait_for(hosts[0], tmp_path / "out", '"step": 8,')
    kill_all(hosts[0])
    reports = [host.communicate(timeout=300)[1] for host in hosts[1:]]
    assert [host.returncode for host in hosts[1:]] == [0, 0], reports
    run = Run(tmp_path / "out", 0, "", reports[0])
    first, second = run.events("run_start")
    assert (first["world_size"], second["world_size"]) == (3, 2)
    assert second["accumulation_steps"] == 3
    unbroken = forked.run(tmp_path / "unbroken", flags, processes=1)
    assert largest_difference(run, unbroken) <= 2e-6


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize("seed", [1, 2])
def test_with_a_global_batch_any_hosts_that_are_left_go_on(
    seed: int, start_hosts: Start, longer_fp32: Run, tmp_path: Path
):
    """Of four hosts one is killed at a random step, and then another: 8 rows on 4, 3, 2."""
    draw = random.Random(seed)
    flags = f"{FP32} {LONGER} --global_batch_size 8"
    left = [*start_hosts(flags, 4, wait=3, restarts=2)]
    for first in (7, 14):
        wait_for(left[0], tmp_path / "out", f'"step": {draw.randrange(first, first + 6)},')
        kill_all(left.pop(draw.randrange(len(left))))
        words = f'"world_size": {len(left)},'
        wait_for(left[0], tmp_path / "out", words)
    reports = [host.communicate(timeout=300)[1] for host in left]
    assert [host.returncode for host in left] == [0, 0], reports
    assert left_over(tmp_path / "out") == []
    run = Run(tmp_path / "out", 0, "", reports[0])
    starts = run.events("run_start")
    assert [one["world_size"] for one in starts] == [4, 3, 2]
    split = [(one["micro_batch_rows"], one["accumulation_steps"]) for one in starts]
    assert split == [(2, 1), (2, 2), (2, 2)]
    assert "on 3 of 4 processes\n" in reports[0]
    assert "on 2 of 3 processes\n" in reports[0]
    found = largest_difference(run, longer_fp32)
    print(f"largest difference of a loss: {found:.1e}")
    assert found <= 2e-6


@pytest.mark.long  # test_runs.py kills a run and starts it again, and above the script restarts
@pytest.mark.launch
def test_a_killed_worker_of_one_host_is_started_again_and_the_run_is_the_same(
    launch: Launcher, unbroken: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in RESTARTING.items():
        monkeypatch.setenv(name, value)
    started = launch.start(tmp_path, f"{BF16} {LONGER} --eval_interval 18")
    wait_for(started, tmp_path, '"step": 8,')
    victim = workers(started.pid)[1].pid
    os.kill(victim, signal.SIGKILL)
    _, report = started.communicate(timeout=300)
    assert left_over(tmp_path) == []
    run = Run(tmp_path, started.returncode, "", report)
    assert run.status == 0, report
    first = next(line for line in report.splitlines() if "error[" in line)
    assert first.startswith("train_pretrain: error[E_PEER] rank=0 step=")
    assert f": rank 1 (process {victim} on " in first
    assert "died: killed by SIGKILL, perhaps for lack of" in first
    line = "rank 1 was lost (status 7); restart 1 of 1 in 1 s on 2 of 2 processes\n"
    assert f"run_accelerate.sh: {line}" in report
    assert len(run.events("run_start")) == 2
    expected = dict(zip(range(1, STEPS + 1), unbroken.curve(), strict=True))
    assert all(step == expected[int(step[0])] for step in run.curve())
    assert {int(step[0]) for step in run.curve()} == {*expected}
