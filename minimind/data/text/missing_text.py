"""Advice for a line or a table without the text field."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from typing import Any

KEYS_SHOWN, KEY_LENGTH_SHOWN = 3, 40
# Fields of fine-tuning data, as MiniMind, ShareGPT, OpenAI and TRL name them.
CONVERSATIONS = ("conversations", "messages", "chosen")
PLAIN = re.compile(rf"[\w.:][\w.: -]{{,{KEY_LENGTH_SHOWN - 1}}}")  # safe to print and to type


def missing_in_line(pairs: Sequence[tuple[str, Any]], field: str) -> tuple[str, str]:
    """Problem and remedy for a JSON object without `field`."""
    name, example = json.dumps(field), f"write {json.dumps({field: '...'})}"
    if problem := _conversation([key for key, value in pairs if isinstance(value, list)], name):
        return problem, f"fine-tune on it with --task sft, or {example}, plain text"
    texts = [key for key, value in pairs if isinstance(value, str)]
    shown = [json.dumps(key[:KEY_LENGTH_SHOWN]) for key, _ in pairs[:KEYS_SHOWN]]
    more = ["..."] if len(pairs) > KEYS_SHOWN else []
    there = f" but {', '.join(shown + more)}" if shown else ""
    return f"has no {name}{there}", f"{_way(texts, 'field')}, or {example}" if texts else example


def missing_in_table(columns: Sequence[str], texts: Sequence[str], field: str) -> tuple[str, str]:
    """Problem and remedy for a table with these columns; `texts` hold strings."""
    name = json.dumps(field)
    if problem := _conversation([column for column in columns if column not in texts], name):
        return (
            problem,
            "fine-tune on it with --task sft, or give a table with a column of plain text",
        )
    there = f" but {', '.join(map(json.dumps, columns))}" if columns else " and no other"
    return f"has no column {name}{there}", _way(texts, "column")


def _conversation(lists: Sequence[str], name: str) -> str:
    """The problem of fine-tuning data, if a list field looks like conversations."""
    keys = [json.dumps(key) for key in lists if key in CONVERSATIONS]
    return f"has {keys[0]}, a conversation to fine-tune on, and no {name}" if keys else ""


def _way(texts: Sequence[str], what: str) -> str:
    names = list(dict.fromkeys(texts))
    if len(names) == 1 and PLAIN.fullmatch(names[0]):
        return f"give --text_field {shlex.quote(names[0])}"
    return f"give --text_field and the {what} with the text"
