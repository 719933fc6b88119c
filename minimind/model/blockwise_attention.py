"""Causal attention on a CPU, compiled: matrix products over blocks of queries.

Torch's fused attention for CPUs multiplies bf16 at a fraction of the rate that its matrix products
do where there is no AMX. Here scores are such products, and what is between them is fused by the
compiler. A block of queries meets the keys up to its own end, so that most of what is masked is
never computed; of its probabilities none is kept for the backward pass. In bf16 scores are rounded
before the softmax, as where attention is written out. Shape letters: B rows, T positions, H query
heads, K key/value heads, G = H / K, D channels per head, N queries of a block, S the keys up to its
end.
"""

import torch
from torch import Tensor

from minimind.model.activation_checkpointing import recomputed

BLOCK = 128  # queries


def blockwise_attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
    """(B, H, T, D), causal, softmax in fp32; key heads are shared, and never repeated."""
    q_BKGTD = q_BHTD.unflatten(1, (k_BKTD.shape[1], -1))
    blocks = []
    for start in range(0, q_BHTD.shape[2], BLOCK):
        q_BKGND = q_BKGTD[:, :, :, start : start + BLOCK]
        end = start + q_BKGND.shape[3]
        blocks.append(recomputed(_block, q_BKGND, k_BKTD[:, :, :end], v_BKTD[:, :, :end]))
    return torch.cat(blocks, dim=3).flatten(1, 2)


def _block(q_BKGND: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
    """(B, K, G, N, D): the last N of S queries over all S keys."""
    q_BKGND = q_BKGND.type_as(k_BKSD)  # here, so that what is kept is not the wider one
    groups, queries, keys = q_BKGND.shape[2], q_BKGND.shape[3], k_BKSD.shape[2]
    scores = q_BKGND.flatten(2, 3) @ k_BKSD.transpose(-2, -1) * q_BKGND.shape[-1] ** -0.5
    scores_BKGNS = scores.unflatten(2, (groups, queries)).float()
    key_S = torch.arange(keys, device=scores.device)
    visible_NS = key_S <= key_S[keys - queries :, None]
    weights = torch.where(visible_NS, scores_BKGNS, float("-inf")).softmax(-1).type_as(v_BKSD)
    return (weights.flatten(2, 3) @ v_BKSD).unflatten(2, (groups, queries))
