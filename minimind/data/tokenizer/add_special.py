"""Special tokens that a tokenizer lacks, appended after its last id."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue] (made at import)

from minimind.data.tokenizer.load import AnyTokenizer, load_tokenizer
from minimind.data.tokenizer.sentencepiece import Tokenizer
from minimind.data.tokenizer.vocabulary import (
    CONFIG_NAME,
    JSON_NAME,
    LISTED,
    MODEL_NAME,
    name_error,
    write_tokenizer,
)
from minimind.errors import DataError


def with_special_tokens(
    tokenizer: AnyTokenizer, names: Sequence[str], directory: Path
) -> AnyTokenizer:
    """Return the tokenizer with control pieces of these names; the given one if it has them all.

    The names that it lacks follow its last id, in this order. The result is written to `directory`:
    the same bytes for the same input. Nothing else changes. Raise DataError for a name that cannot
    be added, such as that of an ordinary piece.
    """
    added = lacking(tokenizer, names)
    if not added:
        return tokenizer
    files = tokenizer.files()
    if isinstance(tokenizer, Tokenizer):
        files[MODEL_NAME] = _with_pieces(files[MODEL_NAME], added)
    else:
        tokens = _added_tokens(added, tokenizer.vocab_size)
        eos_token = tokenizer.piece_name(tokenizer.eos_id)
        files.pop(MODEL_NAME, None)  # it would lack them
        files[JSON_NAME] = _with_added_tokens(files[JSON_NAME], tokens)
        files[CONFIG_NAME] = _with_names(files[CONFIG_NAME], tokens, eos_token)
    write_tokenizer(directory, files)
    extended = load_tokenizer(directory)
    _require_appended(tokenizer, added, extended)
    return extended


def lacking(tokenizer: AnyTokenizer, names: Sequence[str]) -> list[str]:
    """The names that the tokenizer has no control piece of; DataError if one cannot be added."""
    special = tokenizer.special_tokens()
    added = [name for name in names if name not in special]
    for at, name in enumerate(added):
        error = name_error(name, added[:at])
        if tokenizer.piece_id(name) is not None:
            error = "is an ordinary piece of its vocabulary, which text may be encoded to"
        if error:
            raise DataError(
                f"{tokenizer.path}: cannot add the special token {name!r}, which {error}; give"
                " another name, or another tokenizer"
            )
    return added


def _with_pieces(model: bytes, names: Sequence[str]) -> bytes:
    """The SentencePiece model with control pieces appended."""
    proto = ModelProto.FromString(model)
    for name in names:
        proto.pieces.add(piece=name, score=0.0, type=ModelProto.SentencePiece.CONTROL)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return proto.SerializeToString(deterministic=True)


def _added_tokens(names: Sequence[str], first: int) -> list[dict[str, Any]]:
    """Entries of a tokenizer.json: special tokens of the ids `first` and on."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": first + at, "content": name, **flags, "special": True}
        for at, name in enumerate(names)
    ]


def _with_added_tokens(content: bytes, tokens: Sequence[dict[str, Any]]) -> bytes:
    """The tokenizer.json with these tokens as well."""
    values = json.loads(content)
    return _dump({**values, "added_tokens": [*(values.get("added_tokens") or ()), *tokens]})


def _with_names(content: bytes, tokens: Sequence[dict[str, Any]], eos_token: str | None) -> bytes:
    """The tokenizer_config.json with what names tokens in it.

    The end of a document, for a new token may look like one; and the new tokens where it lists all:
    transformers then ignores those of the other file.
    """
    values = json.loads(content)
    named = values if values.get("eos_token") else {**values, "eos_token": eos_token}
    if listed := values.get(LISTED):
        entries = {
            str(token["id"]): {name: token[name] for name in token if name != "id"}
            for token in tokens
        }
        named = {**named, LISTED: {**listed, **entries}}
    return content if named is values else _dump(named)


def _dump(values: Any) -> bytes:
    return json.dumps(values, ensure_ascii=False, indent=2).encode()


def _require_appended(before: AnyTokenizer, names: Sequence[str], after: AnyTokenizer) -> None:
    """Raise DataError if the ids are not those asked for, as where a tokenizer.json skips ids."""
    first, special = before.vocab_size, after.special_tokens()
    roles = [(t.bos_id, t.eos_id, t.pad_id) for t in (before, after)]
    expected = {**before.special_tokens(), **{name: first + at for at, name in enumerate(names)}}
    if special != expected or roles[0] != roles[1] or after.vocab_size != first + len(names):
        raise DataError(
            f"{before.path}: special tokens cannot be added, for other ids would change or be"
            " skipped; give another tokenizer"
        )
