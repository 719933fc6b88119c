"""Out of memory: the error message with the micro-batch in force and one that would fit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minimind.architecture import costs
from minimind.architecture.costs import Layout
from minimind.architecture.plan import GIB, fits, largest_step, layout_of, name_of, recommend
from minimind.architecture.shape import shape_of
from minimind.config.deepspeed.backend_choice import Setup
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.run_config import RunConfig
from minimind.errors import MemoryFull, which_memory

ALLOCATION = re.compile(r"tried to allocate ([0-9.]+ [A-Za-z]+)", re.IGNORECASE)


@contextmanager
def report_out_of_memory(setup: Setup, resolved: ResolvedConfig) -> Iterator[None]:
    """Convert a failed allocation inside the block into MemoryFull; other errors pass unchanged."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        where = which_memory(error)
        if not where:
            raise
        raise MemoryFull(_message(error, where, setup, resolved)) from error


def _message(error: BaseException, where: str, setup: Setup, resolved: ResolvedConfig) -> str:
    run, world_size = resolved.run, setup.launch.world_size
    allocation = ALLOCATION.search(str(error))
    tried = f" (tried to allocate {allocation[1]})" if allocation else ""
    micro_batch = (
        f"{run.micro_batch_rows(world_size)} rows (--batch_size {run.batch_size}"
        f"{', --split_batches' if run.split_batches else ''}) x {run.max_seq_len} tokens"
        f" (--max_seq_len {run.max_seq_len})"
    )
    if setup.device == "cuda" and where == "host":
        return (
            f"the host is out of memory{tried}, not the GPU; give --no-async_save, which saves"
            " without a copy of the training state in host memory, or start fewer processes here"
        )
    return f"the {where} is out of memory{tried} with a micro-batch of {micro_batch}; " + (
        remedy(run, resolved, world_size, setup.device, _capacity(setup))
    )


def _capacity(setup: Setup) -> int:
    """Memory of one process in bytes: that of its GPU, or its share of the host's."""
    if setup.device == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host // setup.launch.local_world_size


def remedy(
    run: RunConfig, resolved: ResolvedConfig, world_size: int, device: str, memory: int
) -> str:
    """Return the change that makes the step fit, by the estimate of `minimind plan`."""
    recompute = "" if run.gradient_checkpointing else ", or give --gradient_checkpointing"
    if run.hugging_face is not None or run.tensor_parallel > 1:
        why = " (`minimind plan` does not count models of transformers)" if run.hugging_face else ""
        return (
            "halve --batch_size and double --accumulation_steps, which leaves the step as it is"
            f"{recompute}{why}"
        )
    shape, current = shape_of(run), layout_of(run, world_size, resolved.config, device)
    needed = costs.memory(shape, current)
    estimate = f"`minimind plan` counts {needed.total / GIB:.2f} GiB for it, of {memory / GIB:.2f}"
    if fits(needed, memory):
        free = "end other processes, or raise the limit on this one (ulimit -v, the container's)"
        if device == "cuda":
            free = "end other processes on this GPU (nvidia-smi lists them)"
            if "expandable_segments:True" not in os.environ.get("PYTORCH_ALLOC_CONF", ""):
                free += ", or set PYTORCH_ALLOC_CONF=expandable_segments:True against fragmentation"
        return f"{estimate}, which should fit: {free}{recompute}"
    if best := largest_step(shape, current, memory):
        return f"{estimate}; {_flags(run, best)} fits{recompute}"
    if best := recommend(shape, current, memory):
        return f"{estimate}; {name_of(best)} with {_flags(run, best)} fits (docs/zero.md)"
    return f"{estimate}, and nothing fits; lower --dim, --n_layers or --max_seq_len"


def _flags(run: RunConfig, layout: Layout) -> str:
    groups = run.parallel(layout.world_size).data_size
    rows = layout.rows * (groups if run.split_batches else 1)
    return f"--batch_size {rows} --accumulation_steps {layout.accumulation_steps}"
