"""Prompts: of a file, one per line or the `prompt` field of JSON lines; and their token ids."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence

from minimind.data.chat.conversations import SYSTEM, USER, Message
from minimind.data.tokenizer.load import Tokenizer
from minimind.errors import DataError, UsageError
from minimind.runtime.durable_files import read_small_text
from minimind.runtime.file_kinds import kind_of_content

MAX_BYTES = 2**28


def strip_prompt(text: str) -> str:
    """The text without a byte order mark and without the newline that ends its last line."""
    return text.removeprefix("\ufeff").removesuffix("\n")


def read_text(path: str, flag: str, pipes: bool = True) -> str:
    """The stripped text of a file; `flag` names its option in a DataError."""
    try:
        return strip_prompt(read_small_text(path, MAX_BYTES, pipes))
    except OSError as error:
        raise DataError(f"{flag} {path}: {error.strerror}; name a readable file") from error
    except UnicodeDecodeError as error:
        if kind := kind_of_content(error.object):
            raise DataError(f"{flag} {path}: is {kind.name}, not text; {kind.remedy}") from error
        raise DataError(
            f"{flag} {path}: not UTF-8 at byte {error.start}; save it as UTF-8"
        ) from error


def read_prompts(path: str, flag: str, pipes: bool = True) -> list[str]:
    """All prompts of a file in order, blank lines skipped; raise DataError if there are none."""
    prompts = [
        _parse_line(line, f"{path}:{number}") if path.endswith(".jsonl") else line
        for number, line in enumerate(read_text(path, flag, pipes).split("\n"), 1)
        if line.strip()
    ]
    if not prompts:
        raise DataError(f"{flag} {path}: has no prompt; write one a line")
    return prompts


def _parse_line(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f'{where}: is not JSON ({error}); write {{"prompt": "..."}}') from error
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, str):
        raise DataError(f'{where}: has no "prompt" that is a string; write {{"prompt": "..."}}')
    return prompt


def room_for_answer(most_new: int, positions: int) -> int:
    """Positions that a conversation leaves to its answer of at most `most_new` tokens."""
    return max(1, min(most_new, positions // 2))


def latest(messages: Sequence[Message], fits: Callable[[list[Message]], bool]) -> list[Message]:
    """The messages without the first questions, each with its answer; as few of them as fit.

    A system message stays, and the last question also if it does not fit. Found by bisection: of a
    conversation that fits, so do its last questions.
    """
    if fits([*messages]):
        return [*messages]
    first = int(messages[0].role == SYSTEM)
    later = [at for at in range(first + 1, len(messages)) if messages[at].role == USER]

    def since(at: int) -> list[Message]:
        return [*messages[:first], *messages[at:]]

    # The last one is not asked for: it stays.
    at = bisect_left(later[:-1], True, key=lambda at: fits(since(at)))
    return since(later[at]) if later else [*messages]


def encode_prompt(prompt: str, number: int, tokenizer: Tokenizer, max_positions: int) -> list[int]:
    """Token ids of a prompt; an empty one starts a new document.

    Raise DataError if it is not Unicode, UsageError if it leaves no position for a new token.
    """
    try:
        ids = [*tokenizer.encode(prompt)] or [tokenizer.eos_id]
    except DataError as error:
        raise DataError(f"prompt {number}: {error}") from error
    if len(ids) >= max_positions:
        raise UsageError(
            f"prompt {number} has {len(ids)} tokens and the model {max_positions} positions;"
            " shorten it"
        )
    return ids
