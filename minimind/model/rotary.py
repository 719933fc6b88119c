"""Position as rotation: the pos_cis table and its application to queries and keys.

Weights and caches pair ADJACENT channels, everywhere and always. A compiled training pass alone
pairs channel j with j + D/2, because only so do its loads and stores stay whole: there the rows of
the projections are put in that order as they are read, which costs a copy of a small matrix, and no
score changes, since queries and keys move alike.

Shape letters: B rows, T positions, H heads, D channels per head (D is even).
"""

import torch
from torch import Tensor


def build_pos_cis(head_dim: int, max_positions: int, theta: float) -> Tensor:
    """Unit complex64 numbers (max_positions, head_dim // 2): the turn of each channel pair.

    Entry (t, j) turns pair j at position t by the angle t * theta ** (-2j / head_dim). Pairs are
    ADJACENT channels (0, 1), (2, 3), ... as in RoFormer (Su et al. 2021, section 3.4); Hugging
    Face Llama pairs channel j with j + D/2, so its q and k rows are permuted on the way in or out.

    The arithmetic is float64: bf16 cannot tell neighbouring positions apart beyond 256. Only
    integer constructors are called, because DeepSpeed's zero.Init casts what floating-point ones
    return to the training precision.
    """
    pairs = torch.arange(0, head_dim, 2).double()
    positions = torch.arange(max_positions).double()
    angles = torch.outer(positions, theta ** (-pairs / head_dim))
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def rotate(x_BTHD: Tensor, pos_cis: Tensor) -> Tensor:
    """x turned by pos_cis, same shape and dtype; pos_cis is (T, D/2) or, per row, (B, T, D/2).

    Computed in fp32. Complex multiplication is the fast form in eager mode and the slow one under
    torch.compile, which cannot fuse complex operators: there the same product is written in reals.
    """
    turn = pos_cis.unsqueeze(-2)
    if torch.compiler.is_compiling():
        return _rotate_in_reals(x_BTHD, turn)
    pairs = torch.view_as_complex(x_BTHD.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).type_as(x_BTHD)


def _rotate_in_reals(x_BTHD: Tensor, turn: Tensor) -> Tensor:
    """The product of rotate, (a + bi)(cos + i sin), without a complex operator on x."""
    a, b = x_BTHD.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = torch.view_as_real(turn).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).type_as(x_BTHD)


def rotate_halves(x_BTHD: Tensor, turn: Tensor) -> Tensor:
    """What `rotate` gives, of channels in the order of `in_halves` and in that order.

    turn is `cos_sin` of its pos_cis, fp32 (2, T, D/2) or, per row, (2, B, T, D/2). Each half is
    rounded before they are joined: compiled, that is one pass over x, and the other way is two.
    """
    a, b = (half.float() for half in x_BTHD.chunk(2, -1))
    cos, sin = turn.unsqueeze(-2).unbind(0)
    halves = (a * cos - b * sin).type_as(x_BTHD), (a * sin + b * cos).type_as(x_BTHD)
    return torch.cat(halves, -1)


def cos_sin(pos_cis: Tensor) -> Tensor:
    """The real and the imaginary parts of pos_cis, fp32 (2, ...), each without gaps."""
    return torch.stack((pos_cis.real, pos_cis.imag))


def in_halves(weight: Tensor, head_dim: int) -> Tensor:
    """The rows of every head with channels 0, 2, 4, ... first: what were pairs are D/2 apart.

    The order of Hugging Face's Llama. Numbers move and none changes, so `in_pairs` is exact.
    """
    return _transposed(weight, (-1, head_dim // 2, 2))


def in_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """The way back from `in_halves`."""
    return _transposed(weight, (-1, 2, head_dim // 2))


def _transposed(weight: Tensor, parts: tuple[int, int, int]) -> Tensor:
    """The rows of each head, seen as a table of `parts`, read down its columns."""
    return weight.unflatten(0, parts).transpose(1, 2).flatten(0, 2)
