"""Next-token cross-entropy as a sum and a count, and what becomes of one that is no number.

Shape letters: B rows, T positions, V vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""The target that counts for nothing; Hugging Face uses the same."""


def next_token_loss(
    logits: Tensor, targets: Tensor, ignore_index: int = IGNORED
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy in nats (fp32 scalar) and the number of targets it sums (int64 scalar).

    logits (B, T, V) at position t predict targets (B, T) at position t: the caller has shifted.
    Never a mean: a mean of means is wrong wherever the counts differ, and only the caller knows
    over which micro-batches and ranks to divide. Nothing is read back to the host. Where every
    target is ignored the sum and all gradients are 0, not NaN.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets of shape {tuple(targets.shape)} do not fit"
            f" logits of shape {tuple(logits.shape)}: each position needs one target."
        )
    loss_sum = F.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction="sum"
    )
    return loss_sum, (targets != ignore_index).sum()


def contagious_mean(loss_sum: Tensor, count: Tensor, also: Tensor | None = None) -> Tensor:
    """loss_sum / count, bit for bit, with gradients that are not finite wherever it is not.

    So too where `also` is not finite. An infinite loss may well have gradients of 0, which nobody
    would notice. Whoever looks at the reduced gradient afterwards sees both faults, on every rank;
    nothing is read back to the host.
    """
    faults = [one.detach() for one in (loss_sum, also) if one is not None]
    return loss_sum / sum((one - one for one in faults), start=count)  # 0, or NaN
