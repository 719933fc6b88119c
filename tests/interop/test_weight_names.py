"""Names and layouts elsewhere: the way there and back, and what the layouts mean."""

from __future__ import annotations

import pytest
import torch

from minimind.interop.tensor_sources import (
    from_minimind2,
    to_gguf,
    to_interleaved,
    to_minimind2,
    to_rotate_half,
)
from minimind.model.configuration import MiniMindConfig
from minimind.model.decoder import MiniMindForCausalLM
from minimind.model.rotary import apply_rotary, build_pos_cis


@pytest.fixture(scope="module")
def names() -> list[str]:
    with torch.device("meta"):
        config = MiniMindConfig(num_hidden_layers=2, qk_norm=True, tie_word_embeddings=False)
        return list(MiniMindForCausalLM(config).state_dict())


def test_minimind2_names_of_a_dense_model_are_unique_and_invertible(names):
    dense = [name for name in names if "q_norm" not in name and "k_norm" not in name]
    theirs = [to_minimind2(name) for name in dense]
    assert None not in theirs
    assert [from_minimind2(name) for name in theirs if name] == dense
    assert to_minimind2("model.layers.1.self_attn.q_proj.weight") == "layers.1.attention.wq.weight"
    assert to_minimind2("model.layers.0.mlp.down_proj.weight") == "layers.0.feed_forward.w2.weight"


@pytest.mark.parametrize(
    "name", ["layers.0.feed_forward.gate.weight", "layers.x.wq.weight", "mask"]
)
def test_tensors_outside_dense_minimind2_have_no_name_here(name):
    assert from_minimind2(name) is None


def test_gguf_names_are_those_of_the_gguf_package(names):
    gguf = pytest.importorskip("gguf")
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    for name in names:
        assert to_gguf(name) == known.get_name(name.removesuffix(".weight")) + ".weight"
    assert to_gguf("model.layers.0.mlp.experts.0.up_proj.weight") is None


@pytest.mark.parametrize("side", ["q_proj", "k_proj", "q_norm", "k_norm"])
def test_layout_conversion_is_invertible(side):
    name = f"model.layers.3.self_attn.{side}.weight"
    weight = torch.randn(3 * 8, 5) if side.endswith("proj") else torch.randn(8)
    there = to_rotate_half(name, weight, 8)
    assert not torch.equal(there, weight)
    assert torch.equal(to_interleaved(name, there, 8), weight)


def test_value_and_output_projections_keep_their_layout():
    weight = torch.randn(16, 16)
    for side in ("v_proj", "o_proj"):
        assert to_rotate_half(f"model.layers.0.self_attn.{side}.weight", weight, 8) is weight


def test_converted_rows_match_rotate_half_rotations():
    """cos and sin of j turn channels j and j + D/2, as Hugging Face's Llama has it."""
    width, heads, theta, positions = 8, 3, 100.0, 11
    weight, x = torch.randn(heads * width, 5), torch.randn(positions, 5)
    ours = apply_rotary(
        (x @ weight.T).view(1, positions, heads, width), build_pos_cis(width, positions, theta)
    )
    turned = to_rotate_half("model.layers.0.self_attn.q_proj.weight", weight, width)
    angles = torch.arange(positions)[:, None] * theta ** (-torch.arange(0, width, 2) / width)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = (x @ turned.T).view(positions, heads, width).chunk(2, -1)
    theirs = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    back = to_interleaved("model.layers.0.self_attn.q_proj.weight", theirs.flatten(1).T, width)
    torch.testing.assert_close(back.T.view(1, positions, heads, width), ours)
