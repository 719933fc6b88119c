"""Short texts for the patterns of a tokenizer.json, under limits (`minimind.runtime.limited`).

Imports nothing but the library, and no vocabulary, so that it ends in a moment.
"""

from __future__ import annotations

import json
import os
import string
from collections.abc import Callable

from tokenizers import Tokenizer

REPEATED = 1024  # times a character; patterns are slow where much of the same may match
SOME = "é春안ж\u0300🙂\u200b\xa0\r\n\t"
TEXTS = [
    *(
        character * REPEATED + end
        for character in string.printable + SOME
        for end in ("", "!", "a")
    ),
    *(f"{word} " * (REPEATED // 4) for word in ("it's", "ab", "12", "a1", "a_", "\n ", "春眠")),
    string.printable * 20,
]


def load(parts: str) -> tuple[None, Callable[[bytes], bytes]]:
    """Encode and decode the texts with the parts of a file, which are refused elsewhere if bad."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library prints a line about each panic
    letters = {letter: i for i, letter in enumerate(dict.fromkeys(string.printable))}
    model = {"type": "BPE", "vocab": letters, "merges": []}
    values = {"version": "1.0", "added_tokens": [], "model": model, **json.loads(parts)}
    try:
        tokenizer = Tokenizer.from_str(json.dumps(values))
    except BaseException:  # a panic, which is no Exception, too
        return None, bytes
    for text in TEXTS:
        try:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            tokenizer.decode(ids)
        except MemoryError:
            raise
        except BaseException:  # panics too; a text that has an error reports it
            continue
    return None, bytes  # nothing more is asked
