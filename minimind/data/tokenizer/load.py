"""Load a tokenizer of either kind by its path; the library of a kind is imported for it alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union

from minimind.data.tokenizer.vocabulary import JSON_NAME, MODEL_NAME
from minimind.errors import DataError, UsageError
from minimind.runtime import disk
from minimind.runtime.file_kinds import TIKTOKEN, kind_of_file
from minimind.runtime.urls import ON_THE_HUB

if TYPE_CHECKING:
    from minimind.data.tokenizer.hf_tokenizer import HuggingFaceTokenizer
    from minimind.data.tokenizer.sentencepiece import Tokenizer

AnyTokenizer: TypeAlias = Union["Tokenizer", "HuggingFaceTokenizer"]
LONGEST_DOCUMENT = 2**26  # bytes


def longest_document(path: str | None) -> int:
    """Default limit for a document in bytes, so that encoding takes at most 1 GiB of memory.

    64 MiB, or less for a tokenizer that encodes a text as a whole.
    """
    limit = None if path is None else load_tokenizer(path).longest_at_once
    return LONGEST_DOCUMENT if limit is None else limit


def load_tokenizer(path: str | Path, rows: int | None = None) -> AnyTokenizer:
    """Load a tokenizer.json or a SentencePiece model, from a file or a directory.

    In a directory that has both, tokenizer.json takes precedence if it has more ids, of which each
    has one of the embedding's `rows`, or if tokenizer.model is tiktoken's. Raise DataError if there
    is none.
    """
    if str(path) == "":
        raise UsageError("--tokenizer is empty, as of a variable that is not set; name one")
    path = Path(path).expanduser()
    if ON_THE_HUB.fullmatch(str(path)):
        from minimind.runtime.hub import local_model

        path = local_model(path, weights=False)
    if not disk.lexists(path):
        raise DataError(f"{path}: there is no such tokenizer file or directory; correct the path")
    if not disk.is_dir(path):
        return _of_hugging_face(path) if path.suffix == ".json" else _of_sentencepiece(path)
    has_json = disk.lexists(path / JSON_NAME)
    if disk.lexists(path / MODEL_NAME):
        kind = kind_of_file(path / MODEL_NAME) if has_json else None
        if kind is None or kind.name != TIKTOKEN:
            model = _of_sentencepiece(path)
            if not has_json or model.vocab_size == rows:
                return model
            try:
                other = _of_hugging_face(path)
            except DataError:  # where rows tell that it is not needed, it is not even read
                if rows is None:
                    return model
                raise
            fits = rows is None or other.vocab_size <= rows
            return other if fits and model.vocab_size < other.vocab_size else model
    if has_json:
        return _of_hugging_face(path)
    raise DataError(
        f"{path}: has neither {MODEL_NAME} (SentencePiece) nor {JSON_NAME} (Hugging Face);"
        " name a directory that has one of them, or the file itself"
    )


def _of_sentencepiece(path: Path) -> Tokenizer:
    from minimind.data.tokenizer.sentencepiece import Tokenizer

    return Tokenizer(path)


def _of_hugging_face(path: Path) -> HuggingFaceTokenizer:
    from minimind.data.tokenizer.hf_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(path)
