"""Files of tokenizers on which the library fails: it panics, or raises an error of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SLOW = {"Regex": "(a+)+$"}  # steps that double with each a, up to a limit of Oniguruma
TEXT = "a" * 30_000 + "b"  # on which it reaches the limit; the others fail on any text
VOCABULARY = {name: i for i, name in enumerate(["</s>", *"abcdefgh "])}
UNKNOWN = {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "absent"}
WORDPIECE = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9}

ON_LOADING: dict[str, dict[str, Any]] = {
    "an empty table of normalization": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    },
    "a table of normalization that is cut": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    },
}
ON_TEXT: dict[str, dict[str, Any]] = {
    "a slow pattern that splits": {
        "pre_tokenizer": {"type": "Split", "pattern": SLOW, "behavior": "Isolated", "invert": False}
    },
    "a slow pattern that replaces": {
        "normalizer": {"type": "Replace", "pattern": SLOW, "content": "b"}
    },
    "a table of normalization that points outside": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAAAAAAD/////"}
    },
    "chunks of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "words without an unknown token": {"model": UNKNOWN},
    "parts of words without an unknown token": {
        "model": UNKNOWN | WORDPIECE | {"type": "WordPiece"}
    },
    "probabilities without an unknown token": {
        "model": {"type": "Unigram", "unk_id": None, "vocab": [["</s>", 0.0]]}
    },
}
ON_TOKENS: dict[str, dict[str, Any]] = {
    "a decoder that strips more than there is": {
        "decoder": {"type": "Strip", "content": "a", "start": 5, "stop": 9}
    },
    "a decoder that strips without end": {
        "decoder": {"type": "Strip", "content": "a", "start": 2**64 - 1, "stop": 2**64 - 1}
    },
    "a slow pattern of a decoder": {
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": SLOW, "content": "b"}],
        }
    },
}


def failing(folder: Path, change: dict[str, Any]) -> Path:
    """A directory with a tokenizer.json of a few letters, changed."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    values = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "</s>", **flags, "special": True}],
        "model": {"type": "BPE", "vocab": VOCABULARY, "merges": []},
        **change,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return folder
