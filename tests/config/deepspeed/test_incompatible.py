"""The nearest right configuration to each refusal is accepted; a refusal is reported once."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest

from minimind.config.deepspeed import backend_choice
from minimind.config.deepspeed.backend_choice import exact_float32, with_choices, with_compile
from minimind.config.deepspeed.resolve import ResolvedConfig, resolve
from minimind.config.deepspeed.values import put
from minimind.config.launcher_env import read_launch
from minimind.config.parse import parse_flags
from minimind.config.rules import with_dtype
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.engine.build import section_faults
from minimind.errors import UsageError

ENGAGED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"}
CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}}
MOVING = {"type": "OneCycle", "params": {**CYCLE["params"], "cycle_momentum": True}}
LIST = {"type": "WarmupLR", "params": {"warmup_max_lr": [1e-3, 1e-3], "warmup_num_steps": 2}}
DECAY = {"type": "WarmupDecayLR", "params": {"total_num_steps": 8}}
OFFLOAD = {"device": "cpu"}
ZERO = "zero_optimization."
PART = {f"{ZERO}offload_optimizer": {**OFFLOAD, "ratio": 0.5}, "optimizer.params.torch_adam": False}


def resolved(line: str, edits: dict[str, Any], device: str = "cpu", **more: Any) -> ResolvedConfig:
    """The shipped file with these edits, for two processes."""
    config = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
    for key, value in edits.items():
        put(config, key, value)
    run = with_dtype(parse_flags(line.split()), device, has_bf16=True)
    return resolve(config, "ds.json", run, 2, device, **more)


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


# Beside the pairs below.
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
# right, wrong by one change, and the words of the refusal
PAIRS = {
    "optimizer offload": (
        {f"{ZERO}stage": 1, f"{ZERO}offload_optimizer": OFFLOAD},
        {f"{ZERO}stage": 0, f"{ZERO}offload_optimizer": OFFLOAD},
        "offload_optimizer (ds.json) needs stage 1 or above and stage is 0 (ds.json); change one",
    ),
    "parameter offload": (
        {f"{ZERO}stage": 3, f"{ZERO}offload_param": OFFLOAD},
        {f"{ZERO}stage": 2, f"{ZERO}offload_param": OFFLOAD},
        "offload_param (ds.json) needs stage 3 or above and stage is 2 (ds.json); change one",
    ),
    "offload to a disk": (
        {f"{ZERO}offload_optimizer": OFFLOAD},
        {f"{ZERO}offload_optimizer": {"device": "nvme"}},
        'offload_optimizer.device is "nvme" (ds.json), of which there are no checkpoints; write',
    ),
    "a part of the optimizer": (
        {**PART, f"{ZERO}stage": 3},
        {**PART, f"{ZERO}stage": 2},
        "offload_optimizer.ratio = 0.5 needs stage 3; remove it",
    ),
    "predivision by stage": (
        {"gradient_predivide_factor": 2.0, f"{ZERO}stage": 1},
        {"gradient_predivide_factor": 2.0, f"{ZERO}stage": 3},
        "gradient_predivide_factor is refused beside reduce_scatter at stage 3; remove it, or",
    ),
    "prescaling by stage": (
        {"prescale_gradients": True, f"{ZERO}stage": 1},
        {"prescale_gradients": True, f"{ZERO}stage": 3},
        "prescale_gradients is refused beside reduce_scatter at stage 3; remove it, or write",
    ),
    "norm of gradients": (
        {f"{ZERO}compute_grad_norm": True, f"{ZERO}stage": 3},
        {f"{ZERO}compute_grad_norm": False, f"{ZERO}stage": 3},
        "compute_grad_norm is false, which stage 3 refuses; remove it",
    ),
    "round robin": (
        {f"{ZERO}round_robin_gradients": True},
        {f"{ZERO}round_robin_gradients": True, f"{ZERO}stage": 3},
        "round_robin_gradients is for stages 1 and 2, and stage is 3; remove it",
    ),
    "fp32 accumulation": (
        {"data_types.grad_accum_dtype": "fp32", f"{ZERO}stage": 1},
        {"data_types.grad_accum_dtype": "fp32", f"{ZERO}stage": 0},
        "grad_accum_dtype is fp32 in bfloat16 at stage 0, which DeepSpeed 0.19.8 has not impl",
    ),
    "warm-up and end": (
        scheduler("WarmupDecayLR", warmup_num_steps=10, total_num_steps=10),
        scheduler("WarmupDecayLR", warmup_num_steps=50, total_num_steps=10),
        "total_num_steps = 10 (ds.json: scheduler.params.total_num_steps) is less than warmup_num",
    ),
    "warm-up of one step": (
        scheduler("WarmupLR", warmup_num_steps=2),
        scheduler("WarmupLR", warmup_num_steps=1),
        "warmup_num_steps = 1, and DeepSpeed's schedulers warm up over 2 steps at least; write",
    ),
    **{
        f"{block} masters": (
            {f"{block}.{block}_master_weights_and_grads": False},
            {f"{block}.{block}_master_weights_and_grads": True},
            f"{block}_master_weights_and_grads gives up the fp32 weights, which every checkpoint",
        )
        for block in ("bf16", "fp16")
    },
    **{
        key: ({key: right}, {key: wrong}, f"{key} is ")
        for key, right, wrong in (
            ("torch_autocast.enabled", False, True),
            ("sequence_parallel_size", 1, 2),
            ("data_parallel_size", 1, 4),
            ("gradient_allreduce_op", "mean", "sum"),
            ("data_efficiency.enabled", False, True),
            ("hybrid_engine.enabled", False, True),
            ("expert_parallel.enabled", False, True),
            ("autotuning.enabled", False, True),
        )
    },
    "gradients that are looked at": (
        {"bf16.check_grad_overflow": True},
        {"bf16.check_grad_overflow": False},
        "check_grad_overflow is false",
    ),
    "predivision without reduce_scatter": (
        {"gradient_predivide_factor": 2.0, f"{ZERO}reduce_scatter": False},
        {"gradient_predivide_factor": 2.0},
        "gradient_predivide_factor",
    ),
    "predivision by one": (
        {"gradient_predivide_factor": 1.0},
        {"gradient_predivide_factor": 1.5},
        "gradient_predivide_factor",
    ),
    "prescaling without reduce_scatter": (
        {"prescale_gradients": True, f"{ZERO}reduce_scatter": False},
        {"prescale_gradients": True},
        "prescale_gradients",
    ),
}


@pytest.mark.parametrize("right", RIGHT.values(), ids=RIGHT.keys())
def test_the_neighbour_of_a_refusal_is_taken(right: dict[str, Any]):
    assert resolved("", right).backend == "deepspeed"


@pytest.fixture(scope="module")
def sections() -> Iterator[Any]:
    """The faults that DeepSpeed's own models find, whose import is full of warnings."""
    with mock.patch.dict(os.environ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            section_faults({}, "ds.json", "cpu")
        yield partial(section_faults, device="cpu")


@pytest.mark.parametrize(("right", "wrong", "words"), PAIRS.values(), ids=PAIRS.keys())
def test_the_closest_right_one_is_taken(
    right: dict[str, Any], wrong: dict[str, Any], words: str, sections: Any
):
    assert resolved("", right, sections=sections).backend == "deepspeed"
    with pytest.raises(UsageError) as caught:
        resolved("", wrong, sections=sections)
    assert words in str(caught.value)
    assert "faults:" not in str(caught.value)


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
    with pytest.raises(
        UsageError, match=r"flops_profiler.enabled .* drop compile = on \(--compile\)"
    ):
        resolved("--compile on", block)
    assert resolved("--compile on", {"flops_profiler.enabled": False}).run.compile == "on"
    assert with_compile(resolved("", block, "cuda"), "cuda").run.compile == "off"
    assert with_compile(resolved("", {}, "cuda"), "cuda").run.compile == "on"


def test_a_model_whose_modules_have_hooks_of_stage_3_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(backend_choice, "compiler_fault", lambda *_: "")
    with pytest.raises(
        UsageError, match=r"zero_optimization.stage is 3 .* drop compile = on \(--compile\)"
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


@pytest.mark.parametrize(
    ("config", "line", "report"),
    [
        ({"scheduler": {"type": "WarmupLR"}}, "--min_lr_ratio 0.5", "min_lr_ratio = 0.5"),
        ({"scheduler": CYCLE}, "--warmup_steps 4", "warmup_steps = 4"),
        ({"scheduler": CYCLE}, "--learning_rate 2e-4", "learning_rate = 0.0002"),
        ({"scheduler": LIST}, "--learning_rate 2e-4", "learning_rate = 0.0002"),
        ({"scheduler": MOVING}, "--beta1 0.8", "beta1 = 0.8"),
        ({"optimizer": {"type": "SGD"}}, "--beta2 0.8", "beta2 = 0.8"),
        ({"scheduler": DECAY}, "--epochs 3", "epochs = 3"),
        ({"optimizer": {"type": "RAdam"}}, "", "RAdam has no checkpoints"),
    ],
)
def test_a_number_that_a_block_cannot_hear_is_refused(config, line, report):
    if line:  # without the flag it is right
        resolve(config, "ds.json", parse_flags([]), 1, "cpu")
    with pytest.raises(UsageError) as caught:
        resolve(config, "ds.json", parse_flags(line.split()), 1, "cpu")
    assert report in str(caught.value)


def test_momenta_that_onecycle_would_pass_over_are_reported():
    params = {**CYCLE["params"], "cycle_min_mom": 0.5}
    config: dict[str, Any] = {"scheduler": {"type": "OneCycle", "params": params}}
    with pytest.raises(UsageError, match="cycle_min_mom is ignored"):
        resolve(config, "ds.json", parse_flags([]), 1, "cpu")
    params["cycle_momentum"] = True
    resolve(config, "ds.json", parse_flags([]), 1, "cpu")


def test_lion_on_a_cpu_needs_its_cpu_class():
    config: dict[str, Any] = {"optimizer": {"type": "Lion"}, "zero_optimization": {"stage": 2}}
    with pytest.raises(UsageError, match="Lion runs on a CPU only with offload_optimizer"):
        resolve(config, "ds.json", parse_flags([]), 1, "cpu")
    resolve(config, "ds.json", parse_flags([]), 1, "cuda")


@pytest.mark.parametrize(
    ("words", "device", "why"),
    [
        ("--tf32", "cuda", r"no effect in bfloat16 \(auto: cuda has bf16 instructions\)"),
        ("--tf32 --dtype float16", "cuda", r"no effect in float16 \(--dtype\)"),
        ("--tf32 --dtype float32", "cpu", "no effect on a CPU"),
    ],
)
def test_tf32_is_refused_where_it_has_no_effect(words: str, device: str, why: str):
    with pytest.raises(UsageError, match=rf"tf32 = True \(--tf32\) has {why}; drop it"):
        resolved(words, {}, device=device)


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        (
            {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}},
            r"optimizer.type is SGD, and mup_base_dim = 64 \(--mup_base_dim\) has rates for",
        ),
        (
            {"optimizer.type": "Adam", "optimizer.params.adam_w_mode": False},
            "adam_w_mode is false, and mup_base_dim = 64",
        ),
        (scheduler("WarmupLR"), "scheduler sets one learning rate, and mup_base_dim = 64"),
    ],
)
def test_mup_is_refused_where_rates_of_groups_do_not_apply(edits: dict[str, Any], said: str):
    with pytest.raises(UsageError, match=said):
        resolved("--mup_base_dim 64 --max_steps 9", edits)
    resolved("--max_steps 9", edits)
    for optimizer in ("Adam", "AdamW"):
        resolved("--mup_base_dim 64 --max_steps 9", {"optimizer.type": optimizer})


def test_tf32_is_advised_once_where_it_would_help():
    exact = resolved("--dtype float32", {}, device="cuda").run
    assert "--tf32 is several times as fast" in exact_float32(exact, "cuda")
    for words in ("--dtype float32 --tf32", "--dtype float32 --no-tf32", ""):
        assert exact_float32(resolved(words, {}, device="cuda").run, "cuda") == ""
    assert exact_float32(exact, "cpu") == ""


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
