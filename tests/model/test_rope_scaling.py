"""Frequencies of a longer context against transformers' own, refusals, and a needle far away."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from benchmarks.needle import FACTOR, LENGTH, extended, share_found, trained
from minimind.config.flags import FLAGS
from minimind.model.configuration import MiniMindConfig
from minimind.model.rotary import KINDS, LLAMA3, build_pos_cis, rotary_frequencies
from minimind.model.sizes import MAX_FACTOR


def scaling(kind: str, factor: float = 4.0, length: int = 32) -> dict[str, Any]:
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": length}


def theirs(
    kind: str, head_dim: int, theta: float, factor: float, length: int, positions: float
) -> tuple[torch.Tensor, float]:
    """Frequencies and attention scaling of transformers for an input of `positions`."""
    values: dict[str, Any] = {"rope_type": kind, "factor": factor, "rope_theta": theta}
    if kind in ("yarn", "llama3"):
        values["original_max_position_embeddings"] = length
    if kind == "llama3":
        values |= LLAMA3
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=length,
        rope_parameters=values,
    )
    return ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=positions)


@pytest.mark.sample(8)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("theta", [50.0, 1e4, 1e6])
@pytest.mark.parametrize("length", [32, 512, 8192])
@pytest.mark.parametrize("factor", [1.5, 4.0, 40.0])
def test_frequencies_and_mscale_are_those_of_transformers(head_dim, theta, length, factor):
    """Dynamic NTK scaling reaches our ntk at (2 - 1/factor) times the trained length."""
    reached = {"linear": 1.0, "yarn": 1.0, "llama3": 1.0, "dynamic": 2 - 1 / factor}
    found = {}
    for kind, share in reached.items():
        expected, mscale = theirs(kind, head_dim, theta, factor, length, share * length)
        given = scaling("ntk" if kind == "dynamic" else kind, factor, length)
        ours, our_mscale = rotary_frequencies(head_dim, theta, given)
        torch.testing.assert_close(ours, expected.double(), rtol=3e-6, atol=0)
        assert our_mscale == mscale
        found[kind] = ours
    plain, _ = rotary_frequencies(head_dim, theta, None)
    assert found["linear"][0] == plain[0] / factor
    assert found["dynamic"][0] == plain[0]
    assert found["dynamic"][-1] == pytest.approx(float(plain[-1]) / factor)


def test_the_table_turns_by_the_scaled_angles_and_has_the_length_mscale():
    for kind in ("linear", "ntk", "llama3", "yarn"):
        frequencies, mscale = rotary_frequencies(8, 1e4, scaling(kind))
        table = build_pos_cis(8, 128, 1e4, scaling(kind))
        angles = torch.arange(128).double()[:, None] * frequencies
        expected = torch.polar(mscale * torch.ones_like(angles), angles).to(torch.complex64)
        assert torch.equal(table, expected)
        assert not torch.equal(table, build_pos_cis(8, 128, 1e4))
    assert mscale == 0.1 * math.log(4) + 1  # of yarn, the last


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"rope_type": "dynamic"},
            "rope_type='dynamic' of rope_scaling is not one of linear, ntk, y",
        ),
        ({"factor": None}, "factor=None of rope_scaling is not a number from 1"),
        ({"factor": math.inf}, "factor=inf of rope_scaling"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings=0"),
        ({"rope_type": "ntk", "n_heads": 16}, "more than one pair of channels"),
        ({"rope_theta": 1.0}, "rope_theta above 1, and it is 1"),
    ],
)
def test_impossible_scaling_is_refused_in_one_sentence(values, sentence):
    shape = {name: values.pop(name) for name in ("n_heads", "rope_theta") if name in values}
    shape = {"dim": 32, "n_heads": 4, "n_kv_heads": 1, **shape}
    with pytest.raises(ValueError, match=sentence):
        MiniMindConfig(**shape, rope_scaling={**scaling("yarn"), **values})


def test_flags_and_model_have_the_same_kinds_and_limit():
    assert FLAGS["rope_scaling"].choices == KINDS
    assert FLAGS["rope_factor"].le == MAX_FACTOR


@pytest.mark.long
def test_a_scaled_model_finds_the_needle_where_the_unscaled_one_does_not():
    """In rows of four times the trained length, without more training; chance is 1 in 62."""
    model = trained(seed=0, steps=700)
    assert share_found(model, LENGTH) > 0.9
    found = {kind: share_found(extended(model, kind), FACTOR * LENGTH) for kind in (None, "yarn")}
    assert found[None] < 0.4
    assert found["yarn"] > found[None] + 0.25
