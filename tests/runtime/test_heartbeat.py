"""Who is to blame for a silent peer: real child processes, and beats of ranks elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from minimind.launch.accelerate_launch import record_ends
from minimind.runtime import heartbeat as module
from minimind.runtime.heartbeat import (
    Digest,
    FailedRank,
    Peers,
    Pulse,
    Worker,
    describe_end,
    main_thread_location,
    read_end,
    record_end,
    registered_workers,
    this_worker,
)
from minimind.runtime.process import STATUS_FILE, Progress


class Clock:
    """Of a loop that stands in one phase."""

    def __init__(self, passed: int, phase: str) -> None:
        self.passed, self.phase = passed, phase


class Store:
    """Beats by rank, in memory; without rank 0 among the peers, `publish` stands in for it."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {"verdict": "", "digest": Digest().to_json()}
        self.reads: list[int] = []  # keys of each read

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def multi_get(self, keys: list[str]) -> list[str]:
        self.reads.append(len(keys))
        return [self.kept[key] for key in keys]

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> None:
        if self.kept[key] == expected_value:
            self.kept[key] = desired_value

    def publish(self, *silent: int) -> None:
        """Write the digest of the beats that are there, in which these ranks are silent."""
        beats = {int(key): json.loads(text) for key, text in self.kept.items() if key.isdecimal()}
        pulses = {rank: Pulse(beats[rank], silent_seconds=1.0) for rank in silent}
        self.kept["digest"] = Digest.of(beats, pulses).to_json()

    def beat(self, rank: int, **values: Any) -> None:
        """Write the beat of another rank, its count one more."""
        before = json.loads(self.kept.get(str(rank), '{"count": 0}'))
        beat = {"at": [12, 3], "phase": "backward", "where": "in step, minimind/x.py:5"}
        beat |= {"gave_up": False, **before, **values}
        self.kept[str(rank)] = json.dumps({**beat, "count": before["count"] + 1})


@pytest.fixture(autouse=True)
def no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STATUS_FILE, raising=False)
    monkeypatch.setattr(module, "VERDICT_TIMEOUT", 0.5)
    monkeypatch.setattr(module, "HEARTBEAT_INTERVAL", 0.05)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as started:
        yield started
        started.kill()


def worker_of(child: subprocess.Popen[bytes], rank: int) -> Worker:
    stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    return Worker(rank, this_worker(0).host, child.pid, stat[19])


def far(rank: int) -> Worker:
    return Worker(rank, "elsewhere", 4711, "1")


@pytest.fixture
def meeting() -> Iterator[Callable[..., tuple[Peers, Store]]]:
    """A rank at step 12 among these others, beating."""
    met: list[Peers] = []

    def set_peers(*others: Worker, rank: int = 0) -> tuple[Peers, Store]:
        progress = Progress(rank, step=12, clock=Clock(4, "optimizer"), is_training=True)
        peers, store = Peers(progress), Store()
        peers.timeout = 10.0
        for other in others:
            store.beat(other.rank)
        peers.set_peers([peers.me, *others], store)
        peers.start()
        met.append(peers)
        return peers, store

    yield set_peers
    for peers in met:
        peers.close()


def seen(child: subprocess.Popen[bytes], state: str) -> Worker:
    worker = worker_of(child, 1)
    deadline = time.monotonic() + 120
    while worker.state() != state:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return worker


def test_a_process_has_a_start_time_where_there_is_no_proc(child, monkeypatch):
    on_linux = this_worker(0)
    monkeypatch.setattr(psutil, "LINUX", False)
    me = this_worker(0)
    assert me.started != on_linux.started
    assert float(me.started) == pytest.approx(time.time(), abs=24 * 3600)
    assert me.state() == "running"
    assert Worker(1, me.host, child.pid, me.started).state() == "gone"


def test_another_machine_or_container_of_the_same_name_is_elsewhere():
    me = this_worker(0)
    assert me.is_here()
    assert not Worker(1, me.host, me.pid, me.started, "another boot").is_here()
    assert not Worker(1, "another name", me.pid, me.started).is_here()


def test_a_process_is_running_stopped_or_gone_and_no_other_is_taken_for_it(child):
    worker = worker_of(child, 1)
    assert worker.state() == "running"
    assert Worker(1, worker.host, worker.pid, "1").state() == "gone"
    child.send_signal(signal.SIGSTOP)
    seen(child, "stopped")
    Worker(1, worker.host, worker.pid, "1").kill()  # another process of that number: not ours
    assert worker.state() == "stopped"
    worker.kill()
    deadline = time.monotonic() + 120
    while worker.state() != "gone":  # a zombie, not waited for
        assert time.monotonic() < deadline
    worker.kill()


@pytest.mark.parametrize(
    ("status", "words", "answer"),
    [
        (-9, "killed by SIGKILL, perhaps for lack of memory", 7),
        (-11, "crashed by SIGSEGV", 7),
        (0, "exited before the others, with status 0", 7),
        (3, "with status 3", 7),
        (-15, "was stopped by SIGTERM while it started", 75),
        (-10, "was stopped by SIGUSR1 while it started", 75),
        (None, "died, perhaps killed", 7),
    ],
)
def test_how_a_process_ended_reports_what_the_run_answers(status, words, answer):
    report, code = describe_end(status)
    assert words in report
    assert code == answer


def test_workers_know_one_another_by_the_scripts_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(STATUS_FILE, str(tmp_path / "status"))
    assert registered_workers() == []
    Peers(Progress(rank=3))
    assert registered_workers() == [this_worker(3)]
    assert read_end(4711) is None
    record_end(tmp_path, 4711, -9)
    assert read_end(4711) == -9


def test_on_a_mac_whose_python_has_no_waitid_no_end_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(os, "waitid")
    record_ends(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_the_dead_is_named_before_the_process_group_stands(tmp_path, monkeypatch, child):
    monkeypatch.setenv(STATUS_FILE, str(tmp_path / "status"))
    worker = worker_of(child, 1)
    (tmp_path / "worker-1").write_text(f"1 {worker.pid} {worker.started}\n")
    peers = Peers(Progress())
    assert peers.check(1.0) is None
    child.kill()
    child.wait()
    record_end(tmp_path, child.pid, 0)
    assert [peers.check(2.0) for _ in range(2)] == [None, None]  # it may have reported its end
    lost = peers.check(2.0)
    assert lost is not None
    assert (lost.rank, lost.status) == (1, 7)
    assert lost.description == f"{worker} exited before the others, with status 0"


def test_a_stopped_process_is_lost_only_after_the_patience_in_one_go(meeting, child):
    peers, store = meeting(worker_of(child, 1))

    def check() -> FailedRank | None:
        store.beat(1, at=[12, 4])  # its other threads live, for all we know
        heard(peers)
        return peers.check(4.0)

    child.send_signal(signal.SIGSTOP)
    seen(child, "stopped")
    assert [check() for _ in range(2)] == [None, None]
    child.send_signal(signal.SIGCONT)
    seen(child, "running")
    assert check() is None
    child.send_signal(signal.SIGSTOP)
    seen(child, "stopped")
    found = [check() for _ in range(3)]
    assert found[:2] == [None, None]
    assert found[2] is not None
    assert found[2].description.endswith("is stopped (SIGSTOP)")
    assert found[2].worker == worker_of(child, 1)


def heard(peers: Peers) -> None:
    """Until the beats of now are known."""
    peers._exchange(30)
    peers._exchange(30)


def test_a_rank_elsewhere_that_beats_is_not_lost_however_long_it_works(meeting):
    peers, store = meeting(far(1))
    for _ in range(20):
        store.beat(1, at=[12, 4])
        heard(peers)
        assert peers.check(4.0) is None


def test_a_rank_elsewhere_that_is_silent_is_lost(meeting):
    peers, _ = meeting(far(1))
    heard(peers)
    found = [peers.check(4.0) for _ in range(5)]
    assert found[:3] == [None] * 3
    assert "rank 1 (process 4711 on elsewhere) sent no heartbeat for 1" in found[4].description
    assert found[4].worker is None


def test_a_rank_behind_us_that_does_not_move_is_stuck_and_one_beside_us_is_not(meeting):
    peers, store = meeting(far(1), far(2))
    found = []
    for _ in range(6):
        store.beat(1, at=[12, 4])  # as far as we are: all may be compiling
        store.beat(2, at=[12, 4])
        heard(peers)
        found.append(peers.check(4.0))
    assert found == [None] * 6
    found = []
    for _ in range(6):
        store.beat(1, at=[12, 4])
        store.beat(2, at=[12, 2], phase="forward")
        heard(peers)
        found.append(peers.check(4.0))
    lost = next(lost for lost in found if lost)
    assert lost.rank == 2
    assert (
        "has not moved since step 12, phase forward (in step, minimind/x.py:5)" in lost.description
    )


def test_nothing_is_lost_after_the_ranks_parted(meeting, child):
    peers, _ = meeting(worker_of(child, 1))
    peers.close()
    child.kill()
    child.wait()
    assert [peers.check(4.0) for _ in range(5)] == [None] * 5


def test_whoever_did_not_give_up_is_guilty(meeting):
    peers, store = meeting(far(1), far(2), far(3))
    store.beat(1, gave_up=True)
    store.beat(2, at=[12, 2], phase="forward")
    store.beat(3, at=[12, 3])  # slower to notice, but further on
    lost = peers.find_culprit(lambda: False)
    assert lost is not None
    assert (lost.rank, lost.status) == (2, 7)
    assert json.loads(store.kept["0"])["gave_up"] is True


def test_when_all_gave_up_no_one_is_guilty(meeting):
    peers, store = meeting(far(1), far(2))
    store.beat(1, gave_up=True)
    store.beat(2, gave_up=True)
    assert peers.find_culprit(lambda: False) is None


def test_the_dead_and_the_stopped_are_found_at_once(meeting, child):
    with subprocess.Popen(["sleep", "600"]) as other:
        peers, _ = meeting(worker_of(child, 1), worker_of(other, 2))
        child.send_signal(signal.SIGSTOP)
        seen(child, "stopped")
        lost = peers.find_culprit(lambda: False)
        assert lost is not None
        assert (lost.rank, lost.worker) == (1, worker_of(child, 1))
        other.kill()
        other.wait()
        lost = peers.find_culprit(lambda: False)
        assert lost is not None
        assert (lost.rank, lost.worker) == (2, None)


def test_what_another_rank_found_is_taken_over_with_its_status(meeting):
    peers, store = meeting(far(1), far(2))
    store.kept["verdict"] = json.dumps([1, 2, "rank 2 ended: the disk is full", 5])
    heard(peers)
    lost = peers.find_culprit(lambda: False)
    assert lost is not None
    assert (lost.rank, lost.status, lost.description) == (2, 5, "rank 2 ended: the disk is full")
    assert peers.find_culprit(lambda: True) is None
    peers.announce(FailedRank(1, "rank 1 is gone"))
    assert json.loads(store.kept["verdict"]) == [1, 2, lost.description, 5]  # the first one counts


def test_a_verdict_ends_ranks_that_wait_in_no_collective(meeting):
    peers, store = meeting(far(0), far(1), rank=2)
    store.kept["verdict"] = json.dumps([0, 1, "rank 1 sent no heartbeat for 120 s", 7])
    heard(peers)
    assert [peers.check(2.0) for _ in range(2)] == [None, None]  # the main thread may report it
    lost = peers.check(2.0)
    assert lost == FailedRank(1, "rank 1 sent no heartbeat for 120 s")


def test_an_announced_verdict_is_not_taken_over_by_its_own_rank(meeting):
    peers, store = meeting(far(0), rank=1)
    peers.announce(FailedRank(1, "rank 1 ended: the disk is full", 5))
    assert json.loads(store.kept["verdict"])[:2] == [1, 1]
    heard(peers)
    store.beat(0)
    store.publish()
    assert [peers.check(2.0) for _ in range(4)] == [None] * 4


def test_only_rank_0_reads_all_heartbeats_and_its_digest_does_not_grow(meeting):
    """Keys read per interval over all ranks: W + 2 (W - 1)."""
    beat = {"count": 1, "at": [12, 3], "phase": "backward", "where": "x", "gave_up": False}
    sizes = [len(Digest.of(dict.fromkeys(range(w), beat), {}).to_json()) for w in (8, 64, 1024)]
    assert len({*sizes}) == 1
    for rank, reads in ((0, 1 + 5), (3, 2)):
        others = [far(other) for other in range(6) if other != rank]
        peers, store = meeting(*others, rank=rank)
        heard(peers)
        assert {*store.reads} == {reads}


def test_ranks_of_a_host_that_is_gone_do_not_fill_the_digest():
    beat = {"count": 1, "at": [12, 3], "phase": "", "where": "x", "gave_up": False}
    beats = dict.fromkeys(range(1024), beat)
    pulses = {rank: Pulse(beat, silent_seconds=1.0) for rank in range(512, 1024)}
    digest = Digest.from_json(Digest.of(beats, pulses).to_json())
    assert digest.silent == tuple(range(512, 528))
    assert digest.awaited == 0


def test_every_rank_watches_rank_0(meeting):
    """It beats in the digest; that another rank is silent, rank 0 has to say."""
    peers, store = meeting(far(0), far(1), rank=2)
    store.beat(1, at=[12, 4])
    for _ in range(6):
        store.beat(0, at=[12, 4])  # and rank 1 does not
        store.publish()
        heard(peers)
        assert peers.check(4.0) is None
    found = [peers.check(4.0) for _ in range(3)]
    assert found[:2] == [None, None]
    assert found[2] is not None
    assert "rank 0 (process 4711 on elsewhere) sent no heartbeat for 12 s" in found[2].description


@pytest.mark.parametrize("stuck", [0, 1])
def test_every_rank_sees_who_is_stuck_behind_it(stuck: int, meeting):
    peers, store = meeting(far(0), far(1), rank=2)
    found = []
    for _ in range(6):
        for other in (0, 1):
            store.beat(other, at=[12, 2] if other == stuck else [12, 4])
        store.publish()
        heard(peers)
        found.append(peers.check(4.0))
    lost = next(lost for lost in found if lost)
    assert lost.rank == stuck
    assert "has not moved since step 12, phase backward" in lost.description


def test_the_digest_says_who_has_not_given_up(meeting):
    peers, store = meeting(far(0), far(1), far(3), rank=2)
    store.beat(0, gave_up=True)
    store.beat(1, at=[12, 4])
    store.beat(3, at=[12, 3])
    peers._gave_up = True
    heard(peers)
    store.publish()
    lost = peers.find_culprit(lambda: False)
    assert lost is not None
    assert (lost.rank, lost.status) == (3, 7)
    assert "has not moved since" in lost.description
    store.publish(1, 3)
    lost = peers.find_culprit(lambda: False)
    assert lost is not None
    assert lost.description == "rank 1 (process 4711 on elsewhere) died or cannot be reached"
    store.beat(1, gave_up=True)
    store.beat(3, gave_up=True)
    store.publish()
    assert peers.find_culprit(lambda: False) is None


def test_a_silent_rank_0_is_guilty_whatever_its_last_digest_says(meeting):
    peers, store = meeting(far(0), far(1), rank=2)
    store.beat(1, at=[12, 2])
    store.beat(0)
    store.publish()
    heard(peers)
    assert [peers.check(0.2) for _ in range(2)] == [None, None]
    lost = peers.find_culprit(lambda: False)
    assert lost is not None
    assert lost.description == "rank 0 (process 4711 on elsewhere) died or cannot be reached"


def test_the_remedy_of_a_rank_that_reported_it_is_not_repeated():
    again = "; run the same command again"
    for reported in ("rank 2 ended: the connection was closed", "rank 2 is stopped (SIGSTOP)"):
        for description in (reported, reported + again):
            assert str(FailedRank(2, description).error()) == reported + again


def test_where_the_main_thread_is_names_the_innermost_line_of_ours():
    place = "in main_thread_location, minimind/runtime/heartbeat.py:"
    assert main_thread_location().startswith(place)
    assert os.getpid() == this_worker(0).pid


def test_whoever_ends_is_heard_before_it_takes_the_store_along(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "HEARTBEAT_INTERVAL", 1.0)
    store, is_gone = Store(), threading.Event()

    def set_if_there(key: str, value: str) -> None:
        if is_gone.is_set():
            raise RuntimeError("Connection reset by peer")
        store.kept[key] = value

    monkeypatch.setattr(store, "set", set_if_there)
    ranks = [Peers(Progress(rank=rank)) for rank in range(2)]
    everyone = [peers.me for peers in ranks]
    for peers in ranks:
        peers.set_peers(everyone, store)
    for peers in ranks:
        peers.start()
    lost = FailedRank(0, "rank 0 ended: /x: No space left on device", 5)
    ranks[0].announce(lost)
    is_gone.set()  # it was rank 0's
    assert ranks[1].find_culprit(lambda: False) == lost
    for peers in ranks:
        peers.close()
