"""What may be shown of URLs: no passwords, and no queries, which have signatures and tokens.

A URL that is known to be one is taken apart; in other text it ends at its closing quote or with
its word, and what looks like a parameter is left out as well.
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "?***"  # in place of a query, its like or a fragment
STORAGE = ("s3:", "gs:", "hf:", "file:")  # "?" is a wildcard of these

_START = r"(?:[a-z][a-z0-9+.-]*:[/\\]{2,}|https?:[/\\])[/\\]*"
_USER = r"(?:[^\s/@:]*:(?!\d*(?:\W|$))[^@\n]*@)?"  # with a password that may have spaces
_NAME = r"[\w.%~+\[\]-]*"
_EQUALS = r"(?:=|%(?:25)*3d)"
_MARK = r"(?:[?&#;]|%(?:25)*(?:3f|26|23|3b))"
_SECRET = rf"{_NAME}(?:sig|token|secret|passw|pwd|credential|key|auth|session){_NAME}"
BEGINS = re.compile(rf"\s*(?:[\w.-]+=)?({_START})", re.IGNORECASE)
OF_WEB = re.compile(rf"[?#](?=.)|{_MARK}{_NAME}{_EQUALS}", re.IGNORECASE | re.DOTALL)
OF_STORAGE = re.compile(
    rf"[?#](?:{_NAME}{_EQUALS}|\*\*\*)|{_MARK}{_SECRET}{_EQUALS}", re.IGNORECASE
)
IN_TEXT = re.compile(
    rf"(?P<quote>['\"`])(?P<quoted>{_START}.*?)(?P=quote)(?=[\s,;:.)\]}}>]|$)"
    rf"|(?P<word>{_START}{_USER}\S*?)(?=[\'\"`)\]}}>.,;:]*(?:\s|$))",
    re.IGNORECASE,
)
PARAMETER = re.compile(rf"{_MARK}{_NAME}{_EQUALS}(?!\*\*\*)[^\s'\"`]+", re.IGNORECASE)
SECRET_PARAMETER = re.compile(rf"{_MARK}{_SECRET}{_EQUALS}[^\s'\"`]+", re.IGNORECASE)


def without_query(url: str) -> tuple[str, str]:
    """A URL up to its query, parameters or fragment, and these, which may choose the object."""
    found = BEGINS.match(url)
    is_storage = found is not None and found[1].lower().startswith(STORAGE)
    tail = (OF_STORAGE if is_storage else OF_WEB).search(url, found.end() if found else 0)
    return (url, "") if tail is None else (url[: tail.start()], url[tail.start() :])


def has_credentials(url: str) -> bool:
    """Whether the place of host and port has more in it: a user, or a password with a slash."""
    authority = _authority(url)
    return re.search(r"@|%40|:(?!\d*$)", authority.rpartition("]")[2], re.IGNORECASE) is not None


def _authority(url: str) -> str:
    found = BEGINS.match(url)
    return re.split(r"[/\\?#]", url[found.end() :], maxsplit=1)[0] if found else ""


def _masked_url(url: str) -> str:
    found, authority = BEGINS.match(url), _authority(url)
    begin, rest = (url[: found.end()], url[found.end() :]) if found else ("", url)
    users = [*re.finditer(r"@|%40", rest, re.IGNORECASE)]
    if users and re.search(r"[:@]|%40|%3a", authority, re.IGNORECASE):
        rest = f"***@{rest[users[-1].end() :]}"
    elif has_credentials(url):
        rest = f"***{rest[len(authority) :]}"
    shown, hidden = without_query(begin + rest)
    if hidden.startswith(HIDDEN):  # as it is, and more text
        return f"{shown}{HIDDEN}{masked_text(hidden[len(HIDDEN) :])}"
    return f"{shown}{HIDDEN}" if hidden else shown


def masked(text: str) -> str:
    """A path or a URL, without the passwords, parameters (signatures, tokens) and fragment of it.

    `NAME=` may come before it.
    """
    if BEGINS.match(text):
        return _masked_url(text)
    return masked_text(text) if IN_TEXT.search(text) else text


def masked_text(text: str) -> str:
    """`text` without the passwords, parameters and fragments of the URLs in it."""

    def of_match(match: re.Match[str]) -> str:
        quote = match["quote"] or ""
        return f"{quote}{_masked_url(match['quoted'] or match['word'])}{quote}"

    shown = IN_TEXT.sub(of_match, text)
    parameter = PARAMETER if IN_TEXT.search(text) else SECRET_PARAMETER
    return parameter.sub(HIDDEN, shown)


def masked_values(value: Any) -> Any:
    """JSON values with every text in them masked."""
    if isinstance(value, dict):
        return {name: masked_values(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(masked_values, value))
    return masked(value) if isinstance(value, str) else value
