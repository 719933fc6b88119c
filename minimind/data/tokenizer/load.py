"""Load a tokenizer of either kind by its path; the library of a kind is imported for it alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union

from minimind.data.tokenizer.as_transformers import is_silent, names_class
from minimind.data.tokenizer.vocabulary import CONFIG_NAME, JSON_NAME, MODEL_NAME
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

    A file is read as it is. A directory is read as AutoTokenizer of transformers reads it: with the
    class that its tokenizer_config.json names, and from tokenizer.json where it has both files. The
    model alone is read if tokenizer.json has more ids than the embedding has `rows`. What we have
    written ourselves is known to give the same ids and is read by SentencePiece. Raise DataError if
    there is none, and if transformers reads none.
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
    model = None
    if disk.lexists(path / MODEL_NAME):
        kind = kind_of_file(path / MODEL_NAME) if has_json else None
        model = _of_sentencepiece(path) if kind is None or kind.name != TIKTOKEN else None
    if model is None and not has_json:
        raise DataError(
            f"{path}: has neither {MODEL_NAME} (SentencePiece) nor {JSON_NAME} (Hugging Face);"
            " name a directory that has one of them, or the file itself"
        )
    return _of_folder(path, model, has_json, rows)


def _of_folder(
    path: Path, model: Tokenizer | None, has_json: bool, rows: int | None
) -> AnyTokenizer:
    """The tokenizer of a directory with one of the files or both."""
    if model is not None and not has_json and is_silent(path, model.is_lossless):
        return model
    if not has_json:
        return _of_autotokenizer(path, model, rows)
    is_ours = model is not None and model.is_lossless and not names_class(path)
    try:
        other = _of_hugging_face(path)
    except DataError:
        if model is not None and is_ours and rows in (None, model.vocab_size):
            return model
        raise
    fits = rows is None or other.vocab_size <= rows
    if model is not None:
        if is_ours and other.is_exported:
            return other if fits and model.vocab_size < other.vocab_size else model
        if not fits and rows is not None and model.vocab_size <= rows:
            return _of_autotokenizer(path, model, rows)
    return other if other.is_literal else _of_autotokenizer(path, None, rows)


def _of_autotokenizer(path: Path, model: Tokenizer | None, rows: int | None) -> AnyTokenizer:
    """What AutoTokenizer makes of a directory, or of its SentencePiece model alone."""
    from minimind.data.tokenizer.as_transformers import as_autotokenizer
    from minimind.data.tokenizer.hf_tokenizer import HuggingFaceTokenizer

    if model is None:
        return HuggingFaceTokenizer(path, as_autotokenizer(path))
    reading = as_autotokenizer(path, without=JSON_NAME)
    if rows is not None and model.vocab_size <= rows:  # the model has not been trained with others
        reading = reading.limited(rows)
    return HuggingFaceTokenizer(path, reading)


def _of_sentencepiece(path: Path) -> Tokenizer:
    from minimind.data.tokenizer.sentencepiece import Tokenizer

    return Tokenizer(path)


def _of_hugging_face(path: Path) -> HuggingFaceTokenizer:
    from minimind.data.tokenizer.hf_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(path)
