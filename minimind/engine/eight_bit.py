"""AdamW with 8-bit moments, by bitsandbytes.

A moment is a code per element, and the scale of its block of 256 elements: the value is the product
of the scale and the code's entry in a table of 256 numbers. Blocks are counted from the start of
the tensor that the optimizer updates, which under ZeRO is a rank's part of many weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from minimind.config.optimizers import ADAM, OPTIMIZERS

# On CPUs its import warns of a package for 4-bit weights, unless its logger is quiet before.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
from bitsandbytes.optim.adamw import AdamW8bit as BitsAndBytes  # noqa: E402 (after the logger)

BLOCK = OPTIMIZERS["adamw_8bit"].blocks
TABLES = "dynamic", "udynamic"  # bitsandbytes' names of those of both moments
SMALLEST = 4096  # elements; tensors of fewer stay in fp32, as bitsandbytes decides
PART = BLOCK * 2**10  # elements that are quantized together, in tens of bytes each
ULPS = 3  # candidates of a scale to both sides


class AdamW8bit(BitsAndBytes):
    """bitsandbytes' AdamW8bit, with moments that are read and set in fp32."""

    found_inf: Tensor | None = None  # 1 to skip the step; set by the backend

    def step(self, closure: Any = None) -> Any:
        """Update every weight."""
        if self.found_inf is None or not self.found_inf.item():
            super().step(closure)

    def unpacked(self, owner: Tensor, kind: str, start: int, length: int) -> Tensor:
        """Values of a moment of `owner`, 1-D fp32."""
        state, n = self.state[owner], ADAM.index(kind) + 1
        codes = state[f"state{n}"].view(-1)[start : start + length]
        if f"absmax{n}" not in state:  # a small tensor, which stays in fp32
            return codes
        first, last = start // BLOCK, -(-(start + length) // BLOCK)
        scales = state[f"absmax{n}"][first:last, None].expand(-1, BLOCK).reshape(-1)
        values = state[f"qmap{n}"].index_select(0, codes.int())
        return values.mul_(scales[start - first * BLOCK :][:length])

    def pack(self, owner: Tensor, moments: dict[str, Any]) -> bool:
        """Store `step` and fp32 moments by kind; return whether 8 bits hold them exactly."""
        state: dict[str, Any] = {"step": int(moments["step"])}
        for n, (kind, name) in enumerate(zip(ADAM, TABLES, strict=True), 1):
            values = moments[kind].view(-1)
            if owner.numel() >= SMALLEST:
                if name not in self.name2qmap:
                    self.fill_qmap()
                table = self.name2qmap[name] = self.name2qmap[name].to(owner.device)
                found = [quantized(part, table) for part in values.split(PART)]
                if None in found:
                    return False
                parts, scales = zip(*found, strict=True)
                values = torch.cat(parts)
                state |= {f"qmap{n}": table, f"absmax{n}": torch.cat(scales)}
            state[f"state{n}"] = values.view(owner.shape)
        self.state[owner] = state
        return True


def quantized(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor] | None:
    """Codes and scales of blocks whose products are `values`; None if there are none.

    The largest number of a block is its scale, or the scale times the lowest entry of the table if
    that number is negative: there is no entry of -1.
    """
    blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    ordered, order = table.sort()
    borders = (ordered[1:] + ordered[:-1]) / 2
    codes = torch.zeros(blocks.shape, dtype=torch.uint8, device=values.device)
    scales, left = torch.zeros_like(largest), torch.ones_like(largest, dtype=torch.bool)
    for scale in _candidates(largest, table):
        found = order[torch.bucketize(blocks / scale[:, None], borders)]
        found[scale == 0] = table.abs().argmin()
        fits = left & (table[found] * scale[:, None] == blocks).all(1)
        codes[fits], scales[fits] = found[fits].to(torch.uint8), scale[fits]
        left &= ~fits
        if not left.any():
            return codes.view(-1)[: len(values)], scales
    return None


def _candidates(largest: Tensor, table: Tensor) -> Iterator[Tensor]:
    """Scales of blocks with these largest numbers."""
    yield largest
    if (lowest := table.min()) < 0:
        for direction in (math.inf, 0.0):
            scale = largest / -lowest
            for _ in range(ULPS):
                yield scale
                scale = scale.nextafter(torch.full_like(scale, direction))
