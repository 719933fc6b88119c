"""Pieces that a BPE tokenizer lacks, joined from its own: learnt from a text, or tokens of a list.

They are merged after all others. So a text is divided as before, and then some pieces are joined.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue] (made at import)
from tokenizers import models, pre_tokenizers, trainers

from minimind.data.tokenizer.add_special import write_extended
from minimind.data.tokenizer.base import Tokenizer
from minimind.data.tokenizer.hf_tokenizer import HuggingFaceTokenizer
from minimind.data.tokenizer.vocabulary import BYTE_NAMES, JSON_NAME, MODEL_NAME, dump_json
from minimind.errors import DataError

# Runs of letters, and of signs, with the space before them; pieces of other vocabularies are such.
WORDS = tokenizers.Regex(r" ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{M}\p{N}]+")
ANCHOR = "\n"  # stands before a word, for some tokenizers put a space before a text
FIRST_LETTER = 0x10000  # from here on every code point is a character
Symbol = tuple[str, tuple[int, ...]]  # a piece, or a character spelt in bytes: its name and its ids


def count_words(texts: Iterable[str]) -> Counter[str]:
    """How often the texts have each word, which pieces do not cross."""
    splitter = pre_tokenizers.Split(WORDS, "removed", invert=True)
    return Counter(word for text in texts for word, _ in splitter.pre_tokenize_str(text))


def with_pieces(
    tokenizer: Tokenizer, words: Mapping[str, int], directory: Path, count: int | None = None
) -> tuple[Tokenizer, dict[int, tuple[int, ...]]]:
    """Return the tokenizer with new pieces, in `directory`, and by id the old ids that each joins.

    With `count`, so many are learnt from words with their frequencies. Without it, all pieces are
    added that make each word one token. Raise DataError if there are fewer, or none, or if a word
    is not one token then.
    """
    files, first = tokenizer.files(), tokenizer.vocab_size
    values = json.loads(files.get(JSON_NAME, b"{}"))
    model, proto = values.get("model", {}), ModelProto()
    kind = model.get("type", "BPE")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        kind += " with marks of words"
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        proto = ModelProto.FromString(files[MODEL_NAME])
        kind = proto.trainer_spec.ModelType.Name(proto.trainer_spec.model_type)
    if kind != "BPE":
        raise DataError(
            f"{tokenizer.path}: is of type {kind}, and pieces are added to type BPE only; give a"
            " model with such a tokenizer"
        )
    joined, merges = _learnt(tokenizer, words, count)
    if len(joined) < (count or 1):
        asked = f"--learn {count}" if count else "--tokens"
        raise DataError(
            f"{asked}: only {len(joined)} new pieces are found; ask for fewer, or give other text"
        )
    if isinstance(tokenizer, HuggingFaceTokenizer):
        files.pop(MODEL_NAME, None)  # it would lack them
        # The library numbers added tokens from the size of the vocabulary on, unless it has them.
        added = {token["content"]: token["id"] for token in values.get("added_tokens") or ()}
        model["vocab"] = added | model["vocab"] | {n: first + at for at, n in enumerate(joined)}
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [*pairs, *merges]
        files[JSON_NAME] = dump_json(values, indent=2)
    else:
        lowest = min(piece.score for piece in proto.pieces)
        for at, name in enumerate(joined, 1):
            proto.pieces.add(piece=name, score=lowest - at)
        proto.trainer_spec.vocab_size = len(proto.pieces)
        files[MODEL_NAME] = proto.SerializeToString(deterministic=True)
    extended = write_extended(tokenizer, files, directory, "pieces", len(joined))
    listed = [*words] if count is None else []
    for token, ids in zip(listed, _ids(extended, listed), strict=True):
        if len(ids) == 1 and extended.decode(ids).strip(" ") == token.strip(" "):
            continue
        raise DataError(
            f"{token!r} cannot be one token: {tokenizer.path} loses a part of it, or divides it"
            " before it merges; take it out"
        )
    return extended, dict(enumerate(joined.values(), first))


def _learnt(
    tokenizer: Tokenizer, words: Mapping[str, int], count: int | None
) -> tuple[dict[str, tuple[int, ...]], list[tuple[str, str]]]:
    """The new pieces by name with the old ids that they join, and the pairs of names that merge.

    To the trainer of the library each symbol is a letter, but a character spelt in bytes is two,
    which it merges before all with them: of pairs as frequent it takes that of the lowest letters.
    """
    ids = zip(words, _ids(tokenizer, [*words]), strict=True)
    units = {word: [*_symbols(tokenizer, i)] for word, i in ids if tokenizer.unk_id not in i}
    symbols = {one for unit in units.values() for one in unit}
    spelt = sorted(one for one in symbols if tokenizer.piece_id(one[0]) is None)
    made: dict[str, Symbol] = {}
    letters: dict[Symbol, str] = {}
    for at, one in enumerate([*spelt, *sorted(symbols - {*spelt})]):
        first, second = chr(FIRST_LETTER + 2 * at), chr(FIRST_LETTER + 2 * at + 1)
        made |= {first: one, second: ("", ())}
        letters[one] = first + second if at < len(spelt) else first
    texts = {word: "".join(letters[one] for one in unit) for word, unit in units.items()}
    most, fewest = (sum(map(len, texts.values())), 1) if count is None else (2 * count, 2)
    options: dict[str, Any] = {"vocab_size": len(made) + most, "min_frequency": fewest}
    library = tokenizers.Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(show_progress=False, **options)
    repeated = (text for word, text in texts.items() for _ in range(words[word]))
    library.train_from_iterator(repeated, trainer)
    joined: dict[str, tuple[int, ...]] = {}
    merges: list[tuple[str, str]] = []
    for left, right in json.loads(library.to_str())["model"]["merges"]:
        if len(joined) == count:
            break
        (name, ids), (rest, others) = made[left], made[right]
        made[left + right] = (name + rest, ids + others)
        if rest:  # else the two letters of a character, which takes no merge
            merges.append((name, rest))
        if tokenizer.piece_id(name + rest) is None:
            joined.setdefault(name + rest, ids + others)
    return joined, merges


def _ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """The ids of each word inside of a text."""
    before, *after = tokenizer.encode_arrays([ANCHOR, *(ANCHOR + word for word in words)], 1)
    size = len(before)
    return [
        ids[size:].tolist() if np.array_equal(ids[:size], before) else tokenizer.encode(word)
        for word, ids in zip(words, after, strict=True)
    ]


def _symbols(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[Symbol]:
    """The pieces of a word with these ids, and the characters that it spells in bytes."""
    own, spelt = (), b""
    for i in ids:
        own, name = (*own, i), tokenizer.piece_name(i) or ""
        if name in BYTE_NAMES:
            spelt += bytes([BYTE_NAMES.index(name)])
            name = spelt.decode(errors="ignore")
        if name:
            yield name, own
            own, spelt = (), b""
