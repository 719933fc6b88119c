"""Attention by blocks of queries against float64, and against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minimind.model import kernels
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.model.decoder import PlainAttention
from minimind.model.kernels import BLOCK, blockwise_attention

B, H, K, D = 2, 6, 2, 8


def drawn(length: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(length)
    return [
        torch.randn(B, length, heads, D).to(dtype).transpose(1, 2).requires_grad_()
        for heads in (H, K, K)
    ]


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def with_gradients(attend, inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.randn(out.shape).type_as(out))]


@pytest.mark.parametrize("length", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 7])
def test_blocks_give_what_float64_gives_with_gradients(length: int):
    inputs = drawn(length, torch.float64)
    found, expected = with_gradients(blockwise_attention, inputs), with_gradients(fused, inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # its softmax is fp32


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return PlainAttention()(q, k, v, None)[0]


def test_bf16_is_as_near_to_float64_as_attention_written_out():
    low = drawn(2 * BLOCK + 3, torch.bfloat16)
    exact = with_gradients(fused, [x.detach().double().requires_grad_() for x in low])

    def errors(attend) -> list[float]:
        found = zip(with_gradients(attend, low), exact, strict=True)
        return [(one.double() - other).norm().item() / other.norm().item() for one, other in found]

    for ours, theirs in zip(errors(blockwise_attention), errors(written_out), strict=True):
        assert ours < 1.2 * theirs < 0.02


def test_no_probability_is_kept_for_the_backward_pass():
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    inputs = drawn(2 * BLOCK, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        blockwise_attention(*inputs)
    assert max(kept, default=0) <= inputs[0].numel()


def test_it_is_what_a_compiled_model_runs_on_a_cpu_and_an_eager_one_does_not(monkeypatch):
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = MiniMindForCausalLM(MiniMindConfig(vocab_size=64, num_key_value_heads=2, **shape))
    ids = torch.randint(64, (2, 9))
    graphs: list[torch.fx.GraphModule] = []

    def keep_the_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=keep_the_graph, fullgraph=True)
    loss = compiled(ids, labels=ids).loss
    called = " ".join(str(graph.graph) for graph in graphs)
    assert "scaled_dot_product" not in called
    monkeypatch.setattr(kernels, "blockwise_attention", None)  # an eager model does not touch it
    torch.testing.assert_close(model(ids, labels=ids).loss, loss, rtol=1e-5, atol=0)
