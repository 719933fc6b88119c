"""A run of `minimind train` repeated in plain PyTorch: the loop to compare with, or to learn from.

    minimind prepare TEXT.jsonl --out out/rows
    minimind train --model tiny --data_path out/rows --dtype float32 --max_steps 100 \\
      --log_interval 1 --deepspeed_config none --out_dir out/run
    python examples/train_small.py out/run

    | step 1: 8.776110 here, 8.776110 in the run
    | step 100: 5.440900 here, 5.440900 in the run
    | largest difference in 100 steps: 1.9e-06

The decoder, the rows and the first weights are this project's. The loss, the schedule, AdamW and
the loop are written out. The run must be as above: one process, float32, no DeepSpeed, AdamW, and
no setting that changes the model or the schedule. The values are read from its config.yaml.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from minimind.data.prepare.prepared import open_prepared
from minimind.data.rows.order import Order
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.model.decoder import Decoder, DecoderConfig

EXPECTED = {
    "dtype": "float32",
    "deepspeed_config": "none",
    "optimizer": "adamw",
    "task": "pretrain",
}
EXPECTED |= {"schedule": "cosine", "accumulation_steps": 1, "use_moe": False, "doc_mask": False}
EXPECTED |= {"tie_word_embeddings": True, "zero_init_outputs": False, "embedding_init": "random"}


def first_weights(config: DecoderConfig, seed: int) -> dict[str, Tensor]:
    """The weights that a run draws from its seed."""
    torch.manual_seed(seed)
    return MiniMindForCausalLM(MiniMindConfig(**vars(config))).model.state_dict()


def learning_rate(run: SimpleNamespace, step: int) -> float:
    """Linear warm-up, then a cosine from the peak to min_ratio of it; `step` counts from 0."""
    if step < run.warmup_steps:
        return run.learning_rate * (step + 1) / run.warmup_steps
    progress = (step - run.warmup_steps) / max(1, run.max_steps - 1 - run.warmup_steps)
    falling = (1 + math.cos(math.pi * progress)) / 2
    return run.learning_rate * (run.min_lr_ratio + (1 - run.min_lr_ratio) * falling)


def losses(run: SimpleNamespace) -> list[float]:
    """Train as the run did; return the loss of each step."""
    config = DecoderConfig(
        vocab_size=run.vocab_size,
        hidden_size=run.dim,
        num_hidden_layers=run.n_layers,
        num_attention_heads=run.n_heads,
        num_key_value_heads=run.n_kv_heads,
        max_position_embeddings=run.max_seq_len,
        rms_norm_eps=run.norm_eps,
        rope_theta=run.rope_theta,
    )
    decoder = Decoder(config)
    decoder.load_state_dict(first_weights(config, run.seed))
    matrices = [weight for weight in decoder.parameters() if weight.ndim > 1]
    gains = [weight for weight in decoder.parameters() if weight.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": run.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(run.beta1, run.beta2))
    text = open_prepared(Path(run.data_path[0])).train
    row_tokens = run.max_seq_len + 1
    order = Order(text.rows(row_tokens), run.batch_size, run.seed)
    found = []
    for step in range(run.max_steps):
        rows = torch.from_numpy(text.read_rows(order.rows_for(step, 0, 1), row_tokens))
        hidden_BTE = decoder(rows[:, :-1])
        logits_BTV = hidden_BTE @ decoder.embed_tokens.weight.T  # embedding and output are tied
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), run.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run, step)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main() -> None:
    """Print the loss of steps here and in the run, and the largest difference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="out_dir of the run")
    folder = parser.parse_args().run
    values = yaml.safe_load((folder / "config.yaml").read_text())
    for name, value in EXPECTED.items():
        if values[name] != value:
            parser.error(f"{folder} has {name} {values[name]}; this loop does {value} only")
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    theirs = {line["step"]: line["loss"] for line in lines if line["event"] == "step"}
    ours = dict(enumerate(losses(SimpleNamespace(**values)), 1))
    for step in (min(theirs), max(theirs)):
        print(f"step {step}: {ours[step]:.6f} here, {theirs[step]:.6f} in the run")
    apart = max(abs(ours[step] - theirs[step]) for step in theirs)
    print(f"largest difference in {len(theirs)} steps: {apart:.1e}")


if __name__ == "__main__":
    main()
