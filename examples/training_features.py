"""Accumulation, clipping and mixed precision by Accelerate, and what each of them does.

    accelerate launch --multi_gpu --num_processes 2 examples/training_features.py
    torchrun --standalone --nproc_per_node 2 examples/training_features.py --clip value
    python examples/training_features.py --mixed_precision bf16

    | 2 processes, no: torch.float32
    | 8 micro-batches each, 4 steps
    | schedule moved on 8 times
    | gradient norm 0.050 after clipping by norm at 0.05
    | parameters sum to -0.28618

Twice the micro-batches of half the rows are the same steps: `--accumulation_steps 4 --batch_size 4`
prints the same parameters. A prepared schedule moves on once for each process at a step of the
optimizer: 8 times in 4 steps here. On a CPU Accelerate computes in fp32 when asked for fp16, and
does not say so. Under DeepSpeed accumulation and clipping by norm are its own, and
`clip_grad_value_` is refused: the gradients lie in its buffers.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

ROWS, LIMIT = 128, 0.05


def parsed() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--accumulation_steps", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=8, help="rows of one process")
    parser.add_argument("--clip", choices=("norm", "value", "none"), default="norm")
    parser.add_argument("--mixed_precision", choices=("no", "bf16", "fp16"), default="no")
    return parser.parse_args()


def clipped(accelerator: Accelerator, model: torch.nn.Module, how: str) -> float:
    """The norm of all gradients together, after they were clipped; the same on every process."""
    if how == "norm":  # one factor for all of them
        accelerator.clip_grad_norm_(model.parameters(), LIMIT, norm_type=2)
    elif how == "value":  # each element for itself
        accelerator.clip_grad_value_(model.parameters(), LIMIT)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.linalg.vector_norm(torch.cat([g.flatten() for g in found])).item()


def main() -> None:
    """One epoch over numbers made here; prints what happened at each step of the optimizer."""
    args = parsed()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=args.accumulation_steps,
        mixed_precision=args.mixed_precision,
    )
    set_seed(42)
    inputs = torch.randn(ROWS, 16)
    rows = TensorDataset(inputs, inputs.sum(-1, keepdim=True).sin())
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=32)
    loader = DataLoader(rows, args.batch_size)
    loader, model, optimizer, schedule = accelerator.prepare(loader, model, optimizer, schedule)
    micro_batches = steps = 0
    norm, seen = 0.0, None
    for batch, targets in loader:
        with accelerator.accumulate(model):  # no exchange and no step but at the last of several
            micro_batches += 1
            outputs = model(batch)
            with accelerator.autocast():  # the model is in one already; this is for what is outside
                loss = torch.nn.functional.mse_loss(outputs.float(), targets)
                seen = torch.mm(batch, batch.T).dtype
            accelerator.backward(loss)  # divides by accumulation_steps: do not do it yourself
            if accelerator.sync_gradients:  # only now are they the gradients of the whole step
                norm = clipped(accelerator, model, args.clip)
                steps += 1
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    total = sum(p.double().sum().item() for p in model.parameters())
    accelerator.print(f"{accelerator.num_processes} processes, {args.mixed_precision}: {seen}")
    accelerator.print(f"{micro_batches} micro-batches each, {steps} steps")
    accelerator.print(f"schedule moved on {schedule.scheduler.last_epoch} times")
    accelerator.print(f"gradient norm {norm:.3f} after clipping by {args.clip} at {LIMIT}")
    accelerator.print(f"parameters sum to {total:.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
