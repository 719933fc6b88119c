"""The nearest right configuration to each refusal is accepted; a refusal is reported once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minimind.config.deepspeed import backend_choice
from minimind.config.deepspeed.backend_choice import with_choices, with_compile
from minimind.config.deepspeed.document import put
from minimind.config.deepspeed.resolve import ResolvedConfig, resolve
from minimind.config.launcher_env import read_launch
from minimind.config.parse import parse_flags
from minimind.config.rules import with_dtype
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.errors import UsageError
from tests.config.notices import notices_of
from tools.runs import MEETING

RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
ENGAGED = {**RANKS, **MEETING, "ACCELERATE_USE_DEEPSPEED": "true"}


OFFLOAD = {"device": "cpu"}
ZERO = "zero_optimization."


def resolved(line: str, edits: dict[str, Any], device: str = "cpu", **more: Any) -> ResolvedConfig:
    """The shipped file with these edits, for two processes."""
    config = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
    for key, value in edits.items():
        put(config, key, value)
    run = with_dtype(parse_flags(line.split()), device, has_bf16=True)
    return resolve(config, "ds.json", run, 2, device, **more)


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


# Beside the neighbours in tests/refusals.
RIGHT = {
    "optimizer offload at stage 2": {f"{ZERO}offload_optimizer": OFFLOAD},
    "no offload at stage 0": {f"{ZERO}stage": 0, f"{ZERO}offload_optimizer": {"device": "none"}},
    "offload of nothing": {f"{ZERO}offload_optimizer": None},
    "no gradient norm at stage 2": {f"{ZERO}compute_grad_norm": False, "gradient_clipping": 0.0},
    "both precisions off": {"bf16.enabled": False, "fp16.enabled": False},
    "a tensor group of one": {"tensor_parallel.autotp_size": 1},
    "batch of two factors": {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
    },
}


@pytest.mark.parametrize("right", RIGHT.values(), ids=RIGHT.keys())
def test_the_neighbour_of_a_refusal_is_taken(right: dict[str, Any]):
    assert resolved("", right).backend == "deepspeed"


@pytest.mark.parametrize(
    ("line", "total", "batch_size", "accumulation_steps"),
    [
        ("", 64, 8, 4),  # accumulation is open, and comes first
        ("--batch_size 4", 64, 4, 8),
        ("--accumulation_steps 2", 64, 16, 2),
        ("", 6, 3, 1),  # 6 is no multiple of the 8 x 2 rows of a micro-batch
        ("--batch_size 4 --accumulation_steps 2", 16, 4, 2),
        ("--split_batches --batch_size 4", 64, 4, 16),
    ],
)
def test_a_batch_in_the_file_settles_the_factor_that_no_one_gave(
    line: str, total: int, batch_size: int, accumulation_steps: int
):
    found = resolved(line, {"train_batch_size": total})
    assert (found.run.batch_size, found.run.accumulation_steps) == (batch_size, accumulation_steps)
    assert found.config["train_batch_size"] == total


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("line", ["", "--warmup_steps 5", "--max_steps 30", "--epochs 2"])
def test_a_scheduler_is_taken_before_the_length_of_the_run_is_known(kind: str, line: str):
    assert resolved(line, scheduler(kind)).scheduler == kind


def test_a_warm_up_of_the_file_is_not_compared_with_steps_that_are_not_counted():
    with pytest.raises(UsageError) as caught:
        resolved("--epochs 1 --warmup_steps 5", scheduler("WarmupDecayLR", warmup_num_steps=10))
    assert "warmup_num_steps is 10 but --warmup_steps says" in str(caught.value)
    assert "total_num_steps" not in str(caught.value)


def test_a_warm_up_as_long_as_max_steps_is_taken():
    found = resolved("--max_steps 10", scheduler("WarmupLR", warmup_num_steps=10))
    assert (found.run.warmup_steps, found.run.max_steps) == (10, 10)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_float16_is_taken_on_a_gpu_from_stage_1(stage: int):
    found = resolved("--dtype float16", {f"{ZERO}stage": stage}, device="cuda")
    assert found.config["fp16"]["enabled"] is True


def test_a_model_that_deepspeed_counts_is_not_compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backend_choice, "compiler_fault", lambda *_: "")
    block = {"flops_profiler.enabled": True}
    with pytest.raises(UsageError, match=r"flops_profiler.enabled .* remove --compile"):
        resolved("--compile on", block)
    assert resolved("--compile on", {"flops_profiler.enabled": False}).run.compile == "on"
    assert with_compile(resolved("", block, "cuda"), "cuda").run.compile == "off"
    assert with_compile(resolved("", {}, "cuda"), "cuda").run.compile == "on"


def test_a_model_whose_modules_have_hooks_of_stage_3_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(backend_choice, "compiler_fault", lambda *_: "")
    with pytest.raises(
        UsageError, match=r"stage is 3, .* compile = on \(--compile\) .* remove --compile"
    ):
        resolved("--compile on", {"zero_optimization.stage": 3})
    for stage in (0, 1, 2):
        found = resolved("--compile on", {"zero_optimization.stage": stage})
        assert found.run.compile == "on"


def test_a_precision_of_the_file_names_its_own_block():
    found = resolved("", {"fp16.enabled": True}, device="cuda").run
    assert (found.dtype, found.sources["dtype"]) == ("float16", "ds.json: fp16.enabled")
    found = resolved("", {"bf16.enabled": False}).run
    assert (found.dtype, found.sources["dtype"]) == ("float32", "ds.json: bf16.enabled")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_of_the_file_is_no_conflict_with_accelerates_default(stage: int):
    launch = read_launch(ENGAGED)
    assert resolved("", {f"{ZERO}stage": stage}, launch=launch).zero_stage == stage


def test_an_accelerate_yaml_that_states_the_same_is_no_conflict():
    variables = {
        "DEEPSPEED_ZERO_STAGE": "3",
        "MIXED_PRECISION": "bf16",
        "GRADIENT_CLIPPING": "none",
    }
    launch = read_launch({**ENGAGED, **{f"ACCELERATE_{k}": v for k, v in variables.items()}})
    assert resolved("--dtype bfloat16", {f"{ZERO}stage": 3}, launch=launch).zero_stage == 3


def test_tf32_is_advised_once_where_it_would_help():
    exact = resolved("--dtype float32", {}, device="cuda").run
    assert "--tf32 is several times as fast" in notices_of(exact, "cuda")
    for words in ("--dtype float32 --tf32", "--dtype float32 --no-tf32", ""):
        assert "--tf32" not in notices_of(resolved(words, {}, device="cuda").run, "cuda")
    assert "--tf32" not in notices_of(exact, "cpu")


@pytest.mark.parametrize(
    ("words", "device", "loss", "why"),
    [
        ("", "cpu", "full", "no GPU"),
        ("--compile on", "cpu", "full", "no GPU"),
        ("--compile on", "cuda", "full", "compiled"),
        ("--compile off", "cuda", "chunked", "not compiled"),
    ],
)
def test_logits_of_all_positions_are_not_widened_on_a_gpu(
    words: str, device: str, loss: str, why: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backend_choice, "compiler_fault", lambda *_: "")
    found = with_choices(ResolvedConfig(parse_flags(words.split()), "single"), device).run
    assert (found.loss, found.sources["loss"]) == (loss, f"derived: {why}")
    for requested in ("full", "chunked"):
        run = parse_flags([*words.split(), "--loss", requested])
        assert with_choices(ResolvedConfig(run, "single"), device).run.loss == requested
