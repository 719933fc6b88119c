"""What a tensor-parallel rank holds and sends."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from minimind.architecture.costs import Layout, bytes_sent, memory, own_part, saving_bytes
from minimind.architecture.plan import Machine, plan
from minimind.architecture.shape import shape_of
from minimind.config.parse import parse_flags

SHAPE = "--dim 64 --n_layers 2 --n_heads 4 --n_kv_heads 2 --hidden_dim 192 --vocab_size 600"


def test_a_rank_has_the_whole_embedding_and_norms_and_a_part_of_each_matrix():
    shape = shape_of(parse_flags(SHAPE.split()))
    part, ranks = own_part(shape, Layout(2, 4, "bfloat16", 2, tensor=2))
    matrices = shape.hidden_matrices
    assert part.parameters == shape.parameters - matrices // 2
    assert ranks.world_size == 2


def test_seven_all_reduces_of_a_block_and_micro_batch_are_sent():
    shape = shape_of(parse_flags(f"{SHAPE} --max_seq_len 32".split()))
    layout = Layout(2, 2, "float32", rows=3, accumulation_steps=2, tensor=2)
    one = 4 * 3 * 32 * 64
    assert bytes_sent(shape, layout) == 2 * 2 * 7 * one  # and no gradients: one group


def test_a_plan_counts_groups_and_names_no_other_stage():
    text = plan(
        f"{SHAPE} --dtype float32 --tensor_parallel 2 --batch_size 4".split(),
        Machine(gpus=4, memory=2**30),
    )
    assert "x 2 processes" in text
    rows = re.findall(r"^[* ](?:ZeRO|DDP).*", text, re.M)
    assert [row.split()[0] for row in rows] == ["*ZeRO-2"]
    assert rows[0].endswith(" yes")
    assert "Recommended" not in text


def test_a_plan_has_a_total_and_says_what_does_not_fit():
    flags = f"{SHAPE} --dtype bfloat16 --tensor_parallel 2 --batch_size 64 --max_seq_len 2048"
    text = plan(flags.split(), Machine(gpus=4, memory=2**28))
    (row,) = re.findall(r"^\*ZeRO-2.*", text, re.M)
    numbers = [0.0 if word == "-" else float(word) for word in row.split()[1:8]]
    model, optimizer, gradients, buffers, activations, update, total = numbers
    backward = gradients + buffers + activations
    assert total == pytest.approx(model + optimizer + max(backward, update), abs=0.1)
    assert row.endswith(" no")


def test_whole_rows_of_o_and_down_are_gathered_to_save_them():
    """64 x (64 + 192) weights, their average and moments; 192 x 64 at once."""
    shape = shape_of(parse_flags(SHAPE.split()))
    layout = Layout(0, 4, "float32", rows=1, averages=True, tensor=2)
    part, ranks = own_part(shape, layout)
    kept = 4 * 4 * 2 * 64 * (64 + 192) // 2 // 2
    assert saving_bytes(part, ranks) == kept + 4 * 64 * 192 // 2
    assert saving_bytes(part, replace(ranks, stage=2)) == kept + 4 * 64 * 192
    assert memory(shape, layout).update >= saving_bytes(part, ranks)
