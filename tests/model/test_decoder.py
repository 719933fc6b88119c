"""The decoder against an independent float64 implementation, and against itself by other routes.

Shape letters: B rows, T positions, S keys, H query heads, K key/value heads, D channels per head,
E model width, V vocabulary.
"""

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.nn.parallel import DistributedDataParallel
from transformers import DynamicCache

from minimind.model import decoder, kernels
from minimind.model.causal_lm import MiniMindForCausalLM, MiniMindModel
from minimind.model.configuration import MiniMindConfig
from minimind.model.decoder import Attention, Decoder, DecoderConfig, PlainAttention, RMSNorm
from minimind.model.kernels import flash_attention
from minimind.model.rotary import Rotary, build_pos_cis, pos_cis_as_reals
from minimind.runtime.device import KINDS
from tests.conftest import ROOT

B, T, V = 3, 11, 97


def build(seed: int = 0, **changes) -> MiniMindForCausalLM:
    torch.manual_seed(seed)
    shape = {"vocab_size": V, "dim": 48, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2}
    return MiniMindForCausalLM(MiniMindConfig(**{**shape, "max_seq_len": 32, **changes})).eval()


@pytest.fixture
def model() -> MiniMindForCausalLM:
    """Weights large enough that every part of the model changes the logits."""
    model = build()
    generator = torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model


@pytest.fixture
def ids_BT() -> Tensor:
    return torch.randint(4, V, (B, T), generator=torch.manual_seed(2))


def logits_in_float64(model: MiniMindForCausalLM, ids: list[int]) -> Tensor:
    """(T, V) for one row: one position, one head, one channel pair at a time."""
    config, weights = model.config, {k: v.double() for k, v in model.state_dict().items()}
    heads, width = config.num_attention_heads, config.hidden_size
    channels, sharing = width // heads, heads // config.num_key_value_heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x / math.sqrt(float((x * x).mean()) + config.rms_norm_eps) * weights[name]

    def turned(x: Tensor, t: int) -> Tensor:
        x = x.clone().view(-1, channels)
        for j in range(channels // 2):
            angle = t * config.rope_theta ** (-2 * j / channels)
            a, b = x[:, 2 * j].clone(), x[:, 2 * j + 1].clone()
            x[:, 2 * j] = a * math.cos(angle) - b * math.sin(angle)
            x[:, 2 * j + 1] = a * math.sin(angle) + b * math.cos(angle)
        return x

    stream = [weights["model.embed_tokens.weight"][i] for i in ids]
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        keys, values = [], []
        for t, x in enumerate(list(stream)):
            x = norm(x, at + "input_layernorm.weight")
            queries = turned(weights[at + "self_attn.q_proj.weight"] @ x, t)
            keys.append(turned(weights[at + "self_attn.k_proj.weight"] @ x, t))
            values.append((weights[at + "self_attn.v_proj.weight"] @ x).view(-1, channels))
            mixed = []
            for h in range(heads):
                scores = [float(queries[h] @ k[h // sharing]) / math.sqrt(channels) for k in keys]
                total = sum(math.exp(s) for s in scores)
                shares = [math.exp(s) / total for s in scores]
                mixed += [sum(p * v[h // sharing] for p, v in zip(shares, values, strict=True))]
            stream[t] = stream[t] + weights[at + "self_attn.o_proj.weight"] @ torch.cat(mixed)
        for t, x in enumerate(stream):
            x = norm(x, at + "post_attention_layernorm.weight")
            gate = weights[at + "mlp.gate_proj.weight"] @ x
            up = weights[at + "mlp.up_proj.weight"] @ x
            hidden = gate / (1 + torch.exp(-gate)) * up
            stream[t] = stream[t] + weights[at + "mlp.down_proj.weight"] @ hidden
    head = weights["lm_head.weight"]
    return torch.stack([head @ norm(x, "model.norm.weight") for x in stream])


@torch.no_grad()
@pytest.mark.parametrize("use_flash_attn", [True, False])
def test_logits_equal_an_independent_float64_implementation(
    model: MiniMindForCausalLM, ids_BT: Tensor, use_flash_attn: bool
):
    chosen = build(use_flash_attn=use_flash_attn)
    chosen.load_state_dict(model.state_dict())
    logits_BTV = chosen(ids_BT).logits
    expected = torch.stack([logits_in_float64(model, row) for row in ids_BT.tolist()])
    assert expected.std() > 0.5
    torch.testing.assert_close(logits_BTV.double(), expected, rtol=1e-5, atol=2e-5)


def heads_of(length: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.manual_seed(3)
    q_BHTD = torch.randn(B, 6, length, 8, generator=generator)
    k_BKSD, v_BKSD = torch.randn(2, B, 2, keys, 8, generator=generator)
    return q_BHTD, k_BKSD, v_BKSD


@pytest.mark.parametrize(("length", "keys"), [(T, T), (1, T)], ids=["causal", "one query"])
def test_flash_attention_equals_the_reference_without_a_mask(length: int, keys: int):
    parts = heads_of(length, keys)
    torch.testing.assert_close(
        flash_attention(*parts, None), PlainAttention()(*parts, None)[0], rtol=1e-5, atol=1e-6
    )


def test_flash_attention_equals_the_reference_under_a_mask():
    parts = heads_of(4, T)
    mask = torch.rand(B, 1, 4, T, generator=torch.manual_seed(4)) < 0.5
    mask[..., 0] = True
    torch.testing.assert_close(
        flash_attention(*parts, mask), PlainAttention()(*parts, mask)[0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("queries", [T, 1])
def test_on_a_gpu_kernels_are_requested_in_our_order(monkeypatch, queries: int, is_masked: bool):
    """cuDNN's first for whole rows, and not at all where torch's have faults."""
    requested, attend = [], F.scaled_dot_product_attention

    def noting(*given, **options):
        requested.extend(_cur_sdpa_kernel_backends(with_priority=True))
        return attend(*given, **options)

    parts = heads_of(queries, T)
    mask = torch.ones(B, 1, queries, T, dtype=torch.bool) if is_masked else None
    expected, before = flash_attention(*parts, mask), _cur_sdpa_kernel_backends(True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    monkeypatch.setattr(kernels, "KERNEL_DEVICE", "cpu")
    assert torch.equal(flash_attention(*parts, mask), expected)
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    is_row = queries > 1 and not is_masked
    assert requested == ([SDPBackend.CUDNN_ATTENTION, *order] if is_row else order)
    assert _cur_sdpa_kernel_backends(True) == before


@pytest.mark.parametrize(
    ("dtype", "major", "repeats"),
    [
        (torch.float32, 9, True),
        (torch.bfloat16, 9, False),
        (torch.float16, 8, False),
        (torch.float16, 7, True),
    ],
)
@pytest.mark.parametrize("queries", [1, T])
def test_key_heads_are_repeated_where_only_the_slow_kernel_takes_groups(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, major: int, repeats: bool, queries: int
):
    """With a stand-in for CUDA: flash attention takes groups, in 16 bits from 8.0 on."""
    heads, attend = [], F.scaled_dot_product_attention

    def noting(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        heads.append((k.shape[1], v.shape[1], options.get("enable_gqa", False)))
        return attend(q, k, v, **options)

    q_BHTD, k_BKSD, v_BKSD = (part.to(dtype) for part in heads_of(queries, T))
    expected = flash_attention(q_BHTD, k_BKSD, v_BKSD, None)
    monkeypatch.setattr(kernels, "KERNEL_DEVICE", "cpu")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major)
    )
    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    torch.testing.assert_close(flash_attention(q_BHTD, k_BKSD, v_BKSD, None), expected)
    query_heads, key_heads = q_BHTD.shape[1], k_BKSD.shape[1]
    assert query_heads > key_heads
    number = query_heads if repeats else key_heads
    assert heads == [(number, number, not repeats)]


@torch.no_grad()
def test_both_attentions_agree_with_left_padding_and_cache(
    model: MiniMindForCausalLM, ids_BT: Tensor
):
    plain = build(use_flash_attn=False)
    plain.load_state_dict(model.state_dict())
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, :5] = 0
    results = []
    for chosen in (model, plain):
        first = chosen(ids_BT[:, :6], mask_BT[:, :6], use_cache=True)
        second = chosen(ids_BT[:, 6:], mask_BT, past_key_values=first.past_key_values)
        results.append(torch.cat([first.logits, second.logits], 1))
    assert results[0].isfinite().all()
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["cache", "past_key_values"])  # since transformers 5.24, before
@pytest.mark.parametrize("pieces", [(6, 5), (6, 1, 1, 3), (1,) * T])
def test_cached_pieces_give_the_logits_of_the_whole(
    model: MiniMindForCausalLM, ids_BT: Tensor, pieces: tuple[int, ...], name: str
):
    given: Any = {name: DynamicCache(config=model.config)}
    logits = [model(ids, **given).logits for ids in ids_BT.split(pieces, dim=1)]
    torch.testing.assert_close(torch.cat(logits, 1), model(ids_BT).logits, rtol=1e-5, atol=1e-5)


def test_a_cache_is_given_by_one_of_its_names(model: MiniMindForCausalLM, ids_BT: Tensor):
    cache = DynamicCache(config=model.config)
    with pytest.raises(ValueError, match="cache and past_key_values are two names of one"):
        model(ids_BT, cache=cache, past_key_values=cache)


@torch.no_grad()
def test_left_padded_rows_give_the_logits_of_unpadded_ones(
    model: MiniMindForCausalLM, ids_BT: Tensor
):
    padded, mask = ids_BT.clone(), torch.ones_like(ids_BT)
    for row, padding in enumerate((0, 4, 7)):
        padded[row, :padding], mask[row, :padding] = 3, 0
    logits = model(padded, mask).logits
    for row, padding in enumerate((0, 4, 7)):
        alone = model(ids_BT[row : row + 1, padding:]).logits[0]
        torch.testing.assert_close(logits[row, padding:], alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_padding_uses_up_no_position(model: MiniMindForCausalLM):
    longest = model.config.max_position_embeddings
    ids = torch.randint(4, V, (1, longest + 9), generator=torch.manual_seed(6))
    mask = torch.ones_like(ids)
    mask[:, :9] = 0
    logits = model(ids, mask).logits[:, 9:]
    torch.testing.assert_close(logits, model(ids[:, 9:]).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_changing_a_token_leaves_earlier_logits_as_they_were(
    model: MiniMindForCausalLM, ids_BT: Tensor
):
    changed = ids_BT.clone()
    changed[:, 7] = (changed[:, 7] + 1) % V
    before, after = model(ids_BT).logits, model(changed).logits
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


def test_training_builds_no_mask(model: MiniMindForCausalLM, ids_BT: Tensor, monkeypatch):
    seen = []

    def watched(q, k, v, **options):
        seen.append((options.get("attn_mask"), options["is_causal"]))
        return torch.zeros_like(q)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", watched)
    model.train()(ids_BT)
    assert seen == [(None, True)] * model.config.num_hidden_layers


def test_gradients_reach_every_parameter(model: MiniMindForCausalLM, ids_BT: Tensor):
    model(ids_BT, labels=ids_BT).loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name


def test_labels_are_shifted_and_shift_labels_are_not(model: MiniMindForCausalLM, ids_BT: Tensor):
    logits_BTV = model(ids_BT).logits
    expected = torch.nn.functional.cross_entropy(
        logits_BTV[:, :-1].double().flatten(0, 1), ids_BT[:, 1:].flatten()
    )
    shifted = torch.nn.functional.pad(ids_BT[:, 1:], (0, 1), value=-100)
    for targets in ({"labels": ids_BT}, {"shift_labels": shifted}):
        loss = model(ids_BT, **targets).loss
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


def test_loss_over_no_targets_is_zero(model: MiniMindForCausalLM, ids_BT: Tensor):
    assert model(ids_BT, labels=torch.full_like(ids_BT, -100)).loss == 0


def test_shift_labels_come_before_labels(model: MiniMindForCausalLM, ids_BT: Tensor):
    both = model(ids_BT, labels=ids_BT, shift_labels=ids_BT).loss
    assert torch.equal(both, model(ids_BT, shift_labels=ids_BT).loss)


@torch.no_grad()
def test_only_the_last_logits_are_computed_on_request(model: MiniMindForCausalLM, ids_BT: Tensor):
    last = model(ids_BT, logits_to_keep=2).logits
    torch.testing.assert_close(last, model(ids_BT).logits[:, -2:], rtol=1e-5, atol=1e-5)


def greedy(model: MiniMindForCausalLM, ids_BT: Tensor, **options) -> Tensor:
    new_tokens = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    # transformers types the self of generate as a protocol that no model class meets.
    out = model.generate(ids_BT, **new_tokens, **options)  # pyright: ignore[reportAttributeAccessIssue] (a mixin's)
    assert isinstance(out, Tensor)
    return out[:, ids_BT.shape[1] :]


def test_greedy_tokens_are_the_same_with_and_without_cache(
    model: MiniMindForCausalLM, ids_BT: Tensor
):
    mask_BT = torch.ones_like(ids_BT)
    cache_sizes = greedy(model, ids_BT, attention_mask=mask_BT, use_cache=True)
    assert len(cache_sizes.unique()) > 5
    assert torch.equal(cache_sizes, greedy(model, ids_BT, attention_mask=mask_BT, use_cache=False))


def test_greedy_tokens_of_left_padded_rows_are_those_of_single_rows(
    model: MiniMindForCausalLM, ids_BT: Tensor
):
    padded, mask_BT = ids_BT.clone(), torch.ones_like(ids_BT)
    padded[1, :4], mask_BT[1, :4] = 3, 0
    together = greedy(model, padded, attention_mask=mask_BT)
    for row, padding in enumerate((0, 4, 0)):
        ids = ids_BT[row : row + 1, padding:]
        alone = greedy(model, ids, attention_mask=torch.ones_like(ids))
        assert torch.equal(together[row], alone[0])


def test_position_beyond_the_last_is_refused(model: MiniMindForCausalLM):
    with pytest.raises(ValueError, match="position 32 is beyond max_position_embeddings=32"):
        model(torch.ones(1, 33, dtype=torch.long))
    alone = Decoder(DecoderConfig(V, 48, max_position_embeddings=32))
    with pytest.raises(ValueError, match="position 32 is beyond max_position_embeddings=32"):
        alone(torch.ones(1, 33, dtype=torch.long))
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="position 40 is beyond"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 40]]))
    cache = model(torch.ones(1, 30, dtype=torch.long), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="position 33 is beyond"):
        model(ids, past_key_values=cache)


def test_mask_of_another_length_is_refused(model: MiniMindForCausalLM, ids_BT: Tensor):
    with pytest.raises(ValueError, match=r"attention_mask of shape \(3, 10\) must be \(3, 11\)"):
        model(ids_BT, torch.ones(B, T - 1))


def table_of(model: MiniMindForCausalLM) -> Tensor:
    config = model.config
    return build_pos_cis(config.head_dim, config.max_position_embeddings, config.rope_theta)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_saved_model_loads_with_equal_logits(tmp_path: Path, ids_BT: Tensor, tied: bool):
    model = build(tie_word_embeddings=tied, rope_theta=1e4)
    model.save_pretrained(tmp_path)
    loaded = MiniMindForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.pos_cis, table_of(model))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert torch.equal(loaded(ids_BT).logits, model(ids_BT).logits)


def test_tables_of_positions_are_one_of_a_kind_and_not_saved(model: MiniMindForCausalLM):
    assert [name for name, _ in model.named_buffers()] == ["model.pos_cis", "model.pos_reals"]
    assert not [name for name in model.state_dict() if "pos_" in name]
    assert torch.equal(model.model.pos_reals, pos_cis_as_reals(table_of(model)))


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.bfloat16(),
        lambda model: model.half(),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.to("meta").to_empty(device="cpu"),
    ],
    ids=["bfloat16()", "half()", "to(bfloat16)", "to_empty()"],
)
def test_pos_cis_stays_complex64_and_exact_wherever_the_model_moves(
    model: MiniMindForCausalLM, move
):
    moved = move(model)
    assert moved.model.pos_cis.dtype == torch.complex64
    assert torch.equal(moved.model.pos_cis, table_of(moved))
    assert moved.model.pos_reals.dtype == torch.float32
    assert torch.equal(moved.model.pos_reals, pos_cis_as_reals(table_of(moved)))


def test_where_complex_operators_are_missing_positions_are_reals(
    model: MiniMindForCausalLM, ids_BT: Tensor, monkeypatch: pytest.MonkeyPatch
):
    """With a stand-in for an Apple GPU, of which tensors have no values."""
    monkeypatch.setitem(KINDS, "meta", KINDS["mps"])
    used: list[Tensor] = []
    monkeypatch.setattr(decoder, "apply_rotary", lambda x, cis: used.append(cis))
    moved: Any = model
    inner = moved.to("meta").model
    assert (inner.pos_cis.device.type, inner.pos_reals.device.type) == ("cpu", "meta")
    assert torch.equal(inner.pos_cis, table_of(model))
    logits_BTV = moved(ids_BT.to("meta")).logits
    assert logits_BTV.device.type == "meta"
    assert not used
    assert moved.to(torch.bfloat16).model.pos_reals.dtype == torch.float32


def test_reals_rotate_as_complex_numbers(
    model: MiniMindForCausalLM, ids_BT: Tensor, monkeypatch: pytest.MonkeyPatch
):
    expected = model(ids_BT).logits
    monkeypatch.setattr(
        MiniMindModel, "rotary_at", lambda self, i: Rotary(None, self.pos_reals[:, i])
    )
    torch.testing.assert_close(model(ids_BT).logits, expected)


@torch.no_grad()
def test_bf16_model_is_near_the_fp32_one(model: MiniMindForCausalLM, ids_BT: Tensor):
    logits_BTV = model(ids_BT).logits
    low = model.bfloat16()(ids_BT).logits
    assert low.dtype == torch.bfloat16
    assert (low.float() - logits_BTV).std() < 0.03 * logits_BTV.std()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_of_low_precision_input_has_fp32_statistics(dtype: torch.dtype):
    norm = RMSNorm(512, 1e-5).to(dtype)
    generator = torch.manual_seed(5)
    with torch.no_grad():
        norm.weight.copy_(1 + torch.rand(512, generator=generator))
    x_BTE = (400 * torch.randn(2, 3, 512, generator=generator)).to(dtype)
    assert x_BTE.square().sum(-1).max() > torch.finfo(torch.float16).max
    x, weight = x_BTE.float(), norm.weight.float()
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(norm(x_BTE), expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_broadcasts_no_complex_buffer(gloo: None, model: MiniMindForCausalLM):
    names = [name for name, _ in model.named_buffers()]
    assert names == model._ddp_params_and_buffers_to_ignore
    wrapped = DistributedDataParallel(model)
    assert wrapped.parameters_to_ignore == set(names)
    assert wrapped.modules_buffers == []


def test_same_seed_draws_the_same_weights_and_another_does_not():
    first, again, other = build(7), build(7), build(8)
    for (name, a), b, c in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == ("norm" in name)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_start_at_their_stated_size(tied: bool):
    model = build(dim=192, n_layers=8, n_heads=6, vocab_size=512, tie_word_embeddings=tied)
    for name, weight in model.named_parameters():
        if "norm" in name:
            assert torch.equal(weight, torch.ones(192)), name
            continue
        std = 0.02 / 4 if "o_proj" in name or "down_proj" in name else 0.02
        assert abs(weight.std().item() / std - 1) < 0.03, name
        assert abs(weight.mean().item()) < 0.05 * std, name


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_seed_draws_all_modules_and_then_their_weights_in_the_order_of_the_modules(is_tied: bool):
    """Another order of draws would give other losses than those of earlier versions."""
    model = build(seed=4, tie_word_embeddings=is_tied)
    torch.manual_seed(4)
    config = model.config
    torch.nn.Embedding(config.vocab_size, config.hidden_size)
    for number in range(config.num_hidden_layers):
        decoder.Block(config, number)
    torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            std = 0.02 / math.sqrt(6) if "o_proj" in name or "down_proj" in name else 0.02
            assert torch.equal(weight, torch.empty_like(weight).normal_(0, std)), name


def test_parameters_have_the_names_of_llama(model: MiniMindForCausalLM):
    layer_names = {
        name.removeprefix("model.layers.0.")
        for name in model.state_dict()
        if name.startswith("model.layers.0.")
    }
    projections = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    projections += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    norms = ["input_layernorm", "post_attention_layernorm"]
    assert layer_names == {f"{name}.weight" for name in projections + norms}
    others = {name for name in model.state_dict() if ".layers." not in name}
    assert others == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert all(isinstance(layer.self_attn, Attention) for layer in model.model.layers)


def test_the_decoder_runs_alone_without_transformers_as_its_first_lines_say():
    lines = (decoder.__doc__ or "").splitlines()
    code = "\n".join(line[4:] for line in lines if line.startswith("    "))
    program = "import sys, torch\nfrom minimind.model.decoder import Decoder, DecoderConfig\n"
    program += f"{code}\nassert 'transformers' not in sys.modules\nprint(tuple(logits_BTV.shape))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "(2, 64, 6400)\n", done.stderr


def test_the_decoder_alone_is_the_one_of_transformers():
    config = DecoderConfig(V, 48, num_hidden_layers=3, num_attention_heads=6, qk_norm=True)
    torch.manual_seed(1)
    alone = Decoder(config).reset_parameters()
    model = MiniMindModel(MiniMindConfig(**vars(config)))
    model.load_state_dict(alone.state_dict())
    ids = torch.randint(V, (2, 20))
    assert torch.equal(alone(ids), model(ids).last_hidden_state)
    assert torch.equal(alone(alone.embed_tokens(ids)), alone(ids))
    written_out = Decoder(replace(config, use_flash_attn=False))
    written_out.load_state_dict(alone.state_dict())
    torch.testing.assert_close(written_out(ids), alone(ids), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_decoder_alone_is_exported_for_every_length():
    """Also for lengths beyond that of the example, without a limit that the table would set."""
    alone = Decoder(DecoderConfig(V, 48, num_hidden_layers=1, max_position_embeddings=32))
    alone.reset_parameters().eval()
    dims = ({0: Dim("B"), 1: Dim("T")},)
    graph = torch.export.export(alone, (torch.zeros(2, 8, dtype=torch.long),), dynamic_shapes=dims)
    ids = torch.randint(V, (3, 32), generator=torch.manual_seed(1))
    torch.testing.assert_close(graph.module()(ids), alone(ids), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="position 32 is beyond"):
        alone(ids.repeat(1, 2)[:, :33])


def test_weights_of_the_decoder_alone_are_drawn_as_those_of_a_model():
    config = DecoderConfig(512, 192, num_attention_heads=6, qkv_bias=True)
    model = MiniMindModel(MiniMindConfig(**vars(config)))
    for name, weight in Decoder(config).reset_parameters().state_dict().items():
        theirs = model.state_dict()[name]
        if weight.ndim == 1:
            assert torch.equal(weight, theirs)
        else:
            assert float(weight.std()) == pytest.approx(float(theirs.std()), rel=0.03)
