"""Small engines built one after another in a process: trained, saved, and resumed by each other.

A start of Python, torch and DeepSpeed costs far more than the steps do, so that the workers of
tests/engine/test_adapters.py and of elastic.py look at many configurations in one
process. Those at stage 3 come last: it replaces torch's linear function for good.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState  # noqa: TID251 (a fresh one for every engine)

from minimind.checkpoint.resume import resume
from minimind.checkpoint.retention import Rules
from minimind.checkpoint.saver import Saver
from minimind.config.deepspeed.document import put, read_deepspeed_json
from minimind.config.deepspeed.resolve import ResolvedConfig, resolve
from minimind.config.parse import parse_flags
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.data.rows.order import Order
from minimind.engine.build import Engine, build_engine
from minimind.engine.clocks import PhaseClock
from minimind.model.causal_lm import MiniMindForCausalLM, enable_checkpointing
from minimind.model.configuration import MiniMindConfig

ROWS, LENGTH, VOCABULARY = 8, 16, 96
ORDER = Order(n_rows=200, rows_per_step=ROWS, seed=1)
TINY: dict[str, Any] = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": VOCABULARY,
}

MUON = {"optimizer": {"type": "Muon", "params": {"lr": "auto", "muon_lr": 0.01, "betas": "auto"}}}


class WithFrozenParts(MiniMindForCausalLM):
    """A matrix and a vector that are not trained, and a persistent buffer that counts."""

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__(config)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        for name, p in self.named_parameters():
            p.requires_grad_(name not in FROZEN)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        self.get_buffer("seen").add_(1)
        return super().forward(*arguments, **options)


class Recomputing(WithFrozenParts):
    """The same, computing every block again in the backward pass."""

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__(config)
        enable_checkpointing(self)


FROZEN = (
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.experts.1.up_proj.weight",
    "model.layers.1.input_layernorm.weight",
)


@dataclass(frozen=True)
class Case:
    """One configuration; stage None is without DeepSpeed."""

    stage: int | None
    dtype: str
    accumulation: int = 2
    edits: dict[str, Any] = field(default_factory=dict)
    model: type[MiniMindForCausalLM] = MiniMindForCausalLM
    flags: str = ""
    shape: dict[str, Any] = field(default_factory=dict)  # beside TINY


def build(case: Case, seed: int, on: str = "cpu") -> Engine:
    """An engine of this process's ranks, its weights drawn from `seed`; `on` is cpu or cuda."""
    AcceleratorState._reset_state(reset_partial_state=True)
    world_size = int(os.environ["WORLD_SIZE"])
    words = f"--split_batches --batch_size {ROWS // case.accumulation} --max_steps 40"
    words += (
        f" --accumulation_steps {case.accumulation} --dtype {case.dtype} --device {on} {case.flags}"
    )
    run = parse_flags(words.split())
    resolved = ResolvedConfig(run, "ddp" if world_size > 1 else "single")
    if case.stage is not None:
        # Left on by an engine with torch_autocast; one process of a user has one engine.
        vars(import_module("deepspeed.runtime.torch_autocast"))["TORCH_AUTOCAST_INITIALIZED"] = (
            False
        )
        written = read_deepspeed_json(str(DEFAULT_DEEPSPEED_CONFIG))
        put(written, "zero_optimization.stage", case.stage)
        put(written, "optimizer.params.torch_adam", True)
        if run.is_explicit("optimizer"):
            del written["optimizer"]
        for key, value in case.edits.items():
            put(written, key, value)
        # As for a GPU where the CPU has no such precision; the engine itself runs on the CPU.
        device = "cuda" if case.dtype == "float16" else on
        resolved = resolve(written, "case.json", run, world_size, device)
    torch.manual_seed(seed)
    config = MiniMindConfig(**(TINY | case.shape), max_seq_len=LENGTH)
    return build_engine(resolved, case.model(config), on)


def text() -> torch.Tensor:
    """Rows (200, LENGTH + 1) with something to learn: a token's follower is one of two."""
    draw = torch.Generator().manual_seed(3)
    after = torch.randint(VOCABULARY, (VOCABULARY, 2), generator=draw)
    tokens = [torch.randint(VOCABULARY, (ORDER.n_rows,), generator=draw)]
    for _ in range(LENGTH):
        chosen = torch.randint(2, (ORDER.n_rows,), generator=draw)
        tokens.append(after[tokens[-1], chosen])
    return torch.stack(tokens, dim=1)


def course(
    engine: Engine, first: int, last: int, norm_limit: float = math.inf
) -> list[dict[str, Any]]:
    """What every step from `first` up to `last` was: rows of all ranks, loss, norm, counters."""
    table, clock, steps = text(), PhaseClock(engine.device), []
    for step in range(first, last):
        rows = ORDER.rows_for(step, engine.data_rank, engine.parallel.data_size)
        batch = table[torch.from_numpy(rows)]
        micro_batches = batch.split(len(batch) // engine.resolved.run.accumulation_steps)
        engine.seed(step)
        clock.begin()
        first = ORDER.share(engine.data_rank, engine.parallel.data_size).start
        result = engine.step(micro_batches, 2e-3 * (1 - step / 100), clock, norm_limit, first)
        loss, tokens = engine.sum_over_ranks([float(result.loss_sum), float(result.tokens)])
        scaler = engine.backend.counters()["loss_scaler"]
        shares = engine.gather(rows.tolist())
        steps.append(
            {
                "step": step,
                "rows": [row for share in shares[:: engine.parallel.group_size] for row in share],
                "loss": loss / tokens,
                "norm": None if result.grad_norm is None else float(result.grad_norm),
                "skipped": int(result.skipped_so_far),
                "scale": scaler.get("cur_scale"),
            }
        )
    return steps


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    """`kind|parameter` -> all its numbers, joined from every rank; an AssertionError on a gap."""
    runs = engine.state().slices(engine.rank, engine.world_size)
    shares = engine.gather([(key, run.detach().cpu().clone()) for key, run in runs])
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for key, run in [item for share in shares for item in share]:
        kind, name, start = key.split("|")
        pieces.setdefault(f"{kind}|{name}", []).append((int(start), run))
    whole = {}
    for key, parts in sorted(pieces.items()):
        parts.sort(key=lambda part: part[0])
        ends = [start + len(run) for start, run in parts]
        assert [start for start, _ in parts] == [0, *ends[:-1]], f"{key}: {parts}"
        whole[key] = torch.cat([run for _, run in parts])
    for name, buffer in engine.model.named_buffers():
        if name in engine.model.state_dict():
            whole[f"buffer|{name}"] = buffer.clone()
    return whole


def save(engine: Engine, root: Path, step: int) -> None:
    """A checkpoint of `step` under `root`."""
    manifest = {"identity": {}, "world_size": engine.world_size, "dtype": ""}
    saver = Saver(engine, engine, root, Rules(9), {}, in_background=False)
    saver.begin({**manifest, "step": step, "tokens": 0})
    saver.poll(wait=True)
    saver.close()


def load(engine: Engine, root: Path, step: int) -> None:
    """The engine as it was saved at `step` under `root`, by whichever configuration."""
    requested = str(root / f"step_{step:08d}")
    assert resume(engine, engine, root / "of-nobody", requested, {}).state.step == step
