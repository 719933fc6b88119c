"""Where tutorials on Accelerate are out of date, what is true of the versions pinned here."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.launch
import transformers
from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.commands.config.default import write_basic_config
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors import SafetensorError
from safetensors.torch import save_file

from tests.conftest import ROOT
from tests.examples.conftest import Start


def test_adamw_is_torchs():
    assert not hasattr(transformers, "AdamW")
    assert issubclass(torch.optim.AdamW, torch.optim.Optimizer)


def test_torch_distributed_launch_is_deprecated():
    main: Any = torch.distributed.launch.main
    assert "torch.distributed.launch is deprecated" in main.__deprecated__


def test_on_local_process_takes_local_process_index():
    taken = inspect.signature(Accelerator.on_local_process).parameters
    assert "local_process_index" in taken
    assert "local_process_idx" not in taken


def test_main_process_is_an_attribute_and_not_a_call():
    assert isinstance(Accelerator.is_main_process, property)
    assert isinstance(Accelerator.is_local_main_process, property)


def test_save_model_writes_safetensors_by_default():
    taken = inspect.signature(Accelerator.save_model).parameters
    assert taken["safe_serialization"].default is True


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.FSDP])
def test_deepspeed_and_fsdp_refuse_to_clip_by_value(kind: DistributedType):
    under: Any = SimpleNamespace(distributed_type=kind)
    with pytest.raises(Exception, match="do not support `clip_grad_value_`"):
        Accelerator.clip_grad_value_(under, [], 1.0)


def test_a_deepspeed_file_beside_multi_gpu_engages_no_deepspeed(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    words = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision bf16"
    words += f" --deepspeed_config_file {ROOT / 'configs' / 'ds_config.json'} train.py"
    args = launch_command_parser().parse_args(words.split())
    args.use_cpu, args.dynamo_backend, args.num_cpu_threads_per_process = False, "no", 1
    handed_on = prepare_multi_gpu_env(args)
    assert not args.use_deepspeed
    assert "ACCELERATE_USE_DEEPSPEED" not in handed_on


def test_write_basic_config_writes_what_accelerate_launch_reads(tmp_path: Path):
    path = tmp_path / "default_config.json"
    assert write_basic_config(mixed_precision="bf16", save_location=str(path))
    written = json.loads(path.read_text())
    assert written["mixed_precision"] == "bf16"
    assert written["num_machines"] == 1
    assert not write_basic_config(save_location=str(path))  # what is there stays


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_gpus_only_cpu_true_makes_processes_know_one_another(start: Start, tmp_path: Path):
    for given, output in (("", "1 cpu\n" * 2), ("cpu=True", "2 cpu:0\n" * 2)):
        script = tmp_path / "count.py"
        script.write_text(
            f"from accelerate import Accelerator\na = Accelerator({given})\n"
            "import sys; sys.stdout.write(f'{a.num_processes} {a.device}\\n')\na.end_training()\n"
        )
        assert start(str(script), processes=2) == output


def test_load_checkpoint_in_model_takes_the_word_cpu_and_no_device_of_torchs(tmp_path: Path):
    model = torch.nn.Linear(2, 2)
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors", {"format": "pt"})
    again = torch.nn.Linear(2, 2)
    load_checkpoint_in_model(again, tmp_path, device_map={"": "cpu"})
    assert torch.equal(again.weight, model.weight)
    for device in (torch.device("cpu"), torch.device("cpu", 0), "cpu:0"):
        with pytest.raises(SafetensorError, match="is invalid"):
            load_checkpoint_in_model(again, tmp_path, device_map={"": device})
