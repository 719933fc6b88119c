"""What the ids of a vocabulary stand for, whichever library reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONTROL, FILLER, BYTE, CHARACTER, LONGER = "control", "filler", "byte", "character", "longer"
KINDS = {
    CONTROL: "never met in text: the end of a document, padding, ...",
    FILLER: "ids that nothing uses",
    BYTE: "one byte of a character that has no piece",
    CHARACTER: "one character",
    LONGER: "several characters, or parts of them",
}
FILLER_PREFIX = "<unused_"


@dataclass(frozen=True)
class Piece:
    """One id: its kind, and the bytes of text it stands for (none for `control` and `filler`).

    A `control` piece is never met in text, a `filler` is an id that nothing uses.
    """

    kind: str
    content: bytes = b""


def piece_of(content: bytes) -> Piece:
    """A piece of text: one character, or part of one, or more."""
    if len(content) == 1 and content >= b"\x80":
        return Piece(BYTE, content)
    try:
        is_character = len(content.decode()) == 1
    except UnicodeDecodeError:
        is_character = False
    return Piece(CHARACTER if is_character else LONGER, content)


def sizes(pieces: Sequence[Piece]) -> np.ndarray:
    """Bytes of text of each piece: int32 (pieces,)."""
    return np.array([len(piece.content) for piece in pieces], dtype=np.int32)


def bytes_of_letters(name: str) -> bytes:
    """What a piece of a byte-level vocabulary stands for: each of its letters is one byte.

    The printable ones of Latin-1 are themselves; the other 68, in order, are U+0100 and on.
    """
    return b"".join(BYTE_OF_LETTER.get(letter, letter.encode()) for letter in name)


def _letters() -> dict[str, bytes]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = {chr(byte): bytes([byte]) for byte in printable}
    return letters | {chr(0x100 + at): bytes([byte]) for at, byte in enumerate(others)}


BYTE_OF_LETTER = _letters()
