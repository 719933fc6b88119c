"""U+2581 kept apart from the spaces that SentencePiece writes with it; half characters refused."""

from __future__ import annotations

import re

from minimind.errors import DataError

# SentencePiece writes a space as U+2581 and cannot tell the two apart afterwards. Two characters
# that Unicode keeps for a program's own use stand in: MARK for U+2581, and GUARD before either of
# them where the text has it. All three take 3 bytes in UTF-8, so U+2581 keeps its size.
SPACE_SIGN, MARK, GUARD = "\u2581", "\ufdd0", "\ufdd1"
ESCAPES = {ord(SPACE_SIGN): MARK, ord(MARK): GUARD + MARK, ord(GUARD): GUARD + GUARD}
ESCAPED = re.compile(f"{GUARD}([{MARK}{GUARD}])|{MARK}")


def escape(text: str) -> str:
    """The text without any U+2581."""
    present = SPACE_SIGN in text or MARK in text or GUARD in text
    return text.translate(ESCAPES) if present else text


def unescape(text: str) -> str:
    """The text itself. A U+2581 here is a space that a given model has no piece for."""
    text = text.replace(SPACE_SIGN, " ")
    return ESCAPED.sub(lambda found: found.group(1) or SPACE_SIGN, text)


def require_unicode(text: str) -> None:
    """Nothing, or a DataError for a text that cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"a text is not Unicode: half a surrogate pair at character {error.start};"
            " check its encoding"
        ) from error
