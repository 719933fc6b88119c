"""Keyed dropout: its masks against integers of Python, chance and a plain loop in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from minimind.model.causal_lm import MiniMindForCausalLM, enable_checkpointing
from minimind.model.configuration import MiniMindConfig
from minimind.model.dropout import Dropout, dropout_of, row_keys
from minimind.model.kernels import repeat_heads

V, B, T, E, LAYERS, RATE = 97, 3, 12, 16, 2, 0.25
PLACES = 1 + 2 * LAYERS
CPU = torch.device("cpu")
SEED, STEP, FIRST = 7, 41, 5
EXPERTS = {"use_moe": True, "n_routed_experts": 4, "num_experts_per_tok": 2}


def build(**changes: Any) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": V, "dim": E, "n_layers": LAYERS, "n_heads": 4}
    return MiniMindForCausalLM(MiniMindConfig(**{**shape, "max_seq_len": T, **changes})).train()


def ids() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


def keys_of_rows(step: int = STEP) -> Tensor:
    return row_keys(SEED, step, FIRST, B, CPU)


def of_tokens(rate: float = RATE) -> Dropout:
    return dropout_of(keys_of_rows(), rate, PLACES, T, E)


def kept(step: int, rate: float, rows: int, length: int, width: int) -> Tensor:
    """Masks of a step, bool (P, B, T, E)."""
    dropout = dropout_of(row_keys(SEED, step, 0, rows, CPU), rate, PLACES, length, width)
    ones = torch.ones(rows, length, width)
    return torch.stack([dropout(ones, place) > 0 for place in range(PLACES)])


@cache
def reference_mask() -> Tensor:
    """Factors of each element (P, B, T, E) in float64, from unsigned integers of Python."""

    def times(x: int, factor: int) -> int:
        return x * factor % 2**32

    def factor(place: int, row: int, position: int, channel: int) -> float:
        key = int.from_bytes(sha256(f"{SEED}/{STEP}".encode()).digest()[:4], "little")
        x = (key + times(FIRST + row, 0x9E3779B1)) % 2**32
        x ^= times(position, 0x85EBCA77) ^ times(place, 0xC2B2AE3D)
        x = times(x ^ x >> 16, 0x7FEB352D)
        x = times(x ^ x >> 15, 0x846CA68B)
        x = times(x ^ x >> 16 ^ times(channel, 0x27D4EB2F), 0x7FEB352D)
        x = times(x ^ x >> 15, 0x846CA68B)
        signed = x - 2**32 if x >= 2**31 else x
        return 1 / (1 - RATE) if signed >= RATE * 2**32 - 2**31 else 0.0

    numbers = [
        factor(p, b, t, e)
        for p in range(PLACES)
        for b in range(B)
        for t in range(T)
        for e in range(E)
    ]
    return torch.tensor(numbers, dtype=torch.float64).view(PLACES, B, T, E)


def trained(model: Any, keys: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The summed loss and the gradients."""
    model.zero_grad()
    given = {} if keys is None else {"dropout": RATE, "dropout_keys": keys}
    targets = ids().roll(-1, 1)
    out = model(input_ids=ids(), shift_labels=targets, loss_chunk_size=0, **given)
    total = out.loss_sum if out.aux_loss is None else out.loss_sum + out.aux_loss
    total.backward()
    return out.loss_sum.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_masks_are_those_of_integers_of_python():
    dropout = of_tokens()
    ones = torch.ones(B, T, E, dtype=torch.float64)
    found = torch.stack([dropout(ones, place) for place in range(PLACES)])
    assert torch.equal(found, reference_mask())
    assert 0 < (found == 0).sum() < found.numel()


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.5])
def test_masks_are_like_chance_in_every_direction(rate: float):
    """Each statistic would be standard normal; the largest of them is below 5."""
    masks = [kept(step, rate, 8, 64, 96).double() - (1 - rate) for step in range(3)]
    variance = rate * (1 - rate)

    def score(products: Tensor, of: float) -> float:
        return float(products.sum() / products.numel() ** 0.5 / of)

    for before, mask in pairwise(masks):
        pairs = [mask * before]
        for dim in range(mask.ndim):  # places, rows, positions, channels
            size = mask.shape[dim]
            pairs += [
                mask.narrow(dim, shift, size - shift) * mask.narrow(dim, 0, size - shift)
                for shift in (1, 2, 4)
                if shift < size
            ]
        quarters = mask[:, ::2] * mask[:, 1::2]
        fours = quarters[..., ::2] * quarters[..., 1::2]  # of two rows and two channels
        scores = [score(mask, variance**0.5), score(fours, variance**2)]
        scores += [score(pair, variance) for pair in pairs]
        assert max(map(abs, scores)) < 5
        # Sums over an axis have the variance of independent elements.
        for dim in range(mask.ndim):
            sums = mask.sum(dim)
            ratio = float(sums.square().mean() / (mask.shape[dim] * variance))
            assert abs(ratio - 1) < 5 * (3 / sums.numel()) ** 0.5


def test_no_two_tokens_share_a_mask():
    masks = kept(0, 0.5, 4, 64, 128).flatten(0, 2)
    assert len(torch.unique(masks, dim=0)) == len(masks)


def test_a_row_has_the_same_mask_whatever_rows_are_beside_it():
    whole, part = row_keys(SEED, STEP, 0, 8, CPU), row_keys(SEED, STEP, 3, 2, CPU)
    whole = dropout_of(whole, RATE, PLACES, T, E).keys
    part = dropout_of(part, RATE, PLACES, T // 2, E).keys
    assert torch.equal(whole[:, 3:5, : T // 2], part)


@pytest.mark.parametrize(("rate", "share"), [(1e-12, 0.0), (1 - 2**-53, 1.0)])
def test_rates_at_the_limits_drop_nothing_or_all_but(rate: float, share: float):
    dropped = 1 - kept(STEP, rate, 4, 64, 96).double().mean()
    assert float(dropped) == pytest.approx(share, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept_is_scaled_once_in_the_dtype_of_the_activations(dtype: torch.dtype):
    x = torch.randn(B, T, E).to(dtype)
    dropout = of_tokens(0.1)
    out = dropout(x, 1)
    mask = dropout(torch.ones(B, T, E), 1) > 0
    assert out.dtype == dtype
    assert torch.equal(out != 0, mask)
    factors = (out.double() / x.double())[mask]
    assert float((factors * 0.9 - 1).abs().max()) < torch.finfo(dtype).eps
    assert float(factors.mean()) == pytest.approx(1 / 0.9, rel=5e-4)  # a bfloat16 is 1.6e-3 below


def test_gradients_are_those_of_finite_differences():
    dropout = of_tokens()
    x = torch.randn(B, T, E, dtype=torch.float64, requires_grad=True)
    check: Callable[..., bool] = torch.autograd.gradcheck
    assert check(lambda x: dropout(x, 2), (x,), fast_mode=True)


def reference_loss(model: Any, factors: Tensor) -> Tensor:
    """A plain loop over the weights of a dense model in float64."""

    def norm(x: Tensor, of: Any) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + of.eps).sqrt() * of.weight

    x = model.model.embed_tokens.weight[ids()] * factors[0]
    cis = model.model.pos_cis[:T].to(torch.complex128)[:, None]
    for number, block in enumerate(model.model.layers):
        attention, given = block.self_attn, norm(x, block.input_layernorm)
        q, k, v = (
            (given @ p.weight.T).unflatten(-1, (-1, attention.head_dim))
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * cis).flatten(-2)
            for y in (q, k)
        )
        q = q.transpose(1, 2)
        k, v = (repeat_heads(y.transpose(1, 2), q) for y in (k, v))
        scores = q @ k.transpose(-2, -1) / attention.head_dim**0.5
        scores = scores.masked_fill(~torch.ones(T, T).tril().bool(), float("-inf"))
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2) @ attention.o_proj.weight.T
        x = x + y * factors[1 + 2 * number]
        mlp, given = block.mlp, norm(x, block.post_attention_layernorm)
        gate, up = given @ mlp.gate_proj.weight.T, given @ mlp.up_proj.weight.T
        y = gate * gate.sigmoid() * up @ mlp.down_proj.weight.T
        x = x + y * factors[2 + 2 * number]
    logits = norm(x, model.model.norm) @ model.lm_head.weight.T
    of_targets = logits.log_softmax(-1).gather(-1, ids().roll(-1, 1).unsqueeze(-1))
    return -of_targets.sum()


def test_loss_and_gradients_are_those_of_a_plain_loop_in_float64():
    model = build().double()
    weights = dict(model.named_parameters())
    loss = reference_loss(model, reference_mask())
    expected = dict(zip(weights, torch.autograd.grad(loss, [*weights.values()]), strict=True))
    found, gradients = trained(model, keys_of_rows())
    assert float(found) == pytest.approx(
        float(loss.detach()), rel=1e-6
    )  # the loss itself is in float32
    for name, gradient in gradients.items():
        gap = (gradient - expected[name]).abs().max() / expected[name].abs().max()
        assert gap < 1e-5, name
    plain, _ = trained(model, None)
    assert abs(float(plain - found)) > 1e-4 * float(found)


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
def test_masks_are_at_the_embedding_and_at_both_outputs_of_every_block(changes: dict[str, Any]):
    """Against hooks that multiply what the modules return."""
    model = build(**changes)
    loss, gradients = trained(model, keys_of_rows())
    parts = [model.model.embed_tokens]
    parts += [part for block in model.model.layers for part in (block.self_attn, block.mlp)]
    for place, part in enumerate(parts):

        def multiply(_: Any, __: Any, out: Any, place: int = place) -> Any:
            factors = reference_mask()[place].float()
            return (out[0] * factors, *out[1:]) if isinstance(out, tuple) else out * factors

        part.register_forward_hook(multiply)
    expected, of_hooks = trained(model, None)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, of_hooks[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("changes", [{}, EXPERTS, {"doc_mask": True}])
def test_blocks_computed_again_have_the_same_masks_bit_for_bit(
    changes: dict[str, Any], reentrant: bool
):
    model = build(**changes)
    loss, gradients = trained(model, keys_of_rows())
    enable_checkpointing(model, use_reentrant=reentrant)
    again, recomputed = trained(model, keys_of_rows())
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], recomputed[name]) for name in gradients)


def test_another_step_has_other_masks():
    model = build()
    losses = {float(trained(model, keys_of_rows(step))[0]) for step in range(8)}
    assert len(losses) == 8


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [37, 40, 64])  # no multiple of a vector's elements, and one
def test_inductor_has_the_masks_of_eager_code(width: int, dtype: torch.dtype):
    dropout = dropout_of(keys_of_rows(), RATE, PLACES, T, width)
    compiled = torch.compile(lambda x: dropout(x, 1), dynamic=False)
    x = torch.randn(B, T, width).to(dtype).requires_grad_()
    for _ in range(20):  # what is written beyond a result is found when memory is freed
        assert torch.equal(compiled(x), dropout(x, 1))
    gradients = [
        torch.autograd.grad(of(x).sum(), x)[0] for of in (compiled, lambda x: dropout(x, 1))
    ]
    assert torch.equal(*gradients)
