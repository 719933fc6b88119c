"""Prompts in a file: one a line, or a field of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator

from minimind.errors import DataError
from minimind.runtime.durable_files import read_small_text

LARGEST = 2**28  # bytes


def prompt_of(text: str) -> str:
    """What a file or standard input has, without the newline that ends its last line."""
    return text.removeprefix("\ufeff").removesuffix("\n")


def read_text(path: str, flag: str) -> str:
    """`prompt_of` a text file; `flag` named it."""
    try:
        return prompt_of(read_small_text(path, LARGEST, pipes=True))
    except OSError as error:
        raise DataError(f"{flag} {path}: {error.strerror}; name a readable file") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{flag} {path}: not UTF-8 at byte {error.start}; save it as UTF-8"
        ) from error


def read_prompts(path: str, flag: str) -> list[str]:
    """At least one, in their order; blank lines are passed over."""
    found = [*_prompts(path, read_text(path, flag))]
    if not found:
        raise DataError(f"{flag} {path}: has no prompt; write one a line")
    return found


def _prompts(path: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _field(line, f"{path}:{number}") if path.endswith(".jsonl") else line


def _field(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f'{where}: is not JSON ({error}); write {{"prompt": "..."}}') from error
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, str):
        raise DataError(f'{where}: has no "prompt" that is a string; write {{"prompt": "..."}}')
    return prompt
