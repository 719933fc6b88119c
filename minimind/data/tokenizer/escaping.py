"""Keep U+2581 distinct from the spaces that SentencePiece writes with it."""

from __future__ import annotations

import re

from minimind.errors import DataError

# SentencePiece writes a space as U+2581 and cannot tell them apart when decoding. Two Unicode
# noncharacters replace it: MARK stands for U+2581, GUARD escapes MARK and GUARD in the text. All
# three take 3 bytes in UTF-8, so U+2581 keeps its size.
SPACE_SIGN, MARK, GUARD = "\u2581", "\ufdd0", "\ufdd1"
ESCAPES = {ord(SPACE_SIGN): MARK, ord(MARK): GUARD + MARK, ord(GUARD): GUARD + GUARD}
ESCAPED = re.compile(f"{GUARD}([{MARK}{GUARD}])|{MARK}")


def escape(text: str) -> str:
    """Replace every U+2581."""
    if SPACE_SIGN in text or MARK in text or GUARD in text:
        return text.translate(ESCAPES)
    return text


def unescape(text: str) -> str:
    """Undo `escape`, and turn U+2581 into the space that it stands for."""
    text = text.replace(SPACE_SIGN, " ")
    return ESCAPED.sub(lambda match: match.group(1) or SPACE_SIGN, text)


def require_unicode(text: str) -> None:
    """Raise DataError if the text cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"a text is not Unicode: a lone surrogate at character {error.start};"
            " check its encoding"
        ) from error
