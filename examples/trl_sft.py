"""A LoRA adapter by PEFT and SFTTrainer of TRL, on a Llama export and the DeepSpeed file here.

    pip install -e ".[examples]"
    minimind export --checkpoint out/sample/sft --format llama --out out/llama
    accelerate launch --multi_gpu --num_processes 2 examples/trl_sft.py \\
        --model out/llama --data my_talk.jsonl --out out/lora
    minimind import --from llama out/lora --out out/lora_imported

    | 2 processes, ZeRO stage 2, 5,632 of 40,448 parameters
    | loss 3.476, then 3.027
    | out/lora: the model with the adapter merged

The figures are those of a model with 34,816 parameters and --learning_rate 5e-3. The loss is that
of the assistant's turns, as with --task sft.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

DEEPSPEED = Path(__file__).resolve().parents[1] / "configs" / "ds_config.json"


def parsed() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="output of minimind export --format llama")
    parser.add_argument("--data", required=True, help="conversations, .jsonl")
    parser.add_argument("--out", required=True, help="new folder for the merged model")
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    return parser.parse_args()


def messages_of(path: str) -> list[list[dict[str, str]]]:
    """The messages of each line: of `messages`, `conversations`, or `prompt` and `completion`."""
    with open(path, encoding="utf-8") as file:  # str.splitlines splits within strings too
        lines = [json.loads(line) for line in file]
    return [line.get("messages") or line.get("conversations") or turns_of(line) for line in lines]


def turns_of(line: dict[str, str]) -> list[dict[str, str]]:
    """The question and the answer of a line with `prompt` and `completion`."""
    ask, answer = line["prompt"], line["completion"]
    return [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]


def training_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of TRL's trainers. Without a GPU, the process group is made here."""
    config = json.loads(DEEPSPEED.read_text())
    # train_pretrain.py fills every "auto", the Trainer does not fill these.
    zero = config["zero_optimization"]
    config["zero_optimization"] = {key: value for key, value in zero.items() if value != "auto"}
    config["optimizer"]["params"]["torch_adam"] = True
    flags = {"max_steps": args.max_steps, "learning_rate": args.learning_rate, "bf16": False}
    flags |= {"per_device_train_batch_size": 4, "logging_steps": max(1, args.max_steps // 6)}
    flags |= {"save_strategy": "no", "report_to": "none", "output_dir": args.out}
    if not torch.cuda.is_available():  # under DeepSpeed the Trainer makes no group on CPUs
        os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true"}
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # 80 s to compile, unused
        PartialState(backend="gloo")
        flags["accelerator_config"] = {"use_configured_state": True}
    return {**flags, "deepspeed": config, "disable_tqdm": True}


def run(trainer: Any, out: str) -> None:
    """Train, and write the model with the adapter merged. Prints on the first process."""
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if not trainer.accelerator.is_main_process:
        return
    model = trainer.accelerator.unwrap_model(trainer.model)  # whole up to ZeRO stage 2
    trained, total = model.get_nb_trainable_parameters()
    model.merge_and_unload().save_pretrained(out)
    trainer.processing_class.save_pretrained(out)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    stage = trainer.accelerator.state.deepspeed_plugin.zero_stage
    processes = f"{trainer.accelerator.num_processes} processes, ZeRO stage {stage}"
    print(f"{processes}, {trained:,} of {total:,} parameters")
    print(f"loss {float(losses[0]):.3f}, then {float(losses[-1]):.3f}")
    print(f"{out}: the model with the adapter merged")


def main() -> None:
    """Train an adapter on conversations."""
    from datasets import Dataset
    from peft import LoraConfig  # pyright: ignore[reportMissingImports] (an extra)
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports] (an extra)

    args = parsed()
    trainer = SFTTrainer(
        model=args.model,
        args=SFTConfig(**training_flags(args), assistant_only_loss=True),
        train_dataset=Dataset.from_list([{"messages": one} for one in messages_of(args.data)]),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    )
    run(trainer, args.out)


if __name__ == "__main__":
    main()
