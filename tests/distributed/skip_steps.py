"""Worker of test_skipped.py: what two processes do of a loss or gradient that one of them spoils.

Usage: torchrun ... skip_steps.py OUT_DIR STAGE,DTYPE[,KEY=VALUE] ...           (STAGE None: DDP)
Each case takes the steps of `COURSE` on one engine, and only those that are not spoilt on another.
Both have to end with the same weights and moments.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState  # noqa: TID251 (a fresh one for every engine)

from minimind.config.deepspeed.document import put, read_deepspeed_json
from minimind.config.deepspeed.resolve import ResolvedConfig, resolve
from minimind.config.parse import parse_flags
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.data.rows.order import Order
from minimind.engine.build import Engine, build_engine
from minimind.engine.clocks import PhaseClock
from minimind.errors import NumericError
from minimind.model import loss as model_loss
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.report.run_logger import RunLogger
from minimind.train.failures import SkippedSteps

SHAPE = MiniMindConfig(
    vocab_size=96, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
)
FLAGS = (
    "--batch_size 2 --accumulation_steps 2 --max_steps 7 --device cpu --max_skipped 2 --spike_guard"
)
ORDER = Order(n_rows=20, rows_per_step=8, seed=5)  # 2 processes x 2 micro-batches x 2 rows
# What rank 1 makes of a micro-batch, by step from 0. The first step is spoilt before there are
# moments, the last is one skipped step too many. "limit": the norm is above the limit of its step.
COURSE = [("loss", 0), None, ("gradient", 1), None, ("limit", 0), None, ("loss", 1)]
NORM_LIMIT = 1e-9


def all_rows() -> torch.Tensor:
    """(20, 9) token ids."""
    return torch.randint(96, (20, 9), generator=torch.Generator().manual_seed(3))


def engine_of(stage: int | None, dtype: str, changes: list[str], out_dir: Path) -> Engine:
    """A new engine with the same first weights as every other."""
    # Or every engine gets the plugin of the first.
    AcceleratorState._reset_state(reset_partial_state=True)
    clip = ["--grad_clip", "0"] if "compute_grad_norm" in str(changes) else []
    run = parse_flags([*FLAGS.split(), "--dtype", dtype, "--out_dir", str(out_dir), *clip])
    written = read_deepspeed_json(str(DEFAULT_DEEPSPEED_CONFIG))
    written["zero_optimization"]["stage"] = stage or 0
    for change in changes:
        key, _, value = change.partition("=")
        put(written, key, json.loads(value))
    resolved = resolve(written, "spoilt.json", run, 2, "cpu")
    torch.manual_seed(1)
    model = MiniMindForCausalLM(SHAPE)
    return build_engine(ResolvedConfig(run, "ddp") if stage is None else resolved, model, "cpu")


class Spoiler:
    """Spoils a loss and leaves its gradient finite, or the gradient of one weight and no loss."""

    def __init__(self, engine: Engine) -> None:
        self.what, self.micro_batch, self.seen = "", -1, 0
        self.true_loss = model_loss.next_token_loss
        model_loss.next_token_loss = self.loss  # spoilt on purpose
        self.rank = engine.rank
        weights = dict(engine.model.named_parameters())
        weights["model.norm.weight"].register_hook(self.gradient)

    def aim(self, fault: tuple[str, int] | None) -> None:
        self.what, self.micro_batch = fault if fault and self.rank == 1 else ("", -1)
        self.seen = -1

    def loss(self, *given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, count = self.true_loss(*given, **named)
        self.seen += 1
        return loss + (float("inf") if self.hits("loss") else 0.0), count

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, float("inf")) if self.hits("gradient") else gradient

    def hits(self, what: str) -> bool:
        return self.what == what and self.seen == self.micro_batch


def state_of(engine: Engine) -> list[Any]:
    """What a step may change: hashes of this rank's weights and moments, and the counts."""
    held = engine.backend.state()
    runs = sorted(held.slices(engine.rank, engine.world_size), key=lambda pair: pair[0])
    digest = hashlib.sha256()
    for key, run in runs:
        if key.startswith("fp32") or run.any():  # moments of 0 are as good as none
            digest.update(key.encode() + run.numpy().tobytes())
    for parameter in engine.model.parameters():
        kept = getattr(parameter, "ds_tensor", parameter)
        digest.update(kept.detach().float().numpy().tobytes())
    return [digest.hexdigest(), held.optimizer_step() or 0]


def micro_batches_of(rows: torch.Tensor, rank: int, step: int) -> Sequence[torch.Tensor]:
    """Those of one of two ranks."""
    return rows[torch.from_numpy(ORDER.rows_for(step, rank, 2))].split(2)


def course(stage: int | None, dtype: str, changes: list[str], out_dir: Path) -> dict[str, Any]:
    """What this rank saw of both runs."""
    rows, clock = all_rows(), PhaseClock(torch.device("cpu"))
    found: dict[str, Any] = {"skipped": [], "unchanged": [], "norms": [], "losses": []}
    found["raised"], ends = None, []
    for is_spoilt in (True, False):
        engine = engine_of(stage, dtype, changes, out_dir)
        logger = RunLogger(out_dir, len(COURSE), engine.device, engine.rank == 0, False)
        steps = SkippedSteps(
            engine.resolved.run,
            engine,
            ORDER,
            lambda step, rank=engine.rank: micro_batches_of(rows, rank, step),
            str,
            logger,
        )
        spoiler = Spoiler(engine)
        for step, fault in enumerate(COURSE):
            if fault and not is_spoilt:
                continue
            spoiler.aim(fault)
            micro_batches = micro_batches_of(rows, engine.rank, step)
            before = state_of(engine)
            clock.begin()
            limit = NORM_LIMIT if fault and fault[0] == "limit" else math.inf
            result = engine.step(micro_batches, 1e-2, clock, limit)
            if not is_spoilt:
                continue
            found["skipped"].append([bool(result.is_skipped), int(result.skipped_so_far)])
            assert result.grad_norm is not None
            found["norms"].append(float(result.grad_norm))
            found["unchanged"].append(state_of(engine) == before)
            found["losses"].append(
                [float(loss / n) for loss, n in zip(result.loss_sums, result.targets, strict=True)]
            )
            try:
                steps.check(step + 1, result)
            except NumericError as error:
                found["raised"] = [step + 1, str(error), error.cause_rank]
        logger.close()
        ends.append(state_of(engine))
    return {**found, "ends": ends}


def main() -> None:
    """Take every case of the command line; rank 0 writes the list."""
    root, report = Path(sys.argv[1]), []
    for words in sys.argv[2:]:
        stage, dtype, *changes = words.split(",")
        out_dir = root / words
        out_dir.mkdir(exist_ok=True)
        seen = course(None if stage == "None" else int(stage), dtype, changes, out_dir)
        by_rank: list[Any] = [None, None]
        dist.all_gather_object(by_rank, seen)
        report.append(by_rank)
    if dist.get_rank() == 0:
        (root / "results.json").write_text(json.dumps(report))
    dist.barrier()
    os._exit(0)  # several engines share one process group: none of them may take it down


if __name__ == "__main__":
    main()
