"""Which names of values say that these are secret: `api_key` does, `eos_token` does not.

Words are separated by _ - . / or spaces, and by capitals as in `apiKey`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

HIDDEN_VALUE = "***"  # stands for a secret
ALWAYS = frozenset("pwd credential authorization bearer jwt cookie signature".split())
# Whatever letters come before them in the word.
ENDS = ("password", "passwd", "passphrase", "passcode", "secret")
# Of what a key or token is one that opens something, as a word before it or of its word, whatever
# words follow: API_KEY_2, apikeys.
OPENS = frozenset(
    "api access secret private auth oauth bearer refresh session account service client signing"
    " encryption ssh hf hub huggingface wandb comet personal deploy storage admin"
    " github gitlab license subscription master aws azure gcp openai security".split()
)
# A token of these is a piece of text, and a key of these finds or sorts something.
OF_TEXT = frozenset(
    "bos eos pad unk sep cls mask begin end start stop eot eom boi eoi special image audio"
    " video vision per each next previous prev last first new extra added additional prompt"
    " decoder encoder forced suppress think tool system assistant document separator newline"
    " boundary n num max min of by to in average mean padding text word byte sub control"
    " filler dummy prefix middle suffix target draft accepted current reasoning call turn time"
    " speech language blank".split()
)
OF_ORDER = frozenset(
    "sort group primary foreign cache index partition column field public attention cross query row"
    " dict json yaml hot metric by of per n num kv qk value lookup hash map object entry shard"
    " dedup join search state config weight tensor merge unique text label content role message"
    " messages image answer question target split batch loss".split()
)
# The last word of names of what is beside a secret: its file, its size, its kind.
BESIDE = frozenset(
    "file path dir folder name env variable length size count type kind url uri ttl expiry expires"
    " mode balance enabled policy position positions limit ids columns".split()
)
_KEY = re.compile("(.*)(?:key|token)")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[A-Z]+")


@lru_cache(4096)
def is_secret(name: str) -> bool:
    """Whether the value of this name is a secret."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or words[-1] in BESIDE:
        return False
    for before, word in zip(["", *words], words, strict=False):
        one = word.removesuffix("s")
        if one in ALWAYS or one.endswith(ENDS):
            return True
        if (opens := _KEY.fullmatch(one)) and (opens[1] or before) in OPENS:
            return True
    before, last = ("", *words)[-2:]
    if last == "token":
        return before not in OF_TEXT
    return last == "auth" or (last == "key" and before != "" and before not in OF_ORDER)


def secrets_in(value: Any) -> Iterator[str]:
    """Every secret of a JSON value, as text."""
    if isinstance(value, dict):
        for name, inner in value.items():
            is_one = isinstance(name, str) and is_secret(name)
            yield from _texts(inner) if is_one else secrets_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from secrets_in(inner)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)
    elif not _is_open(value):
        yield str(value)


def without_those_of(text: str, value: Any) -> str:
    """What a library says, without the secrets of what it was given, short ones left."""
    for secret in sorted({*secrets_in(value)}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN_VALUE) if len(secret) > 3 else text
    return text


def without_secret(name: object, value: Any) -> Any:
    """A JSON value of this name, each text and number in it hidden if the name says so."""
    return _hidden(value) if isinstance(name, str) and is_secret(name) else value


def _hidden(value: Any) -> Any:
    """`value` with its structure, and without what is no switch, nothing or empty."""
    if isinstance(value, dict):
        return {name: _hidden(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_hidden, value))
    return value if _is_open(value) else HIDDEN_VALUE


def _is_open(value: Any) -> bool:
    """Whether a value is no secret under any name: a switch, nothing or empty."""
    return value is None or isinstance(value, bool) or value == ""


def without_secrets_in_text(text: str, may_be_path: bool = False) -> str:
    """A text without the values that stand in it behind a secret name: as JSON, or assigned.

    May it be a path: JSON only, for a folder may be named NAME=VALUE.
    """
    text = _QUOTED.sub(_without_value, text)
    return text if may_be_path else _ASSIGNED.sub(_without_value, text)


def _without_value(match: re.Match[str]) -> str:
    name, value = match["name"].rpartition(".")[2], match["value"]
    sign = match["sign"].strip()
    is_word = sign == "is" or (sign == ":" and value[0] not in "\"'")  # `unknown token: ...`
    is_prose = is_word and name.lower() == "token" and match[0][0] not in "\"'"
    # `--api_key is empty`, `argument --api_key: expected`; a value stands behind `--api_key` alone.
    is_flag = match[0].startswith("--")
    is_prose |= (is_flag and sign == ":") or (not sign and (not is_flag or value in _BEHIND_FLAGS))
    if not is_secret(name) or is_prose or value in _OPEN:
        return match[0]
    quote = value[0] if value[0] in "\"'" else match[0][0] if match[0][0] in "\"'" else ""
    return f"{match[0][: match.start('value') - match.start()]}{quote}{HIDDEN_VALUE}{quote}"


_BEHIND_FLAGS = ("is", "has", "needs", "takes", "and", "or", "with", "of", "expected")
# Repeats have a limit, so that long texts take no longer than their length.
_OPEN = ("None", "null", "True", "true", "False", "false", '""', "''", HIDDEN_VALUE)
_NAME = (
    r"(?P<name>[\w.-]{0,60}(?:key|token|secret|passw|passphrase|passcode|pwd|credential|auth|bearer"
    r"|jwt|cookie|signature)[\w.-]{0,40})"
)
_LITERAL = (
    r"\"(?:[^\"\\\n]|\\.){0,4000}\"|'(?:[^'\\\n]|\\.){0,4000}'"
    r"|\[[^\]\n]{0,4000}\]|\{[^}\n]{0,4000}\}"
)
_QUOTED = re.compile(
    rf"[\"']{_NAME}[\"'](?P<sign>\s{{0,8}}:\s{{0,8}})(?P<value>{_LITERAL}|[\w.+-]+)", re.IGNORECASE
)
_ASSIGNED = re.compile(
    rf"(?<![\w.-])(?:--)?{_NAME}(?P<sign>\s{{0,8}}[=:]\s{{0,8}}| is (?=[\"'])|(?<=\w) (?!-))"
    rf"(?:(?:Bearer|Basic|Token) )?(?P<value>{_LITERAL}|[^\s\"',;)}}\]]+)",
    re.IGNORECASE,
)
