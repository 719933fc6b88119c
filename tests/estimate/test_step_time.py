"""The estimate of a step's time: its FLOPs, launches and bytes against the graphs that torch builds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from minimind.cli.main import main
from minimind.config.parse import parse_flags
from minimind.estimate.costs import Layout, flops_per_token
from minimind.estimate.gpus import GPUS, known_gpu
from minimind.estimate.shape import Shape, shape_of
from minimind.estimate.step_time import (
    ASSUMED,
    DATA_SHEET,
    LAUNCHES,
    UPDATE_LAUNCHES,
    step_launches,
    step_time,
    step_work,
)

H100, H200 = (gpu for name in ("H100", "H200") if (gpu := known_gpu(name)))
LAYOUT = Layout(None, 1, "bfloat16", 32)


def shape(name: str = "26m") -> Shape:
    return replace(shape_of(parse_flags(["--model", name])), max_seq_len=1024)


def test_products_and_attention_have_the_flops_that_mfu_counts_but_for_causal_attention():
    flops: Counter[str] = Counter()
    for work in step_work(shape(), LAYOUT):
        flops[work.part] += int(work.flops)
    tokens = 32 * 1024
    attention = 12 * 8 * 512 * 1024 * tokens
    counted = flops["products"] + flops["head"]
    assert counted + attention == flops_per_token(shape()) * tokens
    # half of the positions; 2 products forward, 5 with the recomputed scores backward, of 4 + 8
    assert flops["attention"] == attention * 7 / 12


@pytest.mark.parametrize("name", ["26m", "104m", "0.4b"])
@pytest.mark.parametrize("how", ["compiled", "eager"])
def test_no_estimate_exceeds_the_data_sheet_and_more_bandwidth_is_faster(name: str, how: str):
    least, likely = (step_time(shape(name), LAYOUT, H100, r, how) for r in (DATA_SHEET, ASSUMED))
    assert 0 < likely.mfu < least.mfu < 1
    assert step_time(shape(name), LAYOUT, H200, ASSUMED, how).mfu > likely.mfu
    assert step_time(shape(name), LAYOUT, H100, ASSUMED, "eager").mfu <= likely.mfu


def test_accumulation_spreads_the_update_over_more_tokens():
    few = step_time(shape("0.4b"), replace(LAYOUT, rows=8), H100)
    many = step_time(shape("0.4b"), replace(LAYOUT, rows=8, accumulation_steps=8), H100)
    assert many.parts["update"] < 2 * few.parts["update"]
    assert many.mfu > few.mfu + 0.05
    assert many.launches - UPDATE_LAUNCHES == 8 * (few.launches - UPDATE_LAUNCHES)


def test_a_small_step_is_bound_by_launches():
    small = step_time(shape(), replace(LAYOUT, rows=1), H100)
    assert small.bound == "launches"
    assert small.seconds == small.host
    assert step_time(shape(), LAYOUT, H100).bound == "products"


def planned(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert main(["plan", *words.split()]) == 0
    return capsys.readouterr().out


def test_plan_estimates_a_step_of_a_named_gpu(capsys: pytest.CaptureFixture[str]):
    words = "--model 26m --max_seq_len 1024 --batch_size 32 --deepspeed_config none"
    out = planned(capsys, f"{words} --gpu_model H100 --tokens 1e9")
    likely = step_time(shape(), LAYOUT, H100)
    assert f"{likely.seconds * 1e3:.1f} ms ({likely.mfu:.0%})" in out
    assert "not measured" in out
    assert "1 x 989.4 TFLOPS" in out
    assert "estimate" not in planned(capsys, words)
    assert "H100, eager" in planned(capsys, f"{words} --gpu_model H100 --compile off")


@pytest.mark.parametrize("more", ["--use_moe", "--doc_mask", "--dtype float32", "--device cpu"])
def test_plan_says_where_there_is_no_estimate(capsys: pytest.CaptureFixture[str], more: str):
    assert "estimate    none" in planned(capsys, f"--gpu_model H100 --batch_size 2 {more}")


def test_every_gpu_with_a_bandwidth_can_be_named():
    assert [known_gpu(gpu.name) for gpu in GPUS] == [*GPUS]
