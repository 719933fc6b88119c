"""A SentencePiece model as a tokenizer.json, which Hugging Face libraries read without our code."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import sentencepiece
import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec  # pyright: ignore[reportAttributeAccessIssue] (made at import)

from minimind.data.tokenizer.escaping import GUARD, MARK, SPACE_SIGN, escape, unescape
from minimind.data.tokenizer.files import CONFIG_NAME, JSON_NAME
from minimind.data.tokenizer.pieces import FILLER_PREFIX

PROBES = 500


def hugging_face_files(
    processor: sentencepiece.SentencePieceProcessor, beside: bytes | None = None
) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json by name; none for a model they cannot express.

    That is any but byte-pair pieces with bytes for the rest and text taken as it is. Both sides
    are tried on every piece and on many put together before anything is given out, unless just
    this tokenizer.json stands `beside` the model already: it was tried when it was written.
    """
    if not merges_plainly(processor):
        return {}
    told = json.dumps(_tokenizer(processor), ensure_ascii=False, indent=1).encode()
    if told != beside and not _agree(processor, tokenizers.Tokenizer.from_str(told.decode())):
        return {}
    config = json.dumps(_config(processor), ensure_ascii=False, indent=1).encode()
    return {JSON_NAME: told, CONFIG_NAME: config}


def merges_plainly(processor: sentencepiece.SentencePieceProcessor) -> bool:
    """Whether ids depend on nothing but merges: byte-pair pieces, bytes, text taken as it is.

    Its kind and its rules of normalisation are in its file, and what it does to spaces shows.
    """
    probe = " a   \n"
    told = ModelProto.FromString(processor.serialized_model_proto())
    return (
        told.trainer_spec.model_type == TrainerSpec.BPE
        and any(processor.is_byte(i) for i in range(processor.vocab_size()))
        and not told.normalizer_spec.precompiled_charsmap
        and processor.normalize(probe) == probe.replace(" ", SPACE_SIGN)
    )


def normal_pieces(processor: sentencepiece.SentencePieceProcessor) -> dict[str, int]:
    """The pieces that text is made of, without bytes, each with its id."""
    return {
        processor.id_to_piece(i): i
        for i in range(processor.vocab_size())
        if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i))
    }


def special_tokens(processor: sentencepiece.SentencePieceProcessor) -> dict[str, int]:
    """The pieces that no text is made of, fillers left out, each with its id."""
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
        "normalizer": {"type": "Sequence", "normalizers": list(_escaping())},
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
    """What transformers adds; a text that has "</s>" in it has four letters there, no end."""
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
        # By this name transformers 4 and 5 both take a list.
        **({"additional_special_tokens": others} if others else {}),
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }


def merges(processor: sentencepiece.SentencePieceProcessor) -> list[tuple[str, str]]:
    """Every way to make a piece from two others, in the order in which they are tried.

    SentencePiece ranks the piece that comes out, and of two places takes the left one. Here the two
    ways to make one piece need an order too: where both are possible in `X Y Z`, the left place has
    the way whose left part is not also how the piece ends.
    """
    pieces = normal_pieces(processor)
    found = []
    for piece, i in pieces.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in pieces and right in pieces:
                order = (-processor.get_score(i), i, piece.endswith(left), -at)
                found.append((order, left, right))
    return [(left, right) for _, left, right in sorted(found)]


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _escaping() -> Iterator[dict[str, Any]]:
    """What `escape` does at once, one after another, and a space's sign."""
    yield _replace(GUARD, GUARD + GUARD)
    yield _replace(MARK, GUARD + MARK)
    yield _replace(SPACE_SIGN, MARK)
    yield _replace(" ", SPACE_SIGN)


def _unescaping() -> Iterator[dict[str, Any]]:
    """What `unescape` does from left to right.

    Once spaces are spaces no U+2581 is left, so that it can begin a name for each thing found
    until all are: a replacement is then never taken for text.
    """
    yield _replace(SPACE_SIGN, " ")
    names = {GUARD + GUARD: "g", GUARD + MARK: "m", MARK: "s"}
    for found, name in names.items():
        yield _replace(found, SPACE_SIGN + name)
    for name, meant in {"g": GUARD, "m": MARK, "s": SPACE_SIGN}.items():
        yield _replace(SPACE_SIGN + name, meant)


def _agree(processor: sentencepiece.SentencePieceProcessor, other: tokenizers.Tokenizer) -> bool:
    """Whether both give the same ids, and the text back, for the pieces and what they make up."""
    other.encode_special_tokens = True
    texts = list(_probes([unescape(piece) for piece in normal_pieces(processor)]))
    ours = processor.encode([escape(text) for text in texts], num_threads=1)
    theirs = [found.ids for found in other.encode_batch_fast(texts, add_special_tokens=False)]
    return ours == theirs and all(
        other.decode(ids) == text for ids, text in zip(theirs, texts, strict=True)
    )


def _probes(pieces: Sequence[str]) -> Iterator[str]:
    yield from pieces
    draw = random.Random(0)
    for _ in range(PROBES if pieces else 0):
        yield "".join(draw.choices(pieces, k=draw.randint(2, 30)))
        yield draw.choice(pieces) * draw.randint(2, 30)
