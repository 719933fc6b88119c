"""Checksums see every flipped bit, and a replay computes the gradients of backward()."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.parse import parse_flags
from minimind.engine.build import Engine, build_engine, leave_process_group
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.recovery.corruption import (
    INTEGERS,
    checksums,
    master_checksums,
    replay,
    replicated_checksums,
    sum_of_bits,
    weight_checksums,
)

TINY = MiniMindConfig(
    vocab_size=96, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
)
ROWS = torch.arange(2 * 9).view(2, 9) % 96

TENSORS = {
    "float32": torch.randn(7, 5),
    "bfloat16": torch.randn(12).bfloat16(),
    "float16": torch.randn(3, 4).half(),
    "float64": torch.randn(6).double(),
    "complex64": torch.randn(4, 2, dtype=torch.complex64),
    "int64": torch.randint(-9, 9, (5,)),
    "uint8": torch.arange(9, dtype=torch.uint8),
    "scalar": torch.tensor(1.5),
    "transposed": torch.randn(4, 6).t(),
}


INTEGER_NAMES = {1: "u1", 2: "i2", 4: "i4", 8: "i8"}


def reference(tensor: Tensor) -> int:
    """The sum of the bits as signed integers (bytes: unsigned), modulo 2**64."""
    values = tensor.contiguous().view(torch.uint8).numpy() if tensor.dim() else tensor.numpy()
    size = 4 if tensor.is_complex() else tensor.element_size()
    kind = np.uint8 if size == 1 else np.dtype(f"i{size}")
    whole = sum(map(int, np.frombuffer(values.tobytes(), kind)))
    return (whole + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("name", TENSORS)
def test_a_checksum_is_the_sum_of_the_bits(name: str):
    tensor = TENSORS[name]
    assert int(sum_of_bits(tensor)) == reference(tensor)
    assert checksums([(name, tensor)]) == {name: reference(tensor)}


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64", "uint8"])
def test_every_flipped_bit_changes_it(name: str):
    tensor = TENSORS[name].clone()
    before, bits = sum_of_bits(tensor), tensor.view(-1).view(INTEGERS[tensor.element_size()])
    for at in range(len(bits)):
        for bit in range(8 * tensor.element_size()):
            kept = bits[at].clone()
            mask = np.array([1 << bit], np.uint64).astype(f"u{tensor.element_size()}")
            bits[at] ^= torch.from_numpy(mask.view(INTEGER_NAMES[tensor.element_size()]))[0]
            assert sum_of_bits(tensor) != before
            bits[at] = kept


@pytest.fixture(params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**alone, "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    run = parse_flags(f"--batch_size 2 --dtype {request.param} --device cpu".split())
    torch.manual_seed(1)
    yield build_engine(ResolvedConfig(run, "single"), MiniMindForCausalLM(TINY), "cpu")
    leave_process_group()


def test_a_replay_computes_what_backward_does_and_leaves_nothing(engine: Engine):
    found = replay(engine, ROWS, 0, is_whole=True)
    model: Any = engine.model
    assert all(p.grad is None for p in model.parameters())
    out = model(input_ids=ROWS[:, :-1], shift_labels=ROWS[:, 1:], loss_chunk_size=0)
    mean = out.loss_sum / out.targets
    mean.backward()
    gradients = [p.grad for p in model.parameters()]
    assert found.loss == float(out.loss_sum.detach().double() / out.targets)
    assert found.norms == [float(torch.linalg.vector_norm(g.float())) for g in gradients]
    assert found.sums == [reference(g) for g in gradients] + [reference(out.loss_sum.detach())]
    assert found.rows == reference(ROWS)
    assert replay(engine, ROWS, 0, is_whole=False) == found


def test_state_and_weights_are_summed_by_name(engine: Engine):
    weights = dict(engine.model.named_parameters())
    held = replicated_checksums(engine)
    is_low = engine.resolved.run.dtype == "bfloat16"
    for name, p in weights.items():
        assert held[f"fp32|{name}"] == reference(p.detach().float())
        assert held[f"exp_avg|{name}"] == held[f"exp_avg_sq|{name}"] == 0
    assert {name.split("|")[0] for name in held} == {"fp32", "exp_avg", "exp_avg_sq", "buffer"}
    masters = master_checksums(engine)
    assert set(masters) == ({(n, 0, p.numel()) for n, p in weights.items()} if is_low else set())
    assert weight_checksums(engine, masters) == masters
    keys = {("model.embed_tokens.weight", 5, 7): None}
    part = weights["model.embed_tokens.weight"].detach().view(-1)[5:12]
    assert list(weight_checksums(engine, keys).values()) == [reference(part)]
