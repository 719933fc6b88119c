"""Refuse a stranger's tokenizer that makes gigabytes of a text, or takes hours for it.

How much a text may grow is known from the file: what patterns are replaced by, what is put before
a text, and what the table of a normalization holds. How long patterns take is tried.
"""

from __future__ import annotations

import json
import re
import struct
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from re import _parser  # pyright: ignore[reportAttributeAccessIssue] (the parser of `re` itself)
from typing import Any

from minimind.data.tokenizer import pattern_trial
from minimind.errors import DataError
from minimind.runtime.limited import tried_within

MOST_GROWTH = 64  # characters that may be written for one; Unicode's own forms reach 18
LONGEST_PIECE = 1024  # characters, for a model that looks for every piece at every character
LONGEST_WORD = 1000  # characters, for WordPiece, whose time grows with the cube
MAX_SECONDS, MAX_BYTES = 3.0, 2**30  # CPU time and memory of pattern_trial.TEXTS
PARTS = ("normalizer", "pre_tokenizer", "decoder")  # keys of a tokenizer.json
REMEDY = "give another tokenizer"


def require_bounded_json(path: Path, values: Mapping[str, Any]) -> None:
    """Raise DataError for a tokenizer.json whose time or memory is not bounded by a text's."""
    model = values.get("model")
    model = model if isinstance(model, dict) else {}
    parts = {part: values.get(part) for part in PARTS}
    for part in ("normalizer", "decoder"):
        growth = 1.0
        for step in _steps(parts[part]):
            growth *= _growth(step)
        _require_growth(path, growth, f"its {part}")
    for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        _require_growth(path, len(_text(model.get(name))), f"its {name}")
    if model.get("type") == "Unigram":
        pieces = model.get("vocab")
        require_short_pieces(path, [entry[0] for entry in _lists(pieces)])
    longest = model.get("max_input_chars_per_word")
    if isinstance(longest, int) and longest > LONGEST_WORD:
        raise DataError(
            f"{path}: compares all parts of words of up to {longest} characters"
            f" (max_input_chars_per_word), more than {LONGEST_WORD}; {REMEDY}"
        )
    has_patterns = any(_regex(step) for part in PARTS for step in _steps(parts[part]))
    if has_patterns and not _is_fast(json.dumps(parts)):
        raise DataError(
            f"{path}: its patterns take more than {MAX_SECONDS:g} s or"
            f" {MAX_BYTES / 2**20:,.0f} MiB for short texts; {REMEDY}"
        )


def require_bounded_model(path: Path, proto: Any) -> None:
    """Raise DataError for a SentencePiece model with such a table, or such a piece."""
    for spec in (proto.normalizer_spec, proto.denormalizer_spec):
        _require_growth(path, _longest_form(spec.precompiled_charsmap), "its normalization")
    _require_growth(path, len(proto.trainer_spec.unk_surface), "its unk_surface")
    if proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM:
        require_short_pieces(path, [piece.piece for piece in proto.pieces])


def require_short_pieces(path: Path, pieces: Iterable[Any]) -> None:
    """Raise DataError for a piece that takes too long to look for at every character."""
    longest = max((len(piece) for piece in pieces if isinstance(piece, str)), default=0)
    if longest > LONGEST_PIECE:
        raise DataError(
            f"{path}: has a piece of {longest:,} characters, more than {LONGEST_PIECE:,}; {REMEDY}"
        )


def _require_growth(path: Path, growth: float, what: str) -> None:
    if growth > MOST_GROWTH:
        times = f"{growth:,.0f}" if growth < 10**9 else f"{growth:.0e}"
        raise DataError(
            f"{path}: {what} may write {times} characters for one, more than {MOST_GROWTH};"
            f" {REMEDY}"
        )


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Every object of a part of the file, in order; `parse_object` bounds the depth."""
    if isinstance(part, dict):
        yield part
    if isinstance(part, dict | list):
        for inner in part.values() if isinstance(part, dict) else part:
            yield from _steps(inner)


def _growth(step: Mapping[str, Any]) -> float:
    """By how much a step of a normalizer or a decoder may lengthen a text."""
    kind = step.get("type")
    if kind == "Replace":
        written = len(_text(step.get("content")))
        read = _shortest(regex) if (regex := _regex(step)) else len(_pattern(step, "String"))
        return max(1.0, written / read) if read else 1.0 + written
    if kind == "Prepend":
        return 1.0 + len(_text(step.get("prepend")))
    if kind == "Precompiled":
        try:
            table = b64decode(_text(step.get("precompiled_charsmap")))
        except NotBase64:  # the library refuses it
            return 1.0
        return _longest_form(table)
    return 1.0


def _regex(step: Mapping[str, Any]) -> str:
    return _pattern(step, "Regex")


def _pattern(step: Mapping[str, Any], kind: str) -> str:
    pattern = step.get("pattern")
    return _text(pattern.get(kind)) if isinstance(pattern, dict) else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _lists(value: Any) -> list[list[Any]]:
    entries = value if isinstance(value, list) else []
    return [entry for entry in entries if isinstance(entry, list) and entry]


def _shortest(pattern: str) -> int:
    """Characters of the shortest match of a pattern; 0 if Python cannot tell."""
    try:
        return int(_parser.parse(pattern).getwidth()[0])
    except (re.error, RecursionError, OverflowError, ValueError):
        return 0


def _longest_form(table: bytes) -> int:
    """Characters of the longest text that a table of SentencePiece puts in the place of others.

    Its size, a trie, and the texts, each with NUL at its end.
    """
    if len(table) < 4:
        return 1
    (size,) = struct.unpack("<I", table[:4])
    forms = table[4 + size :].split(b"\0")
    return max(1, *(len(form.decode(errors="replace")) for form in forms))


@cache
def _is_fast(parts: str) -> bool:
    request = {"parts": json.loads(parts)}
    return tried_within(pattern_trial.__file__, request, MAX_SECONDS, MAX_BYTES) is not None
