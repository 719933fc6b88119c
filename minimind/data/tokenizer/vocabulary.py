"""Pieces of a vocabulary, its size limits, and the names of special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minimind.data.tokenizer.escaping import SPACE_SIGN
from minimind.errors import UsageError

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
    """Kind of an id, and the bytes of text it stands for (empty for `control` and `filler`)."""

    kind: str
    content: bytes = b""


def piece_of(content: bytes) -> Piece:
    """Return the piece of some bytes of text."""
    if len(content) == 1 and content >= b"\x80":
        return Piece(BYTE, content)
    try:
        is_character = len(content.decode()) == 1
    except UnicodeDecodeError:
        is_character = False
    return Piece(CHARACTER if is_character else LONGER, content)


def sizes(pieces: Sequence[Piece]) -> np.ndarray:
    """Bytes of text of each piece, int32 (pieces,)."""
    return np.array([len(piece.content) for piece in pieces], dtype=np.int32)


def decode_byte_level(name: str) -> bytes:
    """Bytes of a piece of a byte-level vocabulary, in which each letter stands for one byte.

    Printable Latin-1 letters stand for themselves; the other 68 bytes, in order, for U+0100 and on.
    """
    return b"".join(BYTE_OF_LETTER.get(letter, letter.encode()) for letter in name)


def _letters() -> dict[str, bytes]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = {chr(byte): bytes([byte]) for byte in printable}
    return letters | {chr(0x100 + at): bytes([byte]) for at, byte in enumerate(others)}


BYTE_OF_LETTER = _letters()


SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 512, 2**20
BUILT_IN = ("<unk>", "<s>", "</s>", "<pad>")
BYTE_NAMES = tuple(f"<0x{byte:02X}>" for byte in range(256))
SMALLEST_ALPHABET = 120  # leaves room for ASCII and as many merges in 512 pieces
RESERVED_PIECES = len(BUILT_IN) + len(BYTE_NAMES)


def max_alphabet(vocab_size: int, special: int) -> int:
    """Number of characters with a piece: with bytes and specials they take half the vocabulary."""
    return max(vocab_size // 2 - RESERVED_PIECES - special, SMALLEST_ALPHABET)


def require_learnable(vocab_size: int, special: Sequence[str] = ()) -> None:
    """Raise UsageError if such a vocabulary cannot be learnt."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise UsageError(
            f"vocab_size = {vocab_size} is less than {SMALLEST_VOCABULARY}, of which"
            f" {RESERVED_PIECES} are bytes and specials; raise --vocab_size"
        )
    if vocab_size > LARGEST_VOCABULARY:
        raise UsageError(
            f"vocab_size = {vocab_size} is more than the {LARGEST_VOCABULARY} that can be learnt;"
            " lower --vocab_size"
        )
    for at, name in enumerate(special):
        if error := name_error(name, special[:at]):
            raise UsageError(f"--special_tokens: {name!r} {error}; give another name, or leave it")
    limit = vocab_size - RESERVED_PIECES - SMALLEST_ALPHABET
    if len(special) > limit:
        raise UsageError(
            f"--special_tokens: {len(special)} are more than the {limit} that vocab_size ="
            f" {vocab_size} has room for; raise --vocab_size, or name fewer"
        )


def name_error(name: str, before: Sequence[str]) -> str:
    """Return why `name` cannot name a special token, after the names `before`; empty if it can."""
    if not name:
        return "is empty"
    if name in before:
        return "is named twice"
    if name in BUILT_IN or name in BYTE_NAMES:
        return "is built in"
    if name.startswith(FILLER_PREFIX):
        return f"begins with {FILLER_PREFIX}, the prefix of fillers"
    if len(name) == 1:
        return "is one character, which occurs in text"
    if not name.isprintable() or " " in name:
        return "holds whitespace, or a character that cannot be printed"
    if SPACE_SIGN in name:
        return "holds U+2581, which stands for a space in pieces"
    return ""
