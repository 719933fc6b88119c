"""`minimind plan`: memory, communication and FLOPs of a run, and the ZeRO stage that fits.

Computed from the flags, the DeepSpeed file and the manifest of the text, without GPU or torch.
"""

from __future__ import annotations

import os
import shlex
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from minimind.architecture import costs
from minimind.architecture.costs import ASSUMED_MFU, Layout, Machine, Memory
from minimind.architecture.shape import (
    Shape,
    flops_per_token,
    shape_of,
    trained_parameters,
    with_special_tokens,
)
from minimind.config.deepspeed.document import offloads, read_deepspeed_json
from minimind.config.deepspeed.keys import Facts
from minimind.config.deepspeed.resolve import auto_values, require_none, resolve
from minimind.config.deepspeed.rules import plain_faults
from minimind.config.flags import ALONE, AUTO, FLAGS
from minimind.config.names import unknown_flag
from minimind.config.optimizers import OPTIMIZERS
from minimind.config.origin import OPEN, Origin, Rank
from minimind.config.parse import parse_flags, words_of
from minimind.config.paths import shell_word
from minimind.config.rules import (
    batch_values,
    can_divide,
    divided,
    flags_with_rules,
    largest_micro_batch,
    most_rows,
    needs_text,
    values_by_rules,
    with_dtype,
)
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG, RunConfig, deepspeed_files
from minimind.config.schedule import budget_steps
from minimind.errors import UsageError, fault_error
from minimind.runtime import disk
from minimind.runtime.installed import LAUNCH
from minimind.runtime.urls import masked

HEADROOM = 0.1  # share for the CUDA context, the libraries' own buffers and fragmentation
OWN_FLAGS = ("gpus", "gpu_model", "memory", "peak_tflops", "mfu", "tokens")
GIB = 2**30
# Shipped files by stage and offloading of optimizer and parameters; without DeepSpeed: none.
FILES = {
    (None, False, False): "none",
    (0, False, False): "zero0",
    (1, False, False): "zero1",
    (2, False, False): "zero2",
    (3, False, False): "zero3",
    (2, True, False): "zero2_offload",
    (3, True, True): "zero3_offload",
}
MOST_ROWS = 2**20  # that are tried
WIDTH = 75  # columns for the flags of a command


def plan(
    argv: Sequence[str], machine: Machine, sized: Callable[[RunConfig], RunConfig] = lambda run: run
) -> str:
    """Return the output of `minimind plan` for flags of train_pretrain.py; raise UsageError.

    `sized` counts the weights of a teacher.
    """
    known = [f"--{flag}" for flag in (*OWN_FLAGS, *FLAGS)]
    faults = []
    for word in argv:
        name = word.split("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        if word.startswith("--") and name not in FLAGS:
            faults.append(unknown_flag(word, known))
    if faults:
        raise fault_error(faults)
    run = parse_flags(argv)
    run = sized(run) if run.teacher else run
    if run.hugging_face is not None:
        raise UsageError(
            f"minimind plan estimates only the built-in decoder, but --model {run.model} is a model"
            " of transformers; give the flags of a decoder of its shape"
        )
    if run.init_from is not None:
        raise UsageError(
            "minimind plan does not read weights, so --init_from has no effect; give the flags of"
            " its shape, or start the run with --dry_run"
        )
    text = None
    if run.source or run.stages or run.is_explicit("data_path"):
        from minimind.data.prepare.mixed import described_text

        text = described_text(run)
    if text and not run.is_explicit("vocab_size"):
        run = run.with_values(Origin("the text", Rank.DATA), vocab_size=text["vocab_size"])
    run, vocabulary = with_special_tokens(run)
    path = run.deepspeed_config or os.path.relpath(DEFAULT_DEEPSPEED_CONFIG)
    device = "cuda" if run.device == "auto" else run.device
    if device in ALONE:
        path = "none"
        if machine.gpus > 1:
            raise UsageError(
                f"--gpus {machine.gpus}: a run on {device} has one process; give --gpus 1"
            )
    run = with_dtype(run, device, has_bf16=True)  # the devices of a plan may be elsewhere
    config: Mapping[str, Any] = {}
    document: Mapping[str, Any] = {}
    optimizer = OPTIMIZERS[run.optimizer].name
    if path != "none":
        document = read_deepspeed_json(path)
        resolved = resolve(document, path, run, machine.gpus, device)
        run, config, optimizer = resolved.run, resolved.config, resolved.optimizer
    else:
        require_none(plain_faults(run))
        run = run.with_micro_batches(machine.gpus)
    batch, most = "", most_rows(run, device)
    is_open, names = "batch_size" in run.open_flags, flags_with_rules(run, optimizer)
    if is_open and machine.memory and run.tensor_parallel == 1:
        here = layout_of(run, machine.gpus, config, device)
        most = most_rows(run, device, rows_that_fit(shape_of(run), here, machine.memory))
    if names:
        run, batch = _with_rules(run, names, optimizer, machine, device, text, most)
    if is_open and "batch_size" not in names and can_divide(run):
        run = divided(run, machine.gpus, most, "by --memory")
    if run.stages:
        vocabulary += f"{_stages(run, machine.gpus)}\n\n"
    text = f"{vocabulary}{plan_text(run, machine.gpus, config, machine, device)}{batch}"
    if machine.memory is None:
        return f"{text}\n\nGive --memory (of one GPU, say 24GiB) or --gpu_model to see what fits."
    if run.tensor_parallel > 1:
        return text
    current = layout_of(run, machine.gpus, config, device)
    return f"{text}\n\n{_advice(run, current, machine, path, document)}"


def _with_rules(
    run: RunConfig,
    names: Sequence[str],
    optimizer: str,
    machine: Machine,
    device: str,
    text: Mapping[str, Any] | None,
    most: int,
) -> tuple[RunConfig, str]:
    """The run with the numbers that the start decides, and a paragraph about its batch.

    `most` limits the rows of a micro-batch. Where the text that decides the rows of a step is not
    known, the run has the largest micro-batch of the rules.
    """
    if run.global_batch_size is not None and "batch_size" in names:  # no text decides it
        batch = batch_values(run, machine.gpus, run.global_batch_size, most)
        run = run.with_values(Origin(f"{AUTO}: as the start", Rank.RULE), **batch)
        run = run.with_micro_batches(machine.gpus)
        names = [name for name in names if name != "batch_size"]
    shape, limited, sources = shape_of(run), run, None
    if text is None and needs_text(run):
        limited = replace(run, epochs=None)
        if machine.tokens is None or not needs_text(limited):
            if "batch_size" not in names:
                return run, ""
            values: dict[str, int] = {}
            if not run.is_explicit("accumulation_steps"):
                by_tokens = most_rows(run, device)
                values = largest_micro_batch(run, machine.gpus, min(most, by_tokens))
            run = run.with_values(OPEN, **values)
            return run, (
                "\n\nauto: --batch_size depends on the text, and on the memory, and is chosen when"
                f" the run starts. The\ntable is for micro-batches of"
                f" {run.micro_batch_rows(machine.gpus)} rows."
            )
        limited = replace(limited, max_tokens=machine.tokens)
    if text is not None:
        from minimind.data.rows.skip_rows import rows_of_sources

        sources = rows_of_sources(run, text)
    values, work = values_by_rules(
        limited,
        names,
        optimizer,
        machine.gpus,
        device,
        sources,
        shape.parameters,
        lambda tokens: budget_steps(limited, tokens, shape.parameters, flops_per_token(shape)),
    )
    run = run.with_values(Origin(f"{AUTO}: as the start", Rank.RULE), **values)
    if "batch_size" not in names:
        return run, ""
    if can_divide(run):
        run = divided(run, machine.gpus, most, "by --memory")
    return run, (
        f"\n\nauto: --batch_size {run.batch_size} --accumulation_steps {run.accumulation_steps},"
        f" chosen for {work.tokens:,} tokens"
    )


def _stages(run: RunConfig, world_size: int) -> str:
    """The stages of the run in steps, and its schedule."""
    from minimind.config.stages import plan_stages, stage_text

    shape = shape_of(run)
    budgets = budget_steps(run, 1, shape.parameters, flops_per_token(shape))
    _, stages, schedule = plan_stages(run, world_size, budgets)
    lines = [stage_text(stage.facts()) for stage in stages]
    return "\n  ".join(["stages:", *lines, f"rate: {schedule}"])


def plan_text(
    run: RunConfig,
    world_size: int,
    config: Mapping[str, Any] | None = None,
    machine: Machine | None = None,
    device: str = "cuda",
) -> str:
    """Return parameters, FLOPs, and a table of memory and communication per ZeRO stage.

    config is the resolved DeepSpeed configuration, whose row is starred; None without DeepSpeed.
    """
    machine = machine or Machine(world_size)
    shape, here = shape_of(run), layout_of(run, world_size, config or {}, device)
    tokens = run.rows_per_step(world_size) * run.max_seq_len
    heads = "dim" if shape.q_dim == shape.dim else "n_heads x head_dim"
    flops, data_size = flops_per_token(shape), run.parallel(world_size).data_size
    active = "active " if shape.use_moe else ""
    spared = ", less what is frozen" if run.freeze else ""
    padding = run.padded_rows(world_size) - run.rows_per_step(world_size)
    more = f", and {padding * run.max_seq_len:,} of padding" if padding else ""
    taught = f"; of the teacher {run.teacher_weights:,}" if run.teacher_weights else ""
    lines = [
        f"parameters  {shape.parameters:,}: {run.n_layers} blocks of {shape.layer:,}, embedding"
        f" and head {shape.embedding:,}, all norms {shape.norms:,}{taught}",
        f"step        {here.rows} rows x {run.max_seq_len} tokens x accumulation"
        f" {run.accumulation_steps} x {data_size} processes = {tokens:,} tokens{more}",
        f"FLOPs       {flops / 1e9:.3g} G per token (6 x {active}weights + 12 x layers x {heads}"
        f" x T{spared}), {flops * tokens / 1e12:.3g} T per step",
    ]
    if machine.tokens and machine.peak_tflops:
        mfu, source = machine.mfu or ASSUMED_MFU, "given" if machine.mfu else "assumed: --mfu"
        needed = costs.seconds(shape, machine.tokens, world_size, machine.peak_tflops, mfu)
        lines.append(
            f"time        {needed / 3600:.3g} hours for {machine.tokens:.3g} tokens on"
            f" {world_size} x {machine.peak_tflops:g} TFLOPS at {mfu:.0%} MFU ({source})"
        )
    if run.freeze:
        lines.append(
            f"trained     {trained_parameters(run, shape.named):,} of the parameters; activations"
            " count as if all were"
        )
    if run.own_loss:
        lines.append(
            f"loss        {run.own_loss}: all logits of a micro-batch at once, and what it holds"
            " beside them is not counted"
        )
    return "\n".join([*lines, "", *_table(shape, here, machine.memory)])


def layout_of(run: RunConfig, world_size: int, config: Mapping[str, Any], device: str) -> Layout:
    """Return the layout of the run; config is the resolved DeepSpeed configuration or empty."""
    derived = auto_values(Facts(config, run, world_size, device))
    ours = {key.split(".")[-1]: value for key, (value, _) in derived.items()}
    zero: Mapping[str, Any] = config["zero_optimization"] if config else ours
    stage = int(zero["stage"]) if config else None
    row = OPTIMIZERS[run.optimizer]
    return Layout(
        stage,
        world_size,
        run.dtype,
        run.micro_batch_rows(world_size),
        run.accumulation_steps,
        int(zero.get("reduce_bucket_size", costs.FLATTENED)),  # DeepSpeed's default
        bool(zero.get("overlap_comm", stage == 3)),  # DeepSpeed's default
        offloads(config, "optimizer"),
        offloads(config, "param"),
        device,
        run.gradient_checkpointing,
        compiles=run.compile != "off" and not (run.use_moe or run.is_divided),
        averages=run.ema is not None,
        drops=run.dropout > 0,
        optimizer=run.optimizer,
        moments=0 if run.optimizer_values.get("sgd_momentum") == 0 else len(row.state),
        loss=run.loss,
        teacher=run.teacher_weights,
        sequence=run.sequence_parallel,
        tensor=run.tensor_parallel,
        max_live_parameters=int(zero.get("stage3_max_live_parameters", 10**9)),
        param_persistence_threshold=int(zero.get("stage3_param_persistence_threshold", 10**5)),
    )


def alternatives(current: Layout) -> list[Layout]:
    """Layouts compared for the same step: those of FILES, less what the resolver refuses.

    DeepSpeed trains wrongly in float16 at stage 0, does not offload Muon, and does not run on some
    devices at all.
    """
    return [
        replace(current, stage=stage, offload_optimizer=optimizer, offload_param=param)
        for stage, optimizer, param in FILES
        if (stage is None) == (current.device in ALONE)
        and not (stage == 0 and current.dtype == "float16")
        and not (optimizer and OPTIMIZERS[current.optimizer].orthogonalizes)
    ]


def name_of(layout: Layout) -> str:
    """`ZeRO-2`, `ZeRO-3 offload opt`, `DDP`."""
    if layout.stage is None:
        return "DDP" if layout.world_size > 1 else "no DeepSpeed"
    optimizer, param = layout.offload_optimizer, layout.offload_param
    offloaded = "all" if optimizer and param else "opt" if optimizer else "par" if param else ""
    return f"ZeRO-{layout.stage}" + (f" offload {offloaded}" if offloaded else "")


COLUMNS = ("weights", "optimizer", "gradients", "buffers", "activations", "update")
HEADS = ("model", "optim", "grads", "bufs", "activ", "updt", "total", "host", "sent")


def _table(shape: Shape, here: Layout, memory: int | None) -> list[str]:
    """Memory and communication of the layouts; of `here` alone where ranks share matrices."""
    layouts = [here]
    if here.tensor == 1:
        without = replace(here, stage=None, offload_optimizer=False, offload_param=False)
        layouts = [*dict.fromkeys((without, *alternatives(here), here))]
    rows = [(one, costs.memory(shape, one), costs.bytes_sent(shape, one)) for one in layouts]
    unit, word = (GIB, "GiB") if max(use.total for _, use, _ in rows) >= GIB else (2**20, "MiB")
    lines = [
        f"Per process in {word}, {here.dtype}, micro-batch {here.rows}:",
        f"{'':<19}" + "".join(f"{head:>6}" for head in HEADS) + " fits" * bool(memory),
    ]
    for layout, use, sent in rows:
        numbers = [getattr(use, column) for column in COLUMNS] + [use.total, use.host, sent]
        row = f"{'*' if layout == here else ' '}{name_of(layout):<18}"
        verdict = f"{'yes' if fits(use, memory) else 'no':>5}" if memory else ""
        lines.append(row + "".join(_cell(n / unit) for n in numbers) + verdict)
    return [
        *lines,
        "total: model + optim + the larger of (grads + bufs + activ) and updt; host: RAM;",
        "sent: by one process in a step; *: as configured",
    ]


def _cell(value: float) -> str:
    digits = 2 if value < 99.995 else 1 if value < 999.95 else 0
    return f"{value:>6,.{digits}f}" if value else f"{'-':>6}"


def fits(held: Memory, memory: int) -> bool:
    """Whether the peak fits into the fraction 1 - HEADROOM of `memory`."""
    return held.total <= memory * (1 - HEADROOM)


def recommend(shape: Shape, current: Layout, memory: int, is_plain: bool = False) -> Layout | None:
    """Return the layout to train with, with the rows per step of `current`; None if nothing fits.

    The lowest stage that fits the configured micro-batch, else the stage that fits the largest one;
    offloading only if nothing else fits. Lower stages communicate less; `is_plain`: the lowest is
    to go without DeepSpeed.
    """
    layouts = alternatives(current)
    if is_plain:
        plain = replace(current, stage=None, offload_optimizer=False, offload_param=False)
        layouts.insert(0, plain)
    for is_offloaded in (False, True):
        same = (layout for layout in layouts if layout.offload_optimizer is is_offloaded)
        fitting = [step for step in (largest_step(shape, one, memory) for one in same) if step]
        if fitting:
            # max() keeps the first of equals: the lowest stage.
            return max(fitting, key=lambda step: min(step.rows, current.rows))
    return None


def rows_that_fit(shape: Shape, layout: Layout, memory: int) -> int:
    """Rows of the largest micro-batch that fits, also of several in a step; at least 1."""
    tried = replace(layout, accumulation_steps=2)  # whose gradients take no less than those of one
    rows = bisect_left(
        range(1, MOST_ROWS),
        True,
        key=lambda rows: not fits(costs.memory(shape, replace(tried, rows=rows)), memory),
    )
    return max(1, rows)


def largest_step(shape: Shape, layout: Layout, memory: int) -> Layout | None:
    """Return `layout` with the largest micro-batch that fits and divides its step, if any."""
    per_step = layout.rows * layout.accumulation_steps
    sizes = (rows for rows in range(per_step, 0, -1) if per_step % rows == 0)
    tried = (replace(layout, rows=n, accumulation_steps=per_step // n) for n in sizes)
    return next((step for step in tried if fits(costs.memory(shape, step), memory)), None)


def _advice(
    run: RunConfig, here: Layout, machine: Machine, path: str, document: Mapping[str, Any]
) -> str:
    """Return the recommendation with its command line, or what would make the run fit.

    One process needs no DeepSpeed (docs/memory.md). A stage is a shipped file; the file at `path`
    stays if it has that stage.
    """
    shape, gpus, memory = shape_of(run), here.world_size, machine.memory or 0
    shipped = {disk.resolve(Path(file)): name for name, file in deepspeed_files().items()}.get(
        disk.resolve(Path(path))
    )
    is_replaceable = path == "none" or shipped in (*FILES.values(), "torch_adamw")
    may_be_plain = is_replaceable and not [*plain_faults(run)] and (gpus == 1 or path == "none")
    best = recommend(shape, here, memory, may_be_plain)
    if shipped and not is_replaceable:  # its stage serves, if it does
        best = largest_step(shape, here, memory) or best
    if best is None:
        return _no_fit(shape, here, memory)
    if not run.is_explicit("batch_size"):  # larger micro-batches than those of the rule are no aim
        own = replace(best, rows=here.rows, accumulation_steps=here.accumulation_steps)
        best = own if fits(costs.memory(shape, own), memory) else best
    needed = costs.memory(shape, best)
    beside = needed.weights + needed.optimizer + needed.gradients + needed.buffers
    row = costs.activation_bytes(shape, replace(best, rows=1))
    largest = int((memory * (1 - HEADROOM) - beside) // row)
    host = f", {needed.host * gpus / GIB:.1f} GiB of RAM" if needed.host else ""
    is_split = (best.rows, best.accumulation_steps) != (here.rows, here.accumulation_steps)
    notes = ""
    if is_split and not run.is_explicit("batch_size"):
        notes = (
            f"Micro-batches of {here.rows} rows do not fit: the command below sets a smaller one.\n"
        )
    batch = batch_flags(run, best)
    flags = [words for name, words in batch.items() if is_split or run.is_explicit(name)]
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sets_batch = any(document.get(key, "auto") != "auto" for key in keys)
    stage, stage_here = (
        (one.stage, one.offload_optimizer, one.offload_param) for one in (best, here)
    )
    if stage != stage_here or (is_split and sets_batch):
        flags.append(f"--deepspeed_config {FILES[stage]}")
        if not is_replaceable:
            notes += f"The command below does not use {path}; its other settings are lost.\n"
    elif run.is_explicit("deepspeed_config"):
        flags.append(f"--deepspeed_config {shell_word(str(shipped or run.deepspeed_config))}")
    set_here = (*batch, "deepspeed_config")
    is_given = {name: origin.rank is Rank.FLAG for name, origin in run.sources.items()}
    kept = {name: getattr(run, name) for name in FLAGS if is_given[name] and name not in set_here}
    from_run = ["--init_from", "RUN"] if run.task == "sft" else []
    given = shlex.join(map(masked, [*from_run, *words_of(kept)]))
    held = "the CUDA context" if here.device == "cuda" else "the device's libraries"
    is_long = len(given) + len(" ".join(flags)) > WIDTH
    words = (" \\\n    " if is_long else " ").join(filter(None, (given, " ".join(flags))))
    return (
        f"Recommended: {name_of(best)}, micro-batch {best.rows}, accumulation"
        f" {best.accumulation_steps}: {needed.total / GIB:.2f} of {memory / GIB:.2f} GiB{host}.\n"
        f"{HEADROOM:.0%} stays free for {held} and fragmentation;"
        f" the largest micro-batch that fits is {largest}.\n"
        f"{notes}  NUM_PROCESSES={gpus} {LAUNCH} \\\n    {words}"
    )


def batch_flags(run: RunConfig, layout: Layout) -> dict[str, str]:
    """The words of --batch_size and --accumulation_steps for the micro-batch of a layout."""
    groups = run.parallel(layout.world_size).data_size if run.split_batches else 1
    numbers = {"batch_size": layout.rows * groups}
    if run.global_batch_size is None:  # else the processes decide it
        numbers["accumulation_steps"] = layout.accumulation_steps
    return {name: f"--{name} {number}" for name, number in numbers.items()}


def _no_fit(shape: Shape, here: Layout, memory: int) -> str:
    """Describe the smallest layout and its largest part."""
    rows = replace(here, rows=1, accumulation_steps=here.rows * here.accumulation_steps)
    least = min(alternatives(rows), key=lambda s: costs.memory(shape, s).total)
    needed = costs.memory(shape, least)
    size, largest = max((getattr(needed, column), column) for column in COLUMNS)
    helps = "--dim or --n_layers"
    if largest == "activations":
        helps = "--max_seq_len or --n_layers"
        helps += "" if here.recomputes else ", give --gradient_checkpointing"
    return (
        f"Nothing fits in {memory / GIB:.2f} GiB with {HEADROOM:.0%} kept free:\n"
        f"{name_of(least)} needs {needed.total / GIB:.2f} GiB with 1 row in a micro-batch.\n"
        f"The largest part is {largest}, {size / GIB:.2f} GiB, which more GPUs do not divide: lower"
        f"\n{helps}, or use GPUs with more memory."
    )
