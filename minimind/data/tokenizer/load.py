"""Load a tokenizer of either kind by its path; the library of a kind is imported for it alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from minimind.data.tokenizer.as_transformers import is_read_alike, names_class
from minimind.data.tokenizer.base import Tokenizer
from minimind.data.tokenizer.vocabulary import JSON_NAME, MODEL_NAME
from minimind.errors import DataError, UsageError
from minimind.runtime import disk
from minimind.runtime.file_kinds import TIKTOKEN, kind_of_file
from minimind.runtime.urls import ON_THE_HUB

if TYPE_CHECKING:
    from minimind.data.tokenizer.hf_tokenizer import HuggingFaceTokenizer
    from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer

LONGEST_DOCUMENT = 2**26  # bytes


def longest_document(path: str | None) -> int:
    """Default limit for a document in bytes, so that encoding takes at most 1 GiB of memory.

    64 MiB, or less for a tokenizer that encodes a text as a whole.
    """
    limit = None if path is None else load_tokenizer(path).longest_at_once
    return LONGEST_DOCUMENT if limit is None else limit


def load_tokenizer(path: str | Path, rows: int | None = None) -> Tokenizer:
    """Load a tokenizer.json or a SentencePiece model, from a file or a directory.

    It is read as AutoTokenizer of transformers reads it: with the class that tokenizer_config.json
    names, and from tokenizer.json where a directory has both files, unless that has more ids than
    the embedding has `rows`. SentencePiece reads a tokenizer.model that has no file of
    transformers beside it, and the models that this package has written: their ids are the same.
    Raise DataError if there is no tokenizer, or if transformers cannot read it.
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
        return _of_file(path)
    has_json = disk.lexists(path / JSON_NAME)
    model = None
    if disk.lexists(path / MODEL_NAME):
        kind = kind_of_file(path / MODEL_NAME) if has_json else None
        model = _of_sentencepiece(path) if kind is None or kind.name != TIKTOKEN else None
    if not has_json:
        if model is None:
            raise DataError(
                f"{path}: has neither {MODEL_NAME} (SentencePiece) nor {JSON_NAME} (Hugging Face);"
                " name a directory that has one of them, or the file itself"
            )
        return model if is_read_alike(path, model) else _of_autotokenizer(path, MODEL_NAME)
    is_ours = model is not None and model.is_lossless and not names_class(path)
    try:
        literal = _of_hugging_face(path)
    except DataError:
        if model is not None and is_ours and rows in (None, model.vocab_size):
            return model
        raise
    if model is not None:
        fits = rows is None or literal.vocab_size <= rows
        if is_ours and literal.is_exported:
            return literal if fits and model.vocab_size < literal.vocab_size else model
        if not fits and rows is not None and model.vocab_size <= rows:
            return _of_file(path / MODEL_NAME)
    return literal if literal.is_literal else _of_autotokenizer(path, JSON_NAME, literal)


def _of_file(path: Path) -> Tokenizer:
    """The tokenizer of a file, by what stands beside it but no other tokenizer."""
    if path.suffix == ".json":
        literal = _of_hugging_face(path)
        is_as_it_is = path.name != JSON_NAME or literal.is_literal
        return literal if is_as_it_is else _of_autotokenizer(path.parent, JSON_NAME, literal)
    model, folder = _of_sentencepiece(path), path.parent
    if path.name != MODEL_NAME or is_read_alike(folder, model):
        return model
    if model.is_lossless and disk.lexists(folder / JSON_NAME) and not names_class(folder):
        return model  # the configuration beside it names tokens of the tokenizer.json
    return _of_autotokenizer(folder, MODEL_NAME)


def _of_autotokenizer(
    folder: Path, name: str, literal: HuggingFaceTokenizer | None = None
) -> HuggingFaceTokenizer:
    """What AutoTokenizer makes of a file in a folder; its `literal` reading if it cannot read it.

    Then nothing but the file says what its ids are.
    """
    from minimind.data.tokenizer.as_transformers import Unread, as_autotokenizer
    from minimind.data.tokenizer.hf_tokenizer import HuggingFaceTokenizer

    try:
        reading = as_autotokenizer(folder, name)
    except Unread:
        if literal is None:
            raise
        return literal
    return HuggingFaceTokenizer(folder / name, reading)


def _of_sentencepiece(path: Path) -> SentencePieceTokenizer:
    from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer

    return SentencePieceTokenizer(path)


def _of_hugging_face(path: Path) -> HuggingFaceTokenizer:
    from minimind.data.tokenizer.hf_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(path)
