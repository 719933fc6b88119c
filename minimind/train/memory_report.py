"""A failed allocation of a run as its ending: the micro-batch in force, and one that would fit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minimind.config.deepspeed.backend_choice import Setup
from minimind.config.deepspeed.resolve import Resolved
from minimind.config.run_config import RunConfig
from minimind.errors import MemoryFull, which_memory
from minimind.estimate import costs
from minimind.estimate.costs import Layout
from minimind.estimate.plan import GIB, fits, largest_step, layout_of, name_of, recommend
from minimind.estimate.shape import shape_of

ASKED = re.compile(r"tried to allocate ([0-9.]+ [A-Za-z]+)", re.IGNORECASE)


@contextmanager
def report_out_of_memory(setup: Setup, resolved: Resolved) -> Iterator[None]:
    """Turn a failed allocation inside into a MemoryFull; every other error passes unchanged."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        where = which_memory(error)
        if not where:
            raise
        raise MemoryFull(_message(error, where, setup, resolved)) from error


def _message(error: BaseException, where: str, setup: Setup, resolved: Resolved) -> str:
    run, world_size = resolved.run, setup.launch.world_size
    asked = ASKED.search(str(error))
    tried = f" (tried to allocate {asked[1]})" if asked else ""
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
    """Bytes of memory that one process has: of its GPU, or its share of the host's."""
    if setup.device == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host // setup.launch.local_world_size


def remedy(run: RunConfig, resolved: Resolved, world_size: int, device: str, memory: int) -> str:
    """What to change so that the step fits, by the arithmetic of `minimind plan`."""
    recompute = "" if run.gradient_checkpointing else ", or give --gradient_checkpointing"
    if run.hugging_face is not None:
        return (
            "halve --batch_size and double --accumulation_steps, which leaves the step as it is"
            f"{recompute} (`minimind plan` does not count models of transformers)"
        )
    shape, here = shape_of(run), layout_of(run, world_size, resolved.config, device)
    needed = costs.memory(shape, here)
    counted = f"`minimind plan` counts {needed.total / GIB:.2f} GiB for it, of {memory / GIB:.2f}"
    if fits(needed, memory):
        return f"{counted}, which should fit: {_outside(device)}{recompute}"
    if best := largest_step(shape, here, memory):
        return f"{counted}; {_typed(run, best)} fits{recompute}"
    if best := recommend(shape, here, memory):
        return f"{counted}; {name_of(best)} with {_typed(run, best)} fits (docs/zero.md)"
    return f"{counted}, and nothing fits; lower --dim, --n_layers or --max_seq_len"


def _outside(device: str) -> str:
    """What takes memory beside the run."""
    if device == "cuda":
        return (
            "end other processes on this GPU (nvidia-smi lists them), or set"
            " PYTORCH_ALLOC_CONF=expandable_segments:True against fragmentation"
        )
    return "end other processes, or raise the limit on this one (ulimit -v, the container's)"


def _typed(run: RunConfig, best: Layout) -> str:
    rows = best.rows * (best.world_size if run.split_batches else 1)
    return f"--batch_size {rows} --accumulation_steps {best.accumulation_steps}"
