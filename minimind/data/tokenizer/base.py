"""What the tokenizers of both libraries have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from minimind.data.tokenizer.vocabulary import (
    FILLER,
    ChatTemplates,
    Piece,
    formatting_as_trained,
    sizes,
    write_tokenizer,
)

if TYPE_CHECKING:
    import numpy as np


class Tokenizer(ABC):
    """Text to ids and back, and the files that say how."""

    KIND: ClassVar[str]  # the library
    LONGEST_AT_ONCE: ClassVar[int]  # bytes of a text that is encoded as a whole
    path: Path
    vocab_size: int  # the largest id plus one, unused ids included
    eos_id: int  # end of a document
    bos_id: int  # beginning of a text, never written by us; -1 if there is none
    pad_id: int  # padding; the end of a document if there is none
    unk_id: int  # stands for text that the tokenizer does not know; -1 if there is none
    fingerprint: str  # SHA-256 hex digest of what gives the ids
    is_lossless: bool  # whether every text is known to come back
    templates: ChatTemplates
    token_names: dict[str, str]  # by role, such as `bos_token`

    @abstractmethod
    def encode_arrays(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        """Ids of each text as int32, without special tokens, whatever the number of threads."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids; special tokens are skipped, invalid UTF-8 becomes U+FFFD."""

    @abstractmethod
    def piece_name(self, i: int) -> str | None:
        """Name of the piece with this id; None if there is none."""

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """What each id stands for."""

    @abstractmethod
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens by name, without fillers."""

    @abstractmethod
    def piece_id(self, name: str) -> int | None:
        """Id of the piece of this name; None if there is none."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Content of its files by name."""

    @cached_property
    def exported(self) -> dict[str, bytes]:
        """The same files, and those that AutoTokenizer reads if they give the same ids."""
        return formatting_as_trained(self.files())

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return self.encode_arrays([text], threads=1)[0].tolist()

    @property
    def longest_at_once(self) -> int | None:
        """Limit for a text in bytes if texts are encoded whole; None if they are chunked."""
        return None if self.is_lossless else self.LONGEST_AT_ONCE

    @property
    def lacks_decoder(self) -> bool:
        """Whether tokens decode to the letters that stand for bytes, not to the bytes."""
        return False

    @cached_property
    def unused(self) -> int:
        """Number of ids without a token, fillers included."""
        return sum(piece.kind == FILLER for piece in self.pieces())

    def piece_bytes(self) -> np.ndarray:
        """UTF-8 bytes of text per id, int32 (vocab_size,); 0 for special tokens.

        They add up to the size of a text if the tokenizer is lossless, unless the text contains one
        of the two noncharacters that `escape` uses, which count twice.
        """
        return sizes(self.pieces())

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template in the files beside it."""
        return self.templates.default

    def save(self, directory: str | Path) -> None:
        """Write `exported` to a directory."""
        write_tokenizer(directory, self.exported)
