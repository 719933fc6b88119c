"""Who attends to whom: positions and masks of padding, documents and caches.

Shape letters: B rows, T positions, S keys (cached ones included), E model width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, StaticLayer

from minimind.model.configuration import MiniMindConfig
from minimind.model.kernels import AttentionMask, document_block_mask, has_flex_kernel, is_traced

# Sliding layers drop keys, quantized ones round them, encoder layers hold keys of other text.
EXACT = (DynamicLayer, StaticLayer)


def eos_starts(input_ids: Tensor, attention_mask: Tensor | None, eos_id: int) -> Tensor:
    """Mark the first position of each document, bool (B, T): the eos of the previous document.

    So a document is [eos, tokens...] and predicts [tokens..., eos], and no target of a packed row
    is lost. Tokens before the first eos continue a document of the previous row.
    """
    starts_BT = input_ids == eos_id
    return starts_BT if attention_mask is None else starts_BT & attention_mask.bool()


def document_positions(
    past: int | Tensor, attention_mask: Tensor | None, starts_BT: Tensor | None
) -> Tensor | None:
    """Positions (B, T) without padding, from 0 in each document.

    None if they are consecutive from `past` on in every row.
    """
    if attention_mask is None and starts_BT is None:
        return None
    if attention_mask is not None:
        positions_BT = attention_mask.long().cumsum(-1) - 1
    else:
        assert starts_BT is not None
        positions_BT = torch.arange(starts_BT.shape[1], device=starts_BT.device).expand_as(
            starts_BT
        )
    if starts_BT is not None:
        positions_BT = positions_BT - torch.where(starts_BT, positions_BT, 0).cummax(-1).values
    return positions_BT.clamp(min=0)[:, past:]


def make_attention_mask(
    config: MiniMindConfig,
    x_BTE: Tensor,
    past: int | Tensor,
    attention_mask: Tensor | None,
    starts_BT: Tensor | None,
    keys: int | None = None,
    length: int | None = None,
) -> AttentionMask:
    """Build the mask that all layers share; `length`: positions, if x has only some of them.

    A BlockMask if flex attention is fast and there is no padding, else a tensor or None. A mask of
    four dimensions is complete.
    """
    device, is_fused = x_BTE.device, config.is_fused
    if attention_mask is not None and attention_mask.ndim == 4:
        is_additive = attention_mask.is_floating_point()
        return attention_mask.to(x_BTE.dtype if is_additive else torch.bool)
    length = x_BTE.shape[1] if length is None else length
    use_flex = is_fused and attention_mask is None
    kind, dtype = device.type, x_BTE.dtype  # of queries
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    use_flex = use_flex and has_flex_kernel(device, config.head_dim, length, dtype)
    if starts_BT is not None and use_flex:
        return document_block_mask(starts_BT)
    mask = boolean_mask(length, past, attention_mask, starts_BT, device, keys)
    return additive_mask(mask, dtype) if is_fused and mask is not None else mask


def boolean_mask(
    length: int,
    past: int | Tensor,
    attention_mask: Tensor | None,
    starts_BT: Tensor | None,
    device: torch.device,
    keys: int | None = None,
) -> Tensor | None:
    """Visible keys of each query, bool (B or 1, 1, T, S); None if plain causal.

    S is past + length, or `keys` if a static cache has more slots, which are masked. A padding
    query attends to itself: a softmax over nothing would give NaN. Documents are distinguished only
    without a cache.
    """
    total: Any = past + length if keys is None else keys
    is_causal = attention_mask is None and starts_BT is None
    # A tensor is of a static cache in a compiled model, and not to be read.
    if is_causal and not isinstance(past, Tensor) and total == past + length:
        if past == 0 or length == 1:
            return None
    key_S = torch.arange(total, device=device)
    query_T1 = torch.arange(length, device=device)[:, None] + past
    mask = (key_S <= query_T1)[None, None]
    if starts_BT is not None:
        document_BT = starts_BT.cumsum(-1)
        mask = mask & (document_BT[:, None, None] == document_BT[:, None, :, None])
    if attention_mask is None:
        return mask
    real_B11S = F.pad(attention_mask.bool(), (0, total - attention_mask.shape[1]))[:, None, None]
    return (key_S == query_T1) | (real_B11S & mask)


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to 0 and -inf, which fused attention adds to its scores.

    With a boolean mask every layer would convert it and keep its copy until the backward pass.
    """
    bias = torch.zeros_like(mask, dtype=dtype)
    return bias.masked_fill_(~mask, float("-inf"))


def cache_sizes(cache: Cache, length: int) -> tuple[int | Tensor, int]:
    """Return the cached positions, and the keys of attention after `length` more are added.

    In a StaticCache the latter is its size, and in traced code the former a tensor. Raise
    ValueError if the cache is full, unless traced, or does not return every key unchanged.
    """
    kinds = [type(layer) for layer in getattr(cache, "layers", ())]
    if future := getattr(cache, "layer_class_to_replicate", None):
        kinds.append(future)
    wrong = next((kind for kind in kinds if kind not in EXACT), None if kinds else type(cache))
    if wrong:
        raise ValueError(
            f"the cache has a {wrong.__name__}, which MiniMind does not support: give a"
            " DynamicCache or a StaticCache."
        )
    past, keys = cache.get_seq_length(), cache.get_mask_sizes(length, 0)[0]
    if is_traced():
        return past + 0, keys  # a copy, as the tensor of a StaticCache is modified by its update
    past = int(past)
    if past + length > keys:
        raise ValueError(
            f"the cache has room for {keys} positions and holds {past}, so that {length}"
            " more do not fit: make it longer."
        )
    return past, keys
