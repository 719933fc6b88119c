"""What a tokenizer loses: the text against what its tokens decode to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unicodedata import normalize

import numpy as np

from minimind.data.tokenizer.load import Tokenizer
from minimind.errors import DataError

MOST_LOST = 0.001  # share of the bytes of a source
SHOWN_BEFORE, SHOWN_AFTER = 6, 12  # characters around a change


@dataclass
class TextLoss:
    """Sums over texts and their tokens.

    The lost bytes are the larger of two numbers: the bytes of the characters that the decoded text
    lacks, and of those that it has in addition. A letter in another case is lost; a word that is
    cut in two by a space is changed. A space before the text, put there or taken away, loses
    nothing: a tokenizer that puts one before every text cannot tell the two apart. An unknown token
    stands for no text.
    """

    bytes: int = 0  # bytes of the texts
    tokens: int = 0
    token_bytes: int = 0  # the sum of what each token stands for
    lost: int = 0
    changed: int = 0  # texts that do not come back as they were
    example: str = ""  # the first of them that loses something, or that changed

    @property
    def share(self) -> float:
        """The lost part of the bytes."""
        return min(self.lost, self.bytes) / max(1, self.bytes)

    def count(
        self,
        tokenizer: Tokenizer,
        sizes: np.ndarray,
        texts: Sequence[str],
        ids: Sequence[np.ndarray],
    ) -> None:
        """Add some texts and their ids; `sizes` are the tokenizer's `piece_bytes`."""
        for text, own in zip(texts, ids, strict=True):
            self.bytes += len(text.encode())
            self.tokens += len(own)
            self.token_bytes += int(sizes[own].sum())
            back = tokenizer.decode(own[own != tokenizer.unk_id])
            if back == text:
                continue
            lost = lost_bytes(text, back)
            if not self.example or (lost and not self.lost):
                self.example = _first_difference(text, back)
            self.changed += 1
            self.lost += lost

    def add(self, other: TextLoss) -> None:
        if not self.example or (other.lost and not self.lost):
            self.example = other.example or self.example
        for name in ("bytes", "tokens", "token_bytes", "lost", "changed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def __str__(self) -> str:
        lost = min(self.lost, self.bytes)
        return f"{self.share:.2%} of the text ({lost:,} of {self.bytes:,} bytes): {self.example}"


def lost_bytes(text: str, back: str) -> int:
    """Bytes of a text that are lost in `back`; see `TextLoss`."""
    if back.startswith(" ") and not text.startswith(" "):
        back = back[1:]
    elif _leading_spaces(text) == _leading_spaces(back) + 1:
        text = text[1:]
    before, after = Counter(text), Counter(back)
    return max(_size(before - after), _size(after - before))


def _leading_spaces(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def _size(characters: Counter[str]) -> int:
    return len("".join(characters.elements()).encode())


def _first_difference(text: str, back: str) -> str:
    """As in `'ab春' comes back as 'ab'`."""
    pairs = enumerate(zip(text, back, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(text), len(back)))
    window = slice(max(at - SHOWN_BEFORE, 0), at + SHOWN_AFTER)
    is_seen = normalize("NFC", text[window]) != normalize("NFC", back[window])
    before, after = map(repr if is_seen else ascii, (text[window], back[window]))
    return f"{before} comes back as {after if back[window] else 'nothing'}"


def require_kept(sources: Sequence[dict[str, Any]], tokenizer: Tokenizer, is_allowed: bool) -> None:
    """Raise DataError if the tokenizer loses more than `MOST_LOST` of a manifest's source."""
    for source in sources:
        loss = TextLoss(**source.get("text_loss", {}))
        if loss.share > MOST_LOST and not is_allowed:
            where = f"source {source['name']}: " if len(sources) > 1 else ""
            remedy = (
                "give one with byte pieces (byte fallback or byte level) and without normalization"
            )
            if tokenizer.lacks_decoder:
                remedy = (
                    'it has no decoder for its bytes: write "decoder": {"type": "ByteLevel"} there'
                )
            raise DataError(
                f"{where}the tokenizer {tokenizer.path} loses {loss}; {remedy}, or"
                " --allow_lossy_tokenizer to train on what is left"
            )


def loss_lines(sources: Sequence[dict[str, Any]]) -> list[str]:
    """What the tokenizer loses of each source of a manifest; empty if it loses nothing."""
    losses = {source["name"]: TextLoss(**source.get("text_loss", {})) for source in sources}
    return [
        f"{name}: the tokenizer loses {loss}" if len(losses) > 1 else f"the tokenizer loses {loss}"
        for name, loss in losses.items()
        if loss.lost
    ]
