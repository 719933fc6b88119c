"""A needle in rows of four times the trained length: without scaling and with each kind.

    OMP_NUM_THREADS=1 python -m benchmarks.needle [--seeds 3] [--out FILE.json]

A row is random tokens with one key token, the needle: its value is the token after it. The last 8
tokens of the row are the key again, and the value is due after each of them. A decoder of 2 layers
learns that in rows of 32 tokens. Then its answers are counted in rows of 128, as it is, and after
more steps on such rows; a value that is guessed is right in 1 of 62 cases. The loop is the
script's own, the decoder that of a run.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import arguments, record
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.model.loss import IGNORED
from minimind.model.rotary import KINDS

LENGTH, FACTOR, PIECES, ASKED = 32, 4, 64, 8
KEY, FIRST_VALUE = 1, 2
STEPS, RATE, MORE_STEPS = 1000, 3e-3, (0, 25, 100)
SHAPE: dict[str, Any] = {
    "vocab_size": PIECES,
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
}


def needle_rows(rows: int, length: int, seed: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return ids and targets (rows, length); the needle lies anywhere before the questions."""
    ids = torch.randint(FIRST_VALUE, PIECES, (rows, length), generator=seed)
    place = torch.randint(0, length - ASKED - 1, (rows, 1), generator=seed)
    values = ids.gather(1, place + 1)
    ids.scatter_(1, place, KEY)
    ids[:, -ASKED:] = KEY
    targets = torch.full_like(ids, IGNORED)
    targets[:, -ASKED:] = values
    return ids, targets


def build(kind: str | None, length: int = FACTOR * LENGTH) -> Any:
    """A decoder for rows of `length`, its rotary positions scaled by FACTOR as `kind` does."""
    scaling = {"rope_type": kind, "factor": FACTOR, "original_max_position_embeddings": LENGTH}
    config = MiniMindConfig(
        **SHAPE,
        hidden_dim=128,
        max_seq_len=length,
        rope_theta=1e4,
        rope_scaling=scaling if kind else None,
    )
    return MiniMindForCausalLM(config)


def train(model: Any, steps: int, rows: int, rate: float, seed: int) -> None:
    """Train on new rows of the model's length, with warm-up and a linear decay to a tenth."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    length = model.config.max_position_embeddings
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 50) * (1 - 0.9 * step / steps)
        ids, targets = needle_rows(rows, length, generator)
        model.train()(ids, shift_labels=targets).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def share_found(model: Any, length: int, rows: int = 256) -> float:
    """Share of right answers in new rows."""
    ids, targets = needle_rows(rows, length, torch.Generator().manual_seed(99))
    answers = model.eval()(ids, logits_to_keep=ASKED).logits.argmax(-1)
    return float((answers == targets[:, -ASKED:]).float().mean())


def trained(seed: int, steps: int = STEPS) -> Any:
    """A decoder trained on rows of LENGTH."""
    torch.manual_seed(seed)
    model = build(None, LENGTH)
    train(model, steps, 32, RATE, seed)
    return model


def extended(model: Any, kind: str | None) -> Any:
    """The same weights with scaled positions."""
    longer = build(kind)
    longer.load_state_dict(model.state_dict())
    return longer


def main() -> None:
    """Run it, print the table, write the JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    before = os.getloadavg()
    found: dict[str, dict[str, list[float]]] = {}
    for seed in range(given.seeds):
        model = trained(seed)
        print(f"seed {seed}: {share_found(model, LENGTH):.3f} in rows of {LENGTH}", flush=True)
        for kind in (None, *KINDS):
            shares = found.setdefault(kind or "none", {})
            for steps in MORE_STEPS:
                longer = extended(model, kind)
                train(longer, steps, 16, RATE / 3, seed + 1000)
                for length in (LENGTH, FACTOR * LENGTH):
                    name = f"{length} tokens, {steps} steps more"
                    shares.setdefault(name, []).append(share_found(longer, length))
    for name in found["none"]:
        print(f"{name:26}" + "".join(f"{kind:>22}" for kind in found))
        cells = (" ".join(f"{share:.3f}" for share in found[kind][name]) for kind in found)
        print(f"{'':26}" + "".join(f"{cell:>22}" for cell in cells))
    record(given.out, "needle", before, found=found)


if __name__ == "__main__":
    main()
