"""A SentencePiece model as a tokenizer.json, for Hugging Face libraries without our code."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
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
    SPECIAL,
    dump_json,
    escape,
    unescape,
)

PROBES = 500
PieceProto = ModelProto.SentencePiece
NEVER_TEXT = (PieceProto.CONTROL, PieceProto.UNKNOWN)  # types of pieces


def hugging_face_files(
    processor: sentencepiece.SentencePieceProcessor, existing: bytes | None = None
) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json by name; empty for a model they cannot express.

    Both tokenizers are compared on every piece and on random sequences of pieces, unless the
    `existing` tokenizer.json is the same: it was compared when it was written.
    """
    if not is_plain_bpe(processor):
        return {}
    proto = ModelProto.FromString(processor.serialized_model_proto())
    content = dump_json(_tokenizer(proto, processor.unk_id()))
    if content != existing and not _agree(processor, [*normal_pieces(proto)], content):
        return {}
    return {JSON_NAME: content, CONFIG_NAME: dump_json(_config(processor, special_tokens(proto)))}


def is_plain_bpe(processor: sentencepiece.SentencePieceProcessor) -> bool:
    """Whether the model is BPE with byte fallback and without normalization."""
    probe = " a   \n"
    proto = ModelProto.FromString(processor.serialized_model_proto())
    return (
        proto.trainer_spec.model_type == TrainerSpec.BPE
        and any(piece.type == PieceProto.BYTE for piece in proto.pieces)
        and not proto.normalizer_spec.precompiled_charsmap
        and processor.normalize(probe) == probe.replace(" ", SPACE_SIGN)
    )


def normal_pieces(proto: ModelProto) -> dict[str, int]:
    """Ids of the pieces that stand for text, without bytes, by piece."""
    return {
        piece.piece: i
        for i, piece in enumerate(proto.pieces)
        if piece.type not in (*NEVER_TEXT, PieceProto.BYTE)
    }


def special_tokens(proto: ModelProto) -> dict[str, int]:
    """Ids of the control pieces, without fillers, by piece."""
    return {
        piece.piece: i
        for i, piece in enumerate(proto.pieces)
        if piece.type in NEVER_TEXT and not piece.piece.startswith(FILLER_PREFIX)
    }


def _tokenizer(proto: ModelProto, unk_id: int) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": piece.piece, **SPECIAL}
            for i, piece in enumerate(proto.pieces)
            if piece.type in NEVER_TEXT
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
            "unk_token": proto.pieces[unk_id].piece,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece.piece: i for i, piece in enumerate(proto.pieces)},
            "merges": merges(proto),
        },
    }


def _config(
    processor: sentencepiece.SentencePieceProcessor, names: Mapping[str, int]
) -> dict[str, Any]:
    """tokenizer_config.json; special tokens are not matched in text: "</s>" is four letters."""
    specials = {
        "bos_token": processor.bos_id(),
        "eos_token": processor.eos_id(),
        "pad_token": processor.pad_id(),
        "unk_token": processor.unk_id(),
    }
    others = [name for name, i in names.items() if i not in specials.values()]
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


def merges(proto: ModelProto) -> list[tuple[str, str]]:
    """All merges that produce a piece, in order of priority.

    SentencePiece ranks the resulting piece and prefers the left position. tokenizer.json ranks
    merges, so two merges that make the same piece need an order: if both apply in `X Y Z`, the left
    position has the merge whose left part is not also the end of the piece.
    """
    pieces = normal_pieces(proto)
    ordered = []
    for piece, i in pieces.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in pieces and right in pieces:
                order = (-proto.pieces[i].score, i, piece.endswith(left), -at)
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


def _agree(
    processor: sentencepiece.SentencePieceProcessor, pieces: Sequence[str], content: bytes
) -> bool:
    """Whether both give the same ids and round-trip, for pieces and sequences of them."""
    other = tokenizers.Tokenizer.from_buffer(content)
    other.encode_special_tokens = True
    texts = list(_probes([unescape(piece) for piece in pieces]))
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
