"""Units as tasks of Ray: the same shards, workers that die, nodes without the shared folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest

from minimind.cli.main import main
from minimind.data.prepare import ray_tasks
from minimind.data.prepare.work_units import PLAN_NAME
from minimind.errors import DataError, StorageError
from tests.conftest import sentences


def words(text: Path, out: Path, *more: str) -> list[str]:
    sizes = ["--vocab_size", "512", "--shard_bytes", "500000"]
    return ["prepare", str(text), *sizes, "--out", str(out), *more]


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def encoding_workers(children_of: int) -> list[int]:
    """Ray workers below a process that encode a unit at this moment."""
    found, below = [], [children_of]
    while below:
        pid = below.pop()
        try:
            below += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except FileNotFoundError:
            continue
        if title.startswith(b"ray::_encode"):
            found.append(pid)
    return found


def claimed_by(pid: int) -> str | None:
    """Number of the unit that a process has claimed."""
    try:
        links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except FileNotFoundError:
        return None
    claims = [link for link in links if link.endswith(".lock") and "/claim-" in link]
    return claims[0][-len("00000.lock") : -len(".lock")] if claims else None


def kill_a_worker_in_a_unit(driver: subprocess.Popen[str], draft: Path) -> str:
    """Kill a worker that has claimed a unit and not finished it; return the number of the unit."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert driver.poll() is None, "the command has ended"
        for pid in encoding_workers(driver.pid):
            os.kill(pid, signal.SIGSTOP)
            unit = claimed_by(pid)
            if unit and not (draft / f"unit-{unit}.json").exists():
                os.kill(pid, signal.SIGKILL)
                return unit
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.005)
    raise AssertionError("no worker was seen in a unit")


@pytest.mark.launch
def test_four_workers_one_of_them_killed_write_the_shards_of_one_process(tmp_path: Path):
    text = write(tmp_path / "t.jsonl", sentences(1, 10_000))
    assert main(words(text, tmp_path / "one", "--processes", "1")) == 0
    assert len(files_of(tmp_path / "one")) > 16
    command = words(text, tmp_path / "ray", "--processes", "4", "--ray")
    with subprocess.Popen(
        [sys.executable, "-m", "minimind", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        unit = kill_a_worker_in_a_unit(driver, tmp_path / "ray.part")
        printed, errors = driver.communicate(timeout=120)
    assert driver.returncode == 0, errors
    assert unit
    assert printed.endswith(f"done: --data_path {tmp_path / 'ray'}\n")
    assert not errors.replace("training the tokenizer ...\n", "")
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "one")
