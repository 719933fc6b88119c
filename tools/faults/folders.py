"""Folders of strangers that hang or fill a host, given to the commands that read one."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.interop.hostile import STATUSES, TEXT, cases, good_folder, words
from tools.faults.outcomes import Outcome, gist
from tools.runs import ROOT

PATIENCE = 300.0  # seconds of a command on a loaded host


def folders(place: Path) -> Iterator[Outcome]:
    """Each folder ends one of its readers, in turn, with the right status and the file's name."""
    good = good_folder(place / "good")
    for number, (name, case) in enumerate(cases().items()):
        here = place / str(number)
        folder = Path(shutil.copytree(good, here / "folder"))
        (here / "text.jsonl").write_text(TEXT, encoding="utf-8")
        case.change(folder)
        reader = case.readers[number % len(case.readers)]
        began = time.monotonic()
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "tools.faults.bounded_command", *words(reader, folder)],
                capture_output=True,
                text=True,
                cwd=ROOT,
                timeout=PATIENCE,
            )
            status, stderr = ended.returncode, ended.stderr
        except subprocess.TimeoutExpired:
            status, stderr = "hangs", ""
        outcome = Outcome(f"a hostile folder, {reader}", status, time.monotonic() - began)
        if status not in STATUSES[reader] or f"{folder}" not in stderr or case.named not in stderr:
            outcome.wrong.append(f"{name}: ended with {status}: {gist(stderr)}")
        yield outcome
        shutil.rmtree(here)
