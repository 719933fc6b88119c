"""Attention within the documents of packed rows on a GPU, by torch's flex attention.

A dense mask has T^2 numbers a row, and every layer reads them all; here blocks in which no query
sees a key are passed over, and key heads are not repeated. Shape letters: B rows, T positions,
H query heads, K key/value heads, D channels per head, N blocks of BLOCK positions.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from minimind.model.activation_checkpointing import recomputed

BLOCK = 128  # positions; what flex attention's kernels are written for
NARROWEST_HEAD = 16  # channels; Triton multiplies no narrower matrices


def is_fast(device: torch.device, head_dim: int) -> bool:
    """Whether flex attention has a fused kernel, with its backward pass, for such heads there."""
    return device.type == "cuda" and head_dim >= NARROWEST_HEAD


def document_blocks(starts_BT: Tensor) -> BlockMask:
    """What `visible_keys` says of documents that begin at starts_BT, as a (B, 1, T, T) BlockMask.

    Documents follow one another, so those of a block's first and last position tell which blocks
    share one, and no table of T^2 is made to find out. All of it stays on the device.
    """
    length = starts_BT.shape[1]
    document_BT = starts_BT.cumsum(-1, dtype=torch.int32)

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (document_BT[row, query] == document_BT[row, key])

    # What fills up the last block is of no document, so that no block with it is seen as a whole.
    filled_BT = F.pad(document_BT, (0, -length % BLOCK), value=length + 1)
    first_BN, last_BN = filled_BT[:, ::BLOCK], filled_BT[:, BLOCK - 1 :: BLOCK]
    seen_BNN = (last_BN[:, None] >= first_BN[..., None]).tril()
    whole_BNN = (first_BN[:, None] == last_BN[..., None]).tril(-1)
    return BlockMask.from_kv_blocks(
        *_listed(seen_BNN & ~whole_BNN),
        *_listed(whole_BNN),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(length, length),
    )


def _listed(chosen_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, (B, 1, N), and which, first in (B, 1, N, N)."""
    chosen_B1NN = chosen_BNN[:, None].int()
    numbers_B1NN = chosen_B1NN.argsort(dim=-1, descending=True, stable=True)
    return chosen_B1NN.sum(-1, dtype=torch.int32), numbers_B1NN.int()


def document_attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, blocks: BlockMask) -> Tensor:
    """(B, H, T, D). On a CPU there is no backward pass, and all scores are held at once."""
    fuses = q_BHTD.is_cuda and not torch.compiler.is_compiling()
    attend = _compiled() if fuses else flex_attention
    return attend(q_BHTD, k_BKTD, v_BKTD, block_mask=blocks, enable_gqa=True)


@cache
def _compiled() -> Callable[..., Tensor]:
    """Compiled at the first call, for only so its kernels are fused, and for each shape apart.

    A run has few shapes, and those that may vary cost checks in every block.
    """
    return torch.compile(flex_attention, dynamic=False)


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
