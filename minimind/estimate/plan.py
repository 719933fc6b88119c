"""What a run would hold, send and compute, as text; and which ZeRO stage and micro-batch fit.

No GPU, process group, data or torch: arithmetic on the flags and the DeepSpeed file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minimind.config.deepspeed.auto_values import auto_values, offloads
from minimind.config.deepspeed.resolve import read_deepspeed_json, resolve
from minimind.config.parse import parse_flags, unknown_flag
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG, FLAGS, RunConfig
from minimind.errors import UsageError, fault_error
from minimind.estimate import costs
from minimind.estimate.costs import Layout, Memory
from minimind.estimate.shape import Shape, shape_of

HEADROOM = 0.1  # for the CUDA context, the libraries' own buffers and fragmentation
OWN_FLAGS = ("gpus", "world_size", "memory", "peak_tflops", "mfu", "tokens")
GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """What is given to train on; None where it was not said."""

    gpus: int = 1
    memory: int | None = None  # bytes of one device
    peak_tflops: float | None = None  # of one device, 10^12 FLOPs a second
    mfu: float = 0.4
    tokens: float | None = None


def plan(argv: Sequence[str], machine: Machine) -> str:
    """The answer of `minimind plan`, for flags of train_pretrain.py; raises UsageError."""
    faults = []
    for word in argv:
        name = word.split("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        if word.startswith("--") and name not in FLAGS:
            faults.append(unknown_flag(word, [f"--{flag}" for flag in (*OWN_FLAGS, *FLAGS)]))
    if faults:
        raise fault_error(faults)
    run = parse_flags(argv)
    if run.hugging_face is not None:
        raise UsageError(
            f"plan counts our own decoder, and --model {run.model} is of transformers; give the"
            " flags of a decoder of its shape"
        )
    if run.init_from is not None:
        raise UsageError("plan reads no weights, so --init_from tells it no shape; give the flags")
    shipped = os.path.relpath(DEFAULT_DEEPSPEED_CONFIG)
    path = run.deepspeed_config or shipped
    device = "cpu" if run.device == "cpu" else "cuda"
    config: Mapping[str, Any] = {}
    if path != "none":
        resolved = resolve(read_deepspeed_json(path), path, run, machine.gpus, device)
        run, config = resolved.run, resolved.config
    text = plan_text(run, machine.gpus, config, machine, device)
    if machine.memory is None:
        return f"{text}\n\nGive --memory (of one GPU, say 24GiB) to be told what fits."
    here = layout_of(run, machine.gpus, config, device)
    target = shipped if path == "none" else path
    return f"{text}\n\n{_advice(run, here, machine.memory, target)}"


def plan_text(
    run: RunConfig,
    world_size: int,
    config: Mapping[str, Any] | None = None,
    machine: Machine | None = None,
    device: str = "cuda",
) -> str:
    """Parameters, FLOPs, and for every ZeRO stage the memory and the bytes sent; a table.

    config is the resolved DeepSpeed configuration, whose row is starred; None without DeepSpeed.
    """
    machine = machine or Machine(world_size)
    shape, here = shape_of(run), layout_of(run, world_size, config or {}, device)
    tokens = here.rows * run.max_seq_len * run.accumulation_steps * world_size
    flops = costs.flops_per_token(shape)
    active = "active " if shape.use_moe else ""
    lines = [
        f"parameters  {shape.parameters:,}: {run.n_layers} blocks of {shape.layer:,}, embedding"
        f" and head {shape.embedding:,}, all norms {shape.norms:,}",
        f"step        {here.rows} rows x {run.max_seq_len} tokens x accumulation"
        f" {run.accumulation_steps} x {world_size} processes = {tokens:,} tokens",
        f"FLOPs       {flops / 1e9:.3g} G per token (6 x {active}weights + 12 x layers x dim x T),"
        f" {flops * tokens / 1e12:.3g} T per step",
    ]
    if machine.tokens and machine.peak_tflops:
        needed = costs.seconds(shape, machine.tokens, world_size, machine.peak_tflops, machine.mfu)
        lines.append(
            f"time        {needed / 3600:.3g} hours for {machine.tokens:.3g} tokens on"
            f" {world_size} x {machine.peak_tflops:g} TFLOPS at {machine.mfu:.0%} MFU"
        )
    return "\n".join([*lines, "", *_table(shape, here, machine.memory)])


def layout_of(run: RunConfig, world_size: int, config: Mapping[str, Any], device: str) -> Layout:
    """How the run is trained; stage None where config, the resolved DeepSpeed one, is empty."""
    derived = auto_values(config, run, world_size, device, None)
    ours = {key.split(".")[-1]: value for key, (value, _) in derived.items()}
    zero: Mapping[str, Any] = config["zero_optimization"] if config else ours
    stage = int(zero["stage"]) if config else None
    return Layout(
        stage,
        world_size,
        run.dtype,
        run.micro_batch_rows(world_size),
        run.accumulation_steps,
        int(zero.get("reduce_bucket_size", costs.FLATTENED)),  # DeepSpeed's default where unsaid
        bool(zero.get("overlap_comm", stage == 3)),  # likewise
        offloads(config, "optimizer"),
        offloads(config, "param"),
        device,
        run.gradient_checkpointing,
    )


def alternatives(here: Layout) -> list[Layout]:
    """Every way to train like `here`: what is replicated first, what is offloaded last."""
    plain = [replace(here, stage=s, offload_optimizer=False, offload_param=False) for s in range(4)]
    if here.dtype == "float16":
        plain.pop(0)  # DeepSpeed trains wrongly there, and the resolver refuses it
    offloaded = [replace(s, offload_optimizer=True) for s in plain if s.stage]
    return [*plain, *offloaded, replace(offloaded[-1], offload_param=True)]


def name_of(layout: Layout) -> str:
    """`ZeRO-2`, `ZeRO-3 offload opt`, `DDP`."""
    if layout.stage is None:
        return "DDP" if layout.world_size > 1 else "no DeepSpeed"
    optimizer, param = layout.offload_optimizer, layout.offload_param
    what = "all" if optimizer and param else "opt" if optimizer else "par" if param else ""
    return f"ZeRO-{layout.stage}" + (f" offload {what}" if what else "")


COLUMNS = ("weights", "optimizer", "gradients", "buffers", "activations", "update")
HEADS = ("weights", "optim.", "grads", "buffers", "activ.", "update", "total", "host", "sent")


def _table(shape: Shape, here: Layout, memory: int | None) -> list[str]:
    without = replace(here, stage=None, offload_optimizer=False, offload_param=False)
    layouts = [without, *alternatives(here)]
    layouts += [] if here in layouts else [here]
    needed = [costs.memory(shape, layout) for layout in layouts]
    unit, word = (GIB, "GiB") if max(m.total for m in needed) >= GIB else (2**20, "MiB")
    lines = [
        f"Per process in {word}, {here.dtype}, micro-batch {here.rows}:",
        f"{'':<20}" + "".join(f"{head:>8}" for head in HEADS) + "  fits" * bool(memory),
    ]
    for layout, held in zip(layouts, needed, strict=True):
        numbers = [getattr(held, column) for column in COLUMNS]
        numbers += [held.total, held.host, costs.bytes_sent(shape, layout)]
        row = f"{'*' if layout == here else ' '}{name_of(layout):<19}"
        verdict = f"{'yes' if fits(held, memory) else 'no':>6}" if memory else ""
        lines.append(row + "".join(_cell(n / unit) for n in numbers) + verdict)
    return [
        *lines,
        "total: weights + optim. + the larger of (grads + buffers + activ.) and update; host: RAM;",
        "sent: by one process in a step; *: as configured",
    ]


def _cell(value: float) -> str:
    return f"{value:>8.2f}" if 0 < value < 1000 else f"{value:>8,.0f}" if value else f"{'-':>8}"


def fits(held: Memory, memory: int) -> bool:
    """Whether that much is there, less what is kept free."""
    return held.total <= memory * (1 - HEADROOM)


def recommend(shape: Shape, here: Layout, memory: int) -> Layout | None:
    """The layout to train with, its step as large as that of `here`; None where nothing fits.

    The first stage that holds the micro-batch asked for, else the one that holds the largest;
    offloading only where nothing fits without. Then the largest micro-batch there that divides the
    rows of a step. A lower stage sends less, and less often.
    """
    ways = alternatives(here)
    for offloads_any in (False, True):
        same = (way for way in ways if way.offload_optimizer is offloads_any)
        fitting = [s for s in (largest_step(shape, way, memory) for way in same) if s]
        if fitting:
            return max(fitting, key=lambda s: min(s.rows, here.rows))  # the first of equals
    return None


def largest_step(shape: Shape, here: Layout, memory: int) -> Layout | None:
    """`here` with the largest micro-batch that fits and divides the rows of its step, if any."""
    per_step = here.rows * here.accumulation_steps
    sizes = (rows for rows in range(per_step, 0, -1) if per_step % rows == 0)
    tried = (replace(here, rows=n, accumulation_steps=per_step // n) for n in sizes)
    return next((step for step in tried if fits(costs.memory(shape, step), memory)), None)


def _advice(run: RunConfig, here: Layout, memory: int, path: str) -> str:
    """The recommendation with what to type, or what would help."""
    shape, gpus = shape_of(run), here.world_size
    best = recommend(shape, here, memory)
    if best is None:
        return _no_fit(shape, here, memory)
    held = costs.memory(shape, best)
    beside = held.weights + held.optimizer + held.gradients + held.buffers
    row = costs.activation_bytes(shape, replace(best, rows=1))
    largest = int((memory * (1 - HEADROOM) - beside) // row)
    same = replace(best, rows=here.rows, accumulation_steps=here.accumulation_steps) == here
    host = f", {held.host * gpus / GIB:.1f} GiB of RAM" if held.host else ""
    rows = best.rows * (gpus if run.split_batches else 1)
    typed = f"{_typed(run)} --batch_size {rows} --accumulation_steps {best.accumulation_steps}"
    others = [replace(here, world_size=gpus * n) for n in (2, 4, 8) if best.offload_optimizer]
    found = [recommend(shape, other, memory) for other in others]
    more = [s.world_size for s in found if s and not s.offload_optimizer]
    return (
        f"Recommended: {name_of(best)}, micro-batch {best.rows}, accumulation"
        f" {best.accumulation_steps}: {held.total / GIB:.2f} of {memory / GIB:.2f} GiB{host}.\n"
        f"{HEADROOM:.0%} stays free for the CUDA context and fragmentation;"
        f" the largest micro-batch that fits is {largest}.\n"
        + (f"With {more[0]} GPUs nothing has to be offloaded.\n" if more else "")
        + f"  {path}: {_written(here, best)}"
        + ("  (as it is)\n" if same else "\n")
        + f"  NUM_PROCESSES={gpus} bash run_accelerate.sh \\\n    {typed.strip()}"
    )


def _written(here: Layout, best: Layout) -> str:
    """What to write into the DeepSpeed file of `here`, and what to take out of it."""
    stage, gone = f'"stage": {best.stage}', []
    for name in ("offload_optimizer", "offload_param"):
        if getattr(best, name):
            stage += f', "{name}": {{"device": "cpu"}}'
        elif getattr(here, name):
            gone.append(name)
    taken_out = f"\n  and remove {', '.join(gone)}" if gone else ""
    return f'"zero_optimization": {{{stage}}}{taken_out}'


def _typed(run: RunConfig) -> str:
    """The flags of the command line as they were given, less those that the advice decides."""
    words = []
    for name in FLAGS:
        value = getattr(run, name)
        if run.sources[name] != f"--{name}" or name in ("batch_size", "accumulation_steps"):
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value != "none":  # as in --deepspeed_config none, which the advice is not
            words.append(f"--{name} {' '.join(value) if isinstance(value, tuple) else value}")
    return " ".join(words)


def _no_fit(shape: Shape, here: Layout, memory: int) -> str:
    """The least that was tried, and what is largest in it."""
    rows = replace(here, rows=1, accumulation_steps=here.rows * here.accumulation_steps)
    least = min(alternatives(rows), key=lambda s: costs.memory(shape, s).total)
    held = costs.memory(shape, least)
    size, largest = max((getattr(held, column), column) for column in COLUMNS)
    helps = "--dim or --n_layers"
    if largest == "activations":
        helps = "--max_seq_len or --n_layers"
        helps += "" if here.recomputes else ", give --gradient_checkpointing"
    return (
        f"Nothing fits in {memory / GIB:.2f} GiB with {HEADROOM:.0%} kept free:\n"
        f"{name_of(least)} needs {held.total / GIB:.2f} GiB with 1 row in a micro-batch.\n"
        f"Most of it is {largest}, {size / GIB:.2f} GiB, which more GPUs do not share: lower"
        f"\n{helps}, or use GPUs with more memory."
    )
