"""Runs whose text and checkpoints are remote, on a network that cuts connections: minutes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from minimind.checkpoint.directory import verify
from minimind.checkpoint.remote_run import RemoteRun
from tests.conftest import PACE, SHAPE, Launcher, sentences
from tests.runtime.servers import BUCKET, KEYS, FaultyProxy, ObjectStore
from tools.forking import Nursery, state_of

MIRROR = f"s3://{BUCKET}/runs/one"
CUT = 0.05  # of the connections
KILLS = 30


@pytest.mark.long
@pytest.mark.launch
def test_a_remote_run_is_the_local_one_also_after_its_disk_is_wiped(
    launch: Launcher, tmp_path: Path, store: ObjectStore, proxy: FaultyProxy
):
    text = tmp_path / "text" / "a.jsonl"
    text.parent.mkdir()
    lines = (json.dumps({"text": one}, ensure_ascii=False) for one in sentences(5, 400))
    text.write_text("\n".join(lines) + "\n")
    url = store.put("text/a.jsonl", text.read_bytes())

    def run(place: str, flags: str) -> Any:
        places = f"--cache_dir {tmp_path / place / 'cache'}"
        found = launch.run(tmp_path / place / "out", f"{places} {flags} --save_interval 3")
        assert found.status in (0, 75), found.stderr
        return found

    local = run("local", f"--data_path {text}").curve()
    proxy.set(cut=CUT)
    remote = f"--data_path {url} --mirror {MIRROR}"
    first = run("remote", f"{remote} --stop_at_step 11")
    assert first.curve() == local[:11]
    shutil.rmtree(tmp_path / "remote")
    second = run("remote", remote)
    assert [one["step"] for one in second.events("checkpoint_fetched")] == [11]
    assert second.curve() == local[11:]
    assert max(one["step"] for one in second.events("checkpoint_mirrored")) == len(local)
    assert proxy.injected


class Killed:
    """Starts of one run that mirrors every step, each killed at a random time."""

    def __init__(self, nursery: Nursery, place: Path, corpus: Path, proxy: FaultyProxy) -> None:
        self.out_dir, self._place, self._nursery = place / "out", place, nursery
        self._environ = {**KEYS, "AWS_ENDPOINT_URL": proxy.url}
        pace = f"{SHAPE} {PACE} --max_steps 4000 --warmup_steps 5 --eval_rows 0 --save_interval 1"
        self._words = ["--data_path", str(corpus), "--cache_dir", str(place / "cache")]
        self._words += [*pace.split(), "--deepspeed_config", "none", "--epochs", "100"]

    def start(self, *words: str) -> int:
        """The pid of a start."""
        names = {name: str(self._place / f"{name}.txt") for name in ("out", "err")}
        argv = [*self._words, "--out_dir", str(self.out_dir), *words]
        ask = {"module": "train_pretrain", "argv": argv, "stop": "", "environ": self._environ}
        return self._nursery.ask(**ask, **names)

    def kill(self, pid: int) -> None:
        """End it as a machine that goes away does."""
        os.kill(pid, signal.SIGKILL)
        assert self._nursery.wait([pid])[0] == [-signal.SIGKILL]

    def finish(self, pid: int) -> None:
        """Wait for its end at --stop_at_step."""
        assert self._nursery.wait([pid])[0] == [75]

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of all starts since the disk was wiped."""
        path = self.out_dir / "metrics.jsonl"
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        return [one for one in map(json.loads, whole.splitlines()) if one["event"] == name]

    def wait_for(self, pid: int, name: str, number: int) -> None:
        """Wait until it has logged so many events of a name."""
        end = time.monotonic() + 120
        while len(self.events(name)) < number:
            errors = self._place / "err.txt"
            assert state_of(pid) not in "ZX", errors.read_text()
            assert time.monotonic() < end, errors.read_text()
            time.sleep(0.02)


@pytest.mark.long
@pytest.mark.launch
def test_killed_runs_lose_nothing_that_was_acknowledged(
    nursery: Nursery, tmp_path: Path, corpus: Path, store: ObjectStore, proxy: FaultyProxy
):
    draw, run = random.Random(3), Killed(nursery, tmp_path, corpus, proxy)
    losses: dict[int, float] = {}
    newest = kills = wiped = interrupted = 0
    proxy.set(cut=CUT)
    while interrupted < KILLS and kills < 4 * KILLS:
        is_wiped = kills > 0 and draw.random() < 0.5
        if is_wiped:
            shutil.rmtree(run.out_dir)
        before = len(run.events("checkpoint_mirrored"))
        pid = run.start("--mirror", MIRROR)
        run.wait_for(pid, "checkpoint_mirrored", before + 1)
        time.sleep(draw.uniform(0.0, 1.5))
        run.kill(pid)
        kills, wiped = kills + 1, wiped + is_wiped
        start = run.events("run_start")[-1]
        assert start["step"] >= newest
        fetched = [one["step"] for one in run.events("checkpoint_fetched")]
        assert (start["step"] in fetched) == is_wiped
        for step in run.events("step"):
            assert losses.setdefault(step["step"], step["loss"]) == step["loss"]
        newest = max(newest, *(one["step"] for one in run.events("checkpoint_mirrored")))
        there = RemoteRun(MIRROR)
        steps = there.published()
        # It may be complete, and deleted as one of the older two, before it is acknowledged.
        assert newest in steps or sum(step > newest for step in steps) >= 2
        for step in steps:
            copy = tmp_path / "copy" / f"step_{step:08d}"
            assert there.fetch(step, copy) is None
            assert verify(copy) is None
            shutil.rmtree(copy)
        interrupted += any(step > newest and step not in steps for step in there.steps())
    print(f"{kills} kills, {interrupted} in an upload; {wiped} wiped disks; {proxy.injected} cuts")
    assert interrupted == KILLS
    assert wiped > kills // 4
    assert proxy.injected
    shutil.rmtree(run.out_dir)
    run.finish(run.start("--stop_at_step", str(max(losses))))
    unbroken = {one["step"]: one["loss"] for one in run.events("step")}
    assert {step: unbroken[step] for step in losses} == losses
