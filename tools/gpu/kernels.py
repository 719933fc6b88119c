"""The attention kernel that is chosen for each shape, and its gradients against the reference's.

python -m tools.gpu.kernels cuda|mps|cpu        (one JSON line for each shape)
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from minimind.model.decoder import PlainAttention
from minimind.model.kernels import document_block_mask, flash_attention, has_flex_kernel
from minimind.model.masks import boolean_mask
from tools.gpu.findings import Finding, check
from tools.gpu.site import Site

HEADS, CHANNELS, ROWS = 8, 64, 2
LENGTHS, LENGTHS_ON_CPU = (1024, 704, 65), (192, 65)
KEY_HEADS = (8, 2)
MASKS = ("causal", "masked", "documents")
GRADIENTS = 1e-2  # of the norm, in bf16; 3e-3 to 8.5e-3 on a CPU
# Flex attention is a template of Triton's, of which its name need not be part.
NAME = re.compile(r"_scaled_dot_product_(\w+)|(flex_attention|triton_tem\w*)")


def kernels(site: Site) -> Iterator[Finding]:
    """The kernel of each shape, its gradients against the reference's, and scores of -128."""
    for line in site.python("tools.gpu.kernels", site.device).splitlines():
        found = json.loads(line)
        kernel, distance, is_finite = found["kernel"], found["distance"], found["is_finite"]
        # An Apple GPU's fused kernel, for passes without gradients, has this name.
        is_fused = bool(kernel) and ("math" not in kernel or "for_mps" in kernel)
        is_right = is_fused and is_finite and distance < GRADIENTS
        far = "finite" if is_finite else "not finite"
        text = f"{kernel or 'none'}, {distance:.1e}, {far}"
        yield check(found["shape"], is_right, text, f"fused, {GRADIENTS:g}, finite", found)


def attended(attend: Any, parts: list[Tensor], visible: Any, of_out: Tensor) -> list[Tensor]:
    """What attention gives, and its gradients to queries, keys and values."""
    q, k, v = (part.detach().requires_grad_() for part in parts)
    out = attend(q, k, v, visible)
    return [out.detach(), *torch.autograd.grad((out * of_out).sum(), (q, k, v))]


def chosen(work: Callable[[], Any]) -> str:
    """The names of the attention kernels that `work` uses in its forward pass."""
    kinds = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(ProfilerActivity.CUDA)
    with profile(activities=kinds, acc_events=True) as recorded:
        work()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    names = (NAME.search(event.key) for event in recorded.key_averages())
    found = {name[1] or name[2] for name in names if name and "backward" not in name.string}
    return ", ".join(sorted(found))


def masks_of(kind: str, length: int, device: torch.device) -> tuple[Tensor | None, Any]:
    """(what the reference is given, what the model would give its fused kernels)."""
    if kind == "causal":
        return None, None
    if kind == "masked":
        dense = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
        return dense, dense
    draw = torch.Generator().manual_seed(length)
    starts = (torch.rand(ROWS, length, generator=draw) < 1 / 100).to(device)
    dense = boolean_mask(length, 0, None, starts, device)
    is_flex = has_flex_kernel(device, CHANNELS, length, torch.bfloat16)
    return dense, document_block_mask(starts) if is_flex else dense


def measure(kind: str, length: int, key_heads: int, device: torch.device) -> dict[str, Any]:
    """One shape in bf16."""
    draw = torch.Generator().manual_seed(length)
    shapes = [(ROWS, heads, length, CHANNELS) for heads in (HEADS, key_heads, key_heads)]
    parts = [torch.randn(shape, generator=draw).to(device).bfloat16() for shape in shapes]
    of_out = torch.randn(shapes[0], generator=draw).to(device)
    dense, visible = masks_of(kind, length, device)
    found = attended(flash_attention, parts, visible, of_out)
    wide = attended(
        lambda *of: PlainAttention()(*of)[0], [part.float() for part in parts], dense, of_out
    )
    distances = [
        float((fused.float() - expected).norm() / expected.norm())
        for fused, expected in zip(found, wide, strict=True)
    ]
    # Scores of about -128, for which torch 2.13's cuDNN has NaNs at a length of 704.
    far = [part + shift for part, shift in zip(parts, (4, -4, 0), strict=True)]
    finite = (bool(t.isfinite().all()) for t in attended(flash_attention, far, visible, of_out))
    return {
        "shape": f"{kind}, {length} positions, {HEADS} to {key_heads} heads",
        "kernel": chosen(lambda: flash_attention(parts[0], parts[1], parts[2], visible)),
        "distance": max(distances),
        "is_finite": all(finite),
    }


def main(device: str) -> None:
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    for kind in MASKS:
        for length in LENGTHS if device != "cpu" else LENGTHS_ON_CPU:
            for key_heads in KEY_HEADS:
                print(json.dumps(measure(kind, length, key_heads, where)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
