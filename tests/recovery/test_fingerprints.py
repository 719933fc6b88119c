"""The numbers of a fingerprint add up, and see what is exchanged."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from minimind.model.causal_lm import MiniMindForCausalLM, enable_checkpointing
from minimind.model.configuration import MiniMindConfig
from minimind.recovery.fingerprints import WIDTH, Recorder, line_of, place_of, watched

SHAPE = {"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 50}
WEIGHT = torch.linspace(-1, 2, 3 * WIDTH + 77)


def of_weight(*starts: int) -> Any:
    """The numbers of WEIGHT, added in slices that begin at `starts`."""
    recorder = Recorder()
    ends = [*starts[1:], len(WEIGHT)]
    for start, end in zip(starts, ends, strict=True):
        recorder.add("fp32", "model.layers.0.mlp.up_proj.weight", WEIGHT[start:end], start)
    return recorder.end()["fp32", "model.layers.0.mlp"]


@pytest.mark.parametrize("starts", [(0, 1), (0, WIDTH), (0, 700, WIDTH + 3, 3 * WIDTH + 1)])
def test_the_numbers_of_slices_are_those_of_the_whole(starts: tuple[int, ...]):
    assert of_weight(*starts) == pytest.approx(of_weight(0), rel=1e-5)


def test_the_projection_sees_two_exchanged_elements(monkeypatch: pytest.MonkeyPatch):
    whole = of_weight(0)
    monkeypatch.setattr(f"{__name__}.WEIGHT", WEIGHT[[1, 0, *range(2, len(WEIGHT))]])
    squares, total, projection = of_weight(0)
    assert (squares, total) == pytest.approx(whole[:2])
    assert abs(projection - whole[2]) > 1e-5


def model_of() -> MiniMindForCausalLM:
    torch.manual_seed(1)
    return MiniMindForCausalLM(MiniMindConfig(**SHAPE, max_seq_len=12))


def passes(
    model: nn.Module, *micro_batches: torch.Tensor, first_row: int = 0, stop: int = sys.maxsize
) -> Any:
    """The numbers of the forward passes over rows (B, T + 1)."""
    recorder = Recorder(model)
    recorder.begin(range(first_row, stop))
    for rows in micro_batches:
        out = model(input_ids=rows[:, :-1], shift_labels=rows[:, 1:])
        out.loss.backward()
    return recorder.end()


def test_micro_batches_and_ranks_have_the_numbers_of_the_whole_step():
    model, rows = model_of().train(), torch.arange(4 * 13).view(4, 13) * 7 % 50
    whole = passes(model, rows)
    assert [place for _, place in whole][2:] == [
        "model.embed_tokens",
        *(
            f"model.layers.{n}{part}"
            for n in (0, 1)
            for part in (
                *(".input_layernorm", ".self_attn", ".post_attention_layernorm", ".mlp", ""),
            )
        ),
        "model.norm",
    ]
    parts = passes(model, rows[:1], rows[1:])
    first, second = passes(model, rows[:2]), passes(model, rows[2:], first_row=2)
    for key, numbers in whole.items():
        near = pytest.approx(numbers, rel=1e-5, abs=1e-6 * numbers[0] ** 0.5)
        assert parts[key] == near, key
        assert [a + b for a, b in zip(first[key], second[key], strict=True)] == near, key
    padding = torch.full((1, 13), 3)  # of a batch that is divided unevenly
    padded = passes(model, rows[:3], torch.cat([rows[3:], padding, padding]), padding, stop=4)
    for key, numbers in whole.items():
        near = pytest.approx(numbers, rel=1e-5, abs=1e-6 * numbers[0] ** 0.5)
        assert padded[key] == near, key
    exchanged = passes(model, rows[[1, 0, 2, 3]])
    assert exchanged["rows", "inputs"][:2] == whole["rows", "inputs"][:2]
    assert exchanged["rows", "inputs"][2] != whole["rows", "inputs"][2]


def test_a_block_that_is_recomputed_counts_once():
    model, rows = model_of().train(), torch.arange(26).view(2, 13)
    whole = passes(model, rows)
    enable_checkpointing(model)
    assert passes(model, rows) == whole


def test_nothing_inside_of_a_graph_is_watched():
    model = model_of()
    inside = watched(model, [*model.model.layers])
    assert [*inside] == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
    assert watched(model, [model]) == {}


def test_places_and_lines():
    assert place_of("model.layers.3.self_attn.q_proj.weight") == "model.layers.3.self_attn"
    assert place_of("model.layers.3.mlp.experts.1.up_proj.weight") == "model.layers.3.mlp"
    assert place_of("model.norm.weight") == "model.norm"
    assert place_of("unused_too") == "unused_too"
    assert line_of(type(model_of().model.layers[0])).startswith("minimind/model/decoder.py:")
    assert line_of(torch.optim.AdamW).startswith("torch/optim/adamw.py:")
