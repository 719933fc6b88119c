"""Files that killed processes left are deleted, and those of living ones are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from minimind.checkpoint.directory import sweep
from minimind.checkpoint.mirror import require_mirror
from minimind.checkpoint.run_folder import lock_out_dir
from minimind.data.prepare.prepare import build_once
from minimind.report.page import write_page
from minimind.runtime import drafts
from minimind.runtime.drafts import A_DAY, draft_of, left_in, remove_left
from minimind.runtime.durable_files import require_writable

# Begins to write files and folders as a start does, and waits to be killed.
WRITING = """
import signal, sys
from pathlib import Path
from minimind.runtime import durable_files, drafts
from minimind.data.prepare import prepare

def killed(*_):
    print(flush=True)
    signal.pause()

durable_files.os.replace = killed
folder, name, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if kind == "folder":
    prepare.build_once(folder / name, killed, "")
durable_files.write_whole(folder / name, b"half")
"""


def writing(folder: Path, name: str, kind: str = "file") -> subprocess.Popen[bytes]:
    """A process that has begun to write `name`."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-c", WRITING, str(folder), name, kind]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline()
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


STARTS = {  # the folder of what is left, its name, and what opens the folder
    "config.yaml of a run": ("", "config.yaml", lambda at: lock_out_dir(at).close()),
    "validation of a checkpoint": (
        *("step_00000002", "validation.json"),
        lambda at: sweep(at.parent),
    ),
    "owner of a mirror": (
        *("", "mirror.json"),
        lambda at: require_mirror(f"file://{at}", at.parent / "run", "auto"),
    ),
    "checkpoint of a mirror": (
        *("checkpoints/step_00000002", "manifest.json"),
        lambda at: _checked_mirror(at.parent.parent),
    ),
    "probe of a mirror": (
        *("", ".probe"),
        lambda at: require_mirror(f"file://{at}", at.parent / "run", "auto"),
    ),
    "answers": ("", "answers.jsonl", lambda at: require_writable(at / "answers.jsonl")),
    "report": ("", "report.html", lambda at: write_page("", at / "report.html", "")),
    "tokens of a cache": (
        "",
        "0123",
        lambda at: build_once(at / str(time.monotonic_ns()), lambda _: None, ""),
    ),
}


def _checked_mirror(folder: Path) -> None:
    for at in (folder, *(folder / "checkpoints").iterdir()):
        remove_left(at)


@pytest.mark.parametrize("what", STARTS)
def test_the_next_start_deletes_what_a_killed_one_left(what: str, tmp_path: Path):
    below, name, start = STARTS[what]
    folder = tmp_path / "place" / below
    process = writing(folder, name, "folder" if what.startswith("tokens") else "file")
    (left,) = folder.glob("*.tmp-*")
    link = draft_of(folder / "linked")
    link.symlink_to(tmp_path)
    start(folder)
    assert left.exists()  # its process lives
    kill(process)
    start(folder)
    assert not left.exists()
    assert link.is_symlink()
    assert not [*left_in(folder)]


def test_what_belongs_to_others_stays_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (own := draft_of(tmp_path / "a")).write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(drafts, "_place", lambda: "0123456789ab")  # another machine
        (other := draft_of(tmp_path / "b")).write_text("")
    (foreign := tmp_path / "c.tmp-12").write_text("")  # of another program
    remove_left(tmp_path)
    assert {own, other, foreign} == {*tmp_path.iterdir()}
    began = psutil.Process().create_time()
    os.utime(
        own, (began - 3600, began - 3600)
    )  # by the clock of a file server, or before ours was set
    remove_left(tmp_path)
    assert {own, other, foreign} == {*tmp_path.iterdir()}
    old = began - A_DAY - 60
    for path in (own, other, foreign):
        os.utime(path, (old, old))
    remove_left(tmp_path)
    assert {*tmp_path.iterdir()} == {foreign}  # this process began after it: another had its number


def test_another_user_s_processes_are_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    dead = subprocess.Popen(["true"])
    dead.wait()
    path = tmp_path / draft_of(Path("a")).name.replace(str(os.getpid()), str(dead.pid))
    path.write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert [*left_in(tmp_path)] == []
    assert [*left_in(tmp_path)] == [path]
