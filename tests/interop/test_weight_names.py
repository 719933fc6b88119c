"""Names and layouts elsewhere: the way there and back, and what the layouts mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minimind.interop.formats import FORMATS
from minimind.interop.tensor_sources import TensorSource
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.model.decoder import apply_rotary
from minimind.model.rotary import build_pos_cis, half_to_interleaved, interleaved_to_half

MINIMIND2 = FORMATS["minimind2"]


def paired(name: str, weight: torch.Tensor, convert: Callable[..., torch.Tensor]) -> torch.Tensor:
    source = TensorSource(Path(), {name: [*weight.shape]}, {name: weight.dtype}, lambda _: weight)
    return source.paired(convert, 8).read(name)


@pytest.fixture(scope="module")
def names() -> list[str]:
    with torch.device("meta"):
        config = MiniMindConfig(num_hidden_layers=2, qk_norm=True, tie_word_embeddings=False)
        return list(MiniMindForCausalLM(config).state_dict())


def test_minimind2_names_of_a_dense_model(names):
    dense = [name for name in names if "q_norm" not in name and "k_norm" not in name]
    theirs = [MINIMIND2.from_ours(name) for name in dense]
    assert theirs[-2:] == ["norm.weight", "output.weight"]
    assert {"layers.1.attention.wq.weight", "layers.0.feed_forward.w2.weight"} < {*theirs}


@pytest.mark.parametrize(
    "name", ["layers.0.feed_forward.gate.weight", "layers.x.wq.weight", "mask"]
)
def test_tensors_outside_dense_minimind2_have_no_name_here(name):
    assert MINIMIND2.to_ours(name) is None


@pytest.mark.parametrize("form", [form for form in FORMATS.values() if form.origins])
def test_names_of_a_format_that_is_read_are_invertible(form, names):
    dense = [name for name in names if "q_norm" not in name and "k_norm" not in name]
    assert [form.to_ours(form.from_ours(name)) for name in dense] == dense


@pytest.mark.parametrize("side", ["q_proj", "k_proj", "q_norm", "k_norm"])
def test_layout_conversion_is_invertible(side):
    name = f"model.layers.3.self_attn.{side}.weight"
    weight = torch.randn(3 * 8, 5) if side.endswith("proj") else torch.randn(8)
    there = paired(name, weight, interleaved_to_half)
    assert not torch.equal(there, weight)
    assert torch.equal(paired(name, there, half_to_interleaved), weight)


def test_value_and_output_projections_keep_their_layout():
    weight = torch.randn(16, 16)
    for side in ("v_proj", "o_proj"):
        assert (
            paired(f"model.layers.0.self_attn.{side}.weight", weight, interleaved_to_half) is weight
        )


def test_converted_rows_match_rotate_half_rotations():
    """cos and sin of j turn channels j and j + D/2, as Hugging Face's Llama has it."""
    width, heads, theta, positions = 8, 3, 100.0, 11
    weight, x = torch.randn(heads * width, 5), torch.randn(positions, 5)
    ours = apply_rotary(
        (x @ weight.T).view(1, positions, heads, width), build_pos_cis(width, positions, theta)
    )
    turned = interleaved_to_half(weight, width)
    angles = torch.arange(positions)[:, None] * theta ** (-torch.arange(0, width, 2) / width)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = (x @ turned.T).view(positions, heads, width).chunk(2, -1)
    theirs = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    back = half_to_interleaved(theirs.flatten(1).T, width)
    torch.testing.assert_close(back.T.view(1, positions, heads, width), ours)
