"""A folder's tokenizer as AutoTokenizer of transformers reads it.

A class of transformers may rebuild what tokenizer.json says, and makes one of a SentencePiece
model: what stands before a text or after a special token depends on tokenizer_config.json
(`tokenizer_class`, `legacy`, `add_prefix_space`). So the library is asked, and what it made is kept
as a tokenizer.json that says all of it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimind.data.tokenizer.vocabulary import (
    CONFIG_NAME,
    JSON_NAME,
    LISTED,
    MODEL_NAME,
    SPECIALS_NAME,
    TEMPLATE_KEY,
    TOKEN_ROLES,
    Configuration,
    dump_json,
    parse_object,
    read_file,
)
from minimind.errors import DataError
from minimind.runtime import disk
from minimind.runtime.panics import panics_caught
from minimind.runtime.terminal import shorten_line

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

    def limited(self, rows: int) -> Reading:
        """Without added tokens for which an embedding has no row."""
        values = json.loads(self.json)
        left_out = [token["content"] for token in values["added_tokens"] if token["id"] >= rows]
        if not left_out:
            return self
        values["added_tokens"] = [one for one in values["added_tokens"] if one["id"] < rows]
        roles = {role: token for role, token in self.roles.items() if token not in left_out}
        return Reading(dump_json(values), roles)


def names_class(folder: Path) -> bool:
    """Whether the files of a folder name a class that may rebuild its tokenizer."""
    config = _values(folder / CONFIG_NAME)
    return config.get("tokenizer_class", LITERAL) not in LITERAL_CLASSES


def is_silent(folder: Path, is_lossless: bool) -> bool:
    """Whether nothing beside a SentencePiece model says that it is read in another way.

    With the configuration of a foreign model AutoTokenizer reads it as it is if it only merges.
    """
    says = _values(folder / CONFIG_NAME).keys() - {TEMPLATE_KEY}
    types = TRUSTING_TYPES if is_lossless else TRUSTING_TYPES[:2]
    return not says and _model_type(folder) in types


def is_literal(folder: Path, values: Mapping[str, Any], added: Mapping[str, Any]) -> bool:
    """Whether AutoTokenizer surely takes a folder's tokenizer.json as it is.

    `values` are those of the files beside it, `added` its added tokens by name. It adds the tokens
    that are named beside it and are not among these.
    """
    if names_class(folder) or _model_type(folder) not in TRUSTING_TYPES:
        return False
    if disk.lexists(folder / ADDED_NAME):
        return False
    listed = values.get(LISTED) or {}
    named = [value for name, value in values.items() if name.endswith("_token") and value]
    for key in ("extra_special_tokens", "additional_special_tokens"):
        more = values.get(key) or []
        named += more.values() if isinstance(more, dict) else more
    return all(_is_among(token, added) for token in (*named, *listed.values()))


def _is_among(token: Any, added: Mapping[str, Any]) -> bool:
    """Whether an added token has this name, and the flags, if the token has any."""
    if not isinstance(token, dict):
        return not isinstance(token, str) or (token in added and added[token]["special"])
    known = added.get(str(token.get("content")))
    flags = {"special": True, **token}
    return known is not None and all(known.get(key, flags[key]) == flags[key] for key in flags)


def _model_type(folder: Path) -> Any:
    return _values(folder / MODEL_CONFIG_NAME).get("model_type")


def _values(path: Path) -> dict[str, Any]:
    return parse_object(path, read_file(path)) if disk.lexists(path) else {}


def as_autotokenizer(folder: Path, without: str = "") -> Reading:
    """What AutoTokenizer makes of a folder `without` one of its files.

    Code of the folder is not run, and nothing is downloaded. Raise DataError if it cannot be read.
    """
    if not without or not disk.lexists(folder / without):
        return _reading(folder, folder)
    with tempfile.TemporaryDirectory() as place:
        for name in (MODEL_NAME, CONFIG_NAME, SPECIALS_NAME, MODEL_CONFIG_NAME, ADDED_NAME):
            if disk.lexists(folder / name):
                (Path(place) / name).write_bytes(read_file(folder / name))
        return _reading(Path(place), folder)


def _reading(place: Path, folder: Path) -> Reading:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its advice on how to load a folder is not for our users
    name = next(name for name in (JSON_NAME, MODEL_NAME) if disk.lexists(place / name))
    remedy = f"name the file {folder / name}, which is then read as it is, or another tokenizer"
    try:
        with panics_caught():
            made = AutoTokenizer.from_pretrained(
                place, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # classes of transformers raise anything for a folder
        raise DataError(
            f"{folder}: AutoTokenizer of transformers, whose ids a model is trained with, cannot"
            f" read the tokenizer ({shorten_line(str(error), SHOWN)}); {remedy}"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    if not isinstance(made, PreTrainedTokenizerFast):
        raise DataError(
            f"{folder}: AutoTokenizer of transformers reads the tokenizer as"
            f" {type(made).__name__}, which is not made of a tokenizer.json; {remedy}"
        )
    roles = {role: str(token) for role in TOKEN_ROLES if (token := getattr(made, role, None))}
    return Reading(made.backend_tokenizer.to_str().encode(), roles)
