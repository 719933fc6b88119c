"""How many processes `accelerate launch` starts by which flags, and what they get."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import launch_command_parser

from tests.conftest import ROOT
from tests.examples.conftest import environment
from tools.forking import free_port

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is without a GPU")
# One line in one write, for those of two processes shall not mix.
WHO = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "ACCELERATE_MIXED_PRECISION")
found = {name: os.environ.get(name) for name in names} | {"argv": sys.argv[1:]}
os.write(1, json.dumps(found).encode() + b"\\n")
"""

Launched = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def launched(tmp_path: Path) -> Launched:
    """launched(flags, arguments, VARIABLE=value) -> variables and arguments of each rank."""
    script = tmp_path / "who.py"
    script.write_text(WHO)

    def run(flags: str, arguments: str = "", **more: str) -> list[dict[str, Any]]:
        line = [sys.executable, "-m", "accelerate.commands.launch", *flags.split(), str(script)]
        done = subprocess.run(
            [*line, *arguments.split()],
            env=environment(tmp_path / "hf") | more,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        output = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return sorted(output, key=lambda one: one["RANK"] or "")

    return run


def test_the_help_of_accelerate_launch_names_the_flags_of_the_page():
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    section = page.split("## Launch flags")[1].split("\n## ")[0]
    named = set(re.findall(r"(--[a-z]\w+)", section))
    taken = {name for action in launch_command_parser()._actions for name in action.option_strings}
    assert len(named) >= 7
    assert named <= taken


@pytest.mark.long
@pytest.mark.launch
@without_gpu
@pytest.mark.parametrize(
    "flags", ["--cpu --num_processes 2", "--num_processes=2", "--config_file multi_cpu.yaml"]
)
def test_these_start_one_process_where_two_were_requested(
    flags: str, launched: Launched, tmp_path: Path
):
    path = tmp_path / "multi_cpu.yaml"
    path.write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n")
    (one,) = launched(flags.replace("multi_cpu.yaml", str(path)))
    assert (one["RANK"], one["WORLD_SIZE"]) == (None, None)


@pytest.mark.long
@pytest.mark.launch
def test_multi_gpu_starts_as_many_as_requested_with_port_and_precision(launched: Launched):
    port = str(free_port())
    flags = f"--multi_gpu --mixed_precision=fp16 --num_processes=2 --main_process_port={port}"
    both = launched(flags, "--learning_rate 1 words")
    assert [one["RANK"] for one in both] == ["0", "1"]
    expected = {"WORLD_SIZE": "2", "MASTER_PORT": port, "ACCELERATE_MIXED_PRECISION": "fp16"}
    for one in both:
        assert {name: one[name] for name in expected} == expected
        assert one["argv"] == ["--learning_rate", "1", "words"]  # behind the script: the script's


@pytest.mark.long
@pytest.mark.launch
def test_a_flag_overrides_config_file(launched: Launched, tmp_path: Path):
    path = tmp_path / "two.yaml"
    path.write_text(
        "distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 2\nmixed_precision: bf16\n"
        "main_process_port: 0\n"
    )
    both = launched(f"--config_file {path}")
    assert [one["RANK"] for one in both] == ["0", "1"]
    assert {one["ACCELERATE_MIXED_PRECISION"] for one in both} == {"bf16"}
    three = launched(f"--config_file {path} --num_processes 3 --mixed_precision no")
    assert [one["WORLD_SIZE"] for one in three] == ["3"] * 3
    assert {one["ACCELERATE_MIXED_PRECISION"] for one in three} == {"no"}


@pytest.mark.long
@pytest.mark.launch
def test_visible_gpus_are_those_of_the_environment_unless_gpu_ids_is_set(launched: Launched):
    (one,) = launched("--num_processes 1", CUDA_VISIBLE_DEVICES="0")
    assert one["CUDA_VISIBLE_DEVICES"] == "0"
    (one,) = launched("--num_processes 1 --gpu_ids 1", CUDA_VISIBLE_DEVICES="0")
    assert one["CUDA_VISIBLE_DEVICES"] == "1"
