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
from minimind.model.decoder import MiniMindConfig, MiniMindForCausalLM

TINY = MiniMindConfig(vocab_size=96, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.parametrize(
    ("words", "device", "expected"),
    [
        ("--dtype float32 --tf32", "cuda", ["high"]),
        ("--dtype float32", "cuda", ["highest"]),
        ("", "cuda", ["highest"]),
        ("--dtype float32", "cpu", []),
    ],
)
def test_products_in_float32_are_exact_unless_tf32_is_given(
    words: str, device: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
):
    """With a stand-in for the backend of a GPU."""
    requested: list[str] = []
    stand_in: Any = lambda *_: (None, torch.device(device))  # noqa: E731 (a stand-in)
    monkeypatch.setattr(build, "_plain", stand_in)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", requested.append)
    resolved = ResolvedConfig(parse_flags(words.split()), "single")
    build.build_engine(resolved, MiniMindForCausalLM(TINY), device)
    assert requested == expected


def test_a_resume_that_changes_tf32_changes_the_dtype():
    order: Any = SimpleNamespace(rows_per_step=1, mixture=None)
    schedule: Any = SimpleNamespace(shape="cosine", total_steps=1, warmup_steps=0, min_ratio=0.1)
    data: Any = SimpleNamespace(
        manifest={"fingerprint": ""}, tokenizer=SimpleNamespace(fingerprint="")
    )
    resolved = SimpleNamespace(config={}, optimizer="AdamW", optimizer_params={})
    engine: Any = SimpleNamespace(resolved=resolved)
    kept = {
        words: identity(parse_flags(words.split()), {}, data, schedule, order, engine)["dtype"]
        for words in ("--dtype float32", "--dtype float32 --tf32", "--dtype bfloat16")
    }
    assert [group["dtype"] for group in kept.values()] == ["float32", "tf32", "bfloat16"]
