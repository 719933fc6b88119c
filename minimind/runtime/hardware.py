"""Capabilities of this machine."""

from __future__ import annotations

import platform

import torch


def has_bf16() -> bool:
    """Whether this CPU has bf16 instructions.

    oneDNN also reports support for AVX-512 without them, and then emulates them slowly.
    """
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return platform.machine() not in ("x86_64", "AMD64") or torch.cpu._is_avx512_bf16_supported()


HAS_BF16 = has_bf16()
