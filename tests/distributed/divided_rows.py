"""Worker of test_sequence_parallel.py: steps whose rows are divided over ranks by position.

Usage: RANKS of ... divided_rows OUT_DIR STAGE,SEQUENCE,KIND ...   (STAGE None: without DeepSpeed)
Saves losses, gradient norms, the loss of held-out rows and the fp32 weights of all ranks to
OUT_DIR/CASE.pt. The case `attention`, behind another one, compares attention in float64 instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minimind.engine.build import leave_process_group
from minimind.engine.clocks import PhaseClock
from minimind.engine.engine import Engine
from minimind.model.causal_lm import MiniMindForCausalLM, enable_checkpointing
from minimind.model.configuration import MiniMindConfig
from minimind.model.kernels import flash_attention
from minimind.model.masks import boolean_mask
from minimind.model.sequence import SequenceGroup
from tests.distributed.target_means import TARGETS, marked
from tools.engines import ROWS, Case, build, state_of, text

STEPS = 20


class Recomputing(MiniMindForCausalLM):
    """Computes every block again in the backward pass."""

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__(config)
        enable_checkpointing(self)


def case_of(stage: int | None, sequence: int, kind: str) -> Case:
    """The configuration of a case."""
    flags = f"--sequence_parallel {sequence} --max_seq_len 16 --n_heads 4 --optimizer sgd"
    more = {"sft": " --task sft", "chunked": " --loss chunked", "dropout": " --dropout 0.2"}
    flags += more.get(kind, "")
    shape: dict[str, Any] = {}
    if kind == "documents":
        shape = {"doc_mask": True, "eos_token_id": 5, "qkv_bias": True, "head_dim": 6}
    model = Recomputing if kind == "recomputed" else MiniMindForCausalLM
    return Case(
        stage,
        "bfloat16" if kind == "bfloat16" else "float32",
        2,
        flags=flags,
        shape=shape,
        model=model,
    )


def rows_of(step: int, kind: str) -> torch.Tensor:
    """All rows of a step, (ROWS, T + 1)."""
    rows = text()[ROWS * step : ROWS * (step + 1)]
    return marked(rows, TARGETS[step % len(TARGETS)]) if kind == "sft" else rows


def course(engine: Engine, kind: str) -> dict[str, Any]:
    """Losses and norms of all steps, and the weights at their end, on every rank."""
    clock, size = PhaseClock(engine.device), engine.parallel.data_size
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        rows = rows_of(step, kind).chunk(size)[engine.data_rank]
        engine.seed(step)
        clock.begin()
        first = engine.data_rank * len(rows)
        result = engine.step(rows.chunk(2), 0.1, clock, first=first)
        loss, count = engine.sum_over_ranks([float(result.loss_sum), float(result.tokens)])
        found["losses"].append(loss / max(count, 1.0))
        norm = result.grad_norm
        found["norms"].append(0.0 if norm is None else float(norm))
    loss_sum, targets = engine.loss_of(rows_of(STEPS, kind)[:3])  # not a multiple of the ranks
    found["held_out"] = float(loss_sum) / float(targets)
    weights = {k: v for k, v in state_of(engine).items() if k.startswith("fp32|")}
    return found | {"weights": weights}


def attend(of: Sequence[torch.Tensor], mask: torch.Tensor | None) -> torch.Tensor:
    """Attention of queries, keys and values (B, H, T, D)."""
    return flash_attention(of[0], of[1], of[2], mask)


def attention() -> dict[str, float]:
    """The largest difference of results and gradients from whole attention, by case."""
    size, rank = dist.get_world_size(), dist.get_rank()
    sequence = SequenceGroup(dist.group.WORLD, rank, size)
    draw, found = torch.Generator().manual_seed(0), {}
    starts = torch.rand(2, 16, generator=draw) < 0.2
    # Heads of queries and of keys. Fewer of keys than ranks are repeated.
    kinds = {"shared keys": (4, 2), "own keys": (4, 4), "one key": (4, 1), "one head": (size, 1)}
    for name, (heads, keys) in kinds.items():
        for mask in (None, boolean_mask(16, 0, None, starts, torch.device("cpu"))):
            shapes = [(2, 16, heads, 6), (2, 16, keys, 6), (2, 16, keys, 6)]
            whole = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]
            weights = torch.randn(shapes[0], generator=draw, dtype=torch.float64)
            parts = [sequence.part(x, 1).clone().requires_grad_() for x in whole]
            whole = [x.requires_grad_() for x in whole]
            expected = attend([x.transpose(1, 2) for x in whole], mask).transpose(1, 2)
            divided = [x.transpose(1, 2) for x in sequence.to_heads(*parts)]
            out = sequence.to_positions(attend(divided, mask).transpose(1, 2))
            of_whole = torch.autograd.grad((expected * weights).sum(), whole)
            of_parts = torch.autograd.grad((out * sequence.part(weights, 1)).sum(), parts)
            pairs = [(expected, out), *zip(of_whole, of_parts, strict=True)]
            gap = max(float((sequence.part(a, 1) - b).abs().max()) for a, b in pairs)
            found[f"{name}, {'causal' if mask is None else 'documents'}"] = gap
    return found


def main() -> None:
    """Run the cases of the command line."""
    root = Path(sys.argv[1])
    os.environ["DS_ACCELERATOR"] = "cpu"
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    for words in sys.argv[2:]:
        if words == "attention":
            found: dict[str, Any] = attention()
        else:
            stage, sequence, kind = words.split(",")
            case = case_of(None if stage == "None" else int(stage), int(sequence), kind)
            found = course(build(case, seed=1), kind)
        if dist.get_rank() == 0:
            torch.save(found, root / f"{words}.pt")
        if os.environ["WORLD_SIZE"] == "1":
            leave_process_group()
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # several engines share one process group: none of them may take it down


if __name__ == "__main__":
    main()
