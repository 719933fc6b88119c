"""Preference tuning of a LoRA adapter with DPOTrainer of TRL, on a Llama export.

    accelerate launch --multi_gpu --num_processes 2 examples/trl_dpo.py \\
        --model out/llama --data my_talk.jsonl --out out/dpo
    minimind import --from llama out/dpo --out out/dpo_imported

    | 2 processes, ZeRO stage 2, 5,632 of 40,448 parameters
    | loss 0.622, then 0.177
    | out/dpo: the model with the adapter merged

DATA holds conversations, a line each. Each becomes a pair: its last answer is preferred to that of
another conversation. With pairs of your own, drop `pairs`: TRL reads `prompt`, `chosen` and
`rejected`. The reference is the model without the adapter, so it needs no memory of its own.
"""

from __future__ import annotations

import argparse
from typing import Any

from trl_sft import messages_of, run, training_flags


def parsed() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="output of minimind export --format llama")
    parser.add_argument("--data", required=True, help="conversations, .jsonl")
    parser.add_argument("--out", required=True, help="new folder for the merged model")
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    return parser.parse_args()


def pairs(conversations: list[list[dict[str, str]]]) -> list[dict[str, Any]]:
    """A pair of answers to the same prompt for each conversation, if there is another answer."""
    others = conversations[1:] + conversations[:1]
    return [
        {"prompt": messages[:-1], "chosen": messages[-1:], "rejected": other[-1:]}
        for messages, other in zip(conversations, others, strict=True)
        if messages[-1] != other[-1]
    ]


def main() -> None:
    """Train an adapter on pairs."""
    from datasets import Dataset
    from peft import LoraConfig  # pyright: ignore[reportMissingImports] (an extra)
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer  # pyright: ignore[reportMissingImports] (an extra)

    args = parsed()
    trainer = DPOTrainer(
        model=args.model,
        args=DPOConfig(**training_flags(args), beta=0.1),
        train_dataset=Dataset.from_list(pairs(messages_of(args.data))),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    )
    run(trainer, args.out)


if __name__ == "__main__":
    main()
