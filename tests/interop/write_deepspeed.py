"""Write a model as DeepSpeed and torch.distributed save it: python -m ... SOURCE OUT STAGE."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import deepspeed  # noqa: TID251 (what it saves is read)
import torch
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM

source, out, stage = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
os.environ.update(zip(names, ("0", "0", "1", "127.0.0.1", "0"), strict=True))
torch.distributed.init_process_group("gloo")
operators = {**deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm": False}  # takes minutes
deepspeed.ops.__dict__["__compatible_ops__"] = operators
model = AutoModelForCausalLM.from_pretrained(source)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": stage},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
}
initialize: Any = deepspeed.initialize
engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
engine.save_checkpoint(str(out / "deepspeed"))
save({"model": model.state_dict()}, checkpoint_id=str(out / "dcp"))
