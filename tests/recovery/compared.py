"""Runs of a few steps with fingerprints, some with a planted fault; worker of test_compare.py.

Usage: one or two ranks of -m tests.recovery.compared FOLDER STEPS NAME...

Each writes FOLDER/NAME.xRANKS.jsonl.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimind.engine.build import Engine, leave_process_group
from minimind.engine.clocks import PhaseClock
from minimind.model.causal_lm import MiniMindForCausalLM, enable_checkpointing
from minimind.model.configuration import MiniMindConfig
from minimind.recovery.fingerprints import Fingerprints
from minimind.runtime.durable_files import Metrics
from tests.distributed.adapters import FP16, OFFLOAD
from tools.engines import ORDER, Case, build, load, save, text

FP32, BF16 = "float32", "bfloat16"
PLAIN = Case(None, FP32)
DROPS = "--dropout 0.1 --ema 0.9"
CLIPPED = Case(None, FP32, flags="--grad_clip 0.05")
RESUMED = 3  # the step after which a run is resumed
Plant = Callable[[Engine, ExitStack], Any]


@dataclass(frozen=True)
class Trial:
    """A run, and what is wrong with it."""

    case: Case = PLAIN
    plant: Plant | None = None
    rows: Callable[[torch.Tensor, int], torch.Tensor] = lambda batch, step: batch
    lr: Callable[[int], float] = lambda step: 2e-3 * (1 - step / 100)
    is_resumed: bool = False
    every_step: Callable[[Engine, int], Any] = field(default=lambda engine, step: None)


def part(engine: Engine, name: str) -> Any:
    """A module of the decoder."""
    return engine.model.model.get_submodule(name)


def replaced(name: str, change: Callable[[Any], Callable[..., Any]]) -> Plant:
    """The forward pass of a module is another one."""

    def plant(engine: Engine, stack: ExitStack) -> None:
        module = part(engine, name)
        module.forward = change(module.forward)

    return plant


def hooked(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """The output of a module is changed."""
    return lambda engine, stack: part(engine, name).register_forward_hook(
        lambda module, given, output: change(output)
    )


def in_groups(option: str, value: Any, is_of: Callable[[Any], bool] = lambda group: True) -> Plant:
    """An option of the optimizer is another one."""

    def plant(engine: Engine, stack: ExitStack) -> None:
        for group in engine.backend.optimizer.param_groups:
            if is_of(group):
                group[option] = value

    return plant


def no_reduction(engine: Engine, stack: ExitStack) -> None:
    ddp: Any = engine.backend.forward
    ddp.require_backward_grad_sync = False


def divides_by_one(engine: Engine, stack: ExitStack) -> None:
    engine.backend.micro_batches = 1  # pyright: ignore[reportAttributeAccessIssue] (of the plain one)


def sums_over_ranks(engine: Engine, stack: ExitStack) -> None:
    engine.backend.optimizer.gradient_average = False


def norm_of_one_rank(engine: Engine, stack: ExitStack) -> None:
    partitions: Any = engine.backend._partitions  # pyright: ignore[reportAttributeAccessIssue] (of DeepSpeed's)

    def norm(*given: Any, **options: Any) -> Any:
        partitions._ranks = 1
        try:
            return partitions._norm(*given, **options)
        finally:
            partitions._ranks = engine.world_size

    partitions.z.get_grad_norm_direct = norm


def not_gathered(engine: Engine, stack: ExitStack) -> None:
    module = sys.modules[type(engine.backend.optimizer).__module__]
    stack.enter_context(mock.patch.object(module, "all_gather_dp_groups"))


def stale_weight(engine: Engine, stack: ExitStack) -> None:
    masters, weight = engine.backend.optimizer, part(engine, "layers.1.mlp.down_proj").weight
    put, old = masters.put_weights, weight.detach().clone()

    def put_all_but_one() -> None:
        put()
        weight.data.copy_(old)

    masters.put_weights = put_all_but_one


def sees_the_next(forward: Callable[..., Any]) -> Callable[..., Any]:
    def changed(x: torch.Tensor, rotary: Any, mask: Any = None, *others: Any) -> Any:
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril(1)
        return forward(x, rotary, mask, *others)

    return changed


class Recomputed(MiniMindForCausalLM):
    """Computes every block again in the backward pass."""

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__(config)
        enable_checkpointing(self)


def in_bfloat16(forward: Callable[..., Any]) -> Callable[..., Any]:
    def changed(*given: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(*given).float()

    return changed


def other_base(engine: Engine, stack: ExitStack) -> None:
    decoder = engine.model.model
    decoder.config.rope_theta = 1e4
    decoder.pos_cis = decoder.build_pos_cis()


def other_eps(engine: Engine, stack: ExitStack) -> None:
    part(engine, "layers.1.input_layernorm").eps = 1e-3


def other_eps_later(engine: Engine, step: int) -> None:
    if step == RESUMED:
        other_eps(engine, ExitStack())


def scaled_head(output: torch.Tensor) -> torch.Tensor:
    return torch.cat([output[..., :8] * 1.05, output[..., 8:]], -1)


def rounded_sums(engine: Engine, stack: ExitStack) -> None:
    def rounded(p: Any) -> None:
        p.grad.copy_(p.grad.bfloat16())

    for p in engine.model.parameters():
        p.register_post_accumulate_grad_hook(rounded)


def clips_what_is_scaled(engine: Engine, stack: ExitStack) -> None:
    clip = torch.nn.utils.clip_grad_norm_

    def clipped(updated: Any, limit: float) -> torch.Tensor:
        return clip(updated, limit / 4) * 1.0  # of gradients that are 4 times as large

    stack.enter_context(mock.patch.object(torch.nn.utils, "clip_grad_norm_", clipped))


def leaves_out_the_last(engine: Engine, stack: ExitStack) -> None:
    loss_of = engine.model.loss_of

    def changed(x: torch.Tensor, targets: torch.Tensor, *others: Any) -> Any:
        return loss_of(x, F.pad(targets[:, :-1], (0, 1), value=-100), *others)

    engine.model.loss_of = changed


def shifts_a_target(engine: Engine, stack: ExitStack) -> None:
    loss_of = engine.model.loss_of

    def changed(x: torch.Tensor, targets: torch.Tensor, *others: Any) -> Any:
        return loss_of(x, torch.cat([targets[:1].roll(-1, 1), targets[1:]]), *others)

    engine.model.loss_of = changed


def halves_gradients(engine: Engine, stack: ExitStack) -> None:
    for p in part(engine, "layers.0").parameters():
        p.register_hook(lambda gradient: gradient / 2)


def frozen_norm(engine: Engine, stack: ExitStack) -> None:
    weight = part(engine, "norm").weight
    old = weight.detach().clone()
    engine.backend.optimizer.register_step_post_hook(lambda *_: weight.data.copy_(old))


def forgets_one(engine: Engine, step: int) -> None:
    if step == RESUMED:
        weight = part(engine, "layers.1.mlp.up_proj").weight
        engine.backend.optimizer.state[weight]["exp_avg"].zero_()


def forgets(engine: Engine, step: int) -> None:
    if step == RESUMED:
        for state in engine.backend.optimizer.state.values():
            state["exp_avg"].zero_()


def exchanged(batch: torch.Tensor, step: int) -> torch.Tensor:
    return batch[[1, 0, *range(2, len(batch))]]


def read_twice(batch: torch.Tensor, step: int) -> torch.Tensor:
    return torch.cat([batch[: len(batch) // 2]] * 2)


# The sound runs by name.
SOUND: dict[str, Trial] = {
    "plain": Trial(),
    "clipped": Trial(CLIPPED),
    "unclipped": Trial(Case(None, FP32, flags="--grad_clip 0")),
    "plain-bf16": Trial(Case(None, BF16)),
    "micro-batches": Trial(Case(None, FP32, 4)),
    "micro-batches-bf16": Trial(Case(None, BF16, 4)),
    **{
        f"{name}{suffix}": Trial(Case(None, FP32, count, flags=flags, shape=shape))
        for suffix, count in (("", 2), ("-micro-batches", 4))
        for name, flags, shape in (
            ("lion", "--optimizer lion", {}),
            ("experts", "", {"use_moe": True}),
        )
    },
    "checkpointing": Trial(Case(None, FP32, model=Recomputed)),
    "attention": Trial(Case(None, FP32, shape={"use_flash_attn": False})),
    "chunked": Trial(Case(None, FP32, flags="--loss chunked")),
    **{f"zero{stage}": Trial(Case(stage, FP32)) for stage in range(4)},
    "zero2-resumed": Trial(Case(2, FP32), is_resumed=True),
    "zero2-clipped": Trial(Case(2, FP32, flags="--grad_clip 0.05")),
    "zero2-bf16": Trial(Case(2, BF16)),
    "zero0-bf16": Trial(Case(0, BF16)),
    "zero3-bf16": Trial(Case(3, BF16)),
    "zero2-fp16": Trial(Case(2, FP16, edits={"fp16.initial_scale_power": 8})),
    "zero2-offload": Trial(Case(2, FP32, edits=OFFLOAD)),
    "zero3-offload": Trial(Case(3, FP32, edits=OFFLOAD)),
    "drops": Trial(Case(None, FP32, flags=DROPS)),
    "zero2-drops": Trial(Case(2, FP32, 4, flags=DROPS)),
    "sequence": Trial(Case(2, FP32, flags="--sequence_parallel 2")),
}
# Faults by name: the sound run, the ranks, the run with the fault, and what is named: the step, the
# kind, and the place or a word of the cause.
FAULTS: dict[str, tuple[str, int, Trial, int, str, str]] = {
    "gradients-not-reduced": ("plain", 2, Trial(plant=no_reduction), 1, "gradient", "model.norm"),
    "wrong-divisor": (
        *("unclipped", 1, Trial(SOUND["unclipped"].case, divides_by_one)),
        *(1, "gradient", "by a factor of 2"),
    ),
    "wrong-divisor-clipped": (
        *("clipped", 1, Trial(CLIPPED, divides_by_one), 1, "gradient", "by a factor of 2"),
    ),
    "sum-instead-of-mean": (
        *("zero1", 2, Trial(Case(1, FP32), sums_over_ranks), 1, "gradient", "by a factor of 2"),
    ),
    "norm-of-one-rank": (
        *("zero2-clipped", 2, Trial(SOUND["zero2-clipped"].case, norm_of_one_rank)),
        *(1, "clipping", "norm or clipping of B"),
    ),
    "clipped-before-unscaled": (
        *("clipped", 1, Trial(CLIPPED, clips_what_is_scaled)),
        *(1, "clipping", "norm or clipping of B"),
    ),
    "weights-not-gathered": (
        *("zero2", 2, Trial(Case(2, FP32), not_gathered), 2, "activation", "weights before"),
    ),
    "stale-weight": (
        *("plain-bf16", 1, Trial(Case(None, BF16), stale_weight)),
        *(2, "activation", "model.layers.1.mlp"),
    ),
    "mask-off-by-one": (
        *("plain", 1, Trial(plant=replaced("layers.0.self_attn", sees_the_next))),
        *(1, "activation", "model.layers.0.self_attn"),
    ),
    "attention-in-bf16": (
        *("plain", 1, Trial(plant=replaced("layers.1.self_attn", in_bfloat16))),
        *(1, "activation", "model.layers.1.self_attn"),
    ),
    "dropout-left-on": (
        *("plain", 1, Trial(plant=hooked("layers.1.mlp", lambda y: F.dropout(y, 0.1)))),
        *(1, "activation", "model.layers.1.mlp"),
    ),
    "eps-of-a-norm": (
        *("plain", 1, Trial(plant=other_eps), 1, "activation", "model.layers.1.input_layernorm"),
    ),
    "eps-of-a-norm-later": (  # the runs differ by rounding before
        *("plain", 1, Trial(SOUND["micro-batches"].case, every_step=other_eps_later)),
        *(RESUMED + 1, "activation", "model.layers.1.input_layernorm"),
    ),
    "base-of-rotary": (
        *("plain", 1, Trial(plant=other_base), 1, "activation", "model.layers.0.self_attn"),
    ),
    "scale-of-a-head": (
        *("plain", 1, Trial(plant=hooked("layers.1.self_attn.q_proj", scaled_head))),
        *(1, "activation", "model.layers.1.self_attn"),
    ),
    "scaled-embedding": (
        *("plain", 1, Trial(plant=hooked("embed_tokens", lambda x: x * 32**0.5))),
        *(1, "activation", "model.embed_tokens"),
    ),
    "target-left-out": ("plain", 1, Trial(plant=leaves_out_the_last), 1, "loss", "loss"),
    "target-shifted": ("plain", 1, Trial(plant=shifts_a_target), 1, "loss", "loss"),
    "gradients-halved": (
        *("clipped", 1, Trial(CLIPPED, halves_gradients)),
        *(1, "gradient", "by a factor of 0.5, of model.layers.0.mlp"),
    ),
    "norm-frozen": ("plain", 1, Trial(plant=frozen_norm), 1, "fp32", "weights of model.norm"),
    "moment-of-one-lost": (
        *("plain", 1, Trial(every_step=forgets_one), RESUMED + 1, "exp_avg", "model.layers.1.mlp"),
    ),
    "detached-value": (
        *("plain", 1, Trial(plant=hooked("layers.0.self_attn.v_proj", lambda v: v.detach()))),
        *(1, "gradient", "model.layers.0.self_attn"),
    ),
    "accumulated-in-bf16": ("plain", 1, Trial(plant=rounded_sums), 1, "gradient", "model.norm"),
    "rows-exchanged": ("plain", 1, Trial(rows=exchanged), 1, "rows", "same tokens in other rows"),
    "micro-batch-twice": ("plain", 1, Trial(rows=read_twice), 1, "rows", "other tokens"),
    "rate-a-step-late": (
        *("plain", 1, Trial(lr=lambda step: 2e-3 * (1 - max(0, step - 1) / 100))),
        *(2, "lr", "step before"),
    ),
    "eps-of-adam": ("plain", 1, Trial(plant=in_groups("eps", 1e-4)), 1, "fp32", "weights"),
    "beta-of-adam": (
        *("plain", 1, Trial(plant=in_groups("betas", (0.8, 0.95)))),
        *(1, "exp_avg", "by a factor of 2"),
    ),
    "decay-of-norms": (
        *("plain", 1, Trial(plant=in_groups("weight_decay", 0.1, lambda g: not g["weight_decay"]))),
        *(1, "fp32", "norm"),
    ),
    "moments-lost": ("plain", 1, Trial(every_step=forgets), RESUMED + 1, "exp_avg", "exp_avg"),
}
# Pairs of equal runs: name and ranks of each.
EQUAL: list[tuple[str, int, str, int]] = [
    *(("plain", 1, f"zero{stage}", 1) for stage in range(4)),
    *(("plain", 1, f"zero{stage}", 2) for stage in range(4)),
    ("plain", 1, "plain", 2),
    ("plain", 1, "micro-batches", 1),
    ("plain", 2, "micro-batches", 1),
    *((name, 1, f"{name}-micro-batches", 1) for name in ("lion", "experts")),
    ("plain", 1, "checkpointing", 1),
    ("plain", 1, "attention", 1),
    ("plain", 1, "chunked", 1),
    ("zero2", 2, "zero2-resumed", 2),
    ("zero2", 1, "zero2-resumed", 1),
    ("plain", 1, "sequence", 2),
    ("plain", 1, "zero2-offload", 1),
    ("plain", 1, "zero2-offload", 2),
    ("plain", 1, "zero3-offload", 2),
    ("drops", 1, "zero2-drops", 1),
    ("drops", 1, "zero2-drops", 2),
    ("zero2-fp16", 1, "zero2-fp16", 2),
    ("plain-bf16", 1, "micro-batches-bf16", 1),
    ("plain-bf16", 1, "zero2-bf16", 2),
    ("plain-bf16", 1, "zero3-bf16", 1),
    ("plain-bf16", 2, "zero0-bf16", 2),
]
TRIALS = SOUND | {name: trial for name, (_, _, trial, *_) in FAULTS.items()}


def take(trial: Trial, path: Path, steps: int) -> None:
    """Train a trial, and write its log."""
    engine, table = build(trial.case, seed=7), text()
    run = engine.resolved.run
    metrics = Metrics(path) if engine.rank == 0 else None
    if metrics:
        identity = {"lr": {"grad_clip": run.grad_clip}}
        metrics.write("run_start", step=0, identity=identity, dtype=run.dtype)
    with ExitStack() as stack:
        if trial.plant:
            trial.plant(engine, stack)
        batches: Any = SimpleNamespace(order=ORDER)
        fingerprints = Fingerprints(engine, batches)
        for step in range(steps):
            if trial.is_resumed and step == RESUMED:
                save(engine, path.with_suffix(".saved"), step)
                engine.release()
                engine = build(trial.case, seed=8)
                load(engine, path.with_suffix(".saved"), step)
                fingerprints = Fingerprints(engine, batches)
            trial.every_step(engine, step)
            rows = ORDER.rows_for(step, engine.data_rank, engine.parallel.data_size)
            batch = trial.rows(table[torch.from_numpy(rows)], step)
            engine.seed(step)
            clock = PhaseClock(engine.device)
            clock.begin()
            fingerprints.begin(step)
            micro_batches = batch.split(len(batch) // run.accumulation_steps)
            first = ORDER.share(engine.data_rank, engine.parallel.data_size).start
            result = engine.step(micro_batches, trial.lr(step), clock, first=first)
            fields = fingerprints.end(step + 1, result)
            if metrics:
                metrics.write("fingerprint", **fields)
    if metrics:
        metrics.close()
    engine.release()


def take_all(folder: Path, steps: int, names: list[str]) -> None:
    """Train the trials of these names: first those without DeepSpeed, then by stage."""
    ranks = int(os.environ["WORLD_SIZE"])

    def stage(name: str) -> int:
        found = TRIALS[name].case.stage
        return -1 if found is None else found

    for name in sorted(names, key=stage):
        take(TRIALS[name], folder / f"{name}.x{ranks}.jsonl", steps)
        if stage(name) < 0 and ranks == 1:
            leave_process_group()


def main() -> None:
    """Train every trial of the command line."""
    for name, alone in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, alone)
    os.environ["DS_ACCELERATOR"] = "cpu"
    accelerator: Any = import_module("deepspeed.accelerator").get_accelerator()
    accelerator.is_fp16_supported = lambda: True  # as in tests/distributed/adapters.py
    take_all(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # several engines share one process group: none of them may take it down


if __name__ == "__main__":
    main()
