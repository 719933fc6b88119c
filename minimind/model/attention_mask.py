"""What each query sees and where it stands: causal, padded, cut into documents, in any combination.

Shape letters: B rows, T positions, S keys (cached ones included).
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from minimind.model.attention_kernels import document_blocks, is_fast
from minimind.model.bf16_matmul import is_widened
from minimind.model.configuration import MiniMindConfig

Visible = Tensor | BlockMask | None


def document_starts(input_ids: Tensor, attention_mask: Tensor | None, eos_id: int) -> Tensor:
    """Where a document begins, bool (B, T): at the end-of-document id of the one before.

    So a document is the stream [eos, tokens...], which predicts [tokens..., eos], and no target of
    a packed row is lost. What stands before the first one goes on from the row before.
    """
    starts_BT = input_ids == eos_id
    return starts_BT if attention_mask is None else starts_BT & attention_mask.bool()


def own_positions(
    past: int, attention_mask: Tensor | None, starts_BT: Tensor | None
) -> Tensor | None:
    """Positions (B, T) counted over what is no padding, from 0 in each document.

    None where they are consecutive in every row, from `past` on.
    """
    if attention_mask is None and starts_BT is None:
        return None
    if attention_mask is not None:
        counted_BT = attention_mask.long().cumsum(-1) - 1
    else:
        assert starts_BT is not None
        counted_BT = torch.arange(starts_BT.shape[1], device=starts_BT.device).expand_as(starts_BT)
    if starts_BT is not None:
        counted_BT = counted_BT - torch.where(starts_BT, counted_BT, 0).cummax(-1).values
    return counted_BT.clamp(min=0)[:, past:]


def visible_in_layers(
    config: MiniMindConfig,
    x_BTE: Tensor,
    past: int,
    attention_mask: Tensor | None,
    starts_BT: Tensor | None,
    keys: int | None = None,
) -> Visible:
    """What the attention of every layer takes, made once for all of them.

    Blocks of documents where their kernels are fast and nothing else is to be hidden, else a mask.
    """
    device, is_fused = x_BTE.device, config.use_flash_attn
    is_by_blocks = is_fused and attention_mask is None and is_fast(device, config.head_dim)
    if starts_BT is not None and is_by_blocks:
        return document_blocks(starts_BT)
    visible = visible_keys(x_BTE.shape[1], past, attention_mask, starts_BT, device, keys)
    dtype = torch.float32 if is_widened(x_BTE) else x_BTE.dtype  # of the scores
    return added_to_scores(visible, dtype) if is_fused and visible is not None else visible


def visible_keys(
    length: int,
    past: int,
    attention_mask: Tensor | None,
    starts_BT: Tensor | None,
    device: torch.device,
    keys: int | None = None,
) -> Tensor | None:
    """Which keys each query sees, bool (B or 1, 1, T, S); None where no mask needs building.

    S is past + length, or `keys` where a cache of fixed size has room for more, which nobody sees.
    A padding query sees itself, or its softmax would be over nothing and its NaN would spread.
    Documents are told apart only where nothing is cached.
    """
    room = 0 if keys is None else keys - past - length
    if attention_mask is None and starts_BT is None and not room and (past == 0 or length == 1):
        return None
    key_S = torch.arange(past + length + room, device=device)
    query_T1 = key_S[past : past + length, None]
    visible = (key_S <= query_T1)[None, None]
    if starts_BT is not None:
        document_BT = starts_BT.cumsum(-1)
        visible = visible & (document_BT[:, None, None] == document_BT[:, None, :, None])
    if attention_mask is None:
        return visible
    real_B11S = F.pad(attention_mask.bool(), (0, room))[:, None, None]
    return (key_S == query_T1) | (real_B11S & visible)


def added_to_scores(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The same as 0 and -inf, which fused attention adds to its scores.

    Given bool, every layer would make this of it, and keep its own until the backward pass.
    """
    hidden = torch.zeros_like(visible, dtype=dtype)
    return hidden.masked_fill_(~visible, float("-inf"))
