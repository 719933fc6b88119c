"""Configurations that cannot be: exit 2, one line, who said what, and the way out, before any work.

Every row goes through `train_pretrain.main`, as rank 0 of the two workers that a launcher starts.
The text it names is not there, so that a row which is let through ends with status 3.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

from minimind.config.deepspeed.values import put
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.engine.build import MODELS, section_faults
from minimind.launch import train_pretrain
from minimind.runtime.exit import Ending
from tests.conftest import Launcher, Run

LAUNCHED = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "configs/ds_config.json",
    "ACCELERATE_MIXED_PRECISION": "no",
}
LINE = re.compile(r"train_pretrain: error\[E_USAGE\] rank=0 step=0: (\S.*); (\S.*)\n")
NAN, HUGE = float("nan"), 10**400


@dataclass(frozen=True)
class Bad:
    """One mistake, or several: where it stands, and what the line has to say."""

    words: tuple[str, ...]
    flags: str = ""
    json: Mapping[str, Any] | str | bytes = field(default_factory=dict)  # edits, or a whole file
    yaml: str = ""  # --config
    environ: Mapping[str, str] = field(default_factory=dict)  # the Accelerate YAML
    launcher: str = "torchrun"  # the command line above the workers
    gpus: int = 0
    several: bool = False

    def deepspeed_file(self, path: Path) -> Path:
        """`path`, with the DeepSpeed JSON of the row in it."""
        if isinstance(self.json, Mapping):
            config = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
            for key, value in self.json.items():
                put(config, key, value)
            path.write_text(json.dumps(config, indent=2))
        else:
            path.write_bytes(self.json.encode() if isinstance(self.json, str) else self.json)
        return path


def bad(*words: str, **where: Any) -> Bad:
    return Bad(words, **where)


def zero(**members: Any) -> dict[str, Any]:
    return {f"zero_optimization.{name}": value for name, value in members.items()}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


def by_accelerate(**fields: str) -> dict[str, str]:
    return {f"ACCELERATE_{name}": value for name, value in fields.items()}


JSON_FILES = {
    "json without its end": bad("ds.json:3:1: ", json='{\n  "bf16": {},\n'),
    "json missing quote": bad(
        'ds.json: bf16" is no key', "did you mean bf16?", json='{\n  bf16": {}\n}\n'
    ),
    "json comment": bad("ds.json:3:14: ", json='{\n  // precision\n  "bf16": {}}}\n'),
    "json cut short": bad("ds.json:1:9: ", json='{"bf16":'),
    "json text after the end": bad("ds.json:2:1: Extra data", json="{}\n{}"),
    "json empty": bad("ds.json:1:1: ", json=""),
    "json byte order mark": bad("ds.json:1:2: ", json=b"\xef\xbb\xbf{]"),
    "json not utf-8": bad("ds.json", "not UTF-8 at byte 2", json=b'{"\xe9": 1}'),
    "json array": bad("ds.json", "list, not a JSON object", json="[]"),
    "json null": bad("ds.json", "not a JSON object", json="null"),
    "json key twice": bad(
        "ds.json: stage is written twice", json='{"a": {"stage": 1, "stage": 2}}'
    ),
    "json nan": bad("ds.json: gradient_clipping is NaN", json={"gradient_clipping": NAN}),
    "json infinity": bad(
        "ds.json: gradient_accumulation_steps is Infinity",
        json={"gradient_accumulation_steps": float("inf")},
    ),
    "json number beyond floats": bad("gradient_clipping", json={"gradient_clipping": HUGE}),
    "json number of 5000 digits": bad("ds.json", json='{"gradient_clipping": 1%s}' % ("0" * 5000)),
    "json nested without end": bad("ds.json", json="[" * 100_000),
    "json not there": bad("none.json: No such file", flags="--deepspeed_config none.json"),
    "json a directory": bad("--deepspeed_config .: Is a directory", flags="--deepspeed_config ."),
}

FLAGS = {
    "flag misspelt": bad("--batch_sise", "did you mean --batch_size?", flags="--batch_sise 3"),
    "flag abbreviated": bad("--learning", "--learning_rate?", flags="--learning 1e-3"),
    "flag without value": bad("--max_steps", "expected one argument", flags="--max_steps"),
    "flag word alone": bad("unexpected argument 'tiny'", flags="tiny"),
    "flag switch with value": bad("--split_batches", flags="--split_batches=yes"),
    "flag negative": bad("batch_size = -1 (--batch_size)", flags="--batch_size -1"),
    "flag zero": bad("accumulation_steps = 0", "at least 1", flags="--accumulation_steps 0"),
    "flag zero rate": bad("learning_rate = 0.0", "above 0.0", flags="--learning_rate 0"),
    "flag fraction": bad("batch_size = '2.5'", "whole number", flags="--batch_size 2.5"),
    "flag no number": bad("grad_clip = 'big' (--grad_clip)", flags="--grad_clip big"),
    "flag nan": bad("learning_rate = 'nan'", "finite", flags="--learning_rate nan"),
    "flag infinity": bad("weight_decay = 'inf'", "finite", flags="--weight_decay inf"),
    "flag beyond one": bad("beta2 = 1.0", "below 1.0", flags="--beta2 1"),
    "flag seed": bad("seed = 4294967296", "at most", flags="--seed 4294967296"),
    "flag choice": bad("dtype = fp16 (--dtype)", "float16", flags="--dtype fp16"),
    "flag empty": bad("deepspeed_config = ''", flags="--deepspeed_config="),
    "flag batch not divisible": bad(
        "batch_size = 3 (--batch_size)",
        "2 processes (--split_batches)",
        flags="--split_batches --batch_size 3",
    ),
    "flag no gpu": bad("device = cuda (--device)", "no GPU", flags="--device cuda"),
    "flag model unknown": bad("--model 27m", "26m", flags="--model 27m"),
    "flag model file odd": bad(
        "run.yaml: 'batch_size'", flags="--model run.yaml", yaml="batch_size: 3"
    ),
    "flag float16 on cpu": bad("dtype = float16 (--dtype)", "needs a GPU", flags="--dtype float16"),
    "flag float16 on cpu without deepspeed": bad(
        "dtype = float16 (--dtype)", "GPU", flags="--dtype float16 --deepspeed_config none"
    ),
}

YAML_FILES = {
    "yaml bracket": bad("run.yaml:2:5: ", yaml="data_path: [a, b\nseed: 3\n"),
    "yaml tab": bad("run.yaml:2:1: ", yaml="seed:\n\tvalue: 3\n"),
    "yaml list": bad("run.yaml: is list, not a mapping", yaml="- seed\n- 3\n"),
    "yaml empty": bad("run.yaml: is empty, not a mapping", yaml="# seed: 3\n"),
    "yaml unknown key": bad("'batchsize' in run.yaml", "mean batch_size?", yaml="batchsize: 3"),
    "yaml key no text": bad("3", "run.yaml", yaml="3: 4"),
    "yaml key null": bad("run.yaml:1:1: the value is empty", yaml="~: 4"),
    "yaml key twice": bad(
        "batch_size", "run.yaml", "duplicate key", yaml="batch_size: 3\nbatch_size: 4"
    ),
    "yaml negative": bad("save_interval = -5 (--config run.yaml)", yaml="save_interval: -5"),
    "yaml infinity": bad("batch_size = '.inf' (--config run.yaml)", yaml="batch_size: .inf"),
    "yaml number beyond floats": bad("grad_clip", "--config run.yaml", yaml=f"grad_clip: {HUGE}"),
    "yaml no such day": bad("seed = '2026-02-30'", yaml="seed: 2026-02-30"),
    "yaml switch as text": bad("profile = 'maybe' (--config run.yaml)", yaml="profile: maybe"),
    "yaml text as object": bad("tokenizer", "--config run.yaml", yaml="tokenizer: {path: t.model}"),
    "yaml null": bad("run.yaml:1:13: the value is empty", yaml="batch_size: null"),
    "yaml names another": bad("'config' in run.yaml", yaml="config: other.yaml"),
    "yaml not there": bad("none.yaml: no such recipe or file", flags="--config none.yaml"),
    "yaml against the json": bad(
        "ds.json: gradient_clipping is 0.5",
        "--config run.yaml says grad_clip = 1.0",
        yaml="grad_clip: 1.0",
        json={"gradient_clipping": 0.5},
    ),
}

KEYS = {
    "key zero_optimisation": bad(
        "ds.json: zero_optimisation",
        "did you mean zero_opt",
        json={"zero_optimisation": {"stage": 3}},
    ),
    "key optimiser": bad("ds.json: optimiser", "mean optimizer?", json={"optimiser": {}}),
    "key train_batchsize": bad("train_batchsize", "train_batch_size?", json={"train_batchsize": 8}),
    "key note": bad("ds.json: _comment", "no place for notes", json={"_comment": "mine"}),
    "key stage too high up": bad("stage", "inside zero_optimization", json={"stage": 3}),
    "key lr too high up": bad("ds.json: lr", "inside optimizer.params", json={"lr": 1e-3}),
    "key lr in optimizer": bad("ds.json: optimizer.lr", json={"optimizer.lr": 1e-3}),
    "key removed amp": bad("ds.json: amp was removed", "bf16", json={"amp": {"enabled": True}}),
    "key removed elasticity": bad("ds.json: elasticity was removed", json={"elasticity": {}}),
    "key removed mics": bad("mics_shard_size", "removed", json=zero(mics_shard_size=2)),
    "key old cpu_offload": bad("cpu_offload", "offload_optimizer", json=zero(cpu_offload=True)),
    "key by its old and its new name": bad(
        "stage3_gather_fp16_weights_on_model_save",
        json=zero(
            stage3_gather_fp16_weights_on_model_save=True,
            stage3_gather_16bit_weights_on_model_save=True,
        ),
    ),
    "key stagee": bad("ds.json: zero_optimization.stagee", json=zero(stagee=2)),
    "key bf16.enable": bad("ds.json: bf16.enable is no key", json={"bf16.enable": True}),
    "key offload devise": bad(
        "offload_optimizer.devise", json=zero(offload_optimizer={"devise": "cpu"})
    ),
    "key tensorboard.enable": bad("tensorboard.enable", json={"tensorboard": {"enable": True}}),
    "key optimizer.parms": bad(
        "optimizer.parms", "params?", json={"optimizer.parms": {"lr": 1e-3}}
    ),
    "key optimizer parameter": bad(
        "weight_decy", "mean weight_decay?", json={"optimizer.params.weight_decy": 0}
    ),
    "key optimizer type": bad(
        'optimizer.type is "AdmaW"', "mean AdamW?", json={"optimizer.type": "AdmaW"}
    ),
    "key optimizer removed": bad(
        '"OneBitAdam"', "use AdamW", json={"optimizer.type": "OneBitAdam"}
    ),
    "key optimizer without type": bad("optimizer has no type", json={"optimizer": {"params": {}}}),
    "key scheduler type": bad('"WarmUpLR"', "mean WarmupLR?", json=scheduler("WarmUpLR")),
    "key scheduler parameter": bad(
        "scheduler.params.warmup_steps",
        "mean warmup_num_steps?",
        json=scheduler("WarmupLR", warmup_steps=3),
    ),
    "key scheduler needs": bad(
        "cycle_max_lr is missing", json=scheduler("OneCycle", cycle_min_lr=1e-4)
    ),
}

TYPES = {
    "type number": bad('gradient_clipping is "big"', "a number", json={"gradient_clipping": "big"}),
    "type whole number": bad("train_batch_size is 8.5", json={"train_batch_size": 8.5}),
    "type number of text": bad('train_batch_size is "Auto"', json={"train_batch_size": "Auto"}),
    "type null": bad("ds.json: gradient_clipping", json={"gradient_clipping": None}),
    "type bool": bad(
        "wall_clock_breakdown is 1", "true or false", json={"wall_clock_breakdown": 1}
    ),
    "type text": bad("communication_data_type is 16", json={"communication_data_type": 16}),
    "type choice": bad('"loud", not one of', "debug", json={"log_level": "loud"}),
    "type choice inside": bad("grad_accum_dtype", json={"data_types": {"grad_accum_dtype": "fp8"}}),
    "type object": bad("ds.json: zero_optimization is 3", json={"zero_optimization": 3}),
    "type block as text": bad("ds.json: bf16 is true", json={"bf16": True}),
    "type block auto": bad("ds.json: bf16 is", json={"bf16": "auto"}),
    "type optimizer auto": bad("ds.json: optimizer is", json={"optimizer": "auto"}),
    "type parameters auto": bad("ds.json: optimizer.params is", json={"optimizer.params": "auto"}),
    "type offload": bad(
        "ds.json: zero_optimization.offload_optimizer is", json=zero(offload_optimizer="cpu")
    ),
    "type offload true": bad(
        "ds.json: zero_optimization.offload_param", json=zero(stage=3, offload_param=True)
    ),
    "type offload device": bad(
        "offload_optimizer.device", "cpu", json=zero(offload_optimizer={"device": "gpu"})
    ),
    "type offload device object": bad(
        "ds.json: zero_optimization.offload_optimizer",
        json=zero(stage=0, offload_optimizer={"device": {"name": "cpu"}}),
    ),
    "type precision": bad('ds.json: bf16.enabled is "maybe"', json={"bf16.enabled": "maybe"}),
    "type betas": bad("optimizer.params.betas is 0.9", json={"optimizer.params.betas": 0.9}),
    "type betas three": bad("betas is [0.9, 0.9, 0.9]", json={"optimizer.params.betas": [0.9] * 3}),
    "type bucket": bad(
        "zero_optimization.reduce_bucket_size", "big", json=zero(reduce_bucket_size="big")
    ),
    "type stage text": bad('stage is "two"', "0, 1, 2 or 3", json=zero(stage="two")),
    "type stage true": bad("ds.json: zero_optimization.stage is true", json=zero(stage=True)),
    "value stage 4": bad("ds.json: zero_optimization.stage is 4", json=zero(stage=4)),
    "value stage negative": bad("ds.json: zero_optimization.stage is -1", json=zero(stage=-1)),
    "value clip negative": bad(
        "(ds.json: gradient_clipping)", "-1", json={"gradient_clipping": -1}
    ),
    "value rate zero": bad("(ds.json: optimizer.params.lr)", json={"optimizer.params.lr": 0}),
    "value eps negative": bad(
        "ds.json: optimizer.params.eps", json={"optimizer.params.eps": -1e-8}
    ),
    "value beta": bad(
        "(ds.json: optimizer.params.betas[1])", json={"optimizer.params.betas": [0.9, 1.0]}
    ),
    "value bucket zero": bad("reduce_bucket_size is 0", json=zero(reduce_bucket_size=0)),
    "value print zero": bad("ds.json: steps_per_print", json={"steps_per_print": 0}),
    "value predivide zero": bad(
        "ds.json: gradient_predivide_factor",
        json={"gradient_predivide_factor": 0, **zero(reduce_scatter=False)},
    ),
    "value predivide negative": bad(
        "ds.json: gradient_predivide_factor",
        json={"gradient_predivide_factor": -1, **zero(reduce_scatter=False)},
    ),
    "value start of the warm-up negative": bad(
        "ds.json: scheduler.params.warmup_min_lr", json=scheduler("WarmupLR", warmup_min_lr=-1e-3)
    ),
    "value cycle zero": bad(
        "ds.json: scheduler.params.cycle_first_step_size",
        json=scheduler("OneCycle", cycle_min_lr=1e-4, cycle_max_lr=1e-3, cycle_first_step_size=0),
    ),
    "value auto unfilled": bad(
        '"auto" is not supported for optimizer.params.foreach',
        json={"optimizer.params.foreach": "auto"},
    ),
    "value auto unfilled at the top": bad(
        '"auto" is not supported for steps_per_print', json={"steps_per_print": "auto"}
    ),
}


def against(key: str, literal: Any, flag: str, value: Any, **where: Any) -> Bad:
    """A literal of the file against a flag: both sides with their values."""
    shown = f"ds.json: {where.pop('shown', f'{key} is')}"
    given = where.pop("flags", f"--{flag} {value}")
    return bad(shown, f"--{flag} says {flag} = {value}", json={key: literal}, flags=given, **where)


CONFLICTS = {
    "literal batch": against("train_micro_batch_size_per_gpu", 4, "batch_size", 8),
    "literal batch, split": against(
        "train_micro_batch_size_per_gpu",
        4,
        "batch_size",
        6,
        flags="--batch_size 6 --split_batches",
        shown="train_micro_batch_size_per_gpu x 2 processes (--split_batches) is 8",
    ),
    "literal accumulation": against("gradient_accumulation_steps", 2, "accumulation_steps", 1),
    "literal clip": against("gradient_clipping", 0.5, "grad_clip", 1.0),
    "literal rate": against("optimizer.params.lr", 1e-3, "learning_rate", 0.0002),
    "literal weight decay": against("optimizer.params.weight_decay", 0, "weight_decay", 0.1),
    "literal beta1": against(
        "optimizer.params.betas",
        [0.8, 0.95],
        "beta1",
        0.9,
        shown="optimizer.params.betas[0] is 0.8",
    ),
    "literal beta2": against(
        "optimizer.params.betas",
        [0.9, 0.99],
        "beta2",
        0.95,
        shown="optimizer.params.betas[1] is 0.99",
    ),
    "literal bf16 on": against("bf16.enabled", True, "dtype", "float32"),
    "literal bf16 off": against("bf16.enabled", False, "dtype", "bfloat16"),
    "literal fp16 on": against("fp16.enabled", True, "dtype", "bfloat16"),
    "literal warm-up": bad(
        "ds.json: scheduler.params.warmup_num_steps is 20",
        "--warmup_steps says warmup_steps = 5",
        json=scheduler("WarmupLR", warmup_num_steps=20),
        flags="--warmup_steps 5",
    ),
    "literal total steps": bad(
        "ds.json: scheduler.params.total_num_steps is 90",
        "--max_steps says max_steps = 50",
        json=scheduler("WarmupDecayLR", total_num_steps=90),
        flags="--max_steps 50",
    ),
    "literal peak of the scheduler": bad(
        "ds.json: scheduler.params.warmup_max_lr is 0.002",
        "--learning_rate says learning_rate = 0.001",
        json=scheduler("WarmupLR", warmup_max_lr=2e-3),
        flags="--learning_rate 1e-3",
    ),
    "literal floor": bad(
        "ds.json: scheduler.params.cos_min_ratio is 0.2",
        "--min_lr_ratio says min_lr_ratio = 0.1",
        json=scheduler("WarmupCosineLR", cos_min_ratio=0.2),
        flags="--min_lr_ratio 0.1",
    ),
    "schedule against scheduler": bad(
        "ds.json: scheduler.type is WarmupLR",
        "schedule = linear (--schedule)",
        json=scheduler("WarmupLR"),
        flags="--schedule linear",
    ),
    "two literals, two rates": bad(
        "ds.json: scheduler.params.warmup_max_lr is 0.002",
        "ds.json: optimizer.params.lr says learning_rate = 0.001",
        json={"optimizer.params.lr": 1e-3, **scheduler("WarmupLR", warmup_max_lr=2e-3)},
    ),
    "two precisions": bad(
        "ds.json: bf16.enabled and fp16.enabled",
        "both true",
        json={"bf16.enabled": True, "fp16.enabled": True},
    ),
    "batch impossible": bad(
        "ds.json: train_batch_size is 7",
        "2 rows (--batch_size)",
        "2 micro-batches (--accumulation_steps)",
        "2 processes = 8",
        json={"train_batch_size": 7},
        flags="--batch_size 2 --accumulation_steps 2",
    ),
    "batch impossible by literals": bad(
        "ds.json: train_batch_size is 32",
        "(ds.json: train_micro_batch_size_per_gpu)",
        "(ds.json: gradient_accumulation_steps)",
        json={
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
        },
    ),
    "batch odd over two processes": bad(
        "ds.json: train_batch_size is 9", "2 processes", json={"train_batch_size": 9}
    ),
    "batch zero": bad("ds.json: train_batch_size is 0", json={"train_batch_size": 0}),
    "batch negative": bad("ds.json: train_batch_size is -8", json={"train_batch_size": -8}),
    "max_steps shorter than the warm-up": bad(
        "total_num_steps = 10 (--max_steps)",
        "warmup_num_steps = 50 (",
        "ds.json: scheduler.params.warmup_num_steps",
        json=scheduler("WarmupDecayLR", warmup_num_steps=50),
        flags="--max_steps 10",
    ),
    "scheduler shorter than --warmup_steps": bad(
        "ds.json: scheduler.params.total_num_steps",
        "warmup_num_steps = 50 (--warmup_steps)",
        json=scheduler("WarmupDecayLR", total_num_steps=10),
        flags="--warmup_steps 50",
    ),
    "max_steps shorter than a warm-up without total": bad(
        "(--max_steps)",
        "ds.json: scheduler.params.warmup_num_steps",
        json=scheduler("WarmupLR", warmup_num_steps=50),
        flags="--max_steps 10",
    ),
    "warm-up of one step by flag": bad(
        "warmup_steps = 1 (--warmup_steps)",
        "ds.json",
        json=scheduler("WarmupLR"),
        flags="--warmup_steps 1",
    ),
}

LAUNCHERS = {
    "accelerate precision against flag": bad(
        "accelerate launch (YAML or flag): mixed_precision is bfloat16",
        "--dtype says dtype = float32",
        environ=by_accelerate(MIXED_PRECISION="bf16"),
        flags="--dtype float32",
    ),
    "accelerate precision against json": bad(
        "ds.json: bf16.enabled is false",
        "accelerate launch (YAML or flag): mixed_precision says dtype = bfloat16",
        environ=by_accelerate(MIXED_PRECISION="bf16"),
        json={"bf16.enabled": False},
    ),
    "accelerate precision unknown": bad(
        "dtype = fp8 (accelerate launch (YAML or flag): mixed_precision)",
        environ=by_accelerate(MIXED_PRECISION="fp8"),
    ),
    "accelerate float16 on cpu": bad(
        "dtype = float16 (accelerate launch (YAML or flag): mixed_precision)",
        "GPU",
        environ=by_accelerate(MIXED_PRECISION="fp16"),
    ),
    "accelerate accumulation against flag": bad(
        "accelerate launch (YAML or flag): gradient_accumulation_steps is 4",
        "--accumulation_steps says accumulation_steps = 2",
        environ=by_accelerate(GRADIENT_ACCUMULATION_STEPS="4"),
        flags="--accumulation_steps 2",
    ),
    "accelerate accumulation against json": bad(
        "ds.json: gradient_accumulation_steps is 2",
        "accelerate launch (YAML or flag): gradient_accumulation_steps says accumulation_steps = 4",
        environ=by_accelerate(GRADIENT_ACCUMULATION_STEPS="4"),
        json={"gradient_accumulation_steps": 2},
    ),
    "accelerate clipping against flag": bad(
        "accelerate launch (YAML or flag): gradient_clipping is 0.5",
        "--grad_clip says grad_clip = 1.0",
        environ=by_accelerate(GRADIENT_CLIPPING="0.5"),
        flags="--grad_clip 1.0",
    ),
    "accelerate clipping no number": bad(
        "grad_clip = 'big' (accelerate launch (YAML or flag): gradient_clipping)",
        environ=by_accelerate(GRADIENT_CLIPPING="big"),
    ),
    "accelerate cpu against flag": bad(
        "accelerate launch (YAML or flag): use_cpu is cpu",
        "--device says device = cuda",
        environ=by_accelerate(USE_CPU="true"),
        flags="--device cuda",
    ),
    "accelerate stage against json": bad(
        "ds.json: zero_optimization.stage is 2",
        "accelerate launch (YAML or flag) says zero_stage = 3",
        environ=by_accelerate(DEEPSPEED_ZERO_STAGE="3"),
    ),
    "accelerate stage unknown": bad(
        "accelerate launch (YAML or flag)",
        "zero_stage",
        "two",
        environ=by_accelerate(DEEPSPEED_ZERO_STAGE="two"),
        json=zero(stage="auto"),
    ),
    "accelerate offload against json": bad(
        'ds.json: zero_optimization.offload_optimizer.device is "none"',
        "accelerate launch (YAML or flag) says offload_optimizer_device = cpu",
        environ=by_accelerate(DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="cpu"),
        json=zero(offload_optimizer={"device": "none"}),
    ),
    "accelerate offload nvme": bad(
        "accelerate launch (YAML or flag)",
        "nvme",
        environ=by_accelerate(DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="nvme"),
    ),
    "accelerate offload below stage 3": bad(
        "accelerate launch (YAML or flag): offload_param_device",
        "ds.json",
        "needs stage 3",
        environ=by_accelerate(DEEPSPEED_OFFLOAD_PARAM_DEVICE="cpu"),
    ),
    "accelerate fsdp": bad(
        "accelerate launch (YAML or flag): distributed_type = FSDP",
        "DEEPSPEED",
        environ=by_accelerate(USE_FSDP="true"),
    ),
    "accelerate megatron": bad("MEGATRON_LM", environ=by_accelerate(USE_MEGATRON_LM="true")),
    "accelerate dynamo": bad(
        "dynamo_backend = INDUCTOR", environ=by_accelerate(DYNAMO_BACKEND="INDUCTOR")
    ),
    "accelerate drops the stage": bad(
        "--zero_stage",
        "--use_deepspeed",
        environ=by_accelerate(USE_DEEPSPEED="false"),
        launcher="python bin/accelerate launch --multi_gpu --zero_stage 3",
    ),
    "accelerate drops another file": bad(
        "--deepspeed_config is ds.json",
        "--deepspeed_config_file",
        flags="--deepspeed_config ds.json",
        environ=by_accelerate(USE_DEEPSPEED="false"),
        launcher="python bin/accelerate launch --multi_gpu --deepspeed_config_file other.json",
    ),
    "more processes than gpus": bad(
        "2 processes", "1 GPU is visible", "NUM_PROCESSES=1", flags="--device cuda", gpus=1
    ),
}

COMBINATIONS = {
    "float16 at stage 0": bad(
        "dtype = float16 (--dtype)",
        "stage 0",
        json=zero(stage=0),
        flags="--dtype float16 --device cuda",
        gpus=2,
    ),
    "float16 by the file on cpu": bad(
        "dtype = float16 (ds.json: fp16.enabled)", "GPU", json={"fp16.enabled": True}
    ),
    "float32 accumulation at stage 1": bad(
        "grad_accum_dtype", json={"data_types": {"grad_accum_dtype": "float32"}, **zero(stage=1)}
    ),
    "tensor parallel at stage 3": bad(
        "ds.json: zero_optimization.stage is 3 is not supported with tensor_parallel = 2",
        "tensor_parallel.autotp_size",
        json={"tensor_parallel": {"autotp_size": 2}, **zero(stage=3)},
    ),
    "tensor parallel key heads": bad(
        "n_kv_heads = 1 (--n_kv_heads) is not divisible by tensor_parallel = 2",
        flags="--tensor_parallel 2 --n_kv_heads 1",
    ),
    "tensor parallel on too few": bad("does not divide 2 processes", flags="--tensor_parallel 3"),
    "tensor parallel twice": bad(
        "tensor_parallel.autotp_size is 1",
        "tensor_parallel = 2",
        json={"tensor_parallel": {"autotp_size": 1}},
        flags="--tensor_parallel 2",
    ),
}

SEVERAL = {
    "several conflicts": bad(
        "3 faults:",
        "ds.json: gradient_clipping is 0.5 but --grad_clip",
        "ds.json: gradient_accumulation_steps is 9 but --accumulation_steps",
        "ds.json: bf16.enabled is false but --dtype",
        json={"gradient_clipping": 0.5, "gradient_accumulation_steps": 9, "bf16.enabled": False},
        flags="--grad_clip 1.0 --accumulation_steps 2 --dtype bfloat16",
        several=True,
    ),
    "several kinds": bad(
        "4 faults:",
        "zero_optimisation",
        "weight_decy",
        "steps_per_print",
        "offload_param",
        json={
            "zero_optimisation": {},
            "optimizer.params.weight_decy": 0.1,
            "steps_per_print": "often",
            **zero(offload_param={"device": "cpu"}),
        },
        several=True,
    ),
    "several in sections": bad(
        "2 faults:",
        "zero_optimization.stagee",
        "bf16.enable",
        json={"bf16.enable": 1, **zero(stagee=2)},
        several=True,
    ),
    "several in the accelerate yaml": bad(
        "2 faults:",
        "--dtype",
        "--grad_clip",
        environ=by_accelerate(MIXED_PRECISION="bf16", GRADIENT_CLIPPING="0.5"),
        flags="--dtype float32 --grad_clip 1.0",
        several=True,
    ),
}

BAD = JSON_FILES | FLAGS | YAML_FILES | KEYS | TYPES | CONFLICTS
BAD |= LAUNCHERS | COMBINATIONS | SEVERAL
# Every launch takes ten seconds, and all go one way: that of those in tests/data/test_bad_input.py.
LONG = [pytest.mark.long]
BY_LAUNCH = (
    pytest.param("json without its end", marks=LONG),
    pytest.param("batch impossible", marks=LONG),
    pytest.param("literal clip", marks=LONG),
    pytest.param("key zero_optimisation", marks=LONG),
    pytest.param("key stagee", marks=LONG),
    pytest.param("max_steps shorter than the warm-up", marks=LONG),
)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """DeepSpeed, whose import alone is full of warnings."""
    with warnings.catch_warnings(), mock.patch.dict(os.environ):
        warnings.simplefilter("ignore")
        assert section_faults({name: {} for name in MODELS}, "ds.json", "cpu") == []


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A process as launchers leave it, in a directory of its own; what main changes is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Ending, "watch", lambda self: None)  # a thread without end
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "MINI"))}
    with mock.patch.dict(os.environ, inherited | LAUNCHED, clear=True):
        yield


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("row", BAD.values(), ids=BAD.keys())
def test_what_cannot_be_is_one_line_and_status_2_before_any_work(row: Bad, monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: row.gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: row.gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    monkeypatch.setattr(
        "minimind.config.deepspeed.backend_choice.parent_command", row.launcher.split
    )
    os.environ |= row.environ  # undone by worker: monkeypatch would put worker's own back after it
    Path("run.yaml").write_text(row.yaml)
    Path("text.jsonl").write_text('{"text": "of which the first record is looked at"}\n')
    given = ["--data_path", "text.jsonl", "--cache_dir", "cache", "--out_dir", "out"]
    given += ["--config", "run.yaml"] if row.yaml and "--model" not in row.flags else []
    given += [] if row.gpus or "--device" in row.flags else ["--device", "cpu"]
    file = row.deepspeed_file(Path("ds.json"))
    given += [] if "accelerate" in row.launcher else ["--deepspeed_config", str(file)]

    status = train_pretrain.main(given + row.flags.split())

    output = capfd.readouterr().err
    assert status == 2, output
    assert LINE.fullmatch(output), output
    for words in row.words:
        assert words in output
    assert (" faults: " in output) == row.several  # one mistake is reported once
    assert not Path("out").exists()
    assert not Path("cache").exists()


def left_over(out_dir: Path) -> list[list[str]]:
    """The command lines of processes that still name this run."""
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [command for command in commands if str(out_dir) in command]


@pytest.mark.launch
@pytest.mark.parametrize("name", BY_LAUNCH)
def test_launched_it_is_the_same_line_and_no_process_is_left(
    name: str, launch: Launcher, tmp_path: Path
):
    row = BAD[name]
    file = row.deepspeed_file(tmp_path / "ds.json")
    done: Run = launch.run(tmp_path / "out", f"--deepspeed_config {file} {row.flags}")
    assert left_over(done.out_dir) == []
    assert done.status == 2, done.stderr
    *phases, line = done.stderr.splitlines(keepends=True)
    assert all(phase.endswith(" ...\n") for phase in phases), done.stderr
    assert LINE.fullmatch(line.replace("rank=1", "rank=0")), done.stderr
    for words in row.words:
        assert words in done.stderr
    assert not done.out_dir.exists()
