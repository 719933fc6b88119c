"""Fingerprints of a run of transformers' Trainer, or of plain torch, for `minimind compare`.

Trainer takes the callback. A loop of plain torch calls `begin` before the forward passes of a step,
`gradients` between clipping and the update, and `end` after it. Then

    minimind compare out/mine theirs.jsonl

says where that run and one of minimind with --fingerprints part. For one process; rows are compared
if the model gets `input_ids` and `shift_labels` as minimind passes them.
"""

import json
from pathlib import Path

import torch
from transformers import TrainerCallback

from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.recovery.fingerprints import Recorder, as_event


class Fingerprints(TrainerCallback):
    """Records every `every`th step to a file; dtype is that of the forward pass."""

    def __init__(self, model, path, every=1, dtype="float32"):
        self.model, self.every, self.dtype = model, every, dtype
        self.recorder, self.path, self.lr = Recorder(model), Path(path), None
        self.path.write_text("")

    def begin(self):
        self.recorder.begin()

    def gradients(self, optimizer):
        self.lr = optimizer.param_groups[0]["lr"]
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                self.recorder.add("gradient", name, p.grad)

    def end(self, step, optimizer, **fields):
        """`fields` are such as loss and grad_norm."""
        for name, p in self.model.named_parameters():
            self.recorder.add("fp32", name, p)
            for kind in ("exp_avg", "exp_avg_sq"):
                if kind in optimizer.state[p]:
                    self.recorder.add(kind, name, optimizer.state[p][kind])
        event = as_event(step, self.recorder.end(), lr=self.lr, dtype=self.dtype, **fields)
        with self.path.open("a") as file:
            file.write(json.dumps({"event": "fingerprint", **event}) + "\n")

    def on_step_begin(self, args, state, control, **kwargs):
        if (state.global_step + 1) % self.every == 0:
            self.begin()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if (state.global_step + 1) % self.every == 0:
            self.gradients(kwargs["optimizer"])

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            self.end(state.global_step, kwargs["optimizer"])


def main() -> None:
    """Train a small model of random rows in plain torch, and write theirs.jsonl."""
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(dim=32, n_layers=2, n_heads=2, vocab_size=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = Fingerprints(model, "theirs.jsonl")
    for step in range(1, 5):
        rows = torch.randint(64, (4, 17))
        log.begin()
        loss = model(input_ids=rows[:, :-1], shift_labels=rows[:, 1:]).loss
        loss.backward()
        log.gradients(optimizer)
        optimizer.step()
        log.end(step, optimizer, loss=loss.item())
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
