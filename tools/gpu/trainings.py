"""Runs one after another in this process: a start costs far more than a small run.

    python -m tools.gpu.trainings PLAN.json [keep]

PLAN.json holds the words of train_pretrain.py by name. Without `keep` the checkpoints of a run are
removed after it. How each ended is written to
PLAN.ended.json after every run. DeepSpeed keeps what it knows of the process group, so that the
group outlives the runs with it: those without come first. Stage 3, which replaces torch's linear
function, comes last.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState  # noqa: TID251 (a fresh one for every run)

import minimind.train.pretrain as pretraining
from minimind.config.parse import parse_flags
from minimind.engine.build import leave_process_group
from minimind.runtime.exit import Ending
from minimind.runtime.process import Progress


@contextlib.contextmanager
def group_kept() -> Iterator[None]:
    """Within, a run that ends leaves the process group to the next."""
    pretraining.leave_process_group = lambda: None
    try:
        yield
    finally:
        pretraining.leave_process_group = leave_process_group


def forget_the_run_before() -> int:
    """Compiled code and memory of earlier runs; bytes that are allocated on the GPU all the same.

    A run freezes what the garbage collector has seen, its engine included.
    """
    torch._dynamo.reset()  # else the limit of recompilations makes the last runs eager
    gc.unfreeze()
    gc.collect()
    if not torch.cuda.is_initialized():
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def train(words: list[str]) -> dict[str, Any]:
    """One run: its status, what it said of an error, and its memory."""
    before, environ, progress = forget_the_run_before(), dict(os.environ), Progress()
    errors, ending = io.StringIO(), Ending(progress, debug=False)
    has_deepspeed = parse_flags(words).deepspeed_config not in (None, "none")
    try:
        with contextlib.redirect_stderr(errors), contextlib.ExitStack() as stack:
            if has_deepspeed:
                stack.enter_context(group_kept())
            try:
                status = ending.done(pretraining.pretrain(parse_flags(words), progress))
            except Exception as error:  # as train_pretrain.py: reported, and the next run begins
                status = ending.report(error)
    finally:
        os.environ.clear()
        os.environ.update(environ)
        AcceleratorState._reset_state(reset_partial_state=True)
        if not has_deepspeed:
            leave_process_group()
        if progress.lock:
            progress.lock.close()
    sys.stderr.write(errors.getvalue())
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    ended = {"status": status, "error": errors.getvalue() if status else "", "words": words}
    return {**ended, "allocated": before, "peak": peak}


def main(plan: Path, keeps: bool) -> int:
    """Train, and write how each run ended."""
    ended = {}
    for name, words in json.loads(plan.read_text()).items():
        ended[name] = train(words)
        if not keeps:
            shutil.rmtree(Path(parse_flags(words).out_dir) / "checkpoints", ignore_errors=True)
        print(f"{name}: {ended[name]['status']}", flush=True)
        plan.with_suffix(".ended.json").write_text(json.dumps(ended))
    return 0


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), keeps="keep" in sys.argv[2:])
    sys.stdout.flush()
    os._exit(status)  # several engines share one process group: none of them may take it down
