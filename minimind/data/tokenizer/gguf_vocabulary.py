"""A SentencePiece model as the vocabulary entries of a GGUF file."""

from __future__ import annotations

from typing import Any

import sentencepiece

from minimind.data.tokenizer.hf_export import is_plain_bpe, merges
from minimind.data.tokenizer.sentencepiece import Tokenizer
from minimind.data.tokenizer.vocabulary import FILLER_PREFIX
from minimind.errors import UsageError

# Token types; 4 (user defined) would be matched in text before any other.
NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6
MODEL = "llama"  # GGUF's name for SentencePiece BPE


def gguf_vocabulary(tokenizer: object) -> dict[str, Any]:
    """Entries by name after `tokenizer.ggml.`; raise UsageError if GGUF cannot express the model.

    llama.cpp merges by score and ignores the merges; transformers reads them, in this order.
    """
    if not isinstance(tokenizer, Tokenizer):
        raise UsageError(
            f"{getattr(tokenizer, 'path', 'tokenizer')}: gguf is written with SentencePiece"
            " vocabularies alone; export --format llama, and convert that with llama.cpp"
        )
    model = tokenizer.files()["tokenizer.model"]
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)  # pyright: ignore[reportCallIssue] (no stubs)
    if not is_plain_bpe(processor):
        raise UsageError(
            f"{tokenizer.path}: gguf has no name for pieces that are not byte pairs with bytes for"
            " the rest; export --format llama, and convert that with llama.cpp"
        )
    ids = range(processor.vocab_size())
    special = {
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "unknown_token_id": processor.unk_id(),
        "padding_token_id": processor.pad_id(),
    }
    return {
        "model": MODEL,
        "pre": "default",
        "tokens": [processor.id_to_piece(i) for i in ids],
        "scores": [processor.get_score(i) for i in ids],
        "token_type": [_token_type(processor, i) for i in ids],
        "merges": [f"{left} {right}" for left, right in merges(processor)],
        **{name: i for name, i in special.items() if i >= 0},
        "add_bos_token": False,
        "add_eos_token": False,
        "add_space_prefix": False,
    }


def _token_type(processor: sentencepiece.SentencePieceProcessor, i: int) -> int:
    if processor.is_unknown(i):
        return UNKNOWN
    if processor.is_control(i):  # fillers must not be matched in text
        return UNUSED if processor.id_to_piece(i).startswith(FILLER_PREFIX) else CONTROL
    return BYTE if processor.is_byte(i) else NORMAL
