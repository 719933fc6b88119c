"""The loss as a sum and a count of targets.

Shape letters: B rows, T positions, E model width, V vocabulary.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED = -100  # target without loss, as in transformers


def next_token_loss(
    logits: Tensor, targets: Tensor, ignore_index: int = IGNORED, by_row: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy in nats (fp32 scalar) and the number of targets (int64).

    With `by_row` both are (B,), of each row.

    logits (B, T, V) at position t predict targets (B, T) at position t, already shifted. A sum, not
    a mean: a mean of means is wrong if counts differ, and only the caller knows over which
    micro-batches and ranks to divide. If all targets are ignored, sum and gradients are 0.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets of shape {tuple(targets.shape)} do not fit"
            f" logits of shape {tuple(logits.shape)}: each position needs one target."
        )
    loss = F.cross_entropy(
        logits.float().flatten(0, -2),
        targets.flatten(),
        ignore_index=ignore_index,
        reduction="none" if by_row else "sum",
    )
    if by_row:
        return loss.view_as(targets).sum(-1), (targets != ignore_index).sum(-1)
    return loss, (targets != ignore_index).sum()


def chunked_loss(
    head: Callable[[Tensor], Tensor],
    x_BTE: Tensor,
    targets_BT: Tensor,
    positions: int,
    by_row: bool,
) -> tuple[Tensor, Tensor]:
    """Return loss_sum and targets from the logits of `positions` positions at a time; 0: all.

    Chunks are recomputed in the backward pass, so logits are never held: this saves 2 V bytes
    or more per token for E V multiplications.
    """
    if not positions:
        return next_token_loss(head(x_BTE), targets_BT, by_row=by_row)

    def loss_of(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return next_token_loss(head(x), targets, by_row=by_row)

    if by_row:  # so many positions of all rows together
        positions = max(1, positions // len(targets_BT))
        parts = zip(x_BTE.split(positions, 1), targets_BT.split(positions, 1), strict=True)
    else:
        x_NE, targets_N = x_BTE.flatten(0, 1), targets_BT.flatten()
        parts = zip(x_NE.split(positions), targets_N.split(positions), strict=True)
    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    sums = [recompute(loss_of, *part) for part in parts]
    loss_sum, targets = (torch.stack(values).sum(0) for values in zip(*sums, strict=True))
    return loss_sum, targets


def own_sum(
    loss: Callable[[Tensor, Tensor], Tensor],
    logits_BTV: Tensor,
    targets_BT: Tensor,
    by_row: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the sum of another loss, and the number of targets; `by_row` of each row, (B,)."""
    loss_sum, is_target = loss(logits_BTV, targets_BT), targets_BT != IGNORED
    return (loss_sum, is_target.sum(-1)) if by_row else (loss_sum.sum(), is_target.sum())


def mean_with_nan_grads(loss_sum: Tensor, count: Tensor, also: Tensor | None = None) -> Tensor:
    """Return loss_sum / count, with NaN gradients if loss_sum or `also` is not finite.

    An infinite loss can have zero gradients, which would go unnoticed. This way the reduced
    gradient shows the fault on every rank, and nothing is read back to the host.
    """
    values = [value.detach() for value in (loss_sum, also) if value is not None]
    return loss_sum / sum((value - value for value in values), start=count)  # adds 0 or NaN
