"""A SentencePiece model as a tokenizer.json, for Hugging Face libraries without our code."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import sentencepiece
import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec  # pyright: ignore[reportAttributeAccessIssue] (made at import)

from minimind.data.tokenizer.vocabulary import (
    CONFIG_NAME,
    FILLER_PREFIX,
    GUARD,
    JSON_NAME,
    MARK,
    SPACE_SIGN,
    escape,
    unescape,
)

PROBES = 500


def hugging_face_files(
    processor: sentencepiece.SentencePieceProcessor, existing: bytes | None = None
) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json by name; empty for a model they cannot express.

    Both tokenizers are compared on every piece and on random sequences of pieces, unless the
    `existing` tokenizer.json is the same: it was compared when it was written.
    """
    if not is_plain_bpe(processor):
        return {}
    text = json.dumps(_tokenizer(processor), ensure_ascii=False, indent=1)
    content = text.encode()
    if content != existing and not _agree(processor, tokenizers.Tokenizer.from_str(text)):
        return {}
    config = json.dumps(_config(processor), ensure_ascii=False, indent=1).encode()
    return {JSON_NAME: content, CONFIG_NAME: config}


def is_plain_bpe(processor: sentencepiece.SentencePieceProcessor) -> bool:
    """Whether the model is BPE with byte fallback and without normalization."""
    probe = " a   \n"
    model = ModelProto.FromString(processor.serialized_model_proto())
    return (
        model.trainer_spec.model_type == TrainerSpec.BPE
        and any(processor.is_byte(i) for i in range(processor.vocab_size()))
        and not model.normalizer_spec.precompiled_charsmap
        and processor.normalize(probe) == probe.replace(" ", SPACE_SIGN)
    )


def normal_pieces(processor: sentencepiece.SentencePieceProcessor) -> dict[str, int]:
    """Ids of the normal pieces, without bytes, by piece."""
    return {
        processor.id_to_piece(i): i
        for i in range(processor.vocab_size())
        if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i))
    }


def special_tokens(processor: sentencepiece.SentencePieceProcessor) -> dict[str, int]:
    """Ids of the control pieces, without fillers, by piece."""
    return {
        processor.id_to_piece(i): i
        for i in range(processor.vocab_size())
        if (processor.is_control(i) or processor.is_unknown(i))
        and not processor.id_to_piece(i).startswith(FILLER_PREFIX)
    }


def _tokenizer(processor: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    ids = range(processor.vocab_size())
    specials = [i for i in ids if processor.is_control(i) or processor.is_unknown(i)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": processor.id_to_piece(i), **flags, "special": True}
            for i in specials
        ],
        "normalizer": escaping(),
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, *_unescaping()],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": processor.id_to_piece(processor.unk_id()),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {processor.id_to_piece(i): i for i in ids},
            "merges": merges(processor),
        },
    }


def _config(processor: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """tokenizer_config.json; special tokens are not matched in text: "</s>" is four letters."""
    specials = {
        "bos_token": processor.bos_id(),
        "eos_token": processor.eos_id(),
        "pad_token": processor.pad_id(),
        "unk_token": processor.unk_id(),
    }
    others = [name for name, i in special_tokens(processor).items() if i not in specials.values()]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: processor.id_to_piece(i) for name, i in specials.items() if i >= 0},
        # Both transformers 4 and 5 accept a list under this name.
        **({"additional_special_tokens": others} if others else {}),
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }


def merges(processor: sentencepiece.SentencePieceProcessor) -> list[tuple[str, str]]:
    """All merges that produce a piece, in order of priority.

    SentencePiece ranks the resulting piece and prefers the left position. tokenizer.json ranks
    merges, so two merges that make the same piece need an order: if both apply in `X Y Z`, the left
    position has the merge whose left part is not also the end of the piece.
    """
    pieces = normal_pieces(processor)
    ordered = []
    for piece, i in pieces.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in pieces and right in pieces:
                order = (-processor.get_score(i), i, piece.endswith(left), -at)
                ordered.append((order, left, right))
    return [(left, right) for _, left, right in sorted(ordered)]


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def escaping() -> dict[str, Any]:
    """The normalizer that does what `escape` does, and replaces the space."""
    steps = ((GUARD, GUARD + GUARD), (MARK, GUARD + MARK), (SPACE_SIGN, MARK), (" ", SPACE_SIGN))
    return {"type": "Sequence", "normalizers": [_replace(old, new) for old, new in steps]}


def _unescaping() -> Iterator[dict[str, Any]]:
    """Decoders that do what `unescape` does.

    Once spaces are restored no U+2581 is left, so it can prefix a placeholder for each sequence:
    a replacement is then never mistaken for text.
    """
    yield _replace(SPACE_SIGN, " ")
    placeholders = {GUARD + GUARD: "g", GUARD + MARK: "m", MARK: "s"}
    for sequence, name in placeholders.items():
        yield _replace(sequence, SPACE_SIGN + name)
    for name, character in {"g": GUARD, "m": MARK, "s": SPACE_SIGN}.items():
        yield _replace(SPACE_SIGN + name, character)


def _agree(processor: sentencepiece.SentencePieceProcessor, other: tokenizers.Tokenizer) -> bool:
    """Whether both give the same ids and round-trip, for pieces and sequences of them."""
    other.encode_special_tokens = True
    texts = list(_probes([unescape(piece) for piece in normal_pieces(processor)]))
    ours = processor.encode([escape(text) for text in texts], num_threads=1)
    theirs = [encoding.ids for encoding in other.encode_batch_fast(texts, add_special_tokens=False)]
    return ours == theirs and all(
        other.decode(ids) == text for ids, text in zip(theirs, texts, strict=True)
    )


def _probes(pieces: Sequence[str]) -> Iterator[str]:
    yield from pieces
    draw = random.Random(0)
    for _ in range(PROBES if pieces else 0):
        yield "".join(draw.choices(pieces, k=draw.randint(2, 30)))
        yield draw.choice(pieces) * draw.randint(2, 30)
