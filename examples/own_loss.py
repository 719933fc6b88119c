"""A loss of one's own: cross-entropy with smoothed labels, by --loss.

    PYTHONPATH=examples python train_pretrain.py --loss own_loss:smoothed --data_path TEXT.jsonl
    python examples/own_loss.py

    | 4 rows: 151.9 here, 151.9 by torch

The loss is a sum over targets, from float32 logits (B, T, V) and targets (B, T), of which those
of -100 count nothing. Started as a script, this compares it with torch's. docs/own_code.md
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SMOOTHING = 0.1


def smoothed(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Summed cross-entropy with a share SMOOTHING of each label spread over all tokens."""
    log_p_BTV = logits_BTV.log_softmax(-1)
    is_target_BT = targets_BT != -100
    at_target_BT = log_p_BTV.gather(-1, targets_BT.clamp(min=0)[..., None])[..., 0]
    loss_BT = -(1 - SMOOTHING) * at_target_BT - SMOOTHING * log_p_BTV.mean(-1)
    return loss_BT[is_target_BT].sum()


def by_torch(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The same, by torch's own function."""
    return F.cross_entropy(
        logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum", label_smoothing=SMOOTHING
    )


def main() -> None:
    """Print the loss of a few random rows by both."""
    draw = torch.Generator().manual_seed(0)
    logits_BTV = torch.randn(4, 8, 100, generator=draw)
    targets_BT = torch.randint(100, (4, 8), generator=draw)
    targets_BT[1, :3] = -100
    here, torchs = smoothed(logits_BTV, targets_BT), by_torch(logits_BTV, targets_BT)
    print(f"4 rows: {here:.1f} here, {torchs:.1f} by torch")


if __name__ == "__main__":
    main()
