"""Worker of test_target_means.py: steps over rows with unequal numbers of targets.

Usage: RANKS of ... target_means OUT_DIR STAGE,DTYPE,MICRO_BATCHES,DROPOUT[,LOSS] ...
(STAGE None: without DeepSpeed)
Each case takes the same rows a step, however they are split, and saves losses, gradient norms, the
gradients of the last step and the fp32 weights of all ranks to OUT_DIR/CASE.pt. With LOSS, full,
chunked or distilled, a target counts by the weight of its row's source; distilled: with a teacher.
"""

from __future__ import annotations

import operator
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minimind.data.shards.conversation_shards import SOURCE
from minimind.engine.build import Engine, leave_process_group
from minimind.engine.clocks import PhaseClock
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.model.distillation import Distillation
from tools.engines import LENGTH, ROWS, TINY, Case, build, state_of, text

# Targets of each row, of 16, by step. Then whole micro-batches, a whole rank of two, and all.
TARGETS = [
    [16, 3, 1, 9, 12, 2, 5, 7],
    [4, 16, 0, 0, 2, 1, 16, 3],
    [5, 1, 11, 8, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 0, 0, 0],
    [1, 1, 2, 1, 16, 15, 14, 16],
]
SOURCES = [0, 2, 1, 1, 0, 2, 2, 0]  # of the rows of every step
WEIGHTS = [1.0, 2.5, 4.0]  # of the targets of each source
SHARE, TEMPERATURE = 0.7, 2.0  # of the teacher
# A step is the gradient times the rate. That of the last step dwarfs the rounding of the weights.
SGD = "--optimizer sgd --sgd_momentum 0 --weight_decay 0 --grad_clip 0 --task sft"
FP32 = "fp32|"
RATES = [0.1, 0.1, 0.1, 0.1, 1000.0]


def marked(rows: torch.Tensor, targets: list[int]) -> torch.Tensor:
    """Rows (B, T + 1) of which only some tokens, anywhere behind the first, are targets."""
    draw = torch.Generator().manual_seed(sum(targets))
    marks = torch.full_like(rows, True, dtype=torch.bool)
    for row, count in enumerate(targets):
        marks[row, 1 + torch.randperm(rows.shape[1] - 1, generator=draw)[:count]] = False
    return torch.where(marks, ~rows, rows)


def rows_of(step: int) -> torch.Tensor:
    """All rows of a step, (ROWS, T + 1)."""
    rows = marked(text()[ROWS * step : ROWS * (step + 1)], TARGETS[step])
    rows[:, 0] -= SOURCE * torch.tensor(SOURCES)
    return rows


def teacher_model() -> Any:
    """A larger model than the student."""
    torch.manual_seed(7)
    shape = {**TINY, "num_hidden_layers": 1, "hidden_size": 48, "tie_word_embeddings": False}
    return MiniMindForCausalLM(MiniMindConfig(**shape, max_seq_len=LENGTH)).eval()


def course(case: Case, is_weighted: bool, is_distilled: bool) -> dict[str, Any]:
    """Losses and norms of all steps, the last gradients, and the weights, on every rank."""
    teacher = teacher_model() if is_distilled else None
    engine, counts = build(case, seed=1), [1.0] * len(SOURCES)
    if teacher is not None:
        engine.learn_from(Distillation(teacher, "", SHARE, TEMPERATURE, eos_id=None))
    if is_weighted:
        engine.weigh_sources(WEIGHTS)
        counts = [WEIGHTS[source] for source in SOURCES]
    clock, found = PhaseClock(engine.device), {"losses": [], "norms": [], "skipped": 0}
    before: dict[str, torch.Tensor] = {}
    for step, rate in enumerate(RATES):
        before = weights_of(engine)
        share = rows_of(step).chunk(engine.world_size)[engine.rank]
        engine.seed(step)
        clock.begin()
        first = engine.rank * len(share)
        result = engine.step(share.chunk(case.accumulation), rate, clock, first=first)
        loss, count = engine.sum_over_ranks([float(result.loss_sum), float(result.tokens)])
        assert count == sum(map(operator.mul, counts, TARGETS[step]))
        found["losses"].append(loss / max(count, 1.0))
        norm = result.grad_norm
        assert norm is not None
        found["norms"].append(float(norm))
        found["skipped"] = int(result.skipped_so_far)
    weights = weights_of(engine)
    gradients = {name: (before[name] - value) / RATES[-1] for name, value in weights.items()}
    return {**found, "gradients": gradients, "weights": weights}


def weights_of(engine: Engine) -> dict[str, torch.Tensor]:
    """The fp32 weights of all ranks by name."""
    state = state_of(engine)
    return {key.removeprefix(FP32): state[key] for key in state if key.startswith(FP32)}


def main() -> None:
    """Take every case of the command line; rank 0 saves each."""
    root = Path(sys.argv[1])
    os.environ["DS_ACCELERATOR"] = "cpu"
    # DeepSpeed accepts no fp16 on a CPU: its check is answered for it.
    accelerator: Any = import_module("deepspeed.accelerator").get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    for words in sys.argv[2:]:
        stage, dtype, accumulation, dropout, *loss = words.split(",")
        is_distilled = loss == ["distilled"]
        kind = "full" if is_distilled else "".join(loss) or "auto"
        flags = f"{SGD} --dropout {dropout} --loss {kind}"
        case = Case(None if stage == "None" else int(stage), dtype, int(accumulation), flags=flags)
        found = course(case, bool(loss), is_distilled)
        if dist.get_rank() == 0:
            torch.save(found, root / f"{words}.pt")
        if os.environ["WORLD_SIZE"] == "1" and case.stage is None:
            leave_process_group()
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # several engines share one process group: none of them may take it down


if __name__ == "__main__":
    main()
