"""A SentencePiece model as the entries that a GGUF file has for a vocabulary."""

from __future__ import annotations

from typing import Any

import sentencepiece

from minimind.data.tokenizer.hf_export import merges, merges_plainly
from minimind.data.tokenizer.pieces import FILLER_PREFIX
from minimind.data.tokenizer.sentencepiece import Tokenizer
from minimind.errors import UsageError

# The kinds of a piece; 4 would be one that is looked for in text before anything else.
NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6
MODEL = "llama"  # what GGUF calls SentencePiece's byte-pair pieces


def gguf_vocabulary(tokenizer: object) -> dict[str, Any]:
    """Entries by their names after `tokenizer.ggml.`; a UsageError for one they cannot express.

    Readers that go by scores, as llama.cpp does, need no merges; transformers', which makes some up
    where there are none, takes them in the order that gives SentencePiece's ids.
    """
    if not isinstance(tokenizer, Tokenizer):
        raise UsageError(
            f"{getattr(tokenizer, 'path', 'tokenizer')}: gguf is written with SentencePiece"
            " vocabularies alone; export --format llama, and convert that with llama.cpp"
        )
    model = tokenizer.files()["tokenizer.model"]
    found = sentencepiece.SentencePieceProcessor(model_proto=model)  # pyright: ignore[reportCallIssue] (no stubs)
    if not merges_plainly(found):
        raise UsageError(
            f"{tokenizer.path}: gguf has no name for pieces that are not byte pairs with bytes for"
            " the rest; export --format llama, and convert that with llama.cpp"
        )
    ids = range(found.vocab_size())
    special = {
        "bos_token_id": found.bos_id(),
        "eos_token_id": found.eos_id(),
        "unknown_token_id": found.unk_id(),
        "padding_token_id": found.pad_id(),
    }
    return {
        "model": MODEL,
        "pre": "default",
        "tokens": [found.id_to_piece(i) for i in ids],
        "scores": [found.get_score(i) for i in ids],
        "token_type": [_kind(found, i) for i in ids],
        "merges": [f"{left} {right}" for left, right in merges(found)],
        **{name: i for name, i in special.items() if i >= 0},
        "add_bos_token": False,
        "add_eos_token": False,
        "add_space_prefix": False,
    }


def _kind(found: sentencepiece.SentencePieceProcessor, i: int) -> int:
    if found.is_unknown(i):
        return UNKNOWN
    if found.is_control(i):  # what fills the vocabulary would else be looked for in text
        return UNUSED if found.id_to_piece(i).startswith(FILLER_PREFIX) else CONTROL
    return BYTE if found.is_byte(i) else NORMAL
