"""Four lines of Accelerate around a PyTorch loop (marked 1 to 4): is a line code or a comment?

    accelerate launch --multi_gpu --num_processes 2 examples/four_lines.py --split_batches
    torchrun --standalone --nproc_per_node 2 examples/four_lines.py --split_batches
    python examples/four_lines.py --split_batches

    | 2 processes, 16 rows a step, 80 steps
    | last rate 0.0e+00, 159 of 201 lines right

One process gets the same 159 right: it sees the same rows in the same steps. gather_for_metrics
leaves out the rows that only fill the last batch: 201 are judged, not 202.
Without GPUs the same commands start CPU processes, but only `cpu=True` makes them know one another
(see docs/coming_from.md). Without --split_batches each process takes 16 rows of its own: twice the
rows in a step, half the steps. `transformers.AdamW` is gone; torch has one. The schedule is not
prepared here: a prepared one is moved on once for each process.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from stdlib_text import labelled_lines, learnt_tokenizer
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification, BertConfig, get_scheduler

TRAINED, EVALUATED = 640, 201  # 201: no number of processes but 3 and 67 divides it


def loaders() -> tuple[DataLoader, DataLoader, int]:
    """Batches to train on, batches to be judged by, and the number of pieces."""
    rows = labelled_lines(TRAINED + EVALUATED)
    tokenizer = learnt_tokenizer([text for text, _ in rows[:TRAINED]])

    def collate(batch: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
        texts, labels = zip(*batch, strict=True)
        tokens = tokenizer(list(texts), padding="max_length", max_length=48, truncation=True)
        named = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
        return {name: torch.tensor(values) for name, values in {**named, "labels": labels}.items()}

    train = DataLoader(rows[:TRAINED], batch_size=16, shuffle=True, collate_fn=collate)  # type: ignore[arg-type] (a list will do)
    evaluated = DataLoader(rows[TRAINED:], batch_size=16, collate_fn=collate)  # type: ignore[arg-type] (a list will do)
    return train, evaluated, len(tokenizer)


def main() -> None:
    """Train two epochs and print how many of the held-out lines are predicted right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--split_batches", action="store_true", help="16 rows over all processes")
    parser.add_argument("--no_device_placement", action="store_true", help="move tensors by hand")
    args = parser.parse_args()
    set_seed(42)
    batches = DataLoaderConfiguration(split_batches=args.split_batches, use_seedable_sampler=True)
    accelerator = Accelerator(  # 1
        cpu=not torch.cuda.is_available(),
        device_placement=not args.no_device_placement,
        dataloader_config=batches,
    )
    train, evaluated, pieces = loaders()
    config = BertConfig(
        vocab_size=pieces, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = 2
    model = AutoModelForSequenceClassification.from_config(config)
    if args.no_device_placement:
        model.to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train, evaluated, model, optimizer = accelerator.prepare(  # 2
        train, evaluated, model, optimizer
    )
    steps = 2 * len(train)  # after prepare: by now it counts the batches of one process
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)
    bar = tqdm(range(steps), disable=not accelerator.is_local_main_process)
    model.train()
    for _ in range(2):
        for batch in train:
            if args.no_device_placement:
                batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            loss = model(**batch).loss
            accelerator.backward(loss)  # 3
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            bar.update(1)
    bar.close()
    model.eval()
    right = seen = 0
    for batch in evaluated:
        batch = {name: value.to(accelerator.device) for name, value in batch.items()}
        with torch.no_grad():
            predicted = model(**batch).logits.argmax(-1)
        predicted, labels = accelerator.gather_for_metrics((predicted, batch["labels"]))  # 4
        right, seen = right + int((predicted == labels).sum()), seen + len(labels)
    rows = train.total_batch_size
    accelerator.print(f"{accelerator.num_processes} processes, {rows} rows a step, {steps} steps")
    accelerator.print(f"last rate {schedule.get_last_lr()[0]:.1e}, {right} of {seen} lines right")
    accelerator.end_training()


if __name__ == "__main__":
    main()
