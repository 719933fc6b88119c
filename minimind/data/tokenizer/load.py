"""A tokenizer by its path, whichever of two kinds lies there."""

from __future__ import annotations

from pathlib import Path

from minimind.data.tokenizer.files import JSON_NAME, MODEL_NAME
from minimind.data.tokenizer.hf_tokenizer import HuggingFaceTokenizer
from minimind.data.tokenizer.sentencepiece import Tokenizer
from minimind.errors import DataError, UsageError

AnyTokenizer = Tokenizer | HuggingFaceTokenizer
LONGEST_DOCUMENT = 2**26  # bytes, whatever the tokenizer


def longest_document(path: str | None) -> int:
    """Bytes of the longest document accepted where nobody says: memory stays within 1 GiB.

    64 MiB, but for a given tokenizer that needs all of a text at once.
    """
    given = None if path is None else load_tokenizer(path).longest_at_once
    return LONGEST_DOCUMENT if given is None else given


def load_tokenizer(path: str | Path) -> AnyTokenizer:
    """Of a file: Hugging Face's if it is a .json, else SentencePiece's. Of a directory: the same.

    Where a directory has both, tokenizer.model is read. A DataError names what was looked for.
    """
    if str(path) == "":
        raise UsageError("--tokenizer is empty, as of a variable that is not set; name one")
    path = Path(path).expanduser()
    if not path.exists():
        raise DataError(f"{path}: there is no such tokenizer file or directory; correct the path")
    if not path.is_dir():
        return HuggingFaceTokenizer(path) if path.suffix == ".json" else Tokenizer(path)
    if (path / MODEL_NAME).exists():
        return Tokenizer(path)
    if (path / JSON_NAME).exists():
        return HuggingFaceTokenizer(path)
    raise DataError(
        f"{path}: has neither {MODEL_NAME} (SentencePiece) nor {JSON_NAME} (Hugging Face);"
        " name a directory that has one of them, or the file itself"
    )
