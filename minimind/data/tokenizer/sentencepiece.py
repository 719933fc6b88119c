"""Lossless SentencePiece BPE tokenizer with byte fallback.

Ids: 0 unknown (never produced), 1 beginning, 2 end of a document, 3 padding, then --special_tokens,
the 256 bytes and the learnt pieces. Any text round-trips: characters without a piece become bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain, compress, pairwise
from operator import not_
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue] (made at import)

from minimind.data.text.sample import SEED, sample
from minimind.data.tokenizer.bounds import require_bounded_model
from minimind.data.tokenizer.hf_export import (
    hugging_face_files,
    is_plain_bpe,
    normal_pieces,
    special_tokens,
)
from minimind.data.tokenizer.vocabulary import (
    BYTE,
    CONFIG_NAME,
    CONTROL,
    FILLER,
    FILLER_PREFIX,
    JSON_NAME,
    LARGEST_FILE,
    MODEL_NAME,
    SPACE_SIGN,
    TEMPLATE_KEY,
    TOKEN_ROLES,
    Piece,
    as_it_is,
    dump_json,
    escape,
    formatting_as_trained,
    max_alphabet,
    piece_of,
    read_configuration,
    require_learnable,
    require_unicode,
    sizes,
    unescape,
    write_tokenizer,
)
from minimind.errors import DataError
from minimind.runtime import disk
from minimind.runtime.durable_files import read_small, write_whole
from minimind.runtime.file_kinds import SENTENCEPIECE, kind_of_content

CHUNK_CHARACTERS = 2**9
LONGEST_CHUNK = 2**16
CHUNK_TOKENS = 2**16
GROUP_CHARACTERS = 2**21  # encoded together, by all threads


def adjacent_pairs(pieces: Iterable[str]) -> frozenset[str]:
    """All pairs of adjacent characters in the pieces."""
    return frozenset(piece[at : at + 2] for piece in pieces for at in range(len(piece) - 1))


def chunks(
    text: str, pairs: frozenset[str], aim: int = CHUNK_CHARACTERS, limit: int = LONGEST_CHUNK
) -> Iterator[str]:
    """Yield chunks of about `aim` characters whose ids in a row are the ids of the whole text.

    Merges only produce pieces of the vocabulary, so none spans a pair of characters that occurs in
    no piece. A chunk ends at the first such pair after `aim`, or at `limit` (a letter repeated a
    million times): then the ids around the cut may differ, and the text still round-trips.
    """
    start, size = 0, len(text)
    while size - start > aim:
        cut, end = start + aim, min(start + limit, size)
        while cut < end and text[cut - 1 : cut + 1] in pairs:
            cut += 1
        yield text[start:cut]
        start = cut
    if start < size or not size:
        yield text[start:]


def id_chunks(ids: np.ndarray, pieces: Callable[[], Iterable[Piece]]) -> Iterator[list[int]]:
    """Split `ids` so that no character is divided; calls `pieces` only if there are several."""
    if len(ids) <= CHUNK_TOKENS:
        yield ids.tolist()
        return
    is_continuation = np.array([p.kind == BYTE and 0x80 <= p.content[0] < 0xC0 for p in pieces()])
    start, size = 0, len(ids)
    while start < size:
        end = start + CHUNK_TOKENS
        while end < size and is_continuation[ids[end]]:
            end += 1
        yield ids[start:end].tolist()
        start = end


Arrays = Callable[[list[str]], list[np.ndarray]]
WORD = re.compile(" *[^ ]+| +")  # a word and the spaces before it
MAX_CHARACTERS_PER_SPACE = 12  # a text with more per space is not looked up by words
LOOKUP_CHARACTERS = 2**18  # characters of texts that are looked up together
MIN_WORDS_PER_NEW = 4  # caching a new word costs more than merging it once
ENTRY_SIZE, CACHE_SIZE = 64, 2**23  # characters; about 20 MB


class WordCache:
    """Ids by word; used by one thread at a time."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        self._encode = partial(processor.encode, num_threads=1, return_type="numpy")
        self._ids: dict[str, bytes] = {}
        self._size = 0

    def encode(self, parts: list[str]) -> list[np.ndarray]:
        """Ids of each part, read-only int32; merged as usual if too many of its words are new.

        So the cache fills with the words of a language rather than with numbers and file names.
        """
        words = [WORD.findall(part) for part in parts]
        new = [*set(chain.from_iterable(words)).difference(self._ids)]
        if len(new) * MIN_WORDS_PER_NEW > sum(map(len, words)):
            return self._encode(parts)
        self._ids.update(zip(new, map(np.ndarray.tobytes, self._encode(new)), strict=True))
        joined = [b"".join(map(self._ids.__getitem__, part_words)) for part_words in words]
        self._size += sum(map(len, new)) + ENTRY_SIZE * len(new)
        if self._size > CACHE_SIZE:
            self._ids, self._size = {}, 0
        return [np.frombuffer(ids, np.int32) for ids in joined]


class TextEncoder:
    """Encodes texts with one model; ids do not depend on the number of threads."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        self._processor = processor
        self._lock = Lock()  # guards `_words`

    @cached_property
    def pairs(self) -> frozenset[str] | None:
        """Adjacent character pairs of all pieces; None if the model does more than merge."""
        if not is_plain_bpe(self._processor):
            return None
        return adjacent_pairs(
            piece.replace(SPACE_SIGN, " ") for piece in normal_pieces(self._processor)
        )

    @cached_property
    def _words(self) -> WordCache | None:
        """None if a piece has a space after another character."""
        if self.pairs is None or any(pair[1] == " " != pair[0] for pair in self.pairs):
            return None
        return WordCache(self._processor)

    @cached_property
    def _separator(self) -> int | None:
        """Id of NUL, which merges with nothing: no piece contains it. None as for `pairs`."""
        if self.pairs is None:
            return None
        (separator,) = self._processor.encode("\0")
        return separator

    def __reduce__(self) -> tuple[Any, ...]:
        return TextEncoder, (self._processor,)  # a lock cannot be copied

    def lists(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """Ids of each text; see `long_texts.chunks` for very long ones."""
        encode = partial(self._processor.encode, num_threads=threads)
        with _require_unicode_on_error(texts):
            return [list(chain.from_iterable(parts)) for parts in self._encode_parts(texts, encode)]

    def arrays(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        """Ids of each text as read-only int32 arrays: a tenth of the memory of lists.

        One thread at a time looks words up, holding the GIL; other threads merge without it.
        """
        with _require_unicode_on_error(texts):
            if threads > 1 or not self._lock.acquire(blocking=False):
                return self._merge(texts, threads)
            try:
                return self._look_up(texts)
            finally:
                self._lock.release()

    def _merge(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        encode = partial(self._processor.encode, num_threads=threads, return_type="numpy")
        whole = partial(self._whole, encode)
        if self._separator is None:
            return whole(texts)
        is_short = [len(text) <= CHUNK_CHARACTERS for text in texts]
        return _encode_by_kind(texts, is_short, partial(self._encode_joined, encode), whole)

    def _look_up(self, texts: Sequence[str]) -> list[np.ndarray]:
        merge = partial(self._merge, threads=1)
        if self._words is None:
            return merge(texts)
        has_words = [text.count(" ") * MAX_CHARACTERS_PER_SPACE > len(text) for text in texts]
        look_up = partial(self._whole, self._words.encode, group_characters=LOOKUP_CHARACTERS)
        return _encode_by_kind(texts, has_words, look_up, merge)

    def _encode_joined(self, encode: Arrays, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode short texts joined by NUL, which takes a fifth less time than one by one.

        They are short enough for every chunk to end below its limit, so no cut changes an id.
        """
        (ids,) = self._whole(encode, ["\0".join([*texts, ""])])
        ends = np.flatnonzero(ids == self._separator).tolist()
        if len(ends) != len(texts):  # a text contains NUL
            return self._whole(encode, texts)
        return [ids[begin + 1 : end] for begin, end in pairwise([-1, *ends])]

    def _whole(
        self, encode: Arrays, texts: Sequence[str], group_characters: int = GROUP_CHARACTERS
    ) -> list[np.ndarray]:
        parts_of = self._encode_parts(texts, encode, group_characters)
        return [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in parts_of]

    def _encode_parts(
        self,
        texts: Sequence[str],
        encode: Callable[[list[str]], list[Any]],
        group_characters: int = GROUP_CHARACTERS,
    ) -> Iterator[list[Any]]:
        """Yield per text the ids of its parts, encoded about `group_characters` at a time."""
        ids: list[Any] = []
        ends: list[int] = []
        group: list[str] = []
        size = 0
        for text in texts:
            for part in self._parts(text):
                group.append(part)
                size += len(part)
                if size >= group_characters:
                    ids += encode(group)
                    group, size = [], 0
            ends.append(len(ids) + len(group))
        ids += encode(group)
        return (ids[begin:end] for begin, end in pairwise([0, *ends]))

    def _parts(self, text: str) -> Iterable[str]:
        """Split into parts that are encoded separately."""
        if len(text) <= CHUNK_CHARACTERS or self.pairs is None:
            return (escape(text),)
        return chunks(escape(text), self.pairs)


def _encode_by_kind(
    texts: Sequence[str], is_first: list[bool], first: Arrays, second: Arrays
) -> list[np.ndarray]:
    """Encode two kinds of texts in two ways; return the arrays in the order of the texts."""
    first_ids = iter(first([*compress(texts, is_first)]))
    second_ids = iter(second([*compress(texts, map(not_, is_first))]))
    return [next(first_ids if flag else second_ids) for flag in is_first]


@contextmanager
def _require_unicode_on_error(texts: Sequence[str]) -> Iterator[None]:
    """Raise DataError for text that is not Unicode, instead of SentencePiece's own errors."""
    try:
        yield
    except (RuntimeError, TypeError):
        for text in texts:
            require_unicode(text)
        raise


SAMPLE_BYTES = 2**24
LONGEST_AT_ONCE = 2**23  # bytes of a text that is not chunked; each takes up to 60 of memory
NO_MODEL = "is not a SentencePiece model, or damaged"
SETTINGS = {  # settings of the trainer, recorded in the model
    "character_coverage": 1.0,
    "byte_fallback": True,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": 3,
    "num_threads": 1,
}
SENTENCE_CHARACTERS = 1000  # SentencePiece silently drops sentences of more than 4192 bytes

# The trainer marks unknown characters with U+2585 and skips sentences that contain it.
RESERVED = {"\u2585", "\0"}


class Tokenizer:
    """A SentencePiece model in a `.model` file, or as `tokenizer.model` in a directory."""

    KIND = "SentencePiece"
    lacks_decoder = False  # only a tokenizer.json may

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        self.path = path / MODEL_NAME if disk.is_dir(path) else path
        try:
            self._model = read_small(self.path, LARGEST_FILE)
        except OSError as error:
            raise DataError(
                f"{self.path}: the tokenizer cannot be read ({error.strerror});"
                f" name a SentencePiece model or a directory with {MODEL_NAME}"
            ) from error
        beside = read_configuration(self.path)
        self._beside, self.templates = beside.files, beside.templates
        self.token_names = beside.token_names
        self._processor = sentencepiece.SentencePieceProcessor()
        self._encoder = TextEncoder(self._processor)
        try:
            require_bounded_model(self.path, ModelProto.FromString(self._model))
            self._processor.LoadFromSerializedProto(self._model)
            self._processor.id_to_piece([*range(self.vocab_size)])  # each must be UTF-8
        # UnicodeDecodeError: a piece is not UTF-8, or an error message quotes such a piece.
        except (RuntimeError, UnicodeDecodeError, DecodeError) as error:
            kind = kind_of_content(self._model, SENTENCEPIECE)
            what = f"is {kind}, not a SentencePiece model" if kind else NO_MODEL
            raise DataError(
                f"{self.path}: {what}; restore it, or delete"
                " it and leave out --tokenizer to learn one from the data"
            ) from error
        if not 0 <= self.eos_id < self.vocab_size:
            raise DataError(
                f"{self.path}: has no piece for the end of a document; train it with an eos_id"
            )

    @property
    def vocab_size(self) -> int:
        """Number of pieces, unused ones included."""
        return self._processor.vocab_size()

    @property
    def bos_id(self) -> int:
        """Beginning of a text, never written by us; -1 if the model has none."""
        return self._processor.bos_id()

    @property
    def eos_id(self) -> int:
        """End of a document."""
        return self._processor.eos_id()

    @property
    def pad_id(self) -> int:
        """Padding; the end of a document if the model has none."""
        pad = self._processor.pad_id()
        return pad if pad >= 0 else self.eos_id

    @property
    def unk_id(self) -> int:
        """Id that stands for text the model does not know; never written if it has byte pieces."""
        return self._processor.unk_id()

    @property
    def is_lossless(self) -> bool:
        """Whether every text is known to come back: a model that only merges has all bytes."""
        return self._encoder.pairs is not None

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 hex digest of the model file."""
        return hashlib.sha256(self._model).hexdigest()

    @cached_property
    def unused(self) -> int:
        """Number of fillers: the training text had no more pieces to learn."""
        return sum(piece.kind == FILLER for piece in self.pieces())

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return self.encode_batch([text], threads=1)[0]

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """Ids of each text; they do not depend on the number of threads.

        Long texts are chunked to bound memory; see `long_texts.chunks`.
        """
        return self._encoder.lists(texts, threads)

    def encode_arrays(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        """Ids of each text as read-only int32 arrays: less memory than lists, and faster."""
        return self._encoder.arrays(texts, threads)

    @property
    def longest_at_once(self) -> int | None:
        """Limit for a text in bytes if texts are encoded whole; None if they are chunked."""
        return LONGEST_AT_ONCE if self._encoder.pairs is None else None

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids; control pieces are skipped, invalid UTF-8 becomes U+FFFD."""
        array = ids if isinstance(ids, np.ndarray) else np.fromiter(ids, np.int64)
        is_whole = self._encoder.pairs is None
        parts = [array.tolist()] if is_whole else id_chunks(array, self.pieces)
        return unescape("".join(map(self._processor.decode, parts)))

    def special_tokens(self) -> dict[str, int]:
        """Ids of the control pieces by name, without fillers."""
        return special_tokens(self._processor)

    def piece_id(self, name: str) -> int | None:
        """Id of the piece of this name; None if there is none."""
        i = self._processor.piece_to_id(name)  # the unknown id for any other
        return i if self._processor.id_to_piece(i) == name else None

    def piece_bytes(self) -> np.ndarray:
        """UTF-8 bytes of text per id, int32 (vocab_size,); 0 for control pieces.

        They add up to the size of a text, unless it contains one of the two noncharacters that
        `escaping` uses, which count twice.
        """
        return sizes(self.pieces())

    def pieces(self) -> list[Piece]:
        return [self._piece(i) for i in range(self.vocab_size)]

    def _piece(self, i: int) -> Piece:
        name = self._processor.id_to_piece(i)
        if self._processor.is_control(i) or self._processor.is_unknown(i):
            return Piece(FILLER if name.startswith(FILLER_PREFIX) else CONTROL)
        if self._processor.is_byte(i):
            return Piece(BYTE, bytes([int(name[3:5], 16)]))  # <0x41>
        return piece_of(unescape(name).encode())

    def files(self) -> dict[str, bytes]:
        """Content of its files by name."""
        files = {MODEL_NAME: self._model, **self._beside}
        return files if self.is_lossless and CONFIG_NAME not in files else as_it_is(files)

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template in the files beside it."""
        return self.templates.default

    @cached_property
    def exported(self) -> dict[str, bytes]:
        """The same files, and those that AutoTokenizer reads if they give the same ids."""
        try:
            existing = read_small(self.path.with_name(JSON_NAME), LARGEST_FILE)
        except OSError:
            existing = None
        files = {**self.files(), **hugging_face_files(self._processor, existing)}
        if JSON_NAME in files and CONFIG_NAME in self._beside:  # what it says of more than ids
            config = json.loads(self._beside[CONFIG_NAME])
            kept = {name: config[name] for name in (*TOKEN_ROLES, TEMPLATE_KEY) if config.get(name)}
            files[CONFIG_NAME] = dump_json(json.loads(files[CONFIG_NAME]) | kept)
        return formatting_as_trained(files)

    def save(self, directory: str | Path) -> None:
        """Write `exported` to a directory."""
        write_tokenizer(directory, self.exported)


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    path: Path,
    sample_bytes: int = SAMPLE_BYTES,
    seed: int = SEED,
    special: Sequence[str] = (),
) -> None:
    """Learn exactly `vocab_size` BPE pieces from a sample of the texts and write the model.

    `special` names control pieces after the built-in ones. The same texts and seed give the same
    bytes. SentencePiece needs a piece for every character in its input and so refuses Chinese verse
    at 4,096 pieces. Its input is therefore restricted to the most frequent characters, which take,
    with the bytes, half the vocabulary; other characters are encoded as bytes.
    """
    require_learnable(vocab_size, special)
    passages = [escape(passage) for passage in sample(texts, sample_bytes, seed)]
    known = alphabet(passages, max_alphabet(vocab_size, len(special)))
    sentences = list(_sentences(passages, known))
    sentences.append(" ")  # without it a Chinese text may give no piece for the space
    if len(sentences) == 1:
        raise DataError("there is no text to learn a tokenizer from; add documents with text")
    model = _train(sentences, vocab_size, special, fillers=0)
    fillers = 0
    while isinstance(model, int):  # the text is too small: fill up; again if it contains a filler
        fillers += vocab_size - model
        model = _train(sentences, vocab_size, special, fillers)
    write_whole(path, model)


def is_trained(folder: Path) -> bool:
    """Whether a folder has the files of a tokenizer that `train_tokenizer` made, as saved."""
    try:
        tokenizer = Tokenizer(folder)
    except DataError:
        return False
    files = {path.name: read_small(path, LARGEST_FILE) for path in disk.entries(folder)}
    model, processor = files.pop(MODEL_NAME), tokenizer._processor
    spec = ModelProto.FromString(model).trainer_spec
    is_ours = all(getattr(spec, name) == value for name, value in SETTINGS.items())
    return is_ours and files == hugging_face_files(processor, files.get(JSON_NAME))


def alphabet(passages: Iterable[str], size: int) -> set[str]:
    """The `size` most frequent characters, the space included."""
    count: Counter[str] = Counter()
    for passage in passages:
        count.update(passage)
    for character in (" ", *RESERVED):
        count.pop(character, None)
    by_frequency = sorted(count, key=lambda character: (-count[character], character))
    return {" ", *by_frequency[: size - 1]}


def _sentences(passages: Iterable[str], known: set[str]) -> Iterator[str]:
    """Yield runs of known characters, with newlines at the start of a sentence.

    At its end the trainer would strip them and learn no piece with a newline.
    """
    line = re.compile(r"[\r\n]*[^\r\n]+")
    unknown = set().union(*passages) - known if passages else set()
    cut = re.compile("[" + re.escape("".join(sorted(unknown))) + "]+") if unknown else None
    for passage in passages:
        for run in cut.split(passage) if cut else [passage]:
            for match in line.finditer(run):
                text = match.group()
                for start in range(0, len(text), SENTENCE_CHARACTERS):
                    yield text[start : start + SENTENCE_CHARACTERS]


def _train(
    sentences: list[str], vocab_size: int, special: Sequence[str], fillers: int
) -> bytes | int:
    """Return the model, or the largest possible vocabulary if `vocab_size` is too large."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue] (no stubs)
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            control_symbols=[*special, *(f"{FILLER_PREFIX}{i}>" for i in range(fillers))],
            minloglevel=2,
            **SETTINGS,
        )
    except RuntimeError as error:
        possible = re.search(r"Vocabulary size too high .* a value <= (\d+)", str(error))
        if not possible:
            raise
        return int(possible.group(1))
    return model.getvalue()
