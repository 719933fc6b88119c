"""What DeepSpeed's configuration object and engine refuse ends a start before the text is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import minimind.train  # noqa: F401 (a module that is called)
from minimind.config.deepspeed.resolve import resolve
from minimind.config.deepspeed.rules import remedy_for, tensor_parallel_faults
from minimind.config.deepspeed.values import Facts, put
from minimind.config.parse import parse_flags
from minimind.config.rules import with_dtype
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG, RunConfig
from minimind.errors import StorageError, UsageError
from minimind.model.sizes import feed_forward_width
from tests.config.deepspeed.test_normalize import leaves as spelt
from tests.config.deepspeed.test_normalize import replaced, spellings
from tests.conftest import ROOT, SMALL, Trained
from tests.forking import Nursery

train: Any = sys.modules["minimind.train"]
ZERO = "zero_optimization."
OFFLOAD = {"device": "cpu"}
CPU_ADAM = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": False}}


def document(edits: dict[str, Any]) -> dict[str, Any]:
    """The shipped file with these edits."""
    written = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
    for key, value in edits.items():
        put(written, key, value)
    return written


def resolved(edits: dict[str, Any], device: str, line: str = "") -> Any:
    return resolve(
        document(edits), "ds.json", with_dtype(parse_flags(line.split()), device, True), 1, device
    )


# edits, device, words of the refusal; or where they are right
RULES = {
    "zenflow": ({f"{ZERO}zenflow": {"topk_ratio": 0.1}}, "cuda", "zenflow has an optimizer"),
    "zenflow, offloaded": (
        {f"{ZERO}zenflow": {}, f"{ZERO}offload_optimizer": OFFLOAD},
        "cpu",
        "zenflow has an optimizer",
    ),
    "superoffload": (
        {f"{ZERO}stage": 3, f"{ZERO}offload_optimizer": {**OFFLOAD, "super_offload": True}},
        "cuda",
        "super_offload has an optimizer",
    ),
    "quantized weights on a CPU": (
        {f"{ZERO}stage": 3, f"{ZERO}zero_quantized_weights": True},
        "cpu",
        "zero_quantized_weights is true and needs a GPU; remove it",
    ),
    "granularity on a CPU": (
        {f"{ZERO}stage": 3, f"{ZERO}stage3_module_granularity_threshold": 1000},
        "cpu",
        "stage3_module_granularity_threshold is 1000 and needs a GPU",
    ),
    "an odd bucket": ({f"{ZERO}allgather_bucket_size": 1001}, "cpu", "an odd number"),
    "a fraction of the optimizer in torch": (
        {f"{ZERO}stage": 3, f"{ZERO}offload_optimizer": {**OFFLOAD, "ratio": 0.5}},
        "cpu",
        "offload_optimizer.ratio = 0.5 needs DeepSpeed's own Adam",
    ),
    "clipping by no norm": (
        {f"{ZERO}compute_grad_norm": False},
        "cpu",
        "compute_grad_norm is false beside gradient_clipping = 1.0",
    ),
    "offload without a norm": (
        {
            f"{ZERO}compute_grad_norm": False,
            "gradient_clipping": 0.0,
            f"{ZERO}offload_optimizer": OFFLOAD,
        },
        "cpu",
        "beside zero_optimization.offload_optimizer",
    ),
    "another precision": (
        {"data_types.param_dtype": "fp32"},
        "cpu",
        "data_types.param_dtype is fp32, and dtype = bfloat16",
    ),
    "AMSGrad of DeepSpeed's": (
        {"optimizer.params.amsgrad": True, "optimizer.params.torch_adam": False},
        "cuda",
        "optimizer.params.amsgrad is true, and only torch's Adam has it",
    ),
    "dropped tokens": (
        {"data_efficiency": {"enabled": False, "data_routing": {"random_ltd": {"enabled": True}}}},
        "cpu",
        "random_ltd.enabled is true, but no layer drops tokens here",
    ),
    "dropped tokens by a text": (
        {"data_efficiency": {"enabled": False, "data_routing": {"random_ltd": {"enabled": "no"}}}},
        "cpu",
        'random_ltd.enabled is "no", but no layer drops tokens here',
    ),
    "a precision that is none": (
        {"data_types.param_dtype": "FP32"},
        "cpu",
        'data_types.param_dtype is "FP32", not one of fp32',
    ),
    "rounded frequencies": (
        {"data_types.buffer_dtype": "bfloat16"},
        "cpu",
        "data_types.buffer_dtype is bfloat16, and rotary frequencies stay in fp32",
    ),
    "a NUL": (
        {"csv_monitor": {"enabled": True, "job_name": "a\0b"}},
        "cpu",
        "csv_monitor.job_name holds a NUL character",
    ),
    "a huge number": (
        {f"{ZERO}reduce_bucket_size": 2**70},
        "cpu",
        "reduce_bucket_size is a number of more than 64 bits",
    ),
    "a monitor that is not installed": (
        {"comet": {"enabled": True}},
        "cpu",
        "the package comet_ml is not installed",
    ),
}
RIGHT = {
    "no zenflow": ({f"{ZERO}zenflow": None}, "cpu"),
    "quantized weights": ({f"{ZERO}stage": 3, f"{ZERO}zero_quantized_weights": True}, "cuda"),
    "an even bucket": ({f"{ZERO}allgather_bucket_size": 1000}, "cpu"),
    "a fraction of DeepSpeed's Adam": (
        {
            f"{ZERO}stage": 3,
            f"{ZERO}offload_optimizer": {**OFFLOAD, "ratio": 0.5},
            "optimizer": CPU_ADAM,
        },
        "cpu",
    ),
    "no norm": ({f"{ZERO}compute_grad_norm": False, "gradient_clipping": 0.0}, "cpu"),
    "the same precision": ({"data_types.param_dtype": "bf16"}, "cpu"),
    "the same precision by another name": ({"data_types.param_dtype": "bfloat16"}, "cpu"),
    "frequencies as they are": ({"data_types.buffer_dtype": "fp32"}, "cpu"),
    "a monitor that is off": ({"comet": {"enabled": False}}, "cpu"),
}


@pytest.mark.parametrize(("edits", "device", "named"), RULES.values(), ids=RULES.keys())
def test_a_rule_names_the_key_and_the_remedy(edits, device, named):
    with pytest.raises(UsageError) as caught:
        resolved(edits, device)
    assert named in str(caught.value)
    assert ";" in str(caught.value)
    assert "faults:" not in str(caught.value)


@pytest.mark.parametrize(("edits", "device", "named"), RULES.values(), ids=RULES.keys())
def test_a_rule_holds_in_every_spelling(edits, device, named):
    for path, value in spelt(edits):
        for other in spellings(value):
            if path[-1] == "lr" or (other == value and type(other) is type(value)):
                continue
            with pytest.raises(UsageError):
                resolved(replaced(edits, path, other), device)


@pytest.mark.parametrize(("edits", "device"), RIGHT.values(), ids=RIGHT.keys())
def test_the_closest_right_one_is_taken(edits, device):
    assert resolved(edits, device).backend == "deepspeed"


def test_the_remedy_names_the_key_that_is_mentioned_first():
    config = {"bf16": {"bf16_optimizer_states": True, "enabled": True}}
    report = "bf16_optimizer_states requires bf16_master_weights_and_grads to be enabled."
    assert remedy_for(config, report) == "change or remove bf16.bf16_optimizer_states"
    assert remedy_for(config, "no") == "correct the file"


# --- of a start ---------------------------------------------------------------------------------


def started(tmp_path: Path, edits: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The flags of a start on a text, with an empty cache."""
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "a b c"}) + "\n")
    (tmp_path / "ds.json").write_text(json.dumps(document(edits)))
    return {
        **{"data_path": [str(tmp_path / "text.jsonl")], "out_dir": str(tmp_path / "out")},
        **{"deepspeed_config": str(tmp_path / "ds.json"), "cache_dir": str(tmp_path / "cache")},
        **{"model": "tiny", "max_steps": 4, "device": "cpu", **more},
    }


@pytest.mark.parametrize(
    ("edits", "named"),
    [
        ({f"{ZERO}zenflow": {"topk_ratio": 0.1}}, "remove it"),
        ({"bf16.bf16_optimizer_states": True}, "; remove bf16.bf16_optimizer_states"),
        ({f"{ZERO}stage": 3, f"{ZERO}zero_quantized_weights": True}, "; remove it"),
        (
            {"data_efficiency": {"enabled": False, "data_sampling": {"curriculum_learning": {
                "enabled": True}}}},
            "; remove data_efficiency.data_sampling.curriculum_learning.enabled",
        ),
        ({"timers.throughput": {"x": 1}}, "timers.throughput.x"),
        (
            {"optimizer.params.set_grad_none": True, "optimizer.params.torch_adam": True},
            "unexpected keyword argument 'set_grad_none'; remove optimizer.params.set_grad_none",
        ),
        (
            {"optimizer.params.foreach": True, "optimizer.params.torch_adam": False},
            "unexpected keyword argument 'foreach'; remove optimizer.params.foreach",
        ),
        ({"optimizer.params.differentiable": True}, "; remove optimizer.params.differentiable"),
        ({"optimizer.params.eps": [0.1, 0.2]}, "; remove optimizer.params.eps"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [1e-3]}}},
            "; remove scheduler.params.warmup_min_lr",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dry_run", [True, False])
def test_it_ends_a_dry_run_and_a_start_before_anything_is_prepared(edits, named, dry_run, tmp_path):
    with pytest.raises(UsageError) as caught:
        train(started(tmp_path, edits, dry_run=dry_run))
    assert named in str(caught.value)
    assert "correct it" not in str(caught.value)
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "edits",
    [
        {"csv_monitor": {"enabled": True, "output_path": "FILE/x"}},
        {"tensorboard": {"enabled": True, "output_path": "FILE/x"}},
        {"flops_profiler": {"enabled": True, "output_file": "FOLDER"}},
        {"flops_profiler": {"enabled": True, "output_file": "FILE/x/y"}},
    ],
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_place_that_cannot_be_made_is_of_storage(edits, dry_run, tmp_path):
    (tmp_path / "file").touch()
    written = json.loads(json.dumps(edits).replace("FILE", str(tmp_path / "file")))
    (tmp_path / "folder").mkdir()
    written = json.loads(json.dumps(written).replace("FOLDER", str(tmp_path / "folder")))
    with pytest.raises(StorageError, match=r"ds\.json: .*\.output_(path|file) .* is (no|a) folder"):
        train(started(tmp_path, written, dry_run=dry_run))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "place", ["/proc/none/x.txt", "/dev/null/x.txt", "PIPE", "LINK", f"/tmp/{'x' * 300}/y"]
)
def test_a_file_that_cannot_be_made_is_of_storage(place, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    place = place.replace("PIPE", str(tmp_path / "pipe")).replace("LINK", str(tmp_path / "link"))
    edits = {"flops_profiler": {"enabled": True, "output_file": place}}
    with pytest.raises(StorageError, match=r"ds\.json: flops_profiler\.output_file .*; "):
        train(started(tmp_path, edits, dry_run=True))


@pytest.mark.parametrize("kind", ["csv_monitor", "tensorboard"])
def test_a_folder_of_a_job_that_cannot_be_made_is_of_storage(kind, tmp_path):
    (tmp_path / "job").touch()
    edits = {kind: {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    with pytest.raises(
        StorageError, match=rf"{kind}\.output_path {tmp_path}/job: .* is no folder; "
    ):
        train(started(tmp_path, edits, dry_run=True))


def test_deepspeed_writes_its_defaults_into_a_copy(tmp_path, nursery: Nursery):
    """It adds data_routing and data_sampling, which the printed table has no source for."""
    edits = {"data_efficiency": {}, f"{ZERO}stage": 1}
    flags = started(tmp_path, edits, max_seq_len=16, vocab_size=512, eval_rows=0)
    text = tmp_path / "text.jsonl"
    lines = (json.dumps({"text": f"line {n} of some text"}) + "\n" for n in range(200))
    text.write_text("".join(lines))
    flags["data_path"] = text
    words = [f"--{name}={value}" for name, value in flags.items()]
    argv = [*words, "--verbose"]
    statuses, _, report = nursery.run("train_pretrain", argv, tmp_path / "rank", processes=1)
    assert statuses == [0], report[-3000:]
    kept = json.loads((tmp_path / "out" / "ds_config.resolved.json").read_text())
    assert kept["data_efficiency"] == {}


@pytest.mark.long
def test_a_tracker_that_deepspeed_cannot_open_is_named(trained: Trained, tmp_path: Path):
    """In a process of its own: wandb keeps threads."""
    (tmp_path / "ds.json").write_text(json.dumps(document({"wandb.enabled": True})))
    flags = {**SMALL, "data_path": str(trained.mixed), "cache_dir": str(trained.cache)}
    flags |= {"deepspeed_config": str(tmp_path / "ds.json"), "out_dir": str(tmp_path / "out")}
    words = [f"--{name}={value}" for name, value in flags.items()]
    no_key = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "train_pretrain.py"), *words],
        env={**no_key, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "ds.json: wandb.enabled is true and wandb fails: " in done.stderr.splitlines()[-1]
    assert "give --report_to wandb" in done.stderr.splitlines()[-1]


def of_tensors(line: str, edits: dict[str, Any]) -> list[str]:
    """Faults of a file with stage 2 and these edits."""
    config: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    for key, value in edits.items():
        put(config, key, value)
    return tensor_parallel_faults(
        Facts(config, parse_flags(line.split()), 2, "cpu", path="ds.json")
    )


@pytest.mark.parametrize(
    ("flags", "edits", "word"),
    [
        (
            "--dtype bfloat16",
            {"zero_optimization.stage": 0},
            "dtype = bfloat16 (--dtype) at stage 0 (ds.json) is not supported",
        ),
        ("", {"zero_optimization.stage": 3}, "ds.json: zero_optimization.stage is 3 is not"),
        (
            "",
            {"zero_optimization.offload_optimizer.device": "cpu"},
            "ds.json: zero_optimization.offload_optimizer is not supported",
        ),
        ("--dtype float16", {}, "dtype = float16 (--dtype) is not supported"),
        ("--optimizer muon", {}, "optimizer = muon (--optimizer) is not supported"),
        ("--optimizer lion", {}, "optimizer = lion (--optimizer) is not supported"),
        ("--use_moe", {}, "use_moe = True (--use_moe) is not supported"),
        ("--qkv_bias", {}, "qkv_bias = True (--qkv_bias) is not supported"),
        ("--mup_base_dim 64", {}, "mup_base_dim = 64 (--mup_base_dim) is not supported"),
        ("--verify_interval 5", {}, "verify_interval = 5 (--verify_interval) is not supported"),
        ("--compile on", {}, "compile = on (--compile) is not supported"),
        ("--sequence_parallel 2", {}, "sequence_parallel = 2 (--sequence_parallel) is not"),
        ("--n_heads 8 --n_kv_heads 1", {}, "n_kv_heads = 1 (--n_kv_heads) is not divisible"),
        ("--hidden_dim 129", {}, "hidden_dim = 129 (--hidden_dim) is not divisible"),
    ],
)
def test_what_tensor_parallelism_excludes_is_one_sentence(
    flags: str, edits: dict[str, Any], word: str
):
    (fault,) = of_tensors(f"--dtype float32 --tensor_parallel 2 {flags}", edits)
    assert fault.startswith(word)
    assert "tensor_parallel = 2 (--tensor_parallel)" in fault
    assert of_tensors(f"--dtype float32 {flags}", edits) == []


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_tensor_parallelism_is_taken_at_stages_0_to_2(stage: int):
    assert of_tensors("--dtype float32 --tensor_parallel 2", {f"{ZERO}stage": stage}) == []


def test_sizes_that_would_divide_the_shape_are_named():
    fault, other = of_tensors("--dim 384 --n_heads 12 --n_kv_heads 4 --tensor_parallel 3", {})
    assert fault.endswith("with this shape 2, 4 would be possible")
    assert other.startswith("hidden_dim = 1024 (default for dim = 384) is not divisible by")


def test_the_default_width_of_the_feed_forward_is_divided():
    assert feed_forward_width(576) == 1536
    assert of_tensors("--dim 576 --n_heads 12 --n_kv_heads 6 --tensor_parallel 3", {}) == []


@pytest.mark.parametrize("dim", [1, 64, 100, 384, 512, 4096])
def test_the_width_of_a_run_is_that_of_the_model(dim: int):
    assert RunConfig(dim=dim).feed_forward_width == feed_forward_width(dim)
    assert RunConfig(dim=dim, hidden_dim=7).feed_forward_width == 7
