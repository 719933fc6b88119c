"""Memory against `minimind plan`, pauses for a save, and the end of a run that is too large."""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Iterator

from examples.stdlib_corpus import main as write_corpus
from minimind.architecture import costs
from minimind.architecture.costs import Layout
from minimind.architecture.plan import GIB, fits, layout_of
from minimind.architecture.shape import shape_of
from minimind.checkpoint.directory import published_checkpoints, verify
from minimind.config.parse import parse_flags
from minimind.runtime.hardware import list_gpus
from tools.gpu.findings import Finding, at_most, check, figure, skipped
from tools.gpu.site import Site, Trained, last_line
from tools.runs import sentences

WITHIN = 0.1  # of the estimate
STAGES = (None, 0, 1, 2, 3)
MIB = 2**20
# On a GPU a size at which activations and states both count.
LARGE = "--model 104m --batch_size 16 --accumulation_steps 1 --max_seq_len 1024"
FEW_STEPS = "--max_steps 4 --log_interval 1 --eval_rows 0 --save_interval 100000 --save_minutes 0"
# Stage, dtype, micro-batches, optimizer.
STATES = [f"{case},1,adamw" for case in ("2,bfloat16", "1,bfloat16", "2,float32", "3,bfloat16")]


def memory(site: Site) -> Iterator[Finding]:
    """Peak memory of a step against the estimate of `minimind plan`, within 10 %."""
    yield from on_gpu(site) if site.device == "cuda" else states_on_cpu(site)


def on_gpu(site: Site) -> Iterator[Finding]:
    """torch.cuda.max_memory_allocated, less what was allocated before the run."""
    runs = {
        f"{'no DeepSpeed' if stage is None else f'ZeRO-{stage}'}, {dtype}, compile {compile}": (
            f"{site.stage(stage)} --dtype {dtype} --compile {compile}"
        )
        for stage in STAGES
        for dtype, compile in (("bfloat16", "off"), ("bfloat16", "on"), ("float32", "off"))
        if stage in (None, 2) or (dtype, compile) == ("bfloat16", "off")
    }
    for name, run in trained_on_much_text(site, runs, f"{LARGE} {FEW_STEPS}").items():
        if run.status:
            yield check(name, False, f"status {run.status}: {last_line(run.error)}", "status 0")
            continue
        flags = parse_flags(run.words)
        written = run.out_dir / "ds_config.resolved.json"
        config = json.loads(written.read_text()) if written.exists() else {}
        layout = layout_of(flags, 1, config if "zero_optimization" in config else {}, "cuda")
        predicted = costs.memory(shape_of(flags), layout).total
        measured = run.peak - run.allocated
        yield of_estimate(name, measured, predicted, is_upper=name.endswith("on"))


def states_on_cpu(site: Site) -> Iterator[Finding]:
    """What a CPU can show: bytes of weights, optimizer and gradients that a step holds."""
    out = site.folder / "held.json"
    words = ["--standalone", "--nproc_per_node=1", "-m", "tools.measure_memory"]
    site.python("torch.distributed.run", *words, str(out), *STATES, DS_ACCELERATOR="cpu")
    shape = shape_of(parse_flags(["--model", "tiny"]))
    for found in json.loads(out.read_text()):
        stage, dtype, accumulation, _ = found["of"]
        bucket, overlap = found["reduce_bucket"], found["overlap"]
        layout = Layout(stage, 1, dtype, 1, accumulation, bucket, overlap, device="cpu")
        held = costs.memory(shape, layout)
        states = held.weights + held.optimizer + max(held.gradients + held.buffers, held.update)
        yield of_estimate(f"ZeRO-{stage}, {dtype}, states", max(found["held"]), states)
    yield skipped("with activations", "torch counts the allocations of a GPU only")


def of_estimate(name: str, measured: float, predicted: float, is_upper: bool = False) -> Finding:
    """Measured over estimated; `is_upper`: compiled, it may well need less."""
    share = measured / predicted
    is_right = share <= 1 + WITHIN and (is_upper or share >= 1 - WITHIN)
    text = f"{measured / MIB:,.0f} of {predicted / MIB:,.0f} MiB: {share:.3f}"
    limit = f"at most {1 + WITHIN:g}" if is_upper else f"{1 - WITHIN:g} to {1 + WITHIN:g}"
    return check(name, is_right, text, limit, {"measured": measured, "predicted": predicted})


def trained_on_much_text(
    site: Site, runs: dict[str, str], base: str, keeps: bool = False, device: str = ""
) -> dict[str, Trained]:
    """Runs of a preset, whose tokenizer takes more text than the small one."""
    text = site.shared / "stdlib.jsonl"
    if not text.exists():
        write_corpus([str(text), "--max_megabytes", "4"])
    return site.train(runs, device, f"{base} --data_path {text}", keeps)


def saves(site: Site) -> Iterator[Finding]:
    """How long training stands still for a checkpoint: written by a thread, or by the loop."""
    # On a GPU seconds apart: a save that begins before the last one is written waits for it.
    every = 30 if site.device == "cuda" else 3
    pace = f"--max_steps {3 * every} --save_interval {every} --save_minutes 0 --keep_last 1"
    runs = {
        name: f"{site.stage(2)} {pace} --compile off {flag}"
        for name, flag in (("async", "--async_save"), ("sync", "--no-async_save"))
    }
    if site.device == "cuda":
        base = f"{LARGE} --log_interval 1 --eval_rows 0"
        found = trained_on_much_text(site, runs, base, keeps=True)
    else:
        found = site.train(runs, keeps=True)
    stalls = {}
    for name, run in found.items():
        saved = run.events("checkpoint_saved")
        stalls[name] = sorted(event["stall_ms"] for event in saved)[len(saved) // 2]
        kept = published_checkpoints(run.out_dir / "checkpoints")
        fault = verify(kept[0]) if kept else "there is none"
        yield check(f"{name}: checkpoint", fault is None, str(fault or kept[0].name), "verifies")
        size = sum(path.stat().st_size for path in kept[0].iterdir()) / MIB
        text = f"{stalls[name]:.1f} ms, median of {len(saved)}, {size:,.0f} MiB"
        yield figure(f"{name}: stall", stalls[name], text)
    share = stalls["async"] / stalls["sync"]
    if site.device != "cuda":
        yield figure("async over sync", share, f"{share:.3f}")
    else:
        yield at_most("async over sync", share, 1.0, f"{share:.3f}")


def out_of_memory(site: Site) -> Iterator[Finding]:
    """A run too large ends with status 10 and names a micro-batch that fits."""
    status, report, capacity = too_large(site)
    lines = [line for line in report.splitlines() if "error[" in line]
    is_right = status == 10 and len(lines) == 1 and "error[E_MEMORY]" in lines[0]
    line = lines[0] if lines else last_line(report)
    yield check("status 10, one line", is_right, f"status {status}: {line}", "E_MEMORY")
    advice = re.search(r"--batch_size (\d+) --accumulation_steps (\d+) fits", line)
    yield check("names a micro-batch", advice is not None, advice[0] if advice else "none", "fits")
    if advice is None:
        return
    flags = f"--batch_size {advice[1]} --accumulation_steps {advice[2]}"
    if site.device == "cpu":
        run = parse_flags(f"{WIDE} {flags}".split())
        held = costs.memory(shape_of(run), layout_of(run, 1, {}, "cpu"))
        text = f"{held.total / GIB:.1f} GiB of {capacity / GIB:.1f}"
        yield check("by `minimind plan`", fits(held, capacity), text, "fits")
        yield skipped("trained so", "hours on a CPU")
        return
    name = f"trained with {flags}"
    runs = {name: f"{HUGE} {flags} --deepspeed_config none"}
    run = trained_on_much_text(site, runs, f"{FEW_STEPS} --compile off --max_steps 1")[name]
    yield check(name, run.status == 0, f"status {run.status}", "status 0", run.peak)


# Attention scores of 69 GB, under a limit of 43 that holds on every machine: torch's own error.
WIDE = "--dim 64 --n_layers 2 --n_heads 16 --n_kv_heads 2 --vocab_size 600 --max_seq_len 4096"
WIDE += " --no-use_flash_attn --deepspeed_config none --dtype float32"
LIMIT = 40 * GIB
# Scores in memory, so that fewer rows of text are too many.
HUGE = "--model 104m --max_seq_len 1024 --dtype bfloat16 --no-use_flash_attn"


def too_large(site: Site) -> tuple[int, str, int]:
    """(exit status of a run of too many rows, what it said at its end, bytes that there are)."""
    if site.device == "cuda":
        capacity = (list_gpus()[0].memory_mib or 0) * MIB
        flags = parse_flags(HUGE.split())
        row = costs.activation_bytes(shape_of(flags), Layout(None, 1, "bfloat16", rows=1))
        rows = 1 << (2 * capacity // row).bit_length()  # two to four times what there is
        words = f"{HUGE} --deepspeed_config none --batch_size {rows} --accumulation_steps 1"
        base = f"{FEW_STEPS} --compile off"
        run = trained_on_much_text(site, {"": words}, base)[""]
        return run.status, run.error, capacity
    text = site.folder / "long.txt"
    text.write_text(" ".join(sentences(3, 4000)))
    flags = f"{WIDE} --batch_size 64 --accumulation_steps 1 --max_steps 1 --val_fraction 0"
    done = site.launcher.run(
        site.folder / "run",
        f"{flags} --data_path {text}",
        processes=1,
        timeout=max(0.0, site.seconds_left),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT)),
    )
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return done.status, done.stderr, host
