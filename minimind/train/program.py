"""The program of a worker: parse the flags, train, and print an error as one line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from minimind.checkpoint.directory import ended_at_once
from minimind.checkpoint.run_folder import lock_before_imports, require_out_dir
from minimind.config.flags import FLAGS
from minimind.config.launcher_env import set_allocator_defaults
from minimind.config.parse import parse_flags
from minimind.config.paths import naming_flags
from minimind.runtime.environment import rank_of, require_environment
from minimind.runtime.exit import Ending
from minimind.runtime.heartbeat import Peers
from minimind.runtime.panics import panics_caught
from minimind.runtime.process import SCRIPT_PID, Progress, restore_stderr
from minimind.runtime.terminal import LONG, guarded, phase
from minimind.train.inputs import require_inputs

if TYPE_CHECKING:
    from minimind.train.own_code import Hook


def main(argv: Sequence[str], hooks: Mapping[str, Hook] | None = None) -> int:
    """Train with the flags `argv`; return the exit status. `hooks`: functions of the caller."""
    restore_stderr()
    with guarded():
        return _main(argv, hooks)


def _main(argv: Sequence[str], hooks: Mapping[str, Hook] | None) -> int:
    # Read when torch is imported: silences messages of the profiler of --trace_steps.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # Likewise: its warnings of a lost connection are stacks of C++; the error says what was lost.
    if "--debug" not in argv and "TORCH_DISTRIBUTED_DEBUG" not in os.environ:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    set_allocator_defaults(os.environ)
    progress = Progress(rank=rank_of(os.environ))
    ending = Ending(progress, "--debug" in argv, ended_at_once)
    ending.watch()
    try:
        with panics_caught():
            require_environment(os.environ)
            progress.peers = Peers(progress)
            run = parse_flags(argv)
            ending.debug = run.debug
            progress.peers.timeout = run.dist_timeout
            values = {flag: getattr(run, flag) for flag in FLAGS}
            if hooks:
                from minimind.train.own_code import require_hooks

                require_hooks(hooks)
            with naming_flags(values):
                require_inputs(run)
                require_out_dir(run)
                progress.lock = lock_before_imports(run, progress.rank)
            # run_accelerate.sh has printed a line already; otherwise print one within a second.
            delay = LONG if SCRIPT_PID in os.environ else 0.5
            with phase("importing libraries", delay):
                from minimind.train.pretrain import pretrain  # torch: after the flags are read

            with naming_flags(values):
                return ending.done(pretrain(run, progress, hooks))
    except Exception as error:  # the one place that turns an error into a message and a status
        return ending.report(error)
    finally:  # the caller may start another run
        if progress.lock:
            progress.lock.close()
