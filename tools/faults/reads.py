"""Commands that read a run while it trains, saves at every step and keeps one checkpoint alone."""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from itertools import cycle, islice
from pathlib import Path

from minimind.cli.main import main
from tools.faults.harness import Site, Start
from tools.faults.kills import wait_for_step
from tools.faults.outcomes import Outcome, events, gist

ENDLESS = "--max_steps 1000000 --save_interval 1 --keep_last 1 --log_interval 100 --dtype float32"
ALONE = "--batch_size 1 --accumulation_steps 1 --max_seq_len 16"  # many saves a second
COMMANDS = [
    "generate --checkpoint RUN --prompt a --max_new_tokens 1",
    "eval --checkpoint RUN --data_path TEXT --max_rows 1 --cache_dir CACHE --json",
    "export --checkpoint RUN --format minimind --out OUT",
    "export --checkpoint RUN --format llama --out OUT",
    "checkpoint consolidate RUN --out OUT",
    "checkpoint diff RUN RUN",
    "checkpoint list RUN --verify",
    "checkpoint verify RUN",
]


def live_reads(site: Site, tries: int) -> Iterator[Outcome]:
    """`tries` readings of one run that goes on: none may fail, and none may hold up the run."""
    out_dir = site.new_run("live")
    start = site.start(out_dir, f"{ENDLESS} {ALONE}", NUM_PROCESSES="1")
    wait_for_step(start, 1, site)
    for words in islice(cycle(COMMANDS), tries):
        yield read(site, out_dir, words)
    yield ended(start, out_dir, tries)


def read(site: Site, out_dir: Path, words: str) -> Outcome:
    """What came of one command, run in this process."""
    out = site.root / "read"
    known = {"RUN": out_dir, "TEXT": site.corpus, "CACHE": site.root / "cache", "OUT": out}
    began, output = time.monotonic(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        status = main([str(known.get(word, word)) for word in words.split()])
    outcome = Outcome(f"live: {words.split(' RUN')[0][:34]}", status, time.monotonic() - began)
    right = (0, 1) if " diff " in words else (0,)
    if status not in right or "skipped checkpoint" in output.getvalue():
        outcome.wrong.append(f"{words}: {status}: {gist(output.getvalue())}")
    shutil.rmtree(out, ignore_errors=True)
    return outcome


def ended(start: Start, out_dir: Path, tries: int) -> Outcome:
    """The end of the run: it saved all the while, and retired what nobody reads any more."""
    saves = sum(event["event"] == "checkpoint_saved" for event in events(out_dir))
    start.process.terminate()
    seconds, left = start.wait_gone(60)
    outcome = Outcome("live: the run itself, stopped", start.process.returncode, seconds, left)
    if start.process.returncode != 75:
        outcome.wrong.append(f"{start.process.returncode}, not 75: {gist(start.stderr)}")
    if saves < tries:
        outcome.wrong.append(f"only {saves} checkpoints were saved during {tries} readings")
    kept = list((out_dir / "checkpoints").glob("step_*"))
    if len(kept) != 1:
        outcome.wrong.append(f"{len(kept)} checkpoints are left, not 1")
    return outcome
