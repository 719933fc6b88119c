"""A folder's tokenizer as AutoTokenizer of transformers reads it.

A class of transformers may rebuild what tokenizer.json says, and makes one of a SentencePiece
model: what stands before a text or after a special token depends on tokenizer_config.json
(`tokenizer_class`, `legacy`, `add_prefix_space`). So the library is asked, and what it made is kept
as a tokenizer.json that says all of it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimind.data.tokenizer.vocabulary import (
    AS_IT_IS,
    CONFIG_NAME,
    JSON_NAME,
    LISTED,
    MODEL_NAME,
    SPECIALS_NAME,
    TEMPLATE_KEY,
    TOKEN_ROLES,
    Configuration,
    dump_json,
    name_of,
    parse_object,
    read_file,
)
from minimind.errors import DataError
from minimind.runtime import disk
from minimind.runtime.panics import panics_caught
from minimind.runtime.terminal import shorten_line

if TYPE_CHECKING:
    from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer

MODEL_CONFIG_NAME, ADDED_NAME = "config.json", "added_tokens.json"
LITERAL = "PreTrainedTokenizerFast"  # the class that takes tokenizer.json as it is
LITERAL_CLASSES = (LITERAL, "TokenizersBackend")
# Types of models for which tokenizer.json is taken as it is unless a class is named.
TRUSTING_TYPES = (None, "minimind", "llama")
# Keys of tokenizer_config.json that say how tokenizer.json is to be changed.
CHANGING = (
    *(LISTED, "extra_special_tokens", "additional_special_tokens", "auto_map", "legacy"),
    *("add_prefix_space", "add_bos_token", "add_eos_token", "backend", "sp_model_kwargs"),
)
NEVER_WRITTEN = {"pad_token", "cls_token", "sep_token", "mask_token"}  # by templates of chats
SHOWN = 200  # characters of the library's own message


@dataclass(frozen=True)
class Reading:
    """What AutoTokenizer makes of a folder: a tokenizer.json, and its tokens by role."""

    json: bytes
    roles: Mapping[str, str]

    def beside(self, given: Configuration) -> Configuration:
        """The files beside the tokenizer.json with which it is read as it is."""
        config = json.loads(given.files.get(CONFIG_NAME, b"{}"))
        kept = {
            name: value
            for name, value in config.items()
            if name not in CHANGING and not name.endswith("_token")
        }
        values = {**kept, "tokenizer_class": LITERAL, **self.roles}
        files = {name: given.files[name] for name in given.files if name != SPECIALS_NAME}
        return Configuration({**files, CONFIG_NAME: dump_json(values)}, values, given.templates)


class Unread(DataError):
    """AutoTokenizer cannot read a tokenizer, or has no tokenizer.json of it."""


def names_class(folder: Path) -> bool:
    """Whether the files of a folder name a class that may rebuild its tokenizer."""
    config = _values(folder / CONFIG_NAME)
    return config.get("tokenizer_class", LITERAL) not in LITERAL_CLASSES


def is_read_alike(folder: Path, model: SentencePieceTokenizer) -> bool:
    """Whether nothing beside a SentencePiece model says that it is read in another way.

    What we have written says so (`AS_IT_IS`). AutoTokenizer reads one that only merges as it is,
    unless a class is named or tokens are added. A model that does more is for SentencePiece if it
    stands alone, or with files of ours.
    """
    values = _values(folder / CONFIG_NAME)
    if values.get(AS_IT_IS) is True:
        return True
    if not model.is_lossless:
        return not values.keys() - {TEMPLATE_KEY} and _model_type(folder) in (None, "minimind")
    named = [str(name_of(token)) for token in _tokens_beside(values)]
    return not names_class(folder) and all(model.piece_id(name) is not None for name in named)


def _tokens_beside(values: Mapping[str, Any]) -> Iterator[Any]:
    """The tokens that a tokenizer_config.json adds, by their names or with flags."""
    for key in (LISTED, "extra_special_tokens", "additional_special_tokens"):
        more = values.get(key)
        if isinstance(more, dict | list):
            yield from more.values() if isinstance(more, dict) else more


def is_literal(folder: Path, values: Mapping[str, Any], added: Mapping[str, Any]) -> bool:
    """Whether AutoTokenizer surely takes a folder's tokenizer.json as it is, or we have written it.

    `values` are read from the files beside it, `added` has its added tokens by name. AutoTokenizer
    adds a token that such a file names and `added` lacks.
    """
    if values.get(AS_IT_IS) is True:
        return True
    if names_class(folder) or _model_type(folder) not in TRUSTING_TYPES:
        return False
    if disk.lexists(folder / ADDED_NAME):
        return False
    named = [value for name, value in values.items() if name.endswith("_token") and value]
    return all(_is_among(token, added) for token in (*named, *_tokens_beside(values)))


def _is_among(token: Any, added: Mapping[str, Any]) -> bool:
    """Whether an added token has this name, and the flags, if the token has any."""
    if not isinstance(token, dict):
        return not isinstance(token, str) or (token in added and added[token]["special"])
    known = added.get(str(name_of(token)))
    flags = {"special": True, **token}
    return known is not None and all(known.get(key, flags[key]) == flags[key] for key in flags)


def _model_type(folder: Path) -> Any:
    return _values(folder / MODEL_CONFIG_NAME).get("model_type")


def _values(path: Path) -> dict[str, Any]:
    return parse_object(path, read_file(path)) if disk.lexists(path) else {}


def as_autotokenizer(folder: Path, name: str) -> Reading:
    """What AutoTokenizer makes of a folder with this one of the two files of a tokenizer.

    Code of the folder is not run, and nothing is downloaded. Raise `Unread` if it cannot be read.
    """
    # The loaders, which need no library of a tokenizer to tell its kind, import this module.
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue] (made at import)

    from minimind.data.tokenizer.bounds import require_short_pieces

    if name == JSON_NAME:
        return _reading(folder, folder)
    proto = ModelProto.FromString(read_file(folder / MODEL_NAME))  # pieces are cut at each place
    require_short_pieces(folder / MODEL_NAME, [piece.piece for piece in proto.pieces])
    if not disk.lexists(folder / JSON_NAME):
        return _reading(folder, folder)
    with tempfile.TemporaryDirectory() as without:
        for beside in (MODEL_NAME, CONFIG_NAME, SPECIALS_NAME, MODEL_CONFIG_NAME, ADDED_NAME):
            if disk.lexists(folder / beside):
                (Path(without) / beside).write_bytes(read_file(folder / beside))
        return _reading(Path(without), folder)


def _reading(place: Path, folder: Path) -> Reading:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its advice on how to load a folder is not for our users
    remedy = "copy the file to a folder of its own to have it read by itself, or give another"
    try:
        with panics_caught():
            made = AutoTokenizer.from_pretrained(
                place, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # classes of transformers raise anything for a folder
        raise Unread(
            f"{folder}: AutoTokenizer of transformers, whose ids a model is trained with, cannot"
            f" read the tokenizer ({shorten_line(str(error), SHOWN)}); {remedy}"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    if not isinstance(made, PreTrainedTokenizerFast):
        raise Unread(
            f"{folder}: AutoTokenizer of transformers reads the tokenizer as"
            f" {type(made).__name__}, which is not made of a tokenizer.json; {remedy}"
        )
    roles = {role: str(token) for role in TOKEN_ROLES if (token := getattr(made, role, None))}
    values = json.loads(made.backend_tokenizer.to_str())
    if unused := _unused(values, roles, place):
        values["added_tokens"] = [
            token for token in values["added_tokens"] if token["content"] not in unused
        ]
        roles = {role: token for role, token in roles.items() if token not in unused}
    return Reading(dump_json(values), roles)


def _unused(values: Mapping[str, Any], roles: Mapping[str, str], folder: Path) -> set[str]:
    """Tokens that AutoTokenizer adds as padding or the like, which no file gives an id.

    No model has a row for them unless it was made with one on purpose.
    """
    given = {str(name_of(token)) for token in _tokens_beside(_values(folder / CONFIG_NAME))}
    given |= _values(folder / ADDED_NAME).keys()
    added = {token["content"]: token["id"] for token in values["added_tokens"]}
    pieces = values["model"]["vocab"]
    return {
        token
        for role, token in roles.items()
        if role in NEVER_WRITTEN and added.get(token, -1) >= len(pieces) and token not in given
    }
