"""Masks and kernels of attention: flex attention of documents on a GPU, blocks on a CPU.

`SequenceGroup` divides the positions of a row over ranks, each of which attends for some heads.

A dense document mask has T^2 elements per row, which every layer reads. Flex attention skips blocks
without a visible key and does not repeat key heads. Shape letters: B rows, T positions, H query
heads, K key/value heads, D channels per head, N blocks of BLOCK positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import Cache
from transformers.cache_utils import DynamicLayer, StaticLayer

from minimind.model.activation_checkpointing import is_traced, recompute
from minimind.model.configuration import MiniMindConfig
from minimind.model.sizes import MIN_FLEX_HEAD_DIM, MIN_FLEX_LENGTH
from minimind.runtime.device import CUDA, block_memory, device_kind, major_capability
from minimind.runtime.hardware import compiler_fault

BLOCK = 128  # positions; the block size of flex attention's kernels, and of queries on a CPU
# Flex attention fits every card for heads of 256 bytes. For twice as many it takes up to 152,064
# bytes of a block's memory, which a GeForce does not have (`python -m benchmarks.other_cards`).
FLEX_HEAD_BYTES, WIDE_FLEX_MEMORY = 256, 152_064
SHAPES = 256  # for which flex attention is compiled in one process


def has_flex_kernel(device: torch.device, head_dim: int, length: int, dtype: torch.dtype) -> bool:
    """Whether flex attention has a fused kernel with backward pass for queries such as these.

    The kernel is compiled, also if the model is not.
    """
    is_large = head_dim >= MIN_FLEX_HEAD_DIM and length >= MIN_FLEX_LENGTH
    if not (is_large and device_kind(device).has_triton):
        return False
    size = head_dim * dtype.itemsize / FLEX_HEAD_BYTES
    if size > 2 or (size > 1 and block_memory(device) < WIDE_FLEX_MEMORY):
        return False
    return torch.compiler.is_compiling() or not _gpu_compiler_fault(dtype == torch.bfloat16)


@cache
def _gpu_compiler_fault(needs_bf16: bool) -> str:
    return compiler_fault(CUDA.name, needs_bf16)


def has_grouped_kernel(x: Tensor) -> bool:
    """Whether a fused CUDA kernel takes x with fewer key heads than query heads.

    Those of cuDNN and flash attention do: 16 bits, compute capability 8.0. Without one torch
    computes all scores at once, which takes T^2 elements per head.
    """
    if x.dtype not in (torch.bfloat16, torch.float16):
        return False
    return major_capability(x.device) >= 8


def document_block_mask(starts_BT: Tensor) -> BlockMask:
    """Return the causal document mask as a (B, 1, T, T) BlockMask; starts_BT marks first tokens.

    Documents are contiguous, so the documents of the first and last position of each block decide
    which blocks share one: no T^2 table is built, and nothing is read back to the host.
    """
    length = starts_BT.shape[1]
    document_BT = starts_BT.cumsum(-1, dtype=torch.int32)

    def is_visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (document_BT[row, query] == document_BT[row, key])

    # The padding of the last block belongs to no document, so that its block is never full.
    padded_BT = F.pad(document_BT, (0, -length % BLOCK), value=length + 1)
    first_BN, last_BN = padded_BT[:, ::BLOCK], padded_BT[:, BLOCK - 1 :: BLOCK]
    visible_BNN = (last_BN[:, None] >= first_BN[..., None]).tril()
    full_BNN = (first_BN[:, None] == last_BN[..., None]).tril(-1)
    return BlockMask.from_kv_blocks(
        *_block_lists(visible_BNN & ~full_BNN),
        *_block_lists(full_BNN),
        BLOCK_SIZE=BLOCK,
        mask_mod=is_visible,
        seq_lengths=(length, length),
    )


def _block_lists(is_listed_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks per query block (B, 1, N), and their indices (B, 1, N, N)."""
    is_listed_B1NN = is_listed_BNN[:, None].int()
    indices_B1NN = is_listed_B1NN.argsort(dim=-1, descending=True, stable=True)
    return is_listed_B1NN.sum(-1, dtype=torch.int32), indices_B1NN.int()


def document_attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, blocks: BlockMask) -> Tensor:
    """Attention (B, H, T, D). On a CPU without backward pass, with all scores in memory."""
    if torch.compiler.is_compiling() or not q_BHTD.is_cuda:
        return flex_attention(q_BHTD, k_BKTD, v_BKTD, block_mask=blocks, enable_gqa=True)
    # Past the limit, 8 by default, flex attention runs unfused, with all scores in memory.
    with torch._dynamo.config.patch(recompile_limit=SHAPES):
        return _compiled()(q_BHTD, k_BKTD, v_BKTD, block_mask=blocks, enable_gqa=True)


@cache
def _compiled() -> Callable[..., Tensor]:
    """Flex attention compiled at the first call: only then its kernels are fused.

    Static shapes: a run has few, and dynamic ones cost checks in every block.
    """
    return torch.compile(flex_attention, dynamic=False)


def blockwise_attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
    """Causal attention (B, H, T, D), softmax in fp32, without repeating key heads."""
    q_BKGTD = q_BHTD.unflatten(1, (k_BKTD.shape[1], -1))
    blocks = []
    for start in range(0, q_BHTD.shape[2], BLOCK):
        q_BKGND = q_BKGTD[:, :, :, start : start + BLOCK]
        end = start + q_BKGND.shape[3]
        blocks.append(recompute(_block, q_BKGND, k_BKTD[:, :, :end], v_BKTD[:, :, :end]))
    return torch.cat(blocks, dim=3).flatten(1, 2)


def _block(q_BKGND: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
    """Attention (B, K, G, N, D) of the last N of S queries over all S keys."""
    q_BKGND = q_BKGND.type_as(k_BKSD)  # here, so that the narrower dtype is saved
    groups, queries, keys = q_BKGND.shape[2], q_BKGND.shape[3], k_BKSD.shape[2]
    scores = q_BKGND.flatten(2, 3) @ k_BKSD.transpose(-2, -1) * q_BKGND.shape[-1] ** -0.5
    scores_BKGNS = scores.unflatten(2, (groups, queries)).float()
    key_S = torch.arange(keys, device=scores.device)
    mask_NS = key_S <= key_S[keys - queries :, None]
    weights = torch.where(mask_NS, scores_BKGNS, float("-inf")).softmax(-1).type_as(v_BKSD)
    return (weights.flatten(2, 3) @ v_BKSD).unflatten(2, (groups, queries))


class _Exchange(torch.autograd.Function):
    """Send part n of the first dimension to rank n of a group, and so their gradients back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        """Return the parts that the ranks sent, in their order."""
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Exchange the gradients: rank n gets that of the part it sent."""
        sent: Any = _Exchange.apply(grads[0], ctx.group)
        return sent, None


@dataclass(frozen=True)
class SequenceGroup:
    """N ranks with T / N consecutive positions each of the same rows.

    Attention needs all positions, but not all heads: before it each rank exchanges its positions of
    all heads for all positions of H / N heads, and back afterwards (DeepSpeed-Ulysses, Jacobs et
    al. 2023). Fewer than N key heads are repeated to N.
    """

    group: Any
    rank: int
    size: int

    def part(self, x: Tensor, dim: int) -> Tensor:
        """The positions of this rank along a dimension of all positions."""
        assert x.shape[dim] % self.size == 0, f"{x.shape[dim]} positions on {self.size} ranks"
        return x.chunk(self.size, dim)[self.rank]

    def to_heads(self, *several: Tensor) -> tuple[Tensor, ...]:
        """Exchange (B, T / N, H, D) each for (B, T, H / N, D), all of them at once."""
        parts = []
        for x_BTHD in several:
            heads = x_BTHD.shape[2]
            x_BTHD = (
                x_BTHD
                if heads >= self.size
                else x_BTHD.repeat_interleave(self.size // heads, dim=2)
            )
            parts.append(x_BTHD.unflatten(2, (self.size, -1)))
        sent = torch.cat(parts, dim=3).movedim(2, 0)
        received: Any = _Exchange.apply(sent, self.group)  # (N, B, T / N, heads, D)
        sizes = [part.shape[3] for part in parts]
        return received.movedim(0, 1).flatten(1, 2).split(sizes, dim=2)

    def to_positions(self, x_BTHD: Tensor) -> Tensor:
        """Exchange (B, T, H / N, D) for (B, T / N, H, D)."""
        sent = x_BTHD.unflatten(1, (self.size, -1)).movedim(1, 0)
        received: Any = _Exchange.apply(sent, self.group)
        return received.movedim(0, 2).flatten(2, 3)


AttentionMask = Tensor | BlockMask | None


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
    return additive_mask(mask, x_BTE.dtype) if is_fused and mask is not None else mask


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
