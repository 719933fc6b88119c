#!/usr/bin/env python
"""Pretrain a MiniMind decoder: parse -> build -> train. Started by run_accelerate.sh."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from minimind.config.parse import parse_flags
from minimind.runtime.environment import rank_of, require_environment
from minimind.runtime.exit import Ending
from minimind.runtime.heartbeat import Peers
from minimind.runtime.process import SCRIPT_PID, Progress, take_back_stderr
from minimind.runtime.terminal import LONG, guarded, phase


def main(argv: list[str]) -> int:
    """The exit status of the run that `argv` asks for."""
    take_back_stderr()
    with guarded():
        return _main(argv)


def _main(argv: list[str]) -> int:
    # Read when torch is imported; of --trace_steps we tell ourselves.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    progress = Progress(rank=rank_of(os.environ))
    ending = Ending(progress, debug="--debug" in argv)
    ending.watch()
    try:
        require_environment(os.environ)
        progress.peers = Peers(progress)
        run = parse_flags(argv)
        ending.debug = run.debug
        progress.peers.patience = run.dist_timeout
        # run_accelerate.sh has printed a line by now; else there should be one within a second.
        patience = LONG if SCRIPT_PID in os.environ else 0.5
        with phase("importing libraries", patience):
            from minimind.train.pretrain import pretrain  # torch: after the flags are read

        return ending.done(pretrain(run, progress))
    except Exception as error:  # the one place that turns an ending into a line and a status
        return ending.tell(error)


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    with suppress(OSError):  # a full disk behind them has been told of
        sys.stdout.flush()
        sys.stderr.flush()
    # A failed rank must not wait, in some library's clean-up, for peers that wait for it.
    os._exit(ended) if ended else sys.exit(0)
