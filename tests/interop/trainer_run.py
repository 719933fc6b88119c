"""A run of transformers' Trainer with DeepSpeed: python -m ... SOURCE OUT, on one process.

It saves OUT/checkpoint-3 and OUT/after.pt, the losses of all steps. If SOURCE is a universal
checkpoint, the run goes on from it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import deepspeed  # noqa: TID251 (what it saves is read)
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.interop.deepspeed_runs import BETAS, CLIP, DECAY, MORE, RATE, ROWS, STEPS, rows

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
    "zero_force_ds_cpu_optimizer": False,
}


class EveryStep(TrainerCallback):
    """Logs each step: the intervals of a checkpoint that has none are 500."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_log = True


def main() -> None:
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ.update(zip(names, ("0", "0", "1", "127.0.0.1", "0"), strict=True))
    operators = {**deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm": False}  # takes minutes
    deepspeed.ops.__dict__["__compatible_ops__"] = operators
    is_universal = (source / "latest_universal").is_file()
    options = TrainingArguments(
        output_dir=str(out),
        deepspeed=CONFIG | {"checkpoint": {"load_universal": is_universal}},
        use_cpu=True,
        per_device_train_batch_size=ROWS,
        max_steps=STEPS + MORE,
        save_steps=STEPS,
        logging_steps=1,
        logging_nan_inf_filter=False,
        learning_rate=RATE,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        train_sampling_strategy="sequential",
        report_to="none",
        seed=1,
    )
    if is_universal:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    else:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    size = model.config.vocab_size
    data = [
        {"input_ids": row, "labels": row}
        for step in range(STEPS + MORE)
        for row in rows(step, size)
    ]
    tokenizer = AutoTokenizer.from_pretrained(source)
    trainer = Trainer(model, options, train_dataset=data, processing_class=tokenizer)  # type: ignore[arg-type] (a list has what is asked for)
    trainer.add_callback(EveryStep())
    trainer.train(resume_from_checkpoint=str(source) if is_universal else None)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    torch.save({"losses": losses}, out / "after.pt")


if __name__ == "__main__":
    main()
