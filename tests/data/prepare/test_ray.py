"""Units as tasks of Ray: the same shards, workers that die, nodes without the shared folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest

from minimind.cli.main import main
from minimind.data.prepare import ray_tasks
from minimind.data.shards.manifest import PLAN_NAME
from minimind.errors import DataError, RendezvousError, StorageError
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


@pytest.mark.long
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


def drafted(tmp_path: Path) -> tuple[Path, str]:
    """A draft with the plan of a text and no unit, and the hash of plan.json."""
    text = write(tmp_path / "t.jsonl", sentences(1, 50))
    # of two shares of one unit, the second is empty
    assert main(words(text, tmp_path / "out", "--shard", "1/2")) == 0
    draft = tmp_path / "out.part"
    return draft, sha256((draft / PLAN_NAME).read_bytes()).hexdigest()


@pytest.mark.parametrize("missing", ["folder", "plan", "text"])
def test_a_node_without_the_shared_folder_is_named(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray_tasks, "SEEN_WITHIN", 0.0)
    draft, plan = drafted(tmp_path)
    if missing == "text":
        (tmp_path / "t.jsonl").unlink()
    folder = tmp_path / "elsewhere" if missing == "folder" else draft
    seen = "0" * 64 if missing == "plan" else plan
    with pytest.raises(StorageError, match="does not see it; every node of the cluster") as error:
        ray_tasks._encode(str(folder), True, seen, 0, False)
    assert str(tmp_path / "t.jsonl" if missing == "text" else folder) in str(error.value)
    assert error.value.status == 5


def test_a_task_encodes_a_unit_once(tmp_path: Path):
    draft, plan = drafted(tmp_path)
    assert ray_tasks._encode(str(draft), True, plan, 0, False)
    written = (draft / "unit-00000.json").stat().st_mtime_ns
    assert ray_tasks._encode(str(draft), True, plan, 0, False)
    assert (draft / "unit-00000.json").stat().st_mtime_ns == written


def test_a_bad_document_of_a_task_is_named(tmp_path: Path):
    (tmp_path / "t.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    out = ["--val_fraction", "0", "--shard", "1/2"]
    good = write(tmp_path / "good.jsonl", sentences(1, 50))
    assert main(words(good, tmp_path / "first")) == 0
    tokenizer = ["--tokenizer", str(tmp_path / "first" / "tokenizer")]
    command = ["prepare", str(tmp_path / "t.jsonl"), *tokenizer, "--out", str(tmp_path / "out")]
    assert main([*command, *out]) == 0
    draft = tmp_path / "out.part"
    plan = sha256((draft / PLAN_NAME).read_bytes()).hexdigest()
    with pytest.raises(DataError, match=r"t\.jsonl:2 \(byte 17\)"):
        ray_tasks._encode(str(draft), True, plan, 0, False)


@pytest.mark.parametrize(
    ("flags", "report"),
    [
        (["--ray", "my_text.jsonl"], "--ray my_text.jsonl: is not an address of a Ray cluster"),
        (["--ray", "--shard", "0/2"], "--ray and --shard cannot be used together"),
        (["--ray", "auto", "--processes", "2"], "--processes 2: --ray auto uses the cores"),
        (["--merge", "--ray"], "--merge and --ray cannot be used together"),
    ],
)
def test_flags_that_ray_does_not_take_are_refused(
    flags: list[str], report: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["prepare", "--out", str(tmp_path / "out"), *flags]) == 2
    assert report in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ["auto", "node7:6379", "ray://10.0.0.1:10001", "[::1]:6379"])
def test_addresses_of_clusters_are_taken(address: str):
    ray_tasks.require_usable(address, None, None)


def test_a_cluster_that_does_not_answer_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RendezvousError, match=f"--ray 127.0.0.1:{port}: no connection to Ray"):
        ray_tasks._require_reachable(f"127.0.0.1:{port}")
