"""What a vocabulary has to have room for, and what the special tokens in it may be called."""

from __future__ import annotations

from collections.abc import Sequence

from minimind.data.tokenizer.escaping import SPACE_SIGN
from minimind.data.tokenizer.pieces import FILLER_PREFIX
from minimind.errors import UsageError

SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 512, 2**20
BUILT_IN = ("<unk>", "<s>", "</s>", "<pad>")
BYTE_NAMES = tuple(f"<0x{byte:02X}>" for byte in range(256))
SMALLEST_ALPHABET = 120  # of 512 pieces 252 are left: room for ASCII and as many merges
TAKEN = len(BUILT_IN) + len(BYTE_NAMES)


def room_for_characters(vocab_size: int, special: int) -> int:
    """How many characters get a piece: with bytes and specials they take half the vocabulary."""
    return max(vocab_size // 2 - TAKEN - special, SMALLEST_ALPHABET)


def require_learnable(vocab_size: int, special: Sequence[str] = ()) -> None:
    """Nothing, or a UsageError where no such vocabulary can be learnt."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise UsageError(
            f"vocab_size = {vocab_size} is less than {SMALLEST_VOCABULARY}, of which {TAKEN} are"
            " bytes and specials; raise --vocab_size"
        )
    if vocab_size > LARGEST_VOCABULARY:
        raise UsageError(
            f"vocab_size = {vocab_size} is more than the {LARGEST_VOCABULARY} that can be learnt;"
            " lower --vocab_size"
        )
    for at, name in enumerate(special):
        if fault := _fault(name, special[:at]):
            raise UsageError(f"--special_tokens: {name!r} {fault}; give another name, or leave it")
    most = vocab_size - TAKEN - SMALLEST_ALPHABET
    if len(special) > most:
        raise UsageError(
            f"--special_tokens: {len(special)} are more than the {most} that vocab_size ="
            f" {vocab_size} has room for; raise --vocab_size, or name fewer"
        )


def _fault(name: str, before: Sequence[str]) -> str:
    """What keeps `name` from being that of a special token; empty where nothing does."""
    if not name:
        return "is empty"
    if name in before:
        return "is named twice"
    if name in BUILT_IN or name in BYTE_NAMES:
        return "is built in"
    if name.startswith(FILLER_PREFIX):
        return f"begins with {FILLER_PREFIX}, as pieces do that fill up a vocabulary"
    if len(name) == 1:
        return "is one character, which texts are made of"
    if not name.isprintable() or " " in name:
        return "holds whitespace, or a character that cannot be printed"
    if SPACE_SIGN in name:
        return "holds U+2581, by which pieces spell a space"
    return ""
