"""The training of a run, and `minimind.train(...)`, which is this package called as a function.

The loop and its actions between steps are in `loop.py`, what a start decides and refuses in
`start.py`, what it builds in `pretrain.py`; `rollback.py` goes back before loss spikes. The
package is a callable module, so that `minimind.train(...)` and `import minimind.train.loop` both
work; torch is imported by the call.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from minimind.errors import PREEMPTED
from minimind.runtime.environment import environment_kept, rank_of, require_environment
from minimind.runtime.process import CAUGHT, Progress

if TYPE_CHECKING:
    from minimind.train.own_code import Hook


class _CallableModule(ModuleType):
    def __call__(
        self,
        flags: Mapping[str, Any] | Sequence[str] | None = None,
        on_step: Hook | None = None,
        on_eval: Hook | None = None,
        **more: Any,
    ) -> int:
        """Train; return 0 if the run is done, 75 if it was stopped and saved.

        A list of words is a command line. With it this is train_pretrain.py: an error is printed,
        and ends the process with its status. Otherwise keywords and the keys of `flags` are the
        flags: `train(model="tiny", data_path=["text.jsonl"],
        deepspeed_config="configs/ds_config.json")`, and errors are raised as RunError. Under
        `notebook_launcher` every process calls it: `notebook_launcher(minimind.train, (flags,),
        num_processes=2)`. Signals stop and save a run of the main thread only, not one in a Ray
        worker's thread.

        `on_step(step, numbers)` is called after each logged step and `on_eval(step, numbers)` after
        each validation, on every rank, with the fields of their events in metrics.jsonl. True from
        any rank ends the run at this step: it is saved, and the status is 0.
        """
        hooks = {"on_step": on_step, "on_eval": on_eval}
        hooks = {name: hook for name, hook in hooks.items() if hook is not None}
        if isinstance(flags, Sequence):
            if isinstance(flags, str) or more:
                raise TypeError("train() takes a list of words, or a mapping and keywords")
            return _as_program([str(word) for word in flags], hooks)
        require_environment(os.environ)  # before torch reads it
        with environment_kept(), _handlers_kept():
            from minimind.config.launcher_env import set_allocator_defaults

            set_allocator_defaults(os.environ)  # torch may have read it already
            import torch.distributed as dist

            from minimind.checkpoint.run_folder import require_out_dir
            from minimind.config.parse import build_config
            from minimind.engine.build import leave_process_group
            from minimind.errors import MemoryFull, UsageError
            from minimind.train.inputs import require_inputs
            from minimind.train.pretrain import log_halved, pretrain

            run = build_config({**(flags or {}), **more}, "train({name}=...)")
            if hooks:
                from minimind.train.own_code import require_hooks

                require_hooks(hooks)
            require_inputs(run)
            require_out_dir(run)
            if dist.is_initialized():
                raise UsageError(
                    "this process already has a process group, and train(...) creates its own;"
                    " leave it first (torch.distributed.destroy_process_group)"
                )
            progress = Progress(rank=rank_of(os.environ))
            try:
                return pretrain(run, progress, hooks)
            except MemoryFull as error:
                log_halved(run, progress, error)
                raise
            finally:  # the caller may start another run
                leave_process_group()
                if progress.lock:
                    progress.lock.close()


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Give the caller its own Ctrl-C back after the block."""
    handlers = {number: signal.getsignal(number) for number in CAUGHT}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _as_program(words: list[str], hooks: Mapping[str, Hook]) -> int:
    """Train as train_pretrain.py does; return 0 or 75, or end the process with another status."""
    from minimind.runtime.exit import leave
    from minimind.train.program import main

    with _handlers_kept():
        status = main(words, hooks)
    if status in (0, PREEMPTED):
        return status
    if os.environ.get("WORLD_SIZE", "1") != "1":
        leave(status, at_once=True)  # exit handlers would wait for the other ranks
    sys.exit(status)


sys.modules[__name__].__class__ = _CallableModule
__qualname__ = "train"  # torch's launcher asks a function for it
