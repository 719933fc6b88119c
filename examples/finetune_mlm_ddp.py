"""ALBERT learns to fill in hidden words, by PyTorch's own DistributedDataParallel: no Accelerate.

    torchrun --standalone --nproc_per_node 2 examples/finetune_mlm_ddp.py
    accelerate launch --multi_gpu --num_processes 2 examples/finetune_mlm_ddp.py
    python examples/finetune_mlm_ddp.py --batch_size 16
    python examples/finetune_mlm_ddp.py --batch_size 16 --data_parallel

    | 2 processes x 8 rows = 16 rows a step, 30 steps an epoch
    | epoch 0: begins with row 102, loss 5.8457
    | epoch 1: begins with row 388, loss 5.1855
    | epoch 2: begins with row 52, loss 5.0280
    | out/mlm/weights.pt: 30 tensors, the same in a bare model: True

Without GPUs all four see the same rows with the same tokens hidden and print the same losses.
`--weights out/mlm/weights.pt` goes on from there instead of random weights. Nothing is fetched: the
tokenizer is learnt on comments of this Python's library. nccl is for GPUs, gloo for CPUs.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from stdlib_text import labelled_lines, learnt_tokenizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AlbertTokenizer,
    DataCollatorForLanguageModeling,
    get_linear_schedule_with_warmup,
)

ROWS, LENGTH, LINES = 480, 48, 2400

Batch = dict[str, torch.Tensor]


def parsed() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8, help="rows of one process")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--weights", type=Path, help="go on from what an earlier run saved")
    parser.add_argument("--out", type=Path, default=Path("out/mlm"))
    parser.add_argument("--data_parallel", action="store_true", help="one process for all GPUs")
    args = parser.parse_args()
    if args.data_parallel and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("--data_parallel is one process for all GPUs: start it by python alone")
    return args


def seed_all(seed: int) -> None:
    """Every generator that something here might draw from, alike in all processes."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # of the CPU and of all GPUs


def join() -> torch.device:
    """The device of this process, in a group with the others, or in one of its own."""
    with_gpu = torch.cuda.is_available()
    place = int(os.environ.get("LOCAL_RANK", "0"))  # torchrun's word for: which GPU of this host
    device = torch.device("cuda", place) if with_gpu else torch.device("cpu")
    if with_gpu:
        torch.cuda.set_device(device)
    known: dict[str, Any] = {}
    if "RANK" not in os.environ:  # no launcher: a group of one, and the rest is as with several
        store = dist.HashStore()  # type: ignore[reportPrivateImportUsage] (torch documents it)
        known = {"store": store, "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if with_gpu else "gloo", **known)
    return device


def tokenizer_and_rows() -> tuple[AlbertTokenizer, list[list[int]]]:
    """A tokenizer, and text cut into rows of one length, so that none needs padding."""
    texts = [text for text, is_comment in labelled_lines(LINES) if is_comment]
    tokenizer = learnt_tokenizer(texts)
    token_ids: Any = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids = [id for text in token_ids for id in text]
    body = LENGTH - 2
    first, last = (tokenizer.convert_tokens_to_ids(name) for name in ("[CLS]", "[SEP]"))
    rows = [[first, *ids[at : at + body], last] for at in range(0, ROWS * body, body)]
    return tokenizer, rows


class Masking:
    """Rows -> a batch with some tokens hidden: of a row, the same ones whichever rank reads it.

    DataCollatorForLanguageModeling alone draws as the rows come by, so what is hidden would depend
    on the number of processes. Here seed, epoch and row decide.
    """

    def __init__(self, tokenizer: AlbertTokenizer, rows: int, seed: int) -> None:
        self.tokenizer, self.rows, self.seed = tokenizer, rows, seed
        self.epoch = 0

    def __call__(self, numbered: list[tuple[int, list[int]]]) -> Batch:
        """input_ids, attention_mask, labels (-100 but where a token is hidden), and row numbers."""
        masked: list[Batch] = []
        for number, ids in numbered:
            draw = self.seed + self.epoch * self.rows + number
            collate = DataCollatorForLanguageModeling(
                self.tokenizer, mlm_probability=0.15, seed=draw
            )
            masked.append(collate([{"input_ids": ids}]))
        numbers = torch.tensor([number for number, _ in numbered])
        return {name: torch.cat([one[name] for one in masked]) for name in masked[0]} | {
            "row": numbers
        }


def loader_of(
    rows: list[list[int]], masking: Masking, batch_size: int, seed: int, rank: int, world: int
) -> tuple[DataLoader[Any], DistributedSampler[Any]]:
    """Batches of the rows that are this rank's: every `world`-th of one order that all agree on."""
    numbered: Any = list(enumerate(rows))
    sampler: DistributedSampler[Any] = DistributedSampler(
        numbered, world, rank, shuffle=True, seed=seed, drop_last=True
    )
    return DataLoader(numbered, batch_size, sampler=sampler, collate_fn=masking), sampler


def loss_of(model: DataParallel[Any] | DistributedDataParallel, batch: Batch) -> torch.Tensor:
    """What to call backward on, so that the gradients are those of the mean over all ranks' tokens.

    DistributedDataParallel gives every rank the mean of the ranks' gradients. The mean of their
    mean losses is not the mean over all tokens where one has more of them hidden than another:
    hence sums here, divided by the tokens of all ranks.
    """
    labels = batch["labels"]
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if isinstance(model, DataParallel):  # several GPUs give a vector: the loss of each one's share
        return model(**inputs, labels=labels).loss.mean()
    logits = model(**inputs).logits
    hidden = (labels != -100).sum()
    dist.all_reduce(hidden)
    total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total * dist.get_world_size() / hidden


def saved_and_read(model: Any, bare: AlbertForMaskedLM, path: Path) -> str:
    """Rank 0 writes the weights without the wrapper; every rank reads them into a bare model."""
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), path)
    dist.barrier()  # the file is whole, and nobody has left while it was written
    held = torch.load(path, map_location="cpu", weights_only=True)
    bare.load_state_dict(held)
    here = model.module.state_dict()
    same = all(torch.equal(value, here[name].cpu()) for name, value in bare.state_dict().items())
    return f"{path}: {len(held)} tensors, the same in a bare model: {same}"


def trained(args: argparse.Namespace, device: torch.device) -> None:
    """Train, and print on rank 0 the mean loss of every epoch and what was saved."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tokenizer, rows = tokenizer_and_rows()
    masking = Masking(tokenizer, len(rows), args.seed)
    loader, sampler = loader_of(rows, masking, args.batch_size, args.seed, rank, world)
    config = AlbertConfig(
        vocab_size=len(tokenizer), embedding_size=32, hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=128, max_position_embeddings=LENGTH,
    )  # fmt: skip
    bare: Any = AlbertForMaskedLM(config)
    if args.weights:
        bare.load_state_dict(torch.load(args.weights, map_location="cpu", weights_only=True))
    bare.to(device)
    ours = [device] if device.type == "cuda" else None
    model = DataParallel(bare) if args.data_parallel else DistributedDataParallel(bare, ours)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    steps = args.epochs * len(loader)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    say = print if rank == 0 else lambda *_: None
    size = f"{args.batch_size} rows = {world * args.batch_size} rows a step"
    say(f"{world} processes x {size}, {len(loader)} steps an epoch")
    model.train()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # else every epoch has the order of the first
        masking.epoch = epoch
        losses, first = torch.zeros((), device=device), None
        for batch in loader:
            first = first or f"row {batch['row'][0]}"
            loss = loss_of(model, {name: value.to(device) for name, value in batch.items()})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses += loss.detach()
        dist.all_reduce(losses)  # each rank's own was its share of the mean, times their number
        say(f"epoch {epoch}: begins with {first}, loss {losses.item() / world / len(loader):.4f}")
    say(saved_and_read(model, AlbertForMaskedLM(config), args.out / "weights.pt"))


def main() -> None:
    """Join the others, train, and leave only when all are done."""
    args = parsed()
    seed_all(args.seed)
    device = join()
    trained(args, device)
    dist.barrier()  # a rank that leaves takes its connections along
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
