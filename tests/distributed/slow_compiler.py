"""A training run in which rank 1 compiles for a long time, or is killed meanwhile.

    RANK=R ... python -m tests.distributed.slow_compiler SECONDS|SIGKILL FLAGS

Graphs are captured as ever and then run as they are.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from typing import Any

import torch
from torch._dynamo.backends.debugging import aot_eager

from minimind.launch.train_pretrain import run

LATE = "rank 1 has compiled late"
waits: list[str] = []  # what rank 1 does at its first graph


def compile_late(graph: Any, inputs: Any) -> Any:
    """The graph as it is, on rank 1 the first one late."""
    if waits and (word := waits.pop()):
        if word == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        end = time.monotonic() + float(word)
        while time.monotonic() < end:  # holds the GIL as much as a compiler in Python does
            pass
        print(LATE, file=sys.stderr)
    return aot_eager(graph, inputs)


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        waits.append(sys.argv[1])
    torch.compile = partial(torch.compile, backend=compile_late)
    run(sys.argv[2:])
