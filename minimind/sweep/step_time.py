"""The time of a training step on this device: steps of real models on random tokens.

`python -m minimind.sweep.step_time JSON` is one process of a run. It prints a line for each run,
so that several of them show what they take from each other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch

from minimind.architecture.hf_models import model_of
from minimind.architecture.select import minimind_config
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.parse import build_config
from minimind.config.rules import with_dtype
from minimind.config.run_config import RunConfig
from minimind.engine.compile import compute_in
from minimind.engine.engine import mean_loss, text_inputs
from minimind.engine.optimizers import run_groups
from minimind.engine.plain_backend import PlainBackend
from minimind.errors import UsageError
from minimind.runtime.device import device_kind
from minimind.runtime.environment import module_path

SECONDS = 2.0  # of a run, after its first step
MOST_STEPS = 32


def step_seconds(run: RunConfig, device: str) -> float:
    """Return the median time of a few steps of one micro-batch in one process, in seconds."""
    torch.manual_seed(run.seed)
    kind = device_kind(device)
    run = with_dtype(run, device, kind.has_bf16)
    model = model_of(minimind_config(run, bos_token_id=None, eos_token_id=0, pad_token_id=None))
    model.to(device, getattr(torch, run.weight_dtype))
    compute_in(run.dtype, model, device)
    backend = PlainBackend(model, model, ResolvedConfig(run, "single"), run_groups(model, run))
    rows = torch.randint(run.vocab_size, (run.batch_size, run.max_seq_len + 1), device=device)
    taken: list[float] = []
    while len(taken) < 2 or (sum(taken[1:]) < SECONDS and len(taken) <= MOST_STEPS):
        begin = time.perf_counter()
        with backend.micro_batch(is_last=True):
            backend.backward(mean_loss(model(**text_inputs(rows), loss_chunk_size=0)))
        backend.update(is_last=True)
        kind.synchronize()
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])


def measured_steps(
    runs: Sequence[Mapping[str, Any]], device: str, processes: int, threads: int
) -> Iterator[float]:
    """Seconds of a step of each run of flags in the slowest of processes that run at the same time.

    The processes end when the iterator is closed.
    """
    environ = {**os.environ, **module_path(), "OMP_NUM_THREADS": str(threads)}
    words = [sys.executable, "-m", __name__, json.dumps([device, *runs])]
    with ExitStack() as running:
        started = []
        for _ in range(processes):
            child = subprocess.Popen(words, stdout=subprocess.PIPE, env=environ, text=True)
            started.append(running.enter_context(child))
            running.callback(child.kill)
        for _ in runs:
            lines = [child.stdout.readline() if child.stdout else "" for child in started]
            if not all(lines):
                raise UsageError(
                    f"no step could be measured on {device}; the lines above say why, or give"
                    " --gpu_model for an estimate"
                )
            yield max(map(float, lines))


def main(argument: str) -> None:
    """Print the seconds of a step of each run of flags."""
    device, *runs = json.loads(argument)
    for flags in runs:
        print(step_seconds(build_config(flags, "{name}"), device), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
