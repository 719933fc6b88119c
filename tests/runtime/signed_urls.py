"""URLs with secrets: of every scheme, in every part, between characters that end a URL in text."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import quote

OURS = ("https", "http", "s3", "gs", "hf", "file")
SCHEMES = (*OURS, "HTTPS", "Http", "S3", "ftp", "wss", "postgresql", "git+https", "hdfs")
STORAGE = ("s3", "gs", "hf", "file")  # "?" is a wildcard of these, and "#" part of a name
HOSTS = ("data7.example", "data7.example:8443", "127.0.0.1:9000", "[2001:db8::7]", "[::1]:9000")
HOSTS += ("müller7.example", "acct.blob.core.windows.net", "bucket7")
# What every part of a secret begins with; rare enough in the random text of a page.
MARKER = "ZqXj"
NAME = "corpus5"
PATHS = ("{}.jsonl", "a/{}(1).jsonl", "a(b)/{}.jsonl", "it's/{}.jsonl", "my {}.jsonl", "[1]/{}")
PATHS += ('a "b"/{}.jsonl', "春/{}.jsonl", "a%20b/{}.jsonl", "{}*.jsonl", "{{a,b}}/{}.jsonl")
PATHS += ("a`b/{}.jsonl", "a,b;c/{}.jsonl", "<x>/{}.jsonl", "a b c/{} (2).jsonl", "a:b/{}.jsonl")
PATHS += ("a=b/{}.jsonl", "a&b/{}.jsonl", "a+b/{}.jsonl", "a@b/{}.jsonl", "{}")
SECRET_NAMES = ("X-Amz-Signature", "X-Amz-Credential", "X-Amz-Security-Token", "sig", "Signature")
SECRET_NAMES += ("X-Goog-Signature", "token", "access_token", "AWSAccessKeyId", "Key-Pair-Id")
OTHER_NAMES = ("Policy", "se", "st", "e", "x[y]", "a.b", "t%6Fken")
BEFORE = ("", "X-Amz-Algorithm=AWS4-HMAC-SHA256&", "a=it's&", "sv=2024-01-01&sr=b&", "download&")
BEFORE += ("response-content-disposition=attachment;filename(1)&",)
BEFORE += ('response-content-disposition=attachment; filename="a b.jsonl"&',)
INSIDE = ("", *"/+=~-_.,;:@!*()'\"[]{}|$<>`^\\", "==", "%2F", "%2B", "%3D", "&x=")


@dataclass(frozen=True)
class Signed:
    """A URL, the parts of its secrets, and whether one of these is a user or a password."""

    url: str
    secrets: tuple[str, ...]
    host: str
    has_user: bool
    outer: str = ""  # host of a URL around it


def signed_urls(seed: int, number: int, inside: tuple[str, ...] = INSIDE) -> Iterator[Signed]:
    """Yield URLs whose secrets have one of `inside` between their parts."""
    draw = random.Random(seed)
    for _ in range(number):
        yield KINDS[draw.choice([*KINDS])](draw, inside)


def _secret(draw: random.Random, inside: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    letters = string.ascii_letters + string.digits
    parts = tuple(
        f"{MARKER}{''.join(draw.choices(letters, k=8))}" for _ in range(draw.randint(1, 3))
    )
    return parts[0] + "".join(draw.choice(inside) + part for part in parts[1:]), parts


def _place(draw: random.Random, schemes: tuple[str, ...] = SCHEMES) -> tuple[str, str, str]:
    """Scheme, host and path."""
    return draw.choice(schemes), draw.choice(HOSTS), draw.choice(PATHS).format(NAME)


def _in_query(draw: random.Random, inside: tuple[str, ...], form: str = "{}?{}{}={}") -> Signed:
    secret, parts = _secret(draw, inside)
    scheme, host, path = _place(draw)
    is_storage = scheme.lower() in STORAGE
    name = draw.choice(SECRET_NAMES if is_storage else SECRET_NAMES + OTHER_NAMES)
    url = form.format(f"{scheme}://{host}/{path}", draw.choice(BEFORE), name, secret)
    return Signed(url, parts, host, False)


def _encoded_query(draw: random.Random, inside: tuple[str, ...]) -> Signed:
    made = _in_query(draw, inside, "{}\0{}{}={}")
    place, _, query = made.url.partition("\0")
    for _ in range(draw.randint(1, 2)):
        query = quote(f"?{query}" if query[0] != "%" else query, safe="")
    return Signed(place + query, made.secrets, made.host, False)


def _in_user(
    draw: random.Random, inside: tuple[str, ...], form: str = "{}://me:{}@{}/{}"
) -> Signed:
    is_name = ":{}" not in form  # which ends at a slash
    secret, parts = _secret(draw, tuple(set(inside) - {*"/\\?#"}) if is_name else inside)
    scheme, host, path = _place(draw)
    return Signed(form.format(scheme, secret, host, path), parts, host, True)


def _bare(draw: random.Random, inside: tuple[str, ...], mark: str = "?") -> Signed:
    secret, parts = _secret(draw, inside)
    scheme, host, path = _place(draw, tuple(s for s in SCHEMES if s.lower() not in STORAGE))
    # Without "=", nothing in a text tells what follows a space.
    return Signed(f"{scheme}://{host}/{path.replace(' ', '_')}{mark}{secret}", parts, host, False)


def _nested(draw: random.Random, inside: tuple[str, ...]) -> Signed:
    inner = KINDS[draw.choice(["query", "user", "matrix", "fragment"])](draw, inside)
    forms = (inner.url, quote(inner.url, safe=""), quote(quote(inner.url, safe=""), safe=""))
    place = draw.choice(["/web", "/get?url=", "/get?a=1&url="])
    url = f"https://outer7.example{place.removesuffix('/')}/{draw.choice(forms)}"
    if "=" in place:
        url = url.replace("=/", "=", 1)
    return Signed(url, inner.secrets, inner.host, inner.has_user, "outer7.example")


def _both(draw: random.Random, inside: tuple[str, ...]) -> Signed:
    first, (secret, parts) = _in_user(draw, inside), _secret(draw, inside)
    url = f"{first.url}?{draw.choice(SECRET_NAMES)}={secret}"
    return Signed(url, first.secrets + parts, first.host, True)


KINDS: dict[str, Callable[[random.Random, tuple[str, ...]], Signed]] = {
    "query": _in_query,
    "parameters": lambda draw, inside: _in_query(draw, inside, "{}#{}{}={}"),
    "matrix": lambda draw, inside: _in_query(draw, inside, "{};{}{}={}"),
    "encoded": _encoded_query,
    "user": _in_user,
    "token": lambda draw, inside: _in_user(draw, inside, "{}://{}@{}/{}"),
    "bare": _bare,
    "fragment": lambda draw, inside: _bare(draw, inside, "#"),
    "nested": _nested,
    "both": _both,
}


def _as_requests(url: str) -> str:
    path = url.partition("://")[2].partition("/")[2]
    return f"HTTPSConnectionPool(host='h'): Max retries exceeded with url: /{path} (Caused by x)"


# What programs and libraries write of a URL. `_as_requests` leaves the user out.
TEXTS: dict[str, Callable[[str], str]] = {
    "alone": lambda url: url,
    "as a beginning": lambda url: f"{url}: there is no such object; correct the URL",
    "as a word": lambda url: f"cannot read {url} (403), end",
    "in parentheses": lambda url: f"cannot read it ({url}), end",
    "in brackets": lambda url: f"[{url}] failed, end",
    "in angles": lambda url: f"<{url}> failed, end",
    "in quotes": lambda url: f"url='{url}' failed, end",
    "in double quotes": lambda url: f'url="{url}" failed, end',
    "in backquotes": lambda url: f"`{url}` failed, end",
    "as Python writes it": lambda url: f"message='Forbidden', url={url!r}",
    "as aiohttp writes it": lambda url: f"403, message='Forbidden', url=URL({url!r})",
    "as JSON": lambda url: json.dumps({"url": url, "n": 3}),
    "as JSON of UTF-8": lambda url: json.dumps({"url": url}, ensure_ascii=False),
    "in a list": lambda url: f"{[url, url]}, end",
    "twice": lambda url: f"{url} {url}",
    "twice, with a comma": lambda url: f"{url},{url}",
    "as a setting": lambda url: f"--data_path={url} is bad, end",
    "as Markdown": lambda url: f"[text]({url}), end",
    "in lines": lambda url: f"first\n{url}\nend",
    "as requests writes it": _as_requests,
}
