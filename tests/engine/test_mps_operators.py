"""Every operator of a step has a kernel for Apple GPUs, by torch's own table of kernels.

The steps run on the CPU, with what a Mac has not (float64, complex numbers) taken away. Which
dtypes a kernel takes is not in the table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.parse import parse_flags
from minimind.engine.build import build_engine, leave_process_group
from minimind.engine.clocks import PhaseClock
from minimind.model.causal_lm import MiniMindForCausalLM, enable_checkpointing
from minimind.model.configuration import MiniMindConfig
from minimind.runtime.device import HOST, Host

TABLE = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
OF_ALL = {
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
}
# Attention is dispatched to another function there.
OF_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu"
CASES: list[tuple[str, dict[str, Any]]] = [
    ("--dtype float32", {"qk_norm": True, "use_moe": True}),
    ("--loss chunked --ema 0.9", {"doc_mask": True, "tie_word_embeddings": False}),
    ("--task sft --optimizer muon", {"attn_implementation": "eager"}),
]


class Operators(TorchDispatchMode):
    """Notes the names of all that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        self.found.add(f"{schema.name}{'.' * bool(schema.overload_name)}{schema.overload_name}")
        return func(*args, **(kwargs or {}))


def without_kernel(names: set[str]) -> set[str]:
    """Return the operators of `names` for which torch's table lists no MPS kernel."""
    rows = yaml.load(TABLE.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    table = {f"aten::{row['func'].partition('(')[0]}": row for row in rows}

    def has_kernel(name: str) -> bool:
        row = table[name]
        if delegate := row.get("structured_delegate"):
            return has_kernel(f"aten::{delegate}")
        if "dispatch" not in row:
            return True
        keys = {key.strip() for keys in row["dispatch"] for key in keys.split(",")}
        return "MPS" in keys or bool(keys & OF_ALL)

    return {name for name in names if name.startswith("aten::") and not has_kernel(name)}


def test_operators_of_a_step_have_kernels_for_apple_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Host, "has_float64", False)
    monkeypatch.setattr(HOST, "has_complex", False)
    operators = Operators()
    shape = {"vocab_size": 96, "dim": 32, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 32}
    rows = torch.arange(2 * 33).view(2, 33)
    for flags, changes in CASES:
        model = MiniMindForCausalLM(MiniMindConfig(n_layers=1, **shape, **changes)).train()
        enable_checkpointing(model)
        words = (
            f"--data_path x --device cpu --dtype bfloat16 --compile off --max_seq_len 32 {flags}"
        )
        try:
            engine = build_engine(
                ResolvedConfig(parse_flags(words.split()), "single"), model, "cpu"
            )
            with operators:
                clock = PhaseClock(engine.device)
                clock.begin()
                float(engine.step([rows], 1e-3, clock).loss_sum)
                engine.loss_of(rows)
                engine.model.generate(rows[:, :4], max_new_tokens=2, do_sample=True, top_p=0.9)
        finally:
            leave_process_group()
    assert {"aten::cummax", "aten::_fused_adamw_"} <= operators.found
    assert without_kernel(operators.found) <= {OF_CPU, f"{OF_CPU}_backward"}
    assert without_kernel({OF_CPU}) == {OF_CPU}  # it can tell
