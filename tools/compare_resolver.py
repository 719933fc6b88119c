"""Compare how two commits resolve the same random command lines, DeepSpeed files and launchers.

`python -m tools.compare_resolver REV N [SEED]` takes the resolver of REV from git and that of the
working tree. Each runs in a process of its own on N inputs. It compares the resolved files, the
sources and the flags where both accept an input, and the status and the keys that the message names
where one refuses it; not the words. Differences are printed in groups, with an example of each.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ZERO, PARAMS, RATE = "zero_optimization.", "optimizer.params.", "scheduler.params."
BOOL, COUNT = [True, False], [1, 2, 4, 1000, 5e8]
# Values that a writer of the file may mean, by key.
VALUES: dict[str, list[Any]] = {
    "train_batch_size": [8, 16, 32, 7, None],
    "train_micro_batch_size_per_gpu": [1, 4, 8, None],
    "gradient_accumulation_steps": [1, 2, 8, None],
    "gradient_clipping": [0.0, 0.5, 1.0, -1],
    "steps_per_print": [10, 0, 2.5, None],
    "prescale_gradients": BOOL,
    "gradient_predivide_factor": [1.0, 2.0, 0],
    "communication_data_type": ["fp32", "BF16", "f32", None],
    "seq_parallel_communication_data_type": ["fp32", None],
    "gradient_allreduce_op": ["mean", "SUM"],
    "log_level": ["error", "loud"],
    "managed_gradient_accumulation": BOOL,
    "sequence_parallel_size": [1, 2],
    "data_parallel_size": [1, 4],
    "vocabulary_size": [None, 7],
    "bf16.enabled": [True, False, "on", "maybe"],
    "fp16.enabled": BOOL,
    "fp16.loss_scale": [0, 128.0],
    "fp16.hysteresis": [2, 2.5],
    "bf16.check_grad_overflow": BOOL,
    "bf16.bf16_optimizer_states": BOOL,
    "bf16.bf16_master_weights_and_grads": BOOL,
    "fp16.fp16_master_weights_and_grads": BOOL,
    "data_types.grad_accum_dtype": ["fp32", "bf16", None],
    "data_types.param_dtype": ["bf16", "float32", "half"],
    "data_types.buffer_dtype": ["fp32", "bf16"],
    "data_types.keep_in_fp32_modules": [["norm"], []],
    f"{ZERO}stage": [0, 1, 2, 3, "2", 4],
    f"{ZERO}offload_optimizer": [{"device": "cpu"}, {"device": "nvme"}, {"device": "none"}, None],
    f"{ZERO}offload_optimizer.ratio": [1.0, 0.5],
    f"{ZERO}offload_optimizer.pin_memory": BOOL,
    f"{ZERO}offload_optimizer.super_offload": BOOL,
    f"{ZERO}offload_optimizer.buffer_count": [4],
    f"{ZERO}offload_param": [{"device": "cpu"}, {"device": "nvme"}, {"device": "none"}, None],
    f"{ZERO}offload_param.pin_memory": BOOL,
    f"{ZERO}offload_param.max_in_cpu": [1e9],
    f"{ZERO}overlap_comm": [True, False, None],
    f"{ZERO}zenflow": [None, {"topk_ratio": 0.1}],
    f"{ZERO}leaf_module": [{"classes": []}],
    f"{ZERO}cpu_offload": [True, False, None],
    f"{ZERO}mics_shard_size": [2],
    f"{ZERO}max_live_parameters": [10**9],
    f"{ZERO}prefetch_bucket_size": [1000],
    **{
        f"{ZERO}{name}": BOOL
        for name in (
            "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce compute_grad_norm"
            " allgather_partitions load_from_fp32_weights elastic_checkpoint round_robin_gradients"
            " ignore_unused_parameters stage3_gather_16bit_weights_on_model_save"
            " stage3_use_all_reduce_for_fetch_params zero_quantized_weights"
            " zero_quantized_gradients zero_quantized_nontrainable_weights memory_efficient_linear"
            " pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings"
            " enable_sanity_checks save_muon_momentum_buffer_in_memory parameter_alignment"
        ).split()
    },
    **{
        f"{ZERO}{name}": COUNT
        for name in (
            "reduce_bucket_size allgather_bucket_size sub_group_size zero_hpz_partition_size"
            " stage3_prefetch_bucket_size stage3_param_persistence_threshold"
            " stage3_model_persistence_threshold stage3_max_live_parameters"
            " stage3_max_reuse_distance stage3_module_granularity_threshold"
        ).split()
    },
    "activation_checkpointing": [{"partition_activations": False}, {"cpu_checkpointing": True}],
    "aio": [{"block_size": 4}, None],
    "autotuning": [{"enabled": True}, {"enabled": False}],
    "checkpoint": [{"load_universal": False}, {"tag_validation": "Fail"}],
    "comms_logger": [{"enabled": True}, {"enabled": False, "verbose": True}],
    "compile": [{"deepcompile": True}, {"deepcompile": False}],
    "csv_monitor": [{"enabled": True, "output_path": "x"}, {"enabled": False}],
    "data_efficiency": [{"enabled": True}, {"enabled": False, "seed": 7}, {"seed": 7}],
    "datastates_ckpt": [{}],
    "expert_parallel": [{"enabled": True}],
    "flops_profiler": [{"enabled": True, "profile_step": 2}, {"enabled": False}],
    "hybrid_engine": [{"enabled": True}, {"enabled": False}, {"max_out_tokens": 3}],
    "pipeline": [{}, {"stages": 4}],
    "tensor_parallel": [{"autotp_size": 1}, {"autotp_size": 2}, {"tp": {"tp_size": 2}}],
    "tensorboard": [{"enabled": False}, {"enable": True}],
    "timers": [{"throughput": {"enabled": False}}, {"throughput": {"x": 1}}],
    "torch_autocast": [{"enabled": True}, {"enabled": False}],
    "wandb": [{"enabled": False, "project": "p"}],
    "weight_quantization": [{"quantized_initialization": {"num_bits": 8}}],
    "amp": [{"enabled": True}],
    "elasticity": [{}],
    "stage": [2],
    "lr": [1e-3],
    "_comment": ["mine"],
    **{
        name: BOOL
        for name in (
            "disable_allgather dump_state disable_python_gc wall_clock_breakdown memory_breakdown"
            " dataloader_drop_last zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
            " use_data_before_expert_parallelism"
        ).split()
    },
}
WRONG = [None, True, 0, -1, 2.5, "x", "2", "yes", [], [1], {}, {"a": 1}, 2**70, "a\0b"]
OPTIMIZERS = [
    *("AdamW", "AdamW", "AdamW", "adamw", "Adam", "Lion", "SGD", "sgd", "Muon", "Adagrad", "Lamb"),
    *("ASGD", "Adadelta", "Adafactor", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "LBFGS"),
    *("OneBitAdam", "MuAdam", "SparseAdam", "AdmaW", 3, None, "auto"),
]
OPTIMIZER_PARAMS: dict[str, list[Any]] = {
    "lr": [1e-3, 5e-4, 0, "auto"],
    "betas": [[0.9, 0.95], [0.8, 0.99], [0.9], 0.9, "auto"],
    "eps": [1e-8, 1e-6, -1e-8, "auto"],
    "weight_decay": [0, 0.1, "auto"],
    "momentum": [0.9, "auto"],
    "muon_lr": [0.03, "auto"],
    "torch_adam": [True, False, "auto"],
    "adam_w_mode": BOOL,
    "bias_correction": BOOL,
    "set_grad_none": BOOL,
    "fp32_optimizer_states": BOOL,
    "amsgrad": BOOL,
    "fused": [True, None, "auto"],
    "foreach": [True, None, "auto"],
    "nesterov": BOOL,
    "ns_method": ["gram", "other"],
    "max_grad_norm": [1.0],
    "weight_decy": [0.1],
    "rho": [0.9],
}
SCHEDULERS = [
    *("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest", "WarmUpLR", 3)
]
SCHEDULER_PARAMS: dict[str, list[Any]] = {
    "warmup_num_steps": [2, 5, 20, 1, "auto"],
    "warmup_type": ["log", "linear", "linaer"],
    "warmup_min_lr": [0.0, -1e-3, "auto"],
    "warmup_max_lr": [1e-3, 2e-3, [1e-3, 1e-3], None, "auto"],
    "total_num_steps": [10, 90, "auto"],
    "warmup_min_ratio": [0.0, "auto"],
    "cos_min_ratio": [0.1, 0.2, "auto"],
    "cycle_min_lr": [1e-5],
    "cycle_max_lr": [1e-3, "auto"],
    "cycle_first_step_size": [0, 10],
    "cycle_momentum": BOOL,
    "cycle_min_mom": [0.5],
    "lr_range_test_min_lr": [1e-5, "auto"],
    "lr_range_test_step_size": [0, 1],
    "last_batch_iteration": [-1],
}
FLAGS: dict[str, list[str]] = {
    "batch_size": ["4", "8", "auto"],
    "accumulation_steps": ["1", "2", "auto"],
    "grad_clip": ["0.5", "1.0", "0"],
    "learning_rate": ["1e-3", "2e-3", "auto"],
    "weight_decay": ["0.1", "0"],
    "beta1": ["0.8", "0.9"],
    "beta2": ["0.95", "0.99"],
    "dtype": ["bfloat16", "float32", "float16"],
    "optimizer": ["adamw", "muon", "lion", "sgd"],
    "muon_lr": ["0.03"],
    "sgd_momentum": ["0.8"],
    "max_steps": ["10", "50"],
    "epochs": ["1"],
    "warmup_steps": ["1", "5", "auto"],
    "schedule": ["cosine", "linear"],
    "min_lr_ratio": ["0.1", "0.5"],
    "mup_base_dim": ["64"],
    "tensor_parallel": ["2"],
    "sequence_parallel": ["2"],
    "compile": ["on", "off"],
    "model": ["tiny"],
    "dim": ["64", "384"],
}
SWITCHES = ["--split_batches", "--use_moe", "--qkv_bias", "--tf32", "--dry_run"]
LAUNCHER: dict[str, list[str]] = {
    "ACCELERATE_MIXED_PRECISION": ["no", "bf16", "fp16", "fp8"],
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ["1", "4", "auto"],
    "ACCELERATE_GRADIENT_CLIPPING": ["0.5", "1.0", "big"],
    "ACCELERATE_USE_CPU": ["true", "false"],
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ["2", "3", "two"],
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ["cpu", "none", "nvme"],
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ["cpu", "none"],
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": ["true", "false"],
    "ACCELERATE_DYNAMO_BACKEND": ["no", "no", "no", "INDUCTOR"],
    "MINIMIND_CONFIG_FILE": ["accelerate.yaml"],
}


def put(document: dict[str, Any], path: str, value: Any) -> None:
    """Set a value at a dotted path unless a value that is no object is in the way."""
    *parents, last = path.split(".")
    for part in parents:
        document = document.setdefault(part, {})
        if not isinstance(document, dict):
            return
    document[last] = value


def random_case(rng: random.Random, shipped: list[dict[str, Any]]) -> dict[str, Any]:
    """A command line, a DeepSpeed file, an environment, a device and a backend."""
    document = json.loads(json.dumps(rng.choice([{}, *shipped])))
    if rng.random() < 0.3:
        document["optimizer"] = block(rng, OPTIMIZERS, OPTIMIZER_PARAMS)
    if rng.random() < 0.25:
        document["scheduler"] = block(rng, SCHEDULERS, SCHEDULER_PARAMS)
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 3])):
        path = rng.choice([*VALUES])
        value, choice = rng.choice(VALUES[path]), rng.random()
        if choice < 0.12:
            value = rng.choice(WRONG)
        elif choice < 0.2:
            value = "auto"
        elif choice < 0.26:
            cut = rng.randrange(len(path))
            path = path[:cut] + path[cut + 1 :] or "x"
        put(document, path, value)
    argv = []
    for name in rng.sample([*FLAGS], rng.choice([0, 0, 0, 1, 1, 2, 4])):
        argv += [f"--{name}", rng.choice(FLAGS[name])]
    argv += [rng.choice(SWITCHES)] if rng.random() < 0.15 else []
    environ = {}
    if rng.random() < 0.5:
        environ = dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | {"WORLD_SIZE": "2"}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    if rng.random() < 0.3:
        environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        for name in rng.sample([*LAUNCHER], rng.choice([0, 1, 1, 2])):
            environ[name] = rng.choice(LAUNCHER[name])
    return {
        "argv": argv,
        "document": document,
        "environ": environ,
        "device": rng.choice(["cpu", "cpu", "cuda"]),
        "backend": rng.choice(["deepspeed"] * 9 + ["single"]),
        "path": rng.choice(["ds.json", "ds.json", "configs/ds_config.json"]),
    }


def block(rng: random.Random, types: list[Any], params: dict[str, list[Any]]) -> Any:
    """An optimizer or a scheduler with some parameters."""
    names = rng.sample([*params], rng.choice([0, 1, 2, 2, 4]))
    written = {"params": {name: rng.choice([*params[name]]) for name in names}}
    for name in names:
        if rng.random() < 0.06:
            written["params"][name] = rng.choice(WRONG)
    if rng.random() < 0.97:
        written["type"] = rng.choice(types)
    return written


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """What the resolver that is imported says of a case: a worker's process."""
    from dataclasses import replace
    from functools import partial
    from inspect import signature

    from minimind.config.deepspeed.backend_choice import Setup
    from minimind.config.launcher_env import read_launch
    from minimind.config.parse import parse_flags
    from minimind.engine import build
    from minimind.errors import RunError

    try:
        run, launch = parse_flags(case["argv"]), read_launch(case["environ"])
        if run.dtype == "auto":  # which the start replaces before
            run = replace(run, dtype="bfloat16")
        document = case["document"] if case["backend"] == "deepspeed" else {}
        setup = Setup(run, launch, case["device"], case["backend"], document, case["path"])
        more: dict[str, Any] = {}
        if "sections" in signature(setup.resolve).parameters:  # of an earlier commit
            more = {"sections": partial(vars(build)["section_faults"], device="cpu")}
        resolved = setup.resolve(**more)
        build.require_accepted(resolved, "cpu")
    except RunError as error:
        return {"status": error.status, "text": str(error)}
    except Exception as error:  # a bug, which is compared like any other answer
        return {"status": 70, "text": f"{type(error).__name__}: {error}"}
    found = resolved.run
    return {
        "status": 0,
        "config": resolved.config,
        "sources": resolved.sources,
        "flags": {name: getattr(found, name) for name in found.sources},
        "flag_sources": dict(found.sources),
    }


def work() -> None:
    """Answer the cases of standard input, one JSON line each."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what libraries print
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line)), default=str), file=out)


def answers(tree: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers of the resolver in `tree`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "MINIMIND_"))}
    done = subprocess.run(
        [sys.executable, __file__, "--work"],
        env=kept | {"PYTHONPATH": str(tree), "DS_ACCELERATOR": "cpu"},
        cwd=tree,
        input="".join(f"{json.dumps(case)}\n" for case in cases),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def named(case: dict[str, Any], text: str) -> frozenset[str]:
    """The flags and keys of a case that a message names, without the sections of such keys."""
    paths = {word.removeprefix("--") for word in case["argv"] if word.startswith("--")}
    pending: list[tuple[str, Any]] = [("", case["document"])]
    while pending:
        prefix, value = pending.pop()
        for key, inner in value.items() if isinstance(value, dict) else ():
            paths.add(f"{prefix}{key}")
            pending.append((f"{prefix}{key}.", inner))
    found = paths & {*re.findall(r"[\w.]*\w", text)}
    return frozenset(p for p in found if not any(q.startswith(f"{p}.") for q in found))


def differences(case: dict[str, Any], old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The groups of the differences between two answers; empty if they are equal."""
    if old["status"] != new["status"]:
        refused = old if old["status"] else new
        keys = ", ".join(sorted(named(case, refused["text"])))
        return [f"status {old['status']} -> {new['status']}: {keys}"]
    if old["status"]:
        before, after = named(case, old["text"]), named(case, new["text"])
        word = "instead" if not before & after else "among others"
        gone = [f"no longer named, {word}: {key}" for key in sorted(before - after)]
        return gone + [f"now named, {word}: {key}" for key in sorted(after - before)]
    for part in ("config", "flags", "sources", "flag_sources"):
        if old[part] != new[part]:
            keys = {*old[part], *new[part]}
            changed = sorted(k for k in keys if old[part].get(k, "") != new[part].get(k, ""))
            return [f"{part}: {', '.join(changed)}"]
    return []


def compare(revision: str, count: int, seed: int) -> int:
    """Print the groups of differences; return their number."""
    from tools.revisions import unpack  # not in every earlier revision, which runs this file

    rng = random.Random(seed)
    folder = ROOT / "configs"
    files = [folder / "ds_config.json", *sorted((folder / "deepspeed").glob("*.json"))]
    shipped = [json.loads(path.read_text()) for path in files]
    cases = [random_case(rng, shipped) for _ in range(count)]
    with tempfile.TemporaryDirectory() as base:
        tree = unpack(revision, Path(base), "minimind", "configs", "pyproject.toml")
        before = answers(tree, cases)
    after = answers(ROOT, cases)
    groups: dict[str, list[int]] = defaultdict(list)
    for n, (case, old, new) in enumerate(zip(cases, before, after, strict=True)):
        for group in differences(case, old, new):
            groups[group].append(n)
    accepted = sum(not answer["status"] for answer in before)
    bugs = sum(answer["status"] == 70 for answer in after)
    print(f"{count} inputs, {accepted} accepted by {revision}; {bugs} raise another error now")
    for group, places in sorted(groups.items(), key=lambda item: -len(item[1])):
        n = places[0]
        print(f"\n{len(places)} x {group}\n  case {json.dumps(cases[n])}")
        for word, told in (("old", before[n]), ("new", after[n])):
            print(f"  {word} {told.get('text', 'accepted')[:300]}")
    return len(groups)


if __name__ == "__main__":
    if sys.argv[1:] == ["--work"]:
        work()
    else:
        revision, count, seed = [*sys.argv[1:], "0"][:3]
        sys.exit(min(1, compare(revision, int(count), int(seed))))
