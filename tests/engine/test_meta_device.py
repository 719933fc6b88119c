"""A micro-batch on the meta device, as a stand-in for a GPU: tensors have no values there.

So a value that the host reads raises, and so does an operator on a tensor that was left on the CPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minimind.engine.loss_of_batch import ModelInputs, compute_loss, mean_routing
from minimind.model import layers
from minimind.model.activation_checkpointing import enable_checkpointing
from minimind.model.attention import document_block_mask
from minimind.model.configuration import MiniMindConfig
from minimind.model.decoder import MiniMindForCausalLM

META = torch.device("meta")


def built(**changes: Any) -> Any:
    shape = {"vocab_size": 96, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
    model = MiniMindForCausalLM(MiniMindConfig(**{**shape, "max_seq_len": 32, **changes}))
    return model.train()


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose kernels as on an H100."""
    monkeypatch.setattr(layers, "KERNEL_DEVICE", "meta")
    properties = SimpleNamespace(major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("chunk", [0, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("doc_mask", [False, True])
def test_forward_and_backward_read_nothing_and_leave_nothing_on_the_cpu(
    doc_mask: bool, dtype: torch.dtype, chunk: int, recomputes: bool
):
    model = built(doc_mask=doc_mask, qk_norm=True)
    if recomputes:
        enable_checkpointing(model)
    model.to(dtype).to(META)
    rows = torch.empty((2, 33), dtype=torch.int64, device=META)
    loss = compute_loss(model, ModelInputs.of_text(rows), chunk)
    loss.total.backward()
    grads = [p.grad for p in model.parameters()]
    assert all(grad is not None and grad.device == META for grad in grads)
    assert (loss.loss_sum.device, loss.tokens.device) == (META, META)


def test_the_blocks_of_documents_are_made_without_a_read():
    blocks = document_block_mask(torch.empty((2, 300), dtype=torch.bool, device=META))
    assert blocks.kv_indices.device == META


def test_experts_read_the_sizes_of_their_groups_once_per_layer(monkeypatch: pytest.MonkeyPatch):
    reads: list[int] = []

    def sizes(counts: torch.Tensor) -> list[int]:
        reads.append(len(counts))
        return [2 * 2 * 32 // len(counts)] * len(counts)  # visits, evenly

    monkeypatch.setattr(torch.Tensor, "tolist", sizes)
    model = built(use_moe=True).to(META)
    rows = torch.empty((2, 33), dtype=torch.int64, device=META)
    loss = compute_loss(model, ModelInputs.of_text(rows))
    loss.total.backward()
    assert mean_routing([loss.routing, loss.routing])
    assert reads == [model.config.n_routed_experts] * model.config.num_hidden_layers


@pytest.mark.parametrize("wait", ["item", "tolist", "__bool__", "cpu"])
def test_a_read_of_the_stand_in_raises(wait: str):
    with pytest.raises((RuntimeError, NotImplementedError)):
        getattr(torch.ones(1, device=META), wait)()
