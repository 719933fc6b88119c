"""Special tokens that a tokenizer lacks, appended after its last id."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue] (made at import)

from minimind.data.tokenizer.base import Tokenizer
from minimind.data.tokenizer.hf_tokenizer import HuggingFaceTokenizer
from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.tokenizer.vocabulary import (
    CONFIG_NAME,
    JSON_NAME,
    LISTED,
    MODEL_NAME,
    SPECIAL,
    dump_json,
    name_error,
    write_tokenizer,
)
from minimind.errors import DataError


def with_special_tokens(tokenizer: Tokenizer, names: Sequence[str], directory: Path) -> Tokenizer:
    """Return the tokenizer with control pieces of these names; the given one if it has them all.

    The names that it lacks follow its last id, in this order. The result is written to `directory`:
    the same bytes for the same input. Nothing else changes. Raise DataError for a name that cannot
    be added, such as that of an ordinary piece.
    """
    added = lacking(tokenizer, names)
    if not added:
        return tokenizer
    files, first = tokenizer.files(), tokenizer.vocab_size
    if isinstance(tokenizer, HuggingFaceTokenizer):
        files.pop(MODEL_NAME, None)  # it would lack them
        tokens = {first + at: {"content": name, **SPECIAL} for at, name in enumerate(added)}
        values, config = json.loads(files[JSON_NAME]), json.loads(files[CONFIG_NAME])
        entries = [{"id": i, **token} for i, token in tokens.items()]
        values["added_tokens"] = [*(values.get("added_tokens") or ()), *entries]
        if not config.get("eos_token"):  # a new token may look like the end of a document
            config["eos_token"] = tokenizer.piece_name(tokenizer.eos_id)
        if config.get(LISTED):  # transformers then ignores those of the other file
            config[LISTED] |= {str(i): token for i, token in tokens.items()}
        files |= {JSON_NAME: dump_json(values, indent=2), CONFIG_NAME: dump_json(config)}
    else:
        proto = ModelProto.FromString(files[MODEL_NAME])
        for name in added:
            proto.pieces.add(piece=name, score=0.0, type=ModelProto.SentencePiece.CONTROL)
        proto.trainer_spec.vocab_size = len(proto.pieces)
        files[MODEL_NAME] = proto.SerializeToString(deterministic=True)
    return write_extended(tokenizer, files, directory, "special tokens", len(added), added)


def write_extended(
    tokenizer: Tokenizer,
    files: Mapping[str, bytes],
    directory: Path,
    what: str,
    count: int,
    special: Sequence[str] = (),
) -> Tokenizer:
    """Write and load `files`, which add `count` ids to the tokenizer, `special` first.

    Raise DataError if another id has changed, or a text would give a special token.
    """
    write_tokenizer(directory, files)
    extended, first = load_tokenizer(directory), tokenizer.vocab_size
    named = tokenizer.special_tokens() | {name: first + at for at, name in enumerate(special)}
    roles = [(t.bos_id, t.eos_id, t.pad_id) for t in (tokenizer, extended)]
    is_appended = extended.special_tokens() == named and roles[0] == roles[1]
    is_appended &= extended.pieces()[:first] == tokenizer.pieces()
    written = {i for name in named for i in extended.encode(name)} - {tokenizer.unk_id}
    if not is_appended or extended.vocab_size != first + count or written & {*named.values()}:
        raise DataError(
            f"{tokenizer.path}: {what} cannot be added, for other ids would change or be skipped;"
            " give another tokenizer"
        )
    return extended


def lacking(tokenizer: Tokenizer, names: Sequence[str]) -> list[str]:
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
