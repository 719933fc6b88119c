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
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from minimind.runtime.environment import environment_kept, rank_of, require_environment
from minimind.runtime.process import CAUGHT, Progress


class _CallableModule(ModuleType):
    def __call__(self, flags: Mapping[str, Any] | None = None, **more: Any) -> int:
        """Train; return 0 if the run is done, 75 if it was stopped and saved.

        Keywords and the keys of `flags` are the flags of train_pretrain.py: `train(model="tiny",
        data_path=["text.jsonl"], deepspeed_config="configs/ds_config.json")`. Under
        `notebook_launcher` every process calls it: `notebook_launcher(minimind.train, (flags,),
        num_processes=2)`. Signals stop and save a run of the main thread only, not one in a Ray
        worker's thread. Raise RunError for errors that train_pretrain.py prints.
        """
        require_environment(os.environ)  # before torch reads it
        handlers = {n: signal.getsignal(n) for n in CAUGHT}
        with environment_kept():
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
            require_inputs(run)
            require_out_dir(run)
            if dist.is_initialized():
                raise UsageError(
                    "this process already has a process group, and train(...) creates its own;"
                    " leave it first (torch.distributed.destroy_process_group)"
                )
            progress = Progress(rank=rank_of(os.environ))
            try:
                return pretrain(run, progress)
            except MemoryFull as error:
                log_halved(run, progress, error)
                raise
            finally:  # the caller needs its own Ctrl-C, and may start another run
                for number, handler in handlers.items():
                    if signal.getsignal(number) is not handler:
                        signal.signal(number, handler)
                leave_process_group()
                if progress.lock:
                    progress.lock.close()


sys.modules[__name__].__class__ = _CallableModule
__qualname__ = "train"  # torch's launcher asks a function for it
