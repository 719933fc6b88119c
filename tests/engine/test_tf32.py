"""The precision of float32 products on a GPU is the one of the flag, also in a second run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minimind.checkpoint.identity import identity
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.parse import parse_flags
from minimind.engine import build
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.runtime.device import set_numerics

TINY = MiniMindConfig(vocab_size=96, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.parametrize(
    ("device", "tf32", "expected"),
    [("cuda", True, ["high"]), ("cuda", False, ["highest"]), ("cpu", False, [])],
)
def test_products_in_float32_are_exact_unless_tf32_is_given(
    device: str, tf32: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
):
    requested: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", requested.append)
    set_numerics(device, False, tf32)
    assert requested == expected


def test_the_engine_is_built_with_the_precision_of_the_run(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[str, bool, bool]] = []
    monkeypatch.setattr(build, "set_numerics", lambda *values: seen.append(values))
    monkeypatch.setattr(build, "configure_libraries", lambda device: None)
    run = parse_flags("--dtype float32 --tf32".split())
    model = MiniMindForCausalLM(TINY)
    monkeypatch.setattr(build, "_plain", lambda *_: (None, torch.device("cpu")))
    with pytest.raises(AssertionError, match="requested cuda, got cpu"):
        build.build_engine(ResolvedConfig(run, "single"), model, "cuda")
    assert seen == [("cuda", False, True)]


def test_a_resume_that_changes_tf32_changes_the_dtype():
    order: Any = SimpleNamespace(rows_per_step=1, mixture=None, left_out=(), stages_json=dict)
    schedule: Any = SimpleNamespace(shape="cosine", total_steps=1, warmup_steps=0, min_ratio=0.1)
    data: Any = SimpleNamespace(
        manifest={"fingerprint": ""}, tokenizer=SimpleNamespace(fingerprint="")
    )
    resolved = SimpleNamespace(config={}, optimizer="AdamW", optimizer_params={})
    model = SimpleNamespace(named_parameters=dict)
    engine: Any = SimpleNamespace(resolved=resolved, distillation=None, model=model)
    kept = {
        words: identity(parse_flags(words.split()), {}, data, schedule, order, engine)["dtype"]
        for words in ("--dtype float32", "--dtype float32 --tf32", "--dtype bfloat16")
    }
    assert [group["dtype"] for group in kept.values()] == ["float32", "tf32", "bfloat16"]
