#!/usr/bin/env python
"""Pretrain a MiniMind decoder: parse -> build -> train. Started by run_accelerate.sh."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import suppress

from minimind.errors import RunError, one_line
from minimind.flags import parse_flags
from minimind.metrics import Metrics
from minimind.process import Progress, claim_status, take_back_stderr, watch_launchers


def main(argv: list[str]) -> int:
    """The exit status of the run that `argv` asks for."""
    take_back_stderr()
    watch_launchers()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for a Ctrl-C before the loop
    progress = Progress(rank=int(os.environ.get("RANK", "0")))
    try:
        run = parse_flags(argv)
        from minimind.train.pretrain import pretrain  # imports torch: after the flags are read

        status = pretrain(run, progress)
        claim_status(status, progress.rank)
        return status
    except Exception as error:  # the one place that turns an ending into a line and a status
        return tell(error, progress, debug="--debug" in argv)


def tell(error: Exception, progress: Progress, debug: bool) -> int:
    """Print the one line, record the end in metrics.jsonl, and return the exit status."""
    told = error if isinstance(error, RunError) else RunError(str(error) or type(error).__name__)
    cause = told.cause_rank if told.cause_rank is not None else progress.rank
    first = cause if cause != progress.rank else claim_status(told.status, progress.rank)
    if first != progress.rank:
        if progress.out_dir:  # before that all ranks meet the same mistake, and one has told it
            print(f"train_pretrain: stopped because rank {first} failed", file=sys.stderr)
        return told.status
    if debug or told is not error:
        traceback.print_exception(error)
    print(one_line("train_pretrain", told, progress.rank, progress.step), file=sys.stderr)
    end = {"code": told.code, "status": told.status, "reason": str(told), "step": progress.step}
    with suppress(OSError):  # where the disk is full, the line above has to do
        if progress.out_dir:
            Metrics(progress.out_dir / "metrics.jsonl").write("exit", **end)
    return told.status


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A failed rank must not wait, in some library's clean-up, for peers that wait for it.
    os._exit(ended) if ended else sys.exit(0)
