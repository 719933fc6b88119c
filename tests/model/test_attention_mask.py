"""Packed rows under --doc_mask against their documents run apart; and where nothing may change.

Shape letters: B rows, T positions, S keys, V vocabulary.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.model.decoder import apply_rotary
from minimind.model.loss import next_token_loss
from minimind.model.masks import boolean_mask, document_positions, eos_starts

V, T, EOS = 97, 24, 2
LENGTHS = (5, 1, 30, 0, 12, 7, 0, 0, 70, 3, 19)  # some longer than a row, some empty


def build(seed: int = 0, **changes: Any) -> MiniMindForCausalLM:
    shape: dict[str, Any] = {"vocab_size": V, "dim": 48, "n_layers": 3, "n_heads": 6}
    shape |= {"n_kv_heads": 2, "max_seq_len": T, "eos_token_id": EOS, "doc_mask": True}
    torch.manual_seed(seed)
    model = MiniMindForCausalLM(MiniMindConfig(**{**shape, **changes}))
    with torch.no_grad():  # large enough that every part changes the gradients
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape)
            weight.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model


def like(model: MiniMindForCausalLM, **changes: Any) -> MiniMindForCausalLM:
    other = build(**changes)
    other.load_state_dict(model.state_dict())
    return other


def packed(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """Documents, each with its eos behind it, cut into rows of T + 1 tokens."""
    draw = torch.manual_seed(3)
    eos = torch.tensor([EOS])
    documents = [torch.randint(4, V, (n,), generator=draw) for n in lengths]
    stream = torch.cat([part for document in documents for part in (document, eos)])
    return stream[: len(stream) // (T + 1) * (T + 1)].view(-1, T + 1)


def pieces(row: Tensor) -> list[Tensor]:
    """The streams of one row: what goes on from the row before, then [eos, tokens...] each.

    Each overlaps the next by the eos, which is the last target of one and the first input of the
    other.
    """
    starts = [at for at in range(1, T) if row[at] == EOS]
    return [row[a : b + 1] for a, b in zip([0, *starts], [*starts, T], strict=True)]


def gradients(model: MiniMindForCausalLM, streams: list[Tensor]) -> tuple[int, dict[str, Tensor]]:
    """Of the summed loss; and how many targets it sums."""
    model.zero_grad()
    count = 0
    for stream in streams:
        stream = stream if stream.dim() == 2 else stream[None]
        loss_sum, targets = next_token_loss(model(stream[:, :-1]).logits, stream[:, 1:])
        loss_sum.backward()
        count += int(targets)
    return count, {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def test_the_rows_have_documents_of_every_kind():
    rows = packed()
    assert len(rows) == 6
    assert any(row[0] != EOS and EOS in row[1:T] for row in rows)  # begun in the row before
    assert any(EOS not in row for row in rows)  # a document longer than a row
    assert any(row[at] == row[at + 1] == EOS for row in rows for at in range(T))  # an empty one


@pytest.mark.parametrize("use_flash_attn", [True, False])
@pytest.mark.parametrize("n_kv_heads", [6, 2, 1])
def test_gradients_equal_those_of_the_documents_run_apart(use_flash_attn: bool, n_kv_heads: int):
    model = build(use_flash_attn=use_flash_attn, n_kv_heads=n_kv_heads)
    plain = like(model, use_flash_attn=use_flash_attn, n_kv_heads=n_kv_heads, doc_mask=False)
    rows = packed()
    count, found = gradients(model, [rows])
    apart = [piece for row in rows for piece in pieces(row)]
    assert len(apart) > len(rows)
    expected_count, expected = gradients(plain, apart)
    assert count == expected_count == rows.shape[0] * T  # no target is lost
    _, unmasked = gradients(plain, [rows])
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        assert scale > 1e-3
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * scale)
    assert any((unmasked[n] - g).abs().max() > 1e-2 * g.abs().max() for n, g in expected.items())


@pytest.mark.parametrize("use_flash_attn", [True, False])
def test_rows_without_a_border_are_what_they_are_without_the_mask(use_flash_attn: bool):
    model = build(use_flash_attn=use_flash_attn)
    plain = like(model, use_flash_attn=use_flash_attn, doc_mask=False)
    rows = torch.randint(4, V, (3, T + 1), generator=torch.manual_seed(5))
    _, found = gradients(model, [rows])
    _, expected = gradients(plain, [rows])
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6 * scale)
    with torch.no_grad():
        rows[:, 0] = EOS  # a border at which nothing stands before
        torch.testing.assert_close(
            model(rows[:, :-1]).logits, plain(rows[:, :-1]).logits, rtol=1e-5, atol=1e-5
        )


def test_positions_begin_again_at_each_border():
    ids = torch.tensor([[9, 9, EOS, 9, 9, EOS, EOS, 9], [EOS, 9, 9, 9, 9, 9, 9, EOS]])
    starts = eos_starts(ids, None, EOS)
    positions = document_positions(0, None, starts)
    assert positions is not None
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 0]]
    mask = boolean_mask(8, 0, None, starts, ids.device)
    assert mask is not None
    assert mask.shape == (2, 1, 8, 8)
    assert mask[0, 0].int().tolist() == [
        *([1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]),
        *([0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1, 0, 0]),
        *([0, 0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1, 1]),
    ]


@torch.no_grad()
def test_those_positions_are_what_queries_and_keys_are_turned_by(monkeypatch: pytest.MonkeyPatch):
    seen = []

    def watched(x: Tensor, pos_cis: Tensor) -> Tensor:
        seen.append(pos_cis)
        return apply_rotary(x, pos_cis)

    monkeypatch.setattr("minimind.model.decoder.apply_rotary", watched)
    model, ids = build(), torch.tensor([[9, 9, EOS, 9, 9, EOS, EOS, 9]])
    model(ids)
    assert len(seen) == 6  # no logit could show it: turns matter by their differences alone
    expected = model.model.pos_cis[torch.tensor([[0, 1, 0, 1, 2, 0, 0, 1]])]
    for pos_cis in seen:
        assert torch.equal(torch.view_as_real(pos_cis), torch.view_as_real(expected))


def test_padding_is_no_border_and_takes_no_position():
    ids = torch.tensor([[EOS, EOS, 9, 9, EOS, 9], [9, 9, EOS, 9, EOS, EOS]])
    real = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    starts = eos_starts(ids, real, EOS)
    positions = document_positions(0, real, starts)
    assert positions is not None
    assert positions[real.bool()].tolist() == [0, 1, 0, 1, 0, 1, 0, 1]


@torch.no_grad()
@pytest.mark.parametrize("use_flash_attn", [True, False])
def test_padded_rows_of_documents_give_the_logits_of_unpadded_ones(use_flash_attn: bool):
    model = build(use_flash_attn=use_flash_attn)
    rows = packed()[:3, :-4]
    padded = torch.full((3, T), EOS)
    real = torch.zeros(3, T, dtype=torch.long)
    for number, (row, left) in enumerate(zip(rows, (0, 2, 3), strict=True)):
        padded[number, left : left + len(row)], real[number, left : left + len(row)] = row, 1
    found = model(padded, real).logits[real.bool()]
    torch.testing.assert_close(found, model(rows).logits.flatten(0, 1), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_one_mask_is_made_for_all_layers(monkeypatch: pytest.MonkeyPatch):
    seen = []

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.append(options["attn_mask"])
        return attention(q, k, v, **options)

    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    model = build()
    model(packed()[:, :-1])
    assert len(seen) == 3
    assert len({id(mask) for mask in seen}) == 1
    assert seen[0].shape == (6, 1, T, T)
    assert seen[0].dtype == torch.float32  # a bool one would become another in every layer


@torch.no_grad()
def test_what_is_cached_is_not_masked_and_a_prompt_of_one_document_is_as_without():
    model: Any = build().eval()
    plain: Any = like(model, doc_mask=False).eval()
    prompt = torch.randint(4, V, (1, 6), generator=torch.manual_seed(6))
    for options in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(prompt)}):
        found, expected = (
            one.generate(
                prompt,
                max_new_tokens=8,
                do_sample=False,
                pad_token_id=3,
                eos_token_id=-1,
                **options,
            )
            for one in (model, plain)
        )
        assert found.tolist() == expected.tolist()
    two_documents = packed()[:2, :-1]
    caches = [DynamicCache(config=one.config) for one in (model, plain)]
    for ids in two_documents.split((9, 1, 14), dim=1):
        found, expected = (
            one(ids, past_key_values=cache).logits
            for one, cache in zip((model, plain), caches, strict=True)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.allclose(model(two_documents).logits, plain(two_documents).logits)


def test_bfloat16_with_checkpointed_layers_gives_finite_gradients_near_those_of_float32():
    model = build()
    exact = gradients(model, [packed()])[1]
    low: Any = like(model)
    low.to(torch.bfloat16)
    for block in low.model.layers:
        forward = block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False)
    found = gradients(low, [packed()])[1]
    for name, gradient in exact.items():
        difference = (found[name].float() - gradient).norm() / gradient.norm()
        assert difference < 0.1, (name, float(difference))


def test_float32_weights_under_autocast_take_the_same_mask():
    model, rows = build(), packed()[:, :-1]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = model(rows).logits
    assert found.dtype == torch.bfloat16
    with torch.no_grad():
        expected = model(rows).logits
    assert (found.float() - expected).norm() < 0.1 * expected.norm()


@torch.no_grad()
def test_a_compiled_model_masks_in_one_graph():
    model, rows = build(), packed()[:, :-1]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(rows).logits, model(rows).logits, rtol=1e-5, atol=1e-5)


def test_a_saved_model_masks_as_before(tmp_path: Path):
    model = build()
    model.save_pretrained(tmp_path)
    loaded = MiniMindForCausalLM.from_pretrained(tmp_path)
    assert (loaded.config.doc_mask, loaded.config.eos_token_id) == (True, EOS)
    rows = packed()[:, :-1]
    with torch.no_grad():
        torch.testing.assert_close(loaded(rows).logits, model(rows).logits, rtol=0, atol=0)


def test_a_mask_without_an_end_of_document_is_refused():
    with pytest.raises(ValueError, match="doc_mask=True needs an eos_token_id"):
        MiniMindConfig(doc_mask=True, eos_token_id=None)
