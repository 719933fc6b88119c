"""Dropout whose masks are hashes of where an element is, not random numbers of a device.

That is the seed and the step of the run, the row in the step, the position, the place in the model
and the channel. So a mask is the same however a step is divided over processes, micro-batches,
positions and heads, and when a block is compiled or computed again.

A token has a 32-bit key at every place. An element takes five integer operations more, which
--compile fuses with the addition to the residual stream. Integers are int32, whose products wrap.

Shape letters: B rows, T positions, P places, E model width.
"""

from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor

# Multipliers of the hash lowbias32 (Wellons 2018), and of the sequences of rows, positions, places
# and channels, which are those of xxHash32 (Collet 2012).
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - 2**32
ROW, POSITION, PLACE = (prime - 2**32 for prime in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D))
CHANNEL = 0x27D4EB2F


class Dropout(NamedTuple):
    """Elements are dropped whose hash is below `bound`."""

    keys: Tensor  # int32 (P, B, T)
    # int32 (E,). Computed in compiled code, they make torch 2.13 write beyond the end of a bfloat16
    # result on CPUs where E is no multiple of 16.
    channels: Tensor
    bound: int

    def between(self, first: int, stop: int) -> "Dropout":
        """The same of some places."""
        return self._replace(keys=self.keys[first:stop])

    def __call__(self, x_BTE: Tensor, place: int) -> Tensor:
        """Return x with the dropped elements 0 and the others scaled, in its dtype."""
        hash_BTE = (self.keys[place].unsqueeze(-1) ^ self.channels) * FIRST
        hash_BTE = (hash_BTE ^ _shifted(hash_BTE, 15)) * SECOND
        kept = (2**31 - self.bound) / 2**32  # share of elements
        # The scale by itself: with the mask it would be rounded to bfloat16.
        return x_BTE * (hash_BTE >= self.bound) * (1 / kept)


def row_keys(seed: int, step: int, first: int, rows: int, device: torch.device) -> Tensor:
    """Keys, int32 (B,), of `rows` rows of a step, from its row `first` on."""
    digest = sha256(f"{seed}/{step}".encode()).digest()
    key = int.from_bytes(digest[:4], "little", signed=True)
    return torch.arange(first, first + rows, dtype=torch.int32, device=device) * ROW + key


def dropout_of(keys_B: Tensor, rate: float, places: int, length: int, width: int) -> Dropout:
    """Dropout of rows with these keys at places of the model."""
    positions, at, channels = (
        torch.arange(n, dtype=torch.int32, device=keys_B.device) for n in (length, places, width)
    )
    keys_BT = keys_B[:, None] ^ positions * POSITION
    keys_PBT = _mixed(keys_BT ^ (at * PLACE)[:, None, None])
    return Dropout(keys_PBT, channels * CHANNEL, int(rate * 2**32) - 2**31)


def _mixed(x: Tensor) -> Tensor:
    """The hash lowbias32."""
    x = (x ^ _shifted(x, 16)) * FIRST
    x = (x ^ _shifted(x, 15)) * SECOND
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros, not with the sign."""
    return (x >> bits) & (2 ** (32 - bits) - 1)
