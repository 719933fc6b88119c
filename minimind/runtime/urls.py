"""What may be shown: of URLs no passwords, and no queries, which have signatures and tokens.

Of other values what `secret_keys` leaves.

A URL that is known to be one is taken apart; in other text it ends at its closing quote or with
its word, and what looks like a parameter is left out as well.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

from minimind.errors import UsageError
from minimind.runtime import disk
from minimind.runtime.secret_keys import without_secret, without_secrets_in_text

SCHEMES = ("s3", "gs", "hf", "http", "https", "file")  # schemes that can be read
HIDDEN = "?***"  # stands for a query, its like or a fragment
STORAGE = ("s3:", "gs:", "hf:", "file:")  # "?" is a wildcard of these

# Repeats have a limit, so that long texts take no longer than their length.
_SCHEME = r"[a-z][a-z0-9+.-]{0,30}"
_START = rf"(?:{_SCHEME}:[/\\]{{2,}}|https?:[/\\])[/\\]*"
_USER = r"(?:[^\s/@:]{0,200}:(?!\d*(?:\W|$))[^@\n]{0,200}@)?"  # a password may have spaces
_NAME = r"[\w.%~+\[\]-]{0,80}"
_EQUALS = r"(?:=|%(?:25)*3d)"
_MARK = r"(?:[?&#;]|%(?:25)*(?:3f|26|23|3b))"
_SECRET = rf"{_NAME}(?:sig|token|secret|passw|pwd|credential|key|auth|session){_NAME}"
_REST = r"\S*[^\s'\"`)\]}>.,;:]"  # the rest of a word
_AT = re.compile("@|%(?:25)*40")
BEGINS = re.compile(rf"\s*(?:[\w.-]+=)?({_START})", re.IGNORECASE)
BEGINNING = re.compile(rf"{_START}|{_SCHEME}(?::|%(?:25)*3a)(?:/|%(?:25)*2f){{2}}", re.IGNORECASE)
HOST = re.compile(r"(?:\[[\da-f:.%]*\])?([^/?#]*)", re.IGNORECASE)
USER = re.compile(r"@|%(?:25)*(?:40|3a)|:(?!\d*$)", re.IGNORECASE)
OF_ENCODED = re.compile(r"%(?:25)*(?:3f|23)(?=.)", re.IGNORECASE | re.DOTALL)
OF_WEB = re.compile(rf"[?#](?=.)|{_MARK}{_NAME}{_EQUALS}", re.IGNORECASE | re.DOTALL)
OF_STORAGE = re.compile(
    rf"[?#](?:{_NAME}{_EQUALS}|\*\*\*)|{_MARK}{_SECRET}{_EQUALS}", re.IGNORECASE
)
IN_TEXT = re.compile(
    rf"(?P<quote>['\"`])(?P<quoted>{_START}.{{0,2000}}?)(?P=quote)(?=[\s,;:.)\]}}>]|$)"
    # requests writes "Max retries exceeded with url: /PATH?QUERY (Caused by".
    rf"|(?P<word>(?:{_START}{_USER}|(?<=with url: )/){_REST})",
    re.IGNORECASE,
)
PARAMETER = re.compile(rf"{_MARK}{_NAME}{_EQUALS}{_REST}", re.IGNORECASE)
SECRET_PARAMETER = re.compile(rf"{_MARK}{_SECRET}{_EQUALS}{_REST}", re.IGNORECASE)
URL = re.compile(rf"({'|'.join(SCHEMES)})://")
HUB_PREFIX = "hf:"  # of a repository of the Hugging Face Hub, and before a local model
ON_THE_HUB = re.compile(
    r"hf:(?:datasets/)?(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>refs/\w+/\w+|[^/\s]+))?"
    r"(?:/(?P<inside>.*))?",
    re.DOTALL,
)
LIKE_A_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.]+:/+")
CACHED = "by-url"  # the folder of a cache that holds what was fetched
PLACE = rf"(?:@[0-9a-f]{{16}}/)?({'|'.join(SCHEMES)})/"  # below it
IN_A_CACHE = re.compile(rf"^/.*?/{CACHED}/{PLACE}", re.DOTALL)
# A snapshot in the cache of huggingface_hub.
OF_THE_HUB = re.compile(
    r"^/.*?/(?:models|datasets)--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})(?=/|$)", re.DOTALL
)
OF_A_QUERY = re.compile(r"/q-[0-9a-f]{16}/")
LONGEST_HOST = 2000  # characters of a percent-encoded URL


def begins_as_url(text: str) -> bool:
    """Whether a text begins as a URL does, of whatever scheme."""
    return re.match(_START, text, re.IGNORECASE) is not None


def without_query(url: str) -> tuple[str, str]:
    """A URL up to its query, parameters or fragment, and these, which may choose the object."""
    match = BEGINS.match(url)
    is_storage = match is not None and match[1].lower().startswith(STORAGE)
    start = match.end() if match else 0
    tail = (OF_STORAGE if is_storage else OF_WEB).search(url, start)
    end = tail.start() if tail else len(url)
    inner = BEGINNING.search(url, start, end)
    if inner and not BEGINS.match(inner[0]) and (tail := OF_ENCODED.search(url, inner.end(), end)):
        end = tail.start()
    return url[:end], url[end:]


def has_credentials(url: str) -> bool:
    """Whether a user or a password is where host and port are, also of a URL in its path."""
    return _with_credentials(url) is not None


def _with_credentials(url: str) -> re.Match[str] | None:
    """The beginning of a URL that has credentials: `url`, or one in its path."""
    for begin in BEGINNING.finditer(without_query(url)[0]):
        text, host = url, begin.end()
        if not BEGINS.match(begin[0]):  # percent-encoded, perhaps twice
            text = url[begin.start() : host + LONGEST_HOST]
            while not (match := BEGINS.match(text)):
                text = unquote(text)
            host = match.end()
        if (place := HOST.match(text, host)) and USER.search(place[1]):
            return begin
    return None


def _masked_url(url: str) -> str:
    shown, hidden = without_query(url)
    if hidden.startswith(HIDDEN):  # the hidden part as it is, and more text
        hidden = HIDDEN + masked_text(hidden[len(HIDDEN) :])
    elif hidden:
        hidden = HIDDEN
    begin = _with_credentials(url)
    if begin is None:
        return shown + hidden
    host = begin.end()
    # The "?" belongs to the password, or the query has an "@", too.
    if not BEGINS.match(begin[0]) or _AT.search(url, len(shown)):
        return f"{url[:host]}***"
    users = [user.end() for user in _AT.finditer(shown, host)]
    host_match = HOST.match(shown, host)
    end = users[-1] if users else host_match.end() if host_match else host
    return f"{url[:host]}***{'@' if users else ''}{shown[end:]}{hidden}"


def masked(text: str) -> str:
    """A path or a URL, without the passwords, parameters (signatures, tokens) and fragment of it.

    `NAME=` may come before it.
    """
    if BEGINS.match(text):
        return _masked_url(text)
    text = without_secrets_in_text(text, may_be_path=True)
    return masked_text(text) if IN_TEXT.search(text) else text


def masked_text(text: str) -> str:
    """`text` without passwords, parameters and fragments of URLs, and values of secret names."""

    def of_match(match: re.Match[str]) -> str:
        quote = match["quote"] or ""
        return f"{quote}{_masked_url(match['quoted'] or match['word'])}{quote}"

    shown = IN_TEXT.sub(of_match, text)
    parameter = PARAMETER if IN_TEXT.search(text) else SECRET_PARAMETER
    return without_secrets_in_text(parameter.sub(HIDDEN, shown))


def masked_values(value: Any) -> Any:
    """JSON values with every text in them masked, and hidden where its name is that of a secret."""
    if isinstance(value, dict):
        return {name: masked_values(without_secret(name, inner)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(masked_values, value))
    return masked(value) if isinstance(value, str) else value


def is_url(text: object) -> bool:
    """Whether `text` is a URL of one of `SCHEMES` or on the Hub, as opposed to a local path."""
    return isinstance(text, str) and bool(URL.match(text) or ON_THE_HUB.fullmatch(text))


def require_path(text: str) -> None:
    """Raise UsageError for a path that was meant as a URL."""
    if (match := LIKE_A_URL.match(text)) and not disk.seems_there(text):
        raise UsageError(
            f"{masked(text)}: begins with {match[0]}, and URLs begin with"
            f" {', '.join(f'{name}://' for name in SCHEMES)}; correct it"
        )


def named(text: str) -> str:
    """A path as records name it: one of a cache by its URL, and a URL without its query."""
    if hub := OF_THE_HUB.match(text):
        user, name, commit = hub.groups()
        return f"{HUB_PREFIX}{user}/{name}@{commit}{text[hub.end() :]}"
    match = IN_A_CACHE.match(text)
    if match is None:
        return masked(text)
    return OF_A_QUERY.sub("/", f"{begin_of(match)}{text[match.end() :]}")


def begin_of(place: re.Match[str]) -> str:
    """How the URLs below a place of the cache begin: those of files have no host."""
    return "file:///" if place[1] == "file" else f"{place[1]}://"
