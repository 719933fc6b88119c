"""The memory of a device: the micro-batch that fits it, and what follows if it is not enough.

The estimate is that of `minimind plan`. Where the start divides the rows of a step, a micro-batch
that was out of memory is halved (`Fit`, `halved`): the run starts again with the same rows.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimind.architecture.select import Architecture
from minimind.architecture.shape import shape_of
from minimind.config.deepspeed.backend_choice import Setup, is_of_another_host
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.flags import ALONE
from minimind.config.rules import most_rows, most_tokens
from minimind.config.run_config import RunConfig
from minimind.errors import HALVED, MemoryFull, which_memory
from minimind.runtime.device import CUDA, HOST, device_kind
from minimind.runtime.event_log import EventLog
from minimind.runtime.process import SCRIPT_PID

if TYPE_CHECKING:
    from minimind.engine.engine import Engine
    from minimind.report.run_logger import RunLogger


@dataclass(frozen=True)
class Fit:
    """The largest micro-batch that the start takes, and why.

    `facts` are those that decide what a row takes and what there is: a record of a micro-batch that
    was out of memory counts for a start that has the same.
    """

    rows: int
    why: str
    facts: Mapping[str, Any]


def largest_fit(setup: Setup, run: RunConfig, resolved: ResolvedConfig, model: Architecture) -> Fit:
    """Return the rows that fit the device of this rank, by the estimate and by records in out_dir.

    Rank 0 reads the records, and all ranks take the smallest number (`with_common_fit`).
    """
    from minimind.architecture.plan import layout_of, rows_that_fit

    launch, memory, fitting = setup.launch, capacity_here(setup, run), None
    layout = layout_of(run, launch.world_size, resolved.config, setup.device)
    if memory is not None and is_estimated(run):
        fitting = rows_that_fit(shape_of(run), layout, memory)
    rows = most_rows(run, setup.device, fitting)
    if memory is None or fitting != rows:
        tokens = most_tokens(setup.device, fitting is not None)
        unknown = "" if memory is not None else ", as the memory is not known here"
        why = f"{tokens:,} tokens{unknown}"
    else:
        why = f"in {memory / 2**30:.2f} GiB"
    facts = {
        **asdict(shape_of(run)),
        **asdict(replace(layout, rows=0, accumulation_steps=0)),  # of any micro-batch
        "device_mib": memory and memory // 2**20,
        "parameters": model.parameters(run),
    }
    facts = json.loads(json.dumps(facts))  # as they are recorded
    if launch.rank == 0:
        for event in EventLog(Path(run.out_dir) / "metrics.jsonl").events(HALVED):
            most = event.get("most_rows")
            if type(most) is int and 0 < most < rows and facts.items() <= event.items():
                rows, why = most, f"as {event.get('micro_batch_rows')} were out of memory"
    return Fit(rows, why, facts)


def is_estimated(run: RunConfig) -> bool:
    """Whether `minimind plan` counts the memory of this run."""
    return run.hugging_face is None and run.tensor_parallel == 1


def capacity(setup: Setup) -> int:
    """Memory of one process in bytes: that of its GPU, or its share of the host's."""
    kind, launch = device_kind(setup.device), setup.launch
    if kind is HOST:
        return kind.memory() // launch.local_world_size
    return kind.memory(launch.local_rank if launch.local_rank < kind.count() else 0)


def capacity_here(setup: Setup, run: RunConfig) -> int | None:
    """The same, None for a dry run of another host, whose memory is not known."""
    is_here = device_kind(setup.device).is_available()
    return capacity(setup) if is_here and not is_of_another_host(run, setup.launch) else None


def halved(run: RunConfig, world_size: int, fit: Fit | None) -> dict[str, Any] | None:
    """The record of a micro-batch that was out of memory; None if there is no smaller one.

    `fit` is None if the micro-batch was given, or what failed does not depend on it.
    """
    rows = run.micro_batch_rows(world_size)
    if fit is None or rows == 1:
        return None
    return {"micro_batch_rows": rows, "most_rows": rows // 2, **fit.facts}


ALLOCATION = re.compile(r"tried to allocate ([0-9.]+ [A-Za-z]+)", re.IGNORECASE)


def log_peak(setup: Setup, engine: Engine, logger: RunLogger, step: int) -> None:
    """Hold the estimate against the peak of the first step; nothing on a CPU (collective).

    There the peak is that of the whole process, with its libraries.
    """
    kind, run = engine.kind, engine.resolved.run
    if kind is HOST or not is_estimated(run):
        return
    from minimind.architecture import costs
    from minimind.architecture.plan import layout_of

    layout = layout_of(run, engine.world_size, engine.resolved.config, engine.device.type)
    estimate, device = costs.memory(shape_of(run), layout).total, capacity(setup)
    peak = max(engine.gather(kind.peak_memory(engine.device)))
    sizes = {"peak_mib": peak, "estimate_mib": estimate, "device_mib": device}
    logger.event("memory", step=step, **{name: size / 2**20 for name, size in sizes.items()})
    logger.print(
        f"step {step}: at most {peak / 2**30:.2f} GiB were taken, {estimate / 2**30:.2f} estimated,"
        f" of {device / 2**30:.2f} (--batch_size auto)"
    )


@contextmanager
def report_out_of_memory(
    setup: Setup, resolved: ResolvedConfig, fit: Fit | None = None
) -> Iterator[None]:
    """Convert a failed allocation inside the block into MemoryFull; other errors pass unchanged.

    With `fit` its micro-batch is halved.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        where = which_memory(error)
        if not where:
            raise
        record = None
        if where == "device" or not device_kind(setup.device).pins:
            record = halved(resolved.run, setup.launch.world_size, fit)
        # Several processes lose one another, and DeepSpeed starts once in a process: the launcher
        # starts them again.
        goes_on = setup.launch.world_size == 1 and resolved.backend != "deepspeed"
        text = _message(error, where, setup, resolved, record, goes_on)
        raise MemoryFull(text, record, goes_on) from error


def _message(
    error: BaseException,
    where: str,
    setup: Setup,
    resolved: ResolvedConfig,
    record: Mapping[str, Any] | None,
    goes_on: bool,
) -> str:
    run, world_size = resolved.run, setup.launch.world_size
    allocation = ALLOCATION.search(str(error))
    tried = f" (tried to allocate {allocation[1]})" if allocation else ""
    micro_batch = (
        f"{run.micro_batch_rows(world_size)} rows (--batch_size {run.batch_size}"
        f"{', --split_batches' if run.split_batches else ''}) x {run.max_seq_len} tokens"
        f" (--max_seq_len {run.max_seq_len})"
    )
    if device_kind(setup.device).pins and where == "host":
        return (
            f"the host is out of memory{tried}, not the GPU; give --no-async_save, which saves"
            " without a copy of the training state in host memory, or start fewer processes here"
        )
    what = f"the {where} is out of memory{tried} with a micro-batch of {micro_batch}"
    if record:
        is_started_again = goes_on or SCRIPT_PID in os.environ  # by our launcher
        again = "the run" if is_started_again else "run the same command again, which"
        return f"{what}; {again} continues with at most {record['most_rows']} rows at once"
    return f"{what}; {remedy(run, resolved, world_size, setup.device, capacity(setup))}"


def too_large(setup: Setup, resolved: ResolvedConfig) -> str:
    """Warning that the micro-batch does not fit the device by the estimate; else empty."""
    run, memory = resolved.run, capacity_here(setup, resolved.run)
    if memory is None or not is_estimated(run):
        return ""
    from minimind.architecture import costs
    from minimind.architecture.plan import layout_of

    size = setup.launch.world_size
    layout = layout_of(run, size, resolved.config, setup.device)
    if costs.memory(shape_of(run), layout).total <= memory:
        return ""
    of_step = f"a micro-batch of {layout.rows} rows x {run.max_seq_len} tokens"
    return f"warning  {of_step}: {remedy(run, resolved, size, setup.device, memory)}"


def remedy(
    run: RunConfig, resolved: ResolvedConfig, world_size: int, device: str, memory: int
) -> str:
    """Return the change that makes the step fit, by the estimate of `minimind plan`."""
    recompute = "" if run.gradient_checkpointing else ", or give --gradient_checkpointing"
    if not is_estimated(run):
        why = " (`minimind plan` does not count models of transformers)" if run.hugging_face else ""
        change = "halve --batch_size and double --accumulation_steps"
        if run.global_batch_size is not None:  # --batch_size may be far above the micro-batch
            change = f"give --batch_size {max(1, run.micro_batch_rows(world_size) // 2)}"
        return f"{change}, which leaves the step as it is{recompute}{why}"
    from minimind.architecture import costs
    from minimind.architecture.plan import (
        GIB,
        batch_flags,
        fits,
        largest_step,
        layout_of,
        name_of,
        recommend,
    )

    shape, current = shape_of(run), layout_of(run, world_size, resolved.config, device)
    needed = costs.memory(shape, current)
    estimate = f"`minimind plan` counts {needed.total / GIB:.2f} GiB for it, of {memory / GIB:.2f}"
    if fits(needed, memory):
        free = "end other processes, or raise the limit on this one (ulimit -v, the container's)"
        if device == CUDA.name:
            free = "end other processes on this GPU (nvidia-smi lists them)"
            if "expandable_segments:True" not in os.environ.get("PYTORCH_ALLOC_CONF", ""):
                free += ", or set PYTORCH_ALLOC_CONF=expandable_segments:True against fragmentation"
        elif device_kind(device).shares_memory:
            free = "end other programs, whose memory the GPU shares"
        return f"{estimate}, which should fit: {free}{recompute}"
    if best := largest_step(shape, current, memory):
        return f"{estimate}; {' '.join(batch_flags(run, best).values())} fits{recompute}"
    if device not in ALONE and (best := recommend(shape, current, memory)):
        flags = " ".join(batch_flags(run, best).values())
        return f"{estimate}; {name_of(best)} with {flags} fits (docs/memory.md)"
    return f"{estimate}, and nothing fits; lower --dim, --n_layers or --max_seq_len"
