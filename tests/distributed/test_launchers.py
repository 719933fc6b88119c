"""The same run under every launcher, with two CPU processes, against run_accelerate.sh's.

Flags and data are those of the fp32 yardstick: DeepSpeed gives its curve bit for bit, DDP within
rounding. Below, without any training: what run_accelerate.sh makes of a YAML and the environment.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from minimind.config.launcher_env import DROPPED
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.errors import RendezvousError, UsageError
from minimind.launch import launcher
from minimind.launch import plan as launch
from minimind.launch.plan import DEEPSPEED_FIELDS, LaunchSettings, count_gpus, fields, plan
from minimind.runtime.environment import GPU_VARIABLES
from minimind.runtime.heartbeat import Layout, this_worker
from minimind.runtime.process import CAUGHT, SCRIPT_PID, STATUS_FILE
from tests.conftest import ROOT, Launcher, Run
from tests.distributed.conftest import FP32
from tools.forking import free_port

SCRIPT = str(ROOT / "train_pretrain.py")
SHIPPED = ROOT / "configs" / "accelerate_config.yaml"
NAMED = ["--deepspeed_config", str(DEFAULT_DEEPSPEED_CONFIG)]
NOTEBOOK = """
import sys
import minimind
from accelerate import notebook_launcher

words = sys.argv[2:]
flags = {flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2])}
notebook_launcher(minimind.train, (flags,), num_processes=2, use_port=sys.argv[1])
"""
# What stands before the flags of train_pretrain.py, and what behind; PORT is a free one.
COMMANDS: dict[str, tuple[str, list[str]]] = {
    "accelerate-yaml": (
        f"accelerate launch --config_file {SHIPPED} --num_processes 2 --main_process_port PORT"
        f" {SCRIPT}",
        [],
    ),
    "accelerate-flags": (
        f"accelerate launch --use_deepspeed --deepspeed_config_file {DEFAULT_DEEPSPEED_CONFIG}"
        f" --num_machines 1 --num_processes 2 --main_process_port PORT {SCRIPT}",
        [],
    ),
    "accelerate-multi-gpu": (
        "accelerate launch --multi_gpu --num_processes 2 --main_process_port PORT"
        f" --deepspeed_config_file ds_config.json {SCRIPT}",
        [],
    ),
    "torchrun": (f"torchrun --standalone --nproc_per_node 2 {SCRIPT}", NAMED),
    "torchrun-ddp": (f"torchrun --standalone --nproc_per_node 2 {SCRIPT}", []),
    "deepspeed": (f"deepspeed --num_gpus 2 --master_port PORT {SCRIPT}", NAMED),
    "notebook": ("python -c NOTEBOOK PORT", NAMED),
}


def words(command: str, flags: Sequence[str]) -> list[str]:
    fill = {"PORT": str(free_port()), "NOTEBOOK": NOTEBOOK}
    found = [fill.get(word, word) for word in command.split()]
    return [str(Path(sys.executable).with_name(found[0])), *found[1:], *flags]


def flags_of(launch: Launcher, out_dir: Path) -> list[str]:
    return launch.command(out_dir, f"{FP32} --save_interval 9 --keep_last 3")[2:]


def environment(**more: str) -> dict[str, str]:
    """This environment, less what would speak to the launch script."""
    text = ("NUM_PROCESSES", "NUM_MACHINES", "MACHINE_RANK", "MAIN_IP", "MAIN_PORT", "CONFIG_FILE")
    kept = {name: value for name, value in os.environ.items() if name not in text}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **more}


@pytest.mark.long  # test_runs.py has the script
@pytest.mark.launch
@pytest.mark.parametrize("name", COMMANDS)
def test_every_launcher_gives_the_same_run(name: str, launch: Launcher, fp32: Run, tmp_path: Path):
    command, behind = COMMANDS[name]
    done = subprocess.run(
        words(command, [*flags_of(launch, tmp_path), *behind]),
        # The deepspeed launcher counts devices before it starts anything.
        env=environment(**{"DS_ACCELERATOR": "cpu"} if name == "deepspeed" else {}),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    run = Run(tmp_path, done.returncode, done.stdout, done.stderr)
    assert run.status == 0, run.stderr
    (start,) = run.events("run_start")
    backend = "ddp" if name == "torchrun-ddp" else "deepspeed"
    assert (start["backend"], start["world_size"]) == (backend, 2)
    assert f"backend  {backend}" in run.stdout
    if backend == "deepspeed":
        assert run.curve() == fp32.curve()
    assert run.losses() == pytest.approx(fp32.losses(), rel=2e-6)


@pytest.mark.long  # the first steps of two hosts are also in test_restarts.py
@pytest.mark.launch
@pytest.mark.parametrize("how", ["by hand", "two hosts"])
def test_two_starts_of_one_process_are_a_world_of_two(
    how: str, launch: Launcher, fp32: Run, tmp_path: Path
):
    """RANK and its kin set by hand; and run_accelerate.sh as on each of two hosts."""
    port, flags = str(free_port()), flags_of(launch, tmp_path)
    if how == "by hand":
        report = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        starts = [{**report, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
        command = [sys.executable, SCRIPT, *flags, *NAMED]
    else:
        report = {"NUM_MACHINES": "2", "NUM_PROCESSES": "2"}
        report |= {"MAIN_IP": "127.0.0.1", "MAIN_PORT": port}
        starts = [{**report, "MACHINE_RANK": rank} for rank in ("1", "0")]
        command = ["bash", str(ROOT / "run_accelerate.sh"), *flags]
    started = [subprocess.Popen(command, env=environment(**start)) for start in starts]
    assert [start.wait(timeout=300) for start in started] == [0, 0]
    run = Run(tmp_path, 0, "", "")
    (start,) = run.events("run_start")
    assert (start["backend"], start["world_size"]) == ("deepspeed", 2)
    assert run.curve() == fp32.curve()


# The two lines of the tutorial this project follows.
TUTORIAL = """
accelerate launch --config_file accelerate_config.yaml train_pretrain_accelerate.py \\
  --epochs 3 \\
  --batch_size 24 \\
  --learning_rate 2e-4 \\
  --dtype bfloat16 \\
  --accumulation_steps 32 \\
  --grad_clip 1.0 \\
  --log_interval 100 \\
  --save_interval 10000 \\
  --dim 1024 \\
  --n_layers 32 \\
  --max_seq_len 1024 \\
  --use_flash_attn \\
  --profile \\
  --profile_interval 10
"""
METHODS = {
    "file": TUTORIAL,
    "flags": TUTORIAL.replace(
        "accelerate launch --config_file accelerate_config.yaml",
        "CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --multi_gpu --num_processes=4"
        " --mixed_precision=bf16 --main_process_port=29500 --deepspeed_config_file ds_config.json",
    ),
}
# Appended, so that a step takes less than a second.
SMALLER = (
    "--batch_size 2 --accumulation_steps 2 --max_steps 3 --dim 64 --n_layers 2 --max_seq_len 64"
)


@pytest.mark.long  # below is what the launcher makes of such files and flags
@pytest.mark.launch
@pytest.mark.parametrize("method", METHODS)
def test_the_lines_of_the_tutorial_train_as_they_are_written(
    method: str, corpus: Path, tmp_path: Path
):
    """In a folder with its files, on two processes and a free port."""
    for name in ("train_pretrain_accelerate.py", "accelerate_config.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "dataset").mkdir()
    shutil.copy(corpus, tmp_path / "dataset" / "pretrain_hq.jsonl")
    line = METHODS[method].replace("=4", "=2").replace("=29500", f"={free_port()}").strip()
    more = f"{SMALLER} --vocab_size 600 --cache_dir cache"
    two = sorted(os.sched_getaffinity(0))[:2]  # which is what num_processes: auto counts
    done = subprocess.run(
        ["bash", "-c", f"{line} {more}"],
        env=environment(),
        preexec_fn=lambda: os.sched_setaffinity(0, two),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    (out_dir,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    run = Run(out_dir, done.returncode, done.stdout, done.stderr)
    assert run.status == 0, run.stderr
    assert run.stderr.count("train_pretrain_accelerate.py runs train_pretrain.py") == 1
    (start,) = run.events("run_start")
    expected = {"backend": "deepspeed", "world_size": 2, "zero_stage": 2, "dtype": "bfloat16"}
    assert {name: start[name] for name in expected} == expected
    assert [event["status"] for event in run.events("exit")] == [0]


# run_accelerate.sh and its plan, up to where `accelerate launch` would start.

DEEPSPEED = {"distributed_type": "DEEPSPEED"}


def planned(document: dict[str, Any], gpus: int = 0, **environ: str) -> dict[str, Any]:
    return plan(LaunchSettings(document, "a.yaml", environ), gpus)


@pytest.mark.parametrize(
    ("document", "gpus", "environ", "processes"),
    [
        (DEEPSPEED, 0, {}, 2),
        (DEEPSPEED, 4, {}, 4),
        ({**DEEPSPEED, "num_processes": "auto"}, 4, {}, 4),
        ({**DEEPSPEED, "num_processes": 3}, 4, {}, 3),
        ({**DEEPSPEED, "num_processes": 3}, 4, {"NUM_PROCESSES": "1"}, 1),
        ({"distributed_type": "MULTI_CPU"}, 0, {}, 2),
        ({"distributed_type": False}, 4, {}, 1),  # a bare NO
        ({"distributed_type": "NO"}, 0, {"NUM_PROCESSES": "2"}, 2),
    ],
)
def test_processes_come_from_the_environment_then_the_yaml_then_the_gpus(
    document, gpus, environ, processes
):
    launched = planned(document, gpus, **environ)
    assert launched["num_processes"] == processes
    assert launched["main_process_port"] == 0
    deepspeed = document["distributed_type"] == "DEEPSPEED"
    assert launched["distributed_type"] == ("DEEPSPEED" if deepspeed else "MULTI_GPU")


@pytest.mark.parametrize(
    "fields",
    [
        {"mixed_precision": False},  # a bare no
        {"mixed_precision": "BF16"},
        {"dynamo_backend": False},
        {"dynamo_backend": "NO"},
        {"dynamo_config": {"dynamo_mode": "default"}},
        {"mpirun_config": {}},
        {"parallelism_config": {"parallelism_config_tp_size": 1, "parallelism_config_sp_size": 1}},
        {"parallelism_config": None},
        {"compute_environment": "LOCAL_MACHINE"},
    ],
)
def test_a_field_that_asks_for_nothing_is_no_fault_and_accelerate_can_read_it(fields):
    launched = planned({**DEEPSPEED, **fields})
    assert launched["num_processes"] == 2
    assert isinstance(launched.get("mixed_precision", ""), str)
    assert not {"dynamo_backend", "dynamo_config", "parallelism_config"} & set(launched)


def test_a_literal_that_the_environment_overrides_is_reported():
    settings = LaunchSettings({**DEEPSPEED, "num_processes": 3}, "a.yaml", {"NUM_PROCESSES": "2"})
    plan(settings, 0)
    assert settings.overridden == ["NUM_PROCESSES=2 overrides num_processes: 3 of a.yaml"]


def test_processes_count_over_all_hosts():
    host = {"MACHINE_RANK": "1", "MAIN_IP": "10.0.0.1", "MAIN_PORT": "29500"}
    launched = planned(DEEPSPEED, 4, NUM_MACHINES="2", **host)
    assert (launched["num_processes"], launched["machine_rank"]) == (8, 1)
    of_yaml = {"num_machines": 2, "machine_rank": 0, "main_process_ip": "a"}
    launched = planned({**DEEPSPEED, **of_yaml, "main_process_port": 29500}, 4)
    assert (launched["num_processes"], launched["main_process_ip"]) == (8, "a")


HOSTS = {"NUM_MACHINES": "2", "MACHINE_RANK": "0", "MAIN_IP": "a", "MAIN_PORT": "29500"}


@pytest.mark.parametrize(
    ("document", "environ", "report"),
    [
        (DEEPSPEED, {"NUM_PROCESSES": "0"}, "NUM_PROCESSES is 0, not a whole number from 1"),
        ({**DEEPSPEED, "num_processes": "two"}, {}, "num_processes in a.yaml is two"),
        (DEEPSPEED, {"MAIN_PORT": "65536"}, "MAIN_PORT is 65536"),
        (
            DEEPSPEED,
            {**HOSTS, "NUM_PROCESSES": "3"},
            "NUM_PROCESSES = 3 (all hosts) is not divisible",
        ),
        (DEEPSPEED, {**HOSTS, "MACHINE_RANK": "2"}, "MACHINE_RANK is 2, not a whole number from 0"),
        (DEEPSPEED, {**HOSTS, "MACHINE_RANK": ""}, "needs MACHINE_RANK; set each on every host"),
        (DEEPSPEED, {"NUM_MACHINES": "2", "MACHINE_RANK": "0"}, "needs MAIN_IP and MAIN_PORT"),
        (DEEPSPEED, {**HOSTS, "MAIN_IP": "[::1]"}, "MAIN_IP is '[::1]'; write ::1, without"),
        (DEEPSPEED, {**HOSTS, "MAIN_IP": "a:29500"}, "MAIN_IP is 'a:29500'; write a, "),
        ({"distributed_type": "FSDP"}, {}, "a.yaml: distributed_type is FSDP; write one of"),
        ({}, {}, "distributed_type is missing"),
        ({**DEEPSPEED, "num_procesess": 2}, {}, "'num_procesess'; did you mean num_processes?"),
        ({"distributed_type": "MULTI_GPU", "deepspeed_config": {"a": 1}}, {}, "ignores"),
        ({**DEEPSPEED, "deepspeed_config": "x.json"}, {}, "deepspeed_config is 'x.json', not"),
        (
            {**DEEPSPEED, "deepspeed_config": {"deepspeed_config_fil": "x.json"}},
            {},
            "'deepspeed_config_fil' in deepspeed_config; did you mean deepspeed_config_file?",
        ),
        (
            {**DEEPSPEED, "deepspeed_config": {"zero_stge": 3}},
            {},
            "a.yaml: unknown key 'zero_stge' in deepspeed_config; did you mean zero_stage?",
        ),
        ({**DEEPSPEED, "deepspeed_config": {"bf16": {}}}, {}, "'bf16' in deepspeed_config; remove"),
        *(  # of other versions of Accelerate, or of no version
            ({**DEEPSPEED, name: value}, {}, f"a.yaml: unknown key {name!r}; remove it")
            for name, value in {
                "ipex_config": {"ipex": False},
                "use_xpu": True,
                "ec2_instance_type": "ml.p3.2xlarge",
            }.items()
        ),
        *(
            ({**DEEPSPEED, name: 1}, {}, f"unknown key {name!r}; did you mean {meant}?")
            for name, meant in {
                "gpu_id": "gpu_ids",
                "main_process_prt": "main_process_port",
                "distribute_type": "distributed_type",
            }.items()
        ),
        *(
            ({**kind, **fields}, {}, f"a.yaml: {report}")
            for kind in (DEEPSPEED, {"distributed_type": "MULTI_GPU"})
            for fields, report in (
                *(
                    ({"mixed_precision": value}, f"mixed_precision is {value}; write one of no, b")
                    for value in ("fp8", "fp32", 16, True)
                ),
                *(
                    ({"compute_environment": value}, f"compute_environment is {value}; write LOCAL")
                    for value in ("AMAZON_SAGEMAKER", "MY_CLUSTER", None)
                ),
                (
                    {"fp16": True, "mixed_precision": "bf16"},
                    "fp16 is True, which Accelerate ignores as mixed_precision is bf16; remove",
                ),
                ({"dynamo_backend": "inductor"}, "dynamo_backend = inductor compiles the model"),
                ({"dynamo_config": {"dynamo_backend": "EAGER"}}, "dynamo_backend = EAGER compiles"),
                ({"mpirun_config": {"mpirun_hostfile": "hosts"}}, "mpirun_config is not read; re"),
                *(
                    (
                        {"parallelism_config": sizes},
                        f"parallelism_config is not read; remove it, {w}",
                    )
                    for sizes, w in (
                        ({"parallelism_config_sp_size": 2}, "and use --sequence_parallel 2"),
                        ({"parallelism_config_cp_size": 4}, "and use --sequence_parallel 4"),
                        (
                            {
                                "parallelism_config_tp_size": 2,
                                "parallelism_config_dp_shard_size": 4,
                            },
                            "and use --tensor_parallel 2",
                        ),
                        ({"tp_size": 2, "sp_size": 2}, "and use --sequence_parallel 2 --tensor_p"),
                        ({"parallelism_config_dp_shard_size": 8}, "and write a ZeRO stage"),
                    )
                ),
            )
        ),
        (
            {"distributed_type": "NO", "num_processes": 8},
            {},
            "a.yaml: distributed_type NO is one process, and num_processes is 8; write MULTI_GPU",
        ),
    ],
)
def test_a_number_or_type_that_cannot_be_is_reported_with_its_giver(document, environ, report):
    with pytest.raises(UsageError) as caught:
        planned(document, **environ)
    assert report in str(caught.value)
    assert "; " in str(caught.value)


def test_the_folders_of_killed_scripts_are_removed_by_the_next_start(tmp_path: Path):
    """Not those of scripts or workers that run, of other machines, or that tell nothing."""
    with subprocess.Popen(["sleep", "60"]) as gone:
        dead = this_worker(0, gone.pid)
        gone.kill()
    alive = this_worker(1)
    owners = {
        "minimind-launch-dead": dead,
        "minimind-launch-alive": alive,
        "minimind-launch-later": dataclasses.replace(alive, started="1"),  # its PID is another's
        "minimind-launch-host": dataclasses.replace(dead, host="elsewhere"),
        "minimind-launch-container": dataclasses.replace(dead, place="another"),
        "minimind-launch-worker": dead,
        "minimind-launch-torn": "{",
        "minimind-launch-new": None,
        "other-dead": dead,
    }
    for name, owner in owners.items():
        (tmp_path / name / "0").mkdir(parents=True)
        if owner:
            text = owner if isinstance(owner, str) else json.dumps(dataclasses.asdict(owner))
            (tmp_path / name / "owner").write_text(text)
    worker = tmp_path / "minimind-launch-worker" / "0" / "worker-1"
    worker.write_text(f"1 {alive.pid} {alive.started}\n")
    mine = tmp_path / "minimind-launch-mine"
    mine.mkdir()
    launch.take(mine)
    assert json.loads((mine / "owner").read_text())["pid"] == os.getpid()
    left = {*owners, mine.name} - {"minimind-launch-dead", "minimind-launch-later"}
    assert {path.name for path in tmp_path.iterdir()} == left


# A value of each field that `accelerate launch` reads under this script, and what it becomes there.
OBEYED: dict[str, tuple[Any, Any]] = {
    "compute_environment": ("LOCAL_MACHINE", "LOCAL_MACHINE"),
    "distributed_type": ("MULTI_GPU", "MULTI_GPU"),
    "mixed_precision": ("fp16", "fp16"),
    "fp16": (True, True),
    "use_cpu": (True, False),  # exported
    "num_processes": (4, 4),
    "machine_rank": (0, 0),
    "num_machines": (1, 1),
    "main_process_ip": ("10.0.0.1", "10.0.0.1"),
    "main_process_port": (29511, 29511),
    "rdzv_backend": ("c10d", "c10d"),
    "same_network": (False, False),
    "enable_cpu_affinity": (True, True),
    "gpu_ids": ("0,1", None),  # exported
}
OBEYED_BLOCK: dict[str, Any] = {
    "deepspeed_config_file": "a.json",
    "zero_stage": 3,
    "offload_optimizer_device": "cpu",
    "offload_param_device": "cpu",
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "zero3_save_16bit_model": True,
}
COMPILES_OR_DIVIDES = {
    "dynamo_backend": "INDUCTOR",
    "dynamo_config": {"dynamo_backend": "INDUCTOR"},
    "parallelism_config": {"parallelism_config_tp_size": 2},
}


def test_every_field_of_accelerate_is_obeyed_refused_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    names, block = {*fields()}, {*DEEPSPEED_FIELDS, *DROPPED}
    known = [*OBEYED, *OBEYED_BLOCK, *COMPILES_OR_DIVIDES, *launch.UNREAD, *launch.WITHOUT_EFFECT]
    assert sorted(known) == sorted((names | block) - {"deepspeed_config"})
    for name, (value, launched) in OBEYED.items():
        assert planned({**DEEPSPEED, name: value}, 4).get(name) == launched, name
    assert planned({**DEEPSPEED, "deepspeed_config": OBEYED_BLOCK})["deepspeed_config"] == (
        OBEYED_BLOCK
    )

    def document(name: str, value: Any) -> dict[str, Any]:
        inside = name in block
        return {**DEEPSPEED, **({"deepspeed_config": {name: value}} if inside else {name: value})}

    for name in launch.UNREAD:
        for nothing in (None, "", {}):
            planned(document(name, nothing))
        with pytest.raises(UsageError, match=f"^a.yaml: {name} is not read; remove it, and "):
            planned(document(name, {"a": 1} if name.endswith("_config") else "a"))
    for name, value in COMPILES_OR_DIVIDES.items():
        with pytest.raises(UsageError, match="remove it"):
            planned(document(name, value))
    with pytest.raises(UsageError, match="launcher is pdsh, which is not started; write standard"):
        planned(document("deepspeed_multinode_launcher", "pdsh"), 0, **HOSTS)
    asked = {name: "asked" for name in launch.WITHOUT_EFFECT if name not in block}
    inside = {name: "asked" for name in launch.WITHOUT_EFFECT if name in block}
    path = tmp_path / "a.yaml"
    monkeypatch.setenv("CONFIG_FILE", str(path))
    path.write_text(yaml.safe_dump({**DEEPSPEED, **asked, "deepspeed_config": inside}))
    launch.write_plan(tmp_path / "launch.yaml", "cpu")
    idle = ", ".join(sorted([*asked]) + sorted(inside))
    assert f"run_accelerate.sh: no effect here: {idle} of {path}\n" in capsys.readouterr().err
    monkeypatch.setenv("CONFIG_FILE", str(SHIPPED))
    launch.write_plan(tmp_path / "launch.yaml", "cpu")
    assert "no effect" not in capsys.readouterr().err


LISTED = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-8a1b-11)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-8a1c-22)
"""
SLICES = f"""{LISTED}  MIG 1g.10gb     Device  0: (UUID: MIG-7b-33)
  MIG 1g.10gb     Device  1: (UUID: MIG-7c-44)
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts an nvidia-smi that lists these GPUs first on PATH; returns its folder."""
    folder = tmp_path / "smi"

    def put(listed: str) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "listed").write_text(listed)
        (folder / "nvidia-smi").write_text('#!/bin/sh\ncat "${0%/*}/listed"\n')
        (folder / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return folder

    return put


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, 2),
        ("0", 1),
        (" 1 , 0 ", 2),
        ("0,1,", 2),
        ("1,-1,0", 1),
        ("GPU-8a1b", 1),  # the beginning of one
        ("GPU-8a1c-22,GPU-8a1b-11", 2),
        ("MIG-7b-33,MIG-7c-44", 2),
        ("MIG-GPU-8a1b-11/1/0", 1),
        *[(hidden, 0) for hidden in ("", " ", "-1", "-1,0", "NoDevFiles")],
    ],
)
def test_visible_gpus_are_counted_as_cuda_does(visible: str, gpus: int, smi):
    smi(SLICES)
    assert count_gpus(visible) == gpus


@pytest.mark.parametrize(
    ("visible", "fault"),
    [
        *[
            (text, "not numbers or UUIDs of GPUs, separated by commas; write it as 0,1")
            for text in (
                *("0;1", "0-1", "0 1", "0,,1", "0x1", "0.1", "cuda:0", "cuda:0,cuda:1", '"0"'),
                *("'0,1'", "[0, 1]", "all", "none", "None", "void", "auto", "gpu0", "GPU-", "1gpu"),
                *("True", "-2", "+0", "\N{FULLWIDTH DIGIT ZERO}"),
            )
        ],
        ("0,0", "in which one GPU is named twice"),
        ("1,0,01", "in which one GPU is named twice"),
        ("GPU-8a1b,GPU-8a1b", "in which one GPU is named twice"),
        ("0,GPU-8a1c-22", "of several kinds, and CUDA reads only the first"),
        ("GPU-8a1b,MIG-7b-33", "of several kinds"),
        ("0,2", "and nvidia-smi lists 2 GPUs; correct it, or unset it"),
        ("7", "and nvidia-smi lists 2 GPUs"),
        ("GPU-8a1", "and nvidia-smi lists 2 GPUs"),  # the beginning of two
        ("GPU-9", "and nvidia-smi lists 2 GPUs"),
        ("MIG-7b", "and nvidia-smi lists 2 GPUs"),
    ],
)
def test_a_list_of_gpus_that_loses_some_is_9_with_its_variable(visible: str, fault: str, smi):
    smi(LISTED)
    for source in ("CUDA_VISIBLE_DEVICES", "gpu_ids in a.yaml"):
        with pytest.raises(RendezvousError) as caught:
            count_gpus(visible, source)
        assert str(caught.value).startswith(f"{source} is {visible!r}, {fault}")


@pytest.mark.parametrize("listed", [None, "", "NVIDIA-SMI has failed because it could not ...\n"])
def test_a_gpu_that_is_named_on_a_host_without_a_driver_is_9(
    listed: str | None, smi, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "DRIVERS", [])
    monkeypatch.setattr(launch, "OTHER_DRIVERS", [])
    if listed is None:
        monkeypatch.setenv("PATH", "/nowhere")
    else:
        smi(listed)
    assert count_gpus(None) == count_gpus("-1") == 0
    with pytest.raises(RendezvousError) as caught:
        count_gpus("0")
    assert str(caught.value) == (
        "CUDA_VISIBLE_DEVICES is '0', and this host has no GPU driver; correct it, or unset it"
    )


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let torch be a build for a type of device, and see three of them."""

    def see(device: str) -> None:
        there = SimpleNamespace(is_available=lambda: True, device_count=lambda: 3)
        monkeypatch.setattr(torch, device, there, raising=False)
        current = SimpleNamespace(type=device)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: current)

    return see


@pytest.mark.parametrize("device", ["cuda", "xpu", "npu"])
@pytest.mark.parametrize(("driver", "gpus"), [("/nowhere/nvidiactl", 0), ("/dev/null", 3)])
def test_without_nvidia_smi_torch_counts_where_there_is_a_driver(
    driver: str, gpus: int, device: str, three, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(launch, "DRIVERS", [Path(driver)])
    monkeypatch.setattr(launch, "OTHER_DRIVERS", [])
    three(device)
    assert count_gpus(None) == gpus
    if gpus:  # the list is believed, as torch would have to be imported to know
        assert count_gpus("0,1") == 2


def test_other_drivers_have_no_gpu_that_cuda_names(three, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(launch, "DRIVERS", [])
    monkeypatch.setattr(launch, "OTHER_DRIVERS", [Path("/dev/null")])
    three("xpu")
    assert count_gpus(None) == 3
    with pytest.raises(RendezvousError, match="is '0', and this host has no GPU driver"):
        count_gpus("0")


def test_a_mac_with_apple_silicon_has_one_gpu(monkeypatch: pytest.MonkeyPatch):
    """With a stand-in for the system: a run there is one process."""
    monkeypatch.setattr(launch.sys, "platform", "darwin")
    for machine, gpus in (("arm64", 1), ("x86_64", 0)):
        monkeypatch.setattr(launch.platform, "machine", lambda machine=machine: machine)
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.setattr(launch, "DRIVERS", [])
        monkeypatch.setattr(launch, "OTHER_DRIVERS", [])
        assert count_gpus(None) == gpus


def test_an_nvidia_smi_that_fails_is_no_answer(smi, three, monkeypatch: pytest.MonkeyPatch):
    place = smi("Failed to initialize NVML: Driver/library version mismatch\n")
    (place / "nvidia-smi").write_text('#!/bin/sh\ncat "${0%/*}/listed"\nexit 18\n')
    monkeypatch.setattr(launch, "DRIVERS", [Path("/dev/null")])
    monkeypatch.setattr(launch, "OTHER_DRIVERS", [])
    three("cuda")
    assert (count_gpus(None), count_gpus("0,1"), count_gpus("")) == (3, 2, 0)


def test_the_known_fields_are_accelerates():
    from accelerate.commands.config.config_args import ClusterConfig  # noqa: TID251 (its own names)

    assert set(fields()) - {"fp16", "dynamo_backend"} == set(ClusterConfig.__dataclass_fields__)


def test_the_known_fields_of_the_deepspeed_block_are_those_accelerate_launch_takes():
    from accelerate.commands.launch import launch_command_parser  # noqa: TID251 (likewise)

    groups = launch_command_parser()._action_groups
    (group,) = [found for found in groups if found.title == "DeepSpeed Arguments"]
    assert {*DEEPSPEED_FIELDS, *DROPPED} == {action.dest for action in group._group_actions}


def test_an_empty_deepspeed_block_is_none():
    assert planned({**DEEPSPEED, "deepspeed_config": None})["num_processes"] == 2


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Run]:
    """run_accelerate.sh with a launcher that prints its arguments and the YAML it got."""
    (tmp_path / "bin").mkdir()
    stub = tmp_path / "bin" / "python"
    output = "file=$MINIMIND_CONFIG_FILE cpu_by=$MINIMIND_CPU_BY omp=$OMP_NUM_THREADS"
    output += " ds=$DS_ACCELERATOR gpus=$CUDA_VISIBLE_DEVICES"
    stub.write_text(
        f'#!/bin/sh\n[ "${{1##*/}}" = accelerate_launch.py ] || exec "{sys.executable}" "$@"\n'
        f'echo "$@" "{output}"\ncat "$3"\n'
    )
    stub.chmod(0o755)

    def run(*flags: str, **more: str) -> Run:
        environ = environment(**{"PYTHON": str(stub), "CUDA_VISIBLE_DEVICES": "", **more})
        environ = {name: value for name, value in environ.items() if value != "unset"}
        command = ["bash", str(ROOT / "run_accelerate.sh"), *(flags or ["--dry_run"])]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path)
        return Run(tmp_path, done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the launch script with a stub as .venv/bin/python, and one for a foreign conda."""
    place = tmp_path / "checkout"
    for folder in ("scripts", "minimind", "configs"):
        (place / folder).parent.mkdir(exist_ok=True)
        (place / folder).symlink_to(ROOT / folder)
    (place / "run_accelerate.sh").write_bytes((ROOT / "run_accelerate.sh").read_bytes())
    for home in (place / ".venv", tmp_path / "conda"):
        stub = home / "bin" / "python"
        stub.parent.mkdir(parents=True)
        stub.write_text(
            f'#!/bin/sh\n[ "${{1##*/}}" = accelerate_launch.py ] || exec "{sys.executable}" "$@"\n'
            f'echo "$0 with $(command -v python)"\n'
        )
        stub.chmod(0o755)
    return place


def python_of(checkout: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """The launch script of `checkout`, with a conda environment active and first on PATH."""
    conda = checkout.parent / "conda"
    active = {"CONDA_PREFIX": str(conda), "VIRTUAL_ENV": str(conda), "CUDA_VISIBLE_DEVICES": ""}
    path = f"{conda / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environ = {**environment(**active), "PATH": path, **more}
    environ = {name: value for name, value in environ.items() if name in more or name != "PYTHON"}
    command = ["bash", str(checkout / "run_accelerate.sh"), "--dry_run"]
    return subprocess.run(command, env=environ, capture_output=True, text=True)


def test_the_checkouts_environment_is_used_whichever_other_one_is_active(checkout: Path):
    own, conda = (
        home / "bin" / "python" for home in (checkout / ".venv", checkout.parent / "conda")
    )
    assert python_of(checkout).stdout == f"{own} with {own}\n"
    # Only by name, or where the checkout has none.
    assert python_of(checkout, PYTHON=str(conda)).stdout == f"{conda} with {conda}\n"
    shutil.rmtree(checkout / ".venv")
    assert python_of(checkout).stdout == f"{conda} with {conda}\n"


def test_an_environment_that_lacks_accelerate_is_reported_with_a_command_that_mends_it(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
):
    (checkout / ".venv" / "bin" / "python").unlink()  # as after an upgrade of the system's Python
    broken = python_of(checkout)
    assert broken.returncode == 2
    assert broken.stderr.endswith(f"cannot be run; make -B -C '{checkout}' setup\n")
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    monkeypatch.setattr(launch, "PROJECT", checkout)
    (checkout / "Makefile").touch()
    for environ, way_out in (({}, "; make -B -C"), ({"PYTHON": "python3"}, "; unset PYTHON")):
        with pytest.raises(UsageError, match=f"accelerate is not installed for .*{way_out}"):
            launch.require_installed(environ)
    shutil.rmtree(checkout / ".venv")
    with pytest.raises(UsageError, match=f"; make -C '{checkout}' setup installs into"):
        launch.require_installed({})


def handed_on(run: Run) -> tuple[str, dict[str, Any]]:
    """(the command line of `accelerate`, the YAML it was given)."""
    assert run.status == 0, run.stderr
    line, _, document = run.stdout.partition("\n")
    return line, yaml.safe_load(document)


def test_the_shipped_yaml_is_launched_on_a_free_port(script):
    line, launched = handed_on(script())
    assert line.endswith(f"train_pretrain.py --dry_run file={SHIPPED} cpu_by= omp=1 ds=cpu gpus=")
    assert (launched["distributed_type"], launched["num_processes"]) == ("DEEPSPEED", 2)
    assert 1024 <= launched["main_process_port"] <= 65535


@pytest.mark.parametrize(
    ("lines", "field"),
    [
        ("distributed_type: MULTI_CPU", "distributed_type"),
        ("distributed_type: 'NO'\nuse_cpu: true", "use_cpu"),
    ],
)
def test_a_yaml_for_the_cpu_is_handed_on_as_such_and_not_as_a_flag(
    script, tmp_path: Path, lines: str, field: str
):
    path = tmp_path / "a b=c.yaml"
    path.write_text(f"{lines}\n")
    line, launched = handed_on(script(CONFIG_FILE=str(path), NUM_PROCESSES="1"))
    assert f"train_pretrain.py --dry_run file={path} cpu_by={field} " in line
    # The type under which Accelerate starts torchrun, which hands on signals.
    assert (launched["distributed_type"], launched["use_cpu"]) == ("MULTI_GPU", False)


@pytest.fixture
def exported(
    smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[dict[str, Any], dict[str, Any], str]]:
    """What the plan of a YAML exports, launches and says on a host with the GPUs listed."""

    def run(lines: str, listed: str = LISTED, **environ: str):
        smi(listed)
        Path("a.yaml").write_text(f"distributed_type: DEEPSPEED\n{lines}\n")
        for name in GPU_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in {"CONFIG_FILE": "a.yaml", **environ}.items():
            monkeypatch.setenv(name, value)
        launched, exports, message = launch.write_plan(Path("launch.yaml"), "auto")
        assert yaml.safe_load(Path("launch.yaml").read_text()) == launched
        return exports, launched, message

    monkeypatch.chdir(tmp_path)
    return run


@pytest.mark.parametrize(
    ("ids", "visible", "gpus"),
    [
        ("0,1", "0,1", 2),
        ("'1'", "1", 1),
        ("0", "0", 1),
        ("[0, 1]", "0,1", 2),
        ("[1]", "1", 1),
        ("['GPU-8a1b']", "GPU-8a1b", 1),
        ("\n- 1\n- 0", "1,0", 2),
        ("all", None, 2),
        ("[all]", None, 2),
        ("", None, 2),  # null, as Accelerate writes it
        *[(hidden, "-1", 0) for hidden in ("-1", "[-1]", "'-1'")],
        *[(hidden, "", 0) for hidden in ("''", "[]")],
    ],
)
def test_gpus_named_in_the_yaml_are_those_visible(
    ids: str,
    visible: str | None,
    gpus: int,
    exported: Callable[..., tuple[dict[str, Any], dict[str, Any], str]],
):
    exports, launched, message = exported(f"gpu_ids: {ids}")
    assert exports.get("CUDA_VISIBLE_DEVICES") == visible
    assert exports.get("DS_ACCELERATOR") == (None if gpus else "cpu")
    assert launched["num_processes"] == (gpus or 2)
    assert "gpu_ids" not in launched
    assert f" on {f'{gpus} GPU' if gpus else 'the CPU'}" in message
    exports, launched, _ = exported(f"gpu_ids: {ids}", CUDA_VISIBLE_DEVICES="1")  # before the file
    assert "CUDA_VISIBLE_DEVICES" not in exports
    assert launched["num_processes"] == 1


@pytest.mark.parametrize(
    ("lines", "environ", "report"),
    [
        ("gpu_ids: 0;1", {}, "gpu_ids in a.yaml is '0;1', not numbers"),
        ("gpu_ids: [0, 0]", {}, "gpu_ids in a.yaml is '0,0', in which"),
        ("gpu_ids: true", {}, "gpu_ids in a.yaml is 'True', not numbers"),
        ("gpu_ids: {a: 0}", {}, "gpu_ids in a.yaml is \"{'a': 0}\", not numbers"),
        ("gpu_ids: 0,1,2", {}, "gpu_ids in a.yaml is '0,1,2', and nvidia-smi lists 2 GPUs"),
        ("", {"CUDA_VISIBLE_DEVICES": "all"}, "CUDA_VISIBLE_DEVICES is 'all', not numbers"),
        ("", {"HIP_VISIBLE_DEVICES": "0;1"}, "HIP_VISIBLE_DEVICES is '0;1', not numbers"),
        ("", {"ROCR_VISIBLE_DEVICES": "0,0"}, "ROCR_VISIBLE_DEVICES is '0,0', in which"),
    ],
)
def test_a_fault_in_a_list_of_gpus_names_its_place(
    lines: str,
    environ: dict[str, str],
    report: str,
    exported: Callable[..., tuple[dict[str, Any], dict[str, Any], str]],
):
    with pytest.raises(RendezvousError) as caught:
        exported(lines, **environ)
    assert str(caught.value).startswith(report)


def test_a_gpu_that_is_not_there_is_one_line_and_9_unless_the_cpu_is_requested(script):
    refused = script(CUDA_VISIBLE_DEVICES="99")
    assert (refused.status, refused.stdout) == (9, "")
    (line,) = refused.stderr.splitlines()
    assert line.startswith("run_accelerate.sh: error[E_RENDEZVOUS]: CUDA_VISIBLE_DEV")
    _, launched = handed_on(script("--dry_run", "--device", "cpu", CUDA_VISIBLE_DEVICES="99"))
    assert launched["num_processes"] == 2


def test_a_taken_port_is_9_and_another_hosts_port_is_not_probed(script):
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = str(taken.getsockname()[1])
        refused = script(MAIN_PORT=port)
        assert refused.status == 9
        assert f"MAIN_PORT={port}" in refused.stderr
        hosts = {"NUM_MACHINES": "2", "MAIN_IP": "10.0.0.1", "MAIN_PORT": port}
        _, launched = handed_on(script(**hosts, MACHINE_RANK="1"))
    assert launched["main_process_port"] == int(port)


def test_a_config_file_that_cannot_be_is_one_line_and_2(script, tmp_path: Path):
    for path in ("gone.yaml", "fsdp.yaml"):
        (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\n")
        refused = script(CONFIG_FILE=str(tmp_path / path))
        assert refused.status == 2
        (line,) = refused.stderr.splitlines()
        assert line.startswith("run_accelerate.sh: error[E_USAGE]")
        assert path in line


MISTAKES = {
    "--lerning_rate 1": "2 unknown flag --lerning_rate; did you mean --learning_rate?",
    "--learning_rate fast": "2 learning_rate = 'fast' (--learning_rate) is not a finite number",
    "--data_path gone.txt": "3 gone.txt: there is no such file or directory",
    "--model tinny": "2 --model tinny: there is no such preset or file; did you mean tiny?",
    "--config gone.yaml": "2 --config gone.yaml: there is no such recipe or file;",
    "--deepspeed_config ds.json": "2 ds.json: zero_optimization.stge is not a key of DeepSpeed",
    "--deepspeed_config gone.json": "2 --deepspeed_config gone.json: there is no such DeepSpeed",
    "--resume gone": "4 --resume gone: there is no such file or directory in ",
    "--device cpu --dtype float16": "2 dtype = float16 (--dtype) needs a GPU;",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_of_a_flag_or_a_path_is_one_line_before_a_process_starts(
    script, tmp_path: Path, flags: str
):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stge": 1}}')
    refused = script("--dry_run", *flags.split())
    status, _, sentence = MISTAKES[flags].partition(" ")
    assert (refused.status, refused.stdout) == (int(status), "")
    (line,) = refused.stderr.splitlines()
    assert re.match(r"run_accelerate\.sh: error\[E_[A-Z]+\]: ", line)
    assert line.partition(": ")[2].partition(": ")[2].startswith(sentence)


def test_an_out_dir_that_cannot_be_made_is_told_before_a_process_starts(script):
    refused = script("--data_path", str(ROOT / "README.md"), "--out_dir", "/proc/nope")
    assert (refused.status, refused.stdout) == (5, "")
    (line,) = refused.stderr.splitlines()
    assert line.startswith("run_accelerate.sh: error[E_STORAGE]: out_dir /proc/nope: /proc cannot")


def test_a_path_that_is_not_on_this_one_of_two_hosts_is_left_to_its_workers(script):
    hosts = {"NUM_MACHINES": "2", "MAIN_IP": "10.0.0.1", "MAIN_PORT": "29500"}
    line, _ = handed_on(script("--data_path", "gone.txt", MACHINE_RANK="1", **hosts))
    assert "train_pretrain.py --data_path gone.txt " in line
    assert script("--data_pth", "gone.txt", MACHINE_RANK="1", **hosts).status == 2


@pytest.mark.parametrize(
    ("number", "output"),
    [(signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "SIGUSR1"), (signal.SIGINT, "Ctrl-C")],
)
def test_a_stop_before_the_launch_answers_75(
    script, tmp_path: Path, number: signal.Signals, output: str
):
    """An nvidia-smi of ours signals the process that asks it while the launch is planned."""
    stub = tmp_path / "bin" / "nvidia-smi"
    stub.write_text(f"#!/bin/sh\nkill -{number} $PPID\n")
    stub.chmod(0o755)
    path = f"{stub.parent}{os.pathsep}{os.environ['PATH']}"
    stopped = script(PATH=path, CUDA_VISIBLE_DEVICES="unset")
    assert stopped.status == 75
    *_, last = stopped.stderr.splitlines()
    assert last == (
        f"run_accelerate.sh: stopped on {output} before the first step; run it again to continue"
    )
    assert stopped.stdout == ""


def layout_in(out_dir: Path) -> Layout:
    return Layout("", str(out_dir), 1, 1, 1, 1, False, "auto", "")


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("is_saved", [False, True])
def test_a_second_ctrl_c_ends_all_processes_in_one_line_and_130(
    tmp_path: Path, is_saved: bool, has_begun: bool
):
    """A launcher of ours whose worker has a session of its own, and heeds no TERM."""
    out, stub, layout = (tmp_path / name for name in ("out", "python", "layout"))
    layout.write_text(json.dumps(dataclasses.asdict(layout_in(out))))
    worker = "import signal, time; signal.signal(15, signal.SIG_IGN); print(0); time.sleep(300)"
    parent = "import signal, subprocess, sys; signal.signal(15, signal.SIG_IGN); "
    parent += f"subprocess.run([sys.executable, '-uc', {worker!r}], start_new_session=True)"
    stub.write_text(
        f'#!/bin/sh\n[ "${{1##*/}}" = accelerate_launch.py ] || exec "{sys.executable}" "$@"\n'
        + f'cp "{layout}" "${{{STATUS_FILE}%/*}}/layout-0"\n' * has_begun
        + f'exec "{sys.executable}" -c "{parent}"\n'
    )
    stub.chmod(0o755)
    (out / "checkpoints" / ("step_00000013" if is_saved else "draft")).mkdir(parents=True)
    earlier = '{"event": "run_start", "time": 1.0, "step": 0}\n{"event": "step", "step": 17}\n'
    (out / "metrics.jsonl").write_text(earlier)
    started = subprocess.Popen(
        ["bash", str(ROOT / "run_accelerate.sh"), "--dry_run", "--out_dir", str(out)],
        env=environment(PYTHON=str(stub), CUDA_VISIBLE_DEVICES=""),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "0\n"
    started.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert started.poll() is None
    started.send_signal(signal.SIGINT)
    _, report = started.communicate(timeout=60)  # the worker holds the pipe until it is gone
    assert started.returncode == 130
    _, line = report.splitlines()  # behind that of the start
    saved = f"the last checkpoint is step 13 of {out}, later steps are lost"
    said = saved if is_saved else f"no checkpoint yet in {out}"
    assert line == f"run_accelerate.sh: ended at once by a second Ctrl-C; {said}"
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    if not has_begun:
        assert last["event"] == "step"
        assert not (out / "console.log").exists()
        return
    assert (last["event"], last["status"], last["step"]) == ("exit", 130, 17)
    assert last["reason"] == line.removeprefix("run_accelerate.sh: ")
    assert (out / "console.log").read_text().splitlines()[-1] == line


def test_an_end_that_a_rank_recorded_before_it_was_killed_is_not_recorded_again(tmp_path: Path):
    (tmp_path / "layout-0").write_text(json.dumps(dataclasses.asdict(layout_in(tmp_path))))
    log = '{"event": "step", "step": 3}\n{"event": "exit", "status": 75, "step": 3}\n'
    (tmp_path / "metrics.jsonl").write_text(log)
    launcher.log_end_at_once(tmp_path, "ended at once")
    assert (tmp_path / "metrics.jsonl").read_text() == log


EARLY_AND_LATE = """
import os, runpy, signal, sys

class Late:  # deleted when the interpreter has given up its handlers
    def __del__(self, kill=os.kill, place=os.getpid(), number=signal.SIGTERM):
        kill(place, number)

def early(event, given):
    if event == "import" and given[0] == "minimind.errors":
        os.kill(os.getpid(), signal.SIGTERM)

sys.late = Late()
sys.addaudithook(early)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_a_stop_while_the_launcher_is_imported_or_ends_answers_75(tmp_path: Path):
    words = [sys.executable, "-c", EARLY_AND_LATE, launcher.__file__, sys.executable]
    stopped = subprocess.run(
        words, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True
    )
    text = "stopped on SIGTERM before the first step; run it again to continue\n"
    assert (stopped.returncode, stopped.stdout) == (75, "")
    assert stopped.stderr.splitlines(keepends=True)[-1] == f"run_accelerate.sh: {text}"
    assert "Traceback" not in stopped.stderr
    assert [*tmp_path.iterdir()] == []


def test_the_slurm_script_starts_one_task_a_node_and_queues_a_saved_run_again(tmp_path: Path):
    """With an `srun` that runs the task for node 0 and 1, and a launch script that says 75."""
    (tmp_path / "run_accelerate.sh").write_text(
        'echo "$NUM_MACHINES $MACHINE_RANK $MAIN_IP $MAIN_PORT $1 $2" >>started; exit 75\n'
    )
    stubs = {
        "srun": 'while [ "$1" != bash ]; do shift; done\n'
        'SLURM_NODEID=0 "$@" & SLURM_NODEID=1 "$@"; code=$?; wait; exit $code',
        "scontrol": '[ "$1" = show ] && printf "node7\\nnode8\\n" || echo "$@" >>queued',
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    report = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "node[7-8]"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "slurm.sbatch"), "--out_dir", "out/a b"],
        env={**environment(**report), "PATH": path},
        cwd=tmp_path,
    )
    assert done.returncode == 75
    assert sorted((tmp_path / "started").read_text().splitlines()) == [
        "2 0 node7 24567 --out_dir out/a b",
        "2 1 node7 24567 --out_dir out/a b",
    ]
    assert (tmp_path / "queued").read_text() == "requeue 1234567\n"


def test_a_folder_that_cannot_be_made_or_filled_is_named(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    refused = script(TMPDIR=str(tmp_path / "gone"))
    assert refused.status == 5
    (line,) = refused.stderr.splitlines()
    assert f"made in {tmp_path / 'gone'} (TMPDIR): No such file or directory; name another" in line

    def full(target: Path, device: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    (tmp_path / "full").mkdir()
    for name in ("PATH", STATUS_FILE, SCRIPT_PID):  # which it sets
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "full"))
    monkeypatch.setattr(launcher, "write_plan", full)
    handlers = {number: signal.getsignal(number) for number in CAUGHT}
    try:
        assert launcher.main(sys.executable, ["--dry_run"]) == 5
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("run_accelerate.sh: error[E_STORAGE]: ")
    assert line.endswith("/0/launch.yaml: No space left on device; free some space")
    assert [*(tmp_path / "full").iterdir()] == []
