"""Processes killed at random times while they upload: nothing acknowledged is lost."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import time
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from minimind.checkpoint.directory import published_checkpoints, step_of, sweep
from minimind.checkpoint.mirror import Uploads, claim
from minimind.checkpoint.remote_run import RemoteRun
from minimind.checkpoint.retention import Rules, prune
from minimind.runtime import filesystem
from tests.checkpoint.saves import facts_of, save
from tests.runtime.servers import BUCKET, FaultyProxy, ObjectStore

PREFIX = "runs/killed"
RULES = Rules(keep_last=3)
IDENTITY = {"seed": {"seed": 42}}
# Forked from a process without threads: this one has those of torch, of servers and of other tests.
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload([__name__])


def run(out_dir: Path, acknowledged: Path, seconds: float, facts: dict[str, object]) -> None:
    """Save and upload until the process ends itself, a time after its first upload."""
    remote = RemoteRun(f"s3://{BUCKET}/{PREFIX}")
    claimed = claim(remote, out_dir, "auto", IDENTITY, frozenset())
    uploads = Uploads(remote, claimed, out_dir, RULES)
    root = out_dir / "checkpoints"
    sweep(root)
    step, has_end = max(map(step_of, published_checkpoints(root)), default=0), False
    while True:
        step += 1
        uploads.offer(step_of(save(root, step, facts)), None)
        prune(root, RULES)
        time.sleep(random.random() / 20)
        while uploads.events:
            name, fields = uploads.events.popleft()
            with open(acknowledged, "a") as file:
                file.write(json.dumps({"event": name, **fields}) + "\n")
            if not has_end:
                has_end = True
                Timer(seconds, os._exit, [9]).start()


def run_until_killed(environ: dict[str, str], *given: Any) -> None:
    """The process of a test, with its environment; retries wait for nothing."""
    os.environ.update(environ)
    filesystem.WAITS = (0.0,) * 5
    run(*given)


def complete(store: ObjectStore) -> list[int]:
    """Steps with a manifest, each of whose files is as the manifest says."""
    found = []
    keys = store.keys(f"{PREFIX}/checkpoints/")
    for key in (key for key in keys if key.endswith("/manifest.json")):
        folder = key.rpartition("/")[0]
        manifest = json.loads(content(store, key))
        for entry in manifest["files"]:
            digest = hashlib.sha256(content(store, f"{folder}/{entry['name']}")).hexdigest()
            assert digest == entry["sha256"], f"{folder}/{entry['name']}"
        found.append(manifest["step"])
    return found


def content(store: ObjectStore, key: str) -> bytes:
    return store.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()


@pytest.mark.long  # test_mirror.py cuts connections, and resumes from what arrived
@pytest.mark.parametrize(("kills", "seed"), [(3, 1), (30, 2)])
def test_kills_during_uploads_lose_nothing_acknowledged(
    tmp_path: Path, store: ObjectStore, proxy: FaultyProxy, trained, kills: int, seed: int
):
    facts = facts_of(trained.run)
    proxy.set(cut=0.05)
    draw, told = random.Random(seed), tmp_path / "told.jsonl"
    number = interrupted = 0
    steps: list[int] = []
    (tmp_path / "run").mkdir()
    while number < kills or not (interrupted or number > 10 * kills):
        number += 1
        given = (tmp_path / "run", told, draw.uniform(0.1, 0.8), facts)
        process = FORKING.Process(target=run_until_killed, args=({**os.environ}, *given))
        process.start()
        process.join()
        assert process.exitcode == 9
        events = [json.loads(line) for line in told.read_text().splitlines()]
        steps = [one["step"] for one in events if one["event"] == "checkpoint_mirrored"]
        there = complete(store)
        for step in steps:
            assert step in there or sum(other > step for other in there) >= RULES.keep_last
        keys = store.keys(f"{PREFIX}/checkpoints/")
        interrupted += len({key.split("/")[3] for key in keys}) > len(there)
    assert steps
    assert interrupted
    assert proxy.injected
