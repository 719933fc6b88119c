"""Refuse a stranger's tokenizer that makes gigabytes of a text, or takes hours for it.

By how much a text may grow is computed from the file. A trial would need the very text that a step
makes longer. How long patterns take is tried, in a process with limits.
"""

from __future__ import annotations

import json
import math
import re
import struct
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from re import _parser  # pyright: ignore[reportAttributeAccessIssue] (the parser of `re` itself)
from typing import Any, NoReturn

from minimind.data.tokenizer import pattern_trial
from minimind.errors import DataError
from minimind.runtime.limited import Exceeded, LimitedServer

MOST_GROWTH = 64  # characters that may be written for one; Unicode's own forms reach 18
LONGEST_PIECE = 1024  # characters, for a model that looks for every piece at every character
LONGEST_WORD = 1000  # characters, for WordPiece, whose time grows with the cube
MAX_SECONDS, MAX_BYTES = 3.0, 2**30  # CPU time and memory of pattern_trial.TEXTS
SEQUENCES = ("normalizers", "pretokenizers", "decoders")  # keys with lists of steps
# What Python and the library read differently: sets in sets, and "{2}?", which is optional there.
AMBIGUOUS = re.compile(r"\}\?|\[[^\]]*\[")
NAMES = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")  # keys of a model


def require_bounded_json(path: Path, values: Mapping[str, Any]) -> None:
    """Raise DataError for a tokenizer.json whose time or memory is not bounded by a text's.

    A step is known by its keys: the library reads one without "type" too, and ignores other keys.
    Values of other types than the library's are left to it, which refuses them.
    """
    parts = {part: values.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")}
    for part in ("normalizer", "decoder"):
        try:
            growth = math.prod(map(_growth, _steps(parts[part])))
        except ValueError:
            _refuse(path, f"its {part} has a step as a list of its values, not as an object")
        _require_growth(path, growth, f"its {part}")
    model = values.get("model")
    if isinstance(model, dict):
        for name in NAMES:
            _require_growth(path, len(str(model.get(name))), f"its {name}")
        if isinstance(model.get("vocab"), list):  # of a Unigram, with or without its "type"
            entries = (entry for entry in model["vocab"] if isinstance(entry, list) and entry)
            require_short_pieces(path, (entry[0] for entry in entries))
        longest = model.get("max_input_chars_per_word")
        if isinstance(longest, int) and longest > LONGEST_WORD:
            what = f"words of up to {longest} characters (max_input_chars_per_word)"
            _refuse(path, f"compares all parts of {what}, more than {LONGEST_WORD}")
    written = json.dumps(parts)
    if '"Regex"' in written and not _is_fast(written):
        limits = f"{MAX_SECONDS:g} s or {MAX_BYTES / 2**20:,.0f} MiB"
        _refuse(path, f"its patterns take more than {limits} for short texts")


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
        _refuse(path, f"has a piece of {longest:,} characters, more than {LONGEST_PIECE:,}")


def _require_growth(path: Path, growth: float, what: str) -> None:
    if growth > MOST_GROWTH:
        times = f"{growth:,.0f}" if growth < 10**9 else f"{growth:.0e}"
        _refuse(path, f"{what} may write {times} characters for one, more than {MOST_GROWTH}")


def _refuse(path: Path, what: str) -> NoReturn:
    raise DataError(f"{path}: {what}; give another tokenizer")


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Every object of a part of the file, in order; `parse_object` bounds the depth.

    Raise ValueError for a list of the values of a step, which the library would take for one.
    """
    if isinstance(part, dict):
        yield part
        for key, value in part.items():
            for inner in value if key in SEQUENCES and isinstance(value, list) else [value]:
                yield from _steps(inner)
    elif isinstance(part, list) and part:
        raise ValueError("a list of values")


def _growth(step: Mapping[str, Any]) -> float:
    """By how much a step of a normalizer or a decoder may lengthen a text."""
    growth, pattern = 1.0, step.get("pattern")
    if isinstance(pattern, dict):
        written, regex = len(str(step.get("content", ""))), pattern.get("Regex")
        read = _shortest(regex) if isinstance(regex, str) else len(str(pattern.get("String")))
        growth = max(1.0, written / read) if read else 1.0 + written
    if isinstance(prepended := step.get("prepend"), str):
        growth *= 1.0 + len(prepended)
    if isinstance(table := step.get("precompiled_charsmap"), str):
        with suppress(ValueError):  # the library refuses it
            growth *= _longest_form(b64decode(table))
    return growth


def _shortest(pattern: str) -> int:
    """Characters of the shortest match of a pattern; 0 if Python cannot tell."""
    if AMBIGUOUS.search(pattern):
        return 0
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
    try:
        LimitedServer(pattern_trial.__file__, parts, MAX_SECONDS, MAX_BYTES).close()
    except Exceeded:
        return False
    return True
