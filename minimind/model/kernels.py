"""What a device, and a compiler, change of the decoder: kernels of attention, forms for --compile.

Attention has fused kernels on every device, flex attention for the documents of a row on a GPU, and
blocks of queries where it is compiled for a CPU. A dense document mask has T^2 elements per row,
which every layer reads; flex attention skips blocks without a visible key. Compiled training
computes queries and keys in the half layout, and computes again what is cheap instead of saving it.

Shape letters: B rows, T positions, S keys (cached ones included), H query heads, K key/value heads,
G query heads per key head, D channels per head, E model width, N blocks of BLOCK positions.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from minimind.model.rotary import Rotary, interleaved_to_half
from minimind.model.sizes import MIN_FLEX_HEAD_DIM, MIN_FLEX_LENGTH
from minimind.runtime.device import CUDA, block_memory, device_kind, major_capability
from minimind.runtime.hardware import compiler_fault

AttentionMask = Tensor | BlockMask | None
KERNEL_DEVICE = CUDA.name  # has several fused attention kernels to choose from

# In order of priority. cuDNN plans its kernels for each shape, so it comes first for the causal
# attention of training, which has one shape. Not with a mask or a single query: there torch 2.13
# gives NaN gradients (pytorch issue 196678) and wrong text (193893).
CAUSAL_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
MASKED_KERNELS = CAUSAL_KERNELS[1:]

BLOCK = 128  # positions; the block size of flex attention's kernels, and of queries on a CPU
# Flex attention fits every card for heads of 256 bytes. For twice as many it takes up to 152,064
# bytes of a block's memory, which a GeForce does not have (`python -m benchmarks.other_cards`).
FLEX_HEAD_BYTES, WIDE_FLEX_MEMORY = 256, 152_064
SHAPES = 256  # for which flex attention is compiled in one process


def flash_attention(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: AttentionMask) -> Tensor:
    """Attention (B, H, T, D) by fused kernels; no mask tensor is built if mask is None.

    mask is boolean or additive, (B or 1, 1, T, S). None means causal over T == S positions or, for
    a single query, all keys. With a mask, and in fp32 on a GPU, key heads are repeated: only the
    slow CUDA kernel combines these with grouped heads. A BlockMask uses flex attention. Compiled
    for a CPU, matrix products are faster than its fused kernel. Keys may have a wider dtype than
    queries, which is then used.
    """
    is_causal = mask is None and bool(q_BHTD.shape[2] > 1)  # torch.jit.trace has tensors as sizes
    if is_causal and is_compiled() and q_BHTD.device.type == "cpu":
        return blockwise_attention(q_BHTD, k_BKSD, v_BKSD)
    if isinstance(mask, BlockMask):
        return document_attention(q_BHTD, k_BKSD, v_BKSD, mask)
    if mask is not None:
        k_BHSD, v_BHSD = repeat_heads(k_BKSD, q_BHTD), repeat_heads(v_BKSD, q_BHTD)
        return _fused(MASKED_KERNELS, q_BHTD, k_BHSD, v_BHSD, attn_mask=mask)
    kernels = CAUSAL_KERNELS if is_causal else MASKED_KERNELS
    if q_BHTD.device.type == KERNEL_DEVICE and not has_grouped_kernel(q_BHTD):
        k_BHSD, v_BHSD = repeat_heads(k_BKSD, q_BHTD), repeat_heads(v_BKSD, q_BHTD)
        return _fused(kernels, q_BHTD, k_BHSD, v_BHSD, is_causal=is_causal)
    return _fused(kernels, q_BHTD, k_BKSD, v_BKSD, is_causal=is_causal, enable_gqa=True)


def _fused(
    kernels: list[SDPBackend], q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, **options: Any
) -> Tensor:
    """Fused attention (B, H, T, D), on a GPU by the first of `kernels` that supports it.

    Selected per call, so that a recomputed block uses the same kernel in its backward pass.
    """
    if q_BHTD.device.type != KERNEL_DEVICE:
        return F.scaled_dot_product_attention(q_BHTD, k_BKSD, v_BKSD, **options)
    with sdpa_kernel(kernels, set_priority=True):
        return F.scaled_dot_product_attention(q_BHTD, k_BKSD, v_BKSD, **options)


def repeat_heads(x_BKSD: Tensor, q_BHTD: Tensor) -> Tensor:
    """Repeat key/value heads for the query heads that share them (B, H, S, D)."""
    groups = q_BHTD.shape[1] // x_BKSD.shape[1]
    return x_BKSD if groups == 1 else x_BKSD.repeat_interleave(groups, dim=1)


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


def is_compiled() -> bool:
    """Whether torch.compile traces this code; not torch.export, which needs one graph for all
    lengths and without recomputation.
    """
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def is_traced() -> bool:
    """Whether this code is recorded for other inputs, so that no value of a tensor may be read."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] (documented)


def recompute(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return function(*inputs), recomputed in the backward pass; only the inputs are saved.

    The random state is not preserved.
    """
    output: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output


def recomputed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function`, a cheap one: compiled for a CPU, it is recomputed in the backward pass.

    The last argument is a tensor. The saving was measured on a CPU only (`benchmarks/units.py`,
    benchmarks/README.md).
    """

    @wraps(function)
    def called(*inputs: Any) -> Tensor:
        if is_compiled() and inputs[-1].device.type == "cpu":
            return recompute(function, *inputs)
        return function(*inputs)

    return called


class HeadProjection(nn.Linear):
    """Projection to queries or keys, with channels in either layout.

    A module of its own, because ZeRO stage 3 gathers a weight only while its module runs.
    """

    def __init__(self, width: int, heads: int, head_dim: int, bias: bool):
        super().__init__(width, heads * head_dim, bias)
        self.head_dim = head_dim

    def forward(self, input: Tensor, is_half: bool = False) -> Tensor:
        """Project (B, T, E) to (B, T, H D); is_half: in the half layout."""
        weight, bias = self.weight, self.bias
        if is_half:
            weight = interleaved_to_half(weight, self.head_dim)
            bias = None if bias is None else interleaved_to_half(bias, self.head_dim)
        return F.linear(input, weight, bias)


class HeadNorm(nn.RMSNorm):
    """Norm of each query or key head; its weight follows the channel layout.

    It is rotated next, so that no copy is saved.
    """

    def forward(self, x: Tensor, is_half: bool = False) -> Tensor:
        """Normalize; is_half: channels are in the half layout."""
        weight = interleaved_to_half(self.weight, len(self.weight)) if is_half else self.weight
        # Under autocast x is in bf16 and the weight in fp32; attention takes one dtype.
        return F.rms_norm(x.type_as(weight), self.normalized_shape, weight, self.eps).type_as(x)


def half_heads(
    x_BTE: Tensor, project: nn.Module, norm: nn.Module | None, rotary: Rotary, head_dim: int
) -> Tensor:
    """Queries or keys (B, T, H, D) in the half layout: projected, normalized and rotated.

    Scores are those of the interleaved layout, since queries and keys are permuted alike.
    """
    x_BTHD = project(x_BTE, is_half=True).unflatten(-1, (-1, head_dim))
    if norm is not None:
        x_BTHD = norm(x_BTHD, is_half=True)
    return apply_rotary_half(x_BTHD, rotary.reals)


def apply_rotary_half(x_BTHD: Tensor, rotary: Tensor) -> Tensor:
    """`apply_rotary` for x in the half layout.

    rotary is `pos_cis_as_reals(pos_cis)`, fp32 (2, T, D/2) or (2, B, T, D/2). Halves are rounded
    before they are concatenated: compiled, that takes one pass over x instead of two.
    """
    a, b = (half.float() for half in x_BTHD.chunk(2, -1))
    cos, sin = rotary.unsqueeze(-2).unbind(0)
    halves = (a * cos - b * sin).type_as(x_BTHD), (a * sin + b * cos).type_as(x_BTHD)
    return torch.cat(halves, -1)


def apply_rotary_real(x_BTHD: Tensor, rotary: Tensor) -> Tensor:
    """`apply_rotary` without complex operators, which compilers do not fuse, and ONNX does not
    have; rotary is that of `apply_rotary_half`.
    """
    a, b = x_BTHD.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotary.unsqueeze(-2).unbind(0)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).type_as(x_BTHD)
