"""Next-token cross-entropy as a sum and a count.

Shape letters: B rows, T positions, V vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # target without loss, as in transformers


def next_token_loss(
    logits: Tensor, targets: Tensor, ignore_index: int = IGNORED
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy in nats (fp32 scalar) and the number of targets (int64).

    logits (B, T, V) at position t predict targets (B, T) at position t, already shifted. A sum, not
    a mean: a mean of means is wrong if counts differ, and only the caller knows over which
    micro-batches and ranks to divide. If all targets are ignored, sum and gradients are 0.
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


def mean_with_nan_grads(loss_sum: Tensor, count: Tensor, also: Tensor | None = None) -> Tensor:
    """Return loss_sum / count, with NaN gradients if loss_sum or `also` is not finite.

    An infinite loss can have zero gradients, which would go unnoticed. This way the reduced
    gradient shows the fault on every rank, and nothing is read back to the host.
    """
    values = [value.detach() for value in (loss_sum, also) if value is not None]
    return loss_sum / sum((value - value for value in values), start=count)  # adds 0 or NaN
