"""Chat templates of strangers that hang or fill a host, given to the commands that render one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.data.chat.hostile import HOSTILE
from tools.faults.harness import Site
from tools.faults.outcomes import Outcome, gist
from tools.runs import ROOT

PATIENCE = 300.0  # seconds of a command on a loaded host
FOR_SOME = ("only for long chats", "only for tools", "only where it is asked")
LOADING = ("power", "repeated text", "nested loops")  # also with a model, and as runs


def templates(site: Site) -> Iterator[Outcome]:
    """Each template ends each command with 2 and its path, soon and with nothing left.

    One that is heavy for some chats alone passes where none of these is rendered.
    """
    talk = site.root / "talk.jsonl"
    talk.write_text(json.dumps({"prompt": "what is it?", "completion": "a word"}) + "\n")
    base = next(iter(site.root.glob("*unbroken*")))
    for number, (name, source) in enumerate(HOSTILE.items()):
        file = site.root / f"template-{number}.jinja"
        file.write_text(source)
        yield _command(name, file, ["plan", "--task", "sft", "--chat_template", str(file)])
        if name not in LOADING:
            continue
        words = ["chat", "--checkpoint", str(base), "--chat_template", str(file), "--once", "hello"]
        yield _command(name, file, words)
        out_dir = site.new_run("templates")
        flags = f"--task sft --init_from {base} --data_path {talk} --chat_template {file}"
        start = site.start(out_dir, flags)
        seconds, left = start.wait_gone(4 * site.patience)
        yield _outcome("a run", name, file, start.process.returncode, start.stderr, seconds, left)


def _command(name: str, file: Path, words: list[str]) -> Outcome:
    began = time.monotonic()
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "minimind", *words],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return _outcome(words[0], name, file, "hangs", "", PATIENCE, 1)
    seconds = time.monotonic() - began
    return _outcome(words[0], name, file, ended.returncode, ended.stderr, seconds, 0)


def _outcome(
    verb: str, name: str, file: Path, status: int | str, stderr: str, seconds: float, left: int
) -> Outcome:
    outcome = Outcome(f"a hostile template, {verb}", status, seconds, left)
    is_said = any(reason in stderr for reason in ("takes more than", "cannot be rendered ("))
    if verb == "plan" and name in FOR_SOME and status == 0:  # it renders none of these chats
        is_wrong = bool(left)
    else:
        is_wrong = status != 2 or str(file) not in stderr or not is_said or bool(left)
    if is_wrong:
        outcome.wrong.append(f"{name}: ended with {status}, {left} left: {gist(stderr)}")
    return outcome
