"""Checks of single documents: length, and texts that were read before."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

LINE_BITS = 40  # of a place: the number of a file above them, the line or row in them


@dataclass(frozen=True)
class Removal:
    """Why a document is removed.

    `kept` is the place of the document that it repeats, `found` what else is listed.
    """

    reason: str
    kept: int | None = None
    found: Mapping[str, Any] = field(default_factory=dict)


Check = Callable[[str, int], Removal | None]  # of a text and its place


def place_of(file: int, line: int) -> int:
    """The number of a file and a line as one number."""
    return file << LINE_BITS | line


def file_and_line(place: int) -> tuple[int, int]:
    """The file and the line of `place_of`."""
    return place >> LINE_BITS, place & (1 << LINE_BITS) - 1


def at_least_chars(least: int) -> Check:
    """Remove texts of fewer than `least` characters."""
    return lambda text, _: Removal("min_chars") if len(text) < least else None


def at_most_chars(most: int) -> Check:
    """Remove texts of more than `most` characters."""
    return lambda text, _: Removal("max_chars") if len(text) > most else None


def exact_duplicates() -> Check:
    """Remove texts that were read before, but for blanks; the first one stays.

    Compares 128 bits of BLAKE2b of the text, in which each run of blanks and newlines is one space.
    """
    seen: dict[bytes, int] = {}

    def check(text: str, place: int) -> Removal | None:
        content = " ".join(text.split()).encode()
        first = seen.setdefault(hashlib.blake2b(content, digest_size=16).digest(), place)
        return None if first == place else Removal("exact_duplicate", first)

    return check
