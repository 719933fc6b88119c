#!/usr/bin/env python
"""Pretrain a MiniMind decoder: parse -> build -> train. Started by run_accelerate.sh."""

from __future__ import annotations

import os
import sys
import traceback

from minimind.errors import RunError, one_line
from minimind.flags import parse_flags
from minimind.process import Progress, StopRequest, claim_status, take_back_stderr, watch_launchers

PROGRAM = "train_pretrain"


def main(argv: list[str]) -> int:
    """The exit status of the run that `argv` asks for."""
    take_back_stderr()
    watch_launchers()
    stop = StopRequest()
    progress = Progress(rank=int(os.environ.get("RANK", "0")))
    try:
        run = parse_flags(argv, os.environ)
        from minimind.train.pretrain import (
            pretrain,
        )  # imports torch, so only after the flags are read

        status = pretrain(run, stop, progress)
        claim_status(status, progress.rank)
        return status
    except Exception as error:  # the one place that turns an ending into a line and a status
        return tell(error, progress, debug="--debug" in argv)


def tell(error: Exception, progress: Progress, debug: bool) -> int:
    """Print the one line, record the end in metrics.jsonl, and return the exit status."""
    status = error.status if isinstance(error, RunError) else RunError.status
    cause = error.cause_rank if isinstance(error, RunError) else None
    first = cause if cause not in (None, progress.rank) else claim_status(status, progress.rank)
    if first != progress.rank:
        if progress.out_dir:  # before that all ranks meet the same mistake, and one has told it
            print(f"{PROGRAM}: stopped because rank {first} failed", file=sys.stderr)
        return status
    if debug or not isinstance(error, RunError):
        traceback.print_exception(error)
    print(one_line(PROGRAM, error, progress.rank, progress.step), file=sys.stderr, flush=True)
    if progress.out_dir:
        from minimind.train.report import Metrics

        code = getattr(error, "code", RunError.code)
        metrics = Metrics(progress.out_dir / "metrics.jsonl")
        metrics.write("exit", code=code, status=status, reason=str(error), step=progress.step)
        metrics.close()
    return status


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A failed rank must not wait, in some library's clean-up, for peers that wait for it.
    os._exit(ended) if ended else sys.exit(0)
