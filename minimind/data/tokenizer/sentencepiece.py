"""Text <-> token ids with SentencePiece: byte-pair pieces that lose nothing.

Ids: 0 unknown (never produced), 1 beginning, 2 end of a document, 3 padding, then special tokens
that were asked for, the 256 byte pieces and the learnt ones. Any text comes back as it was:
characters without a piece become bytes.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import sentencepiece

from minimind.data.text.sample import SEED, sample
from minimind.data.tokenizer.encoder import TextEncoder
from minimind.data.tokenizer.escaping import escape, unescape
from minimind.data.tokenizer.files import JSON_NAME, LARGEST_FILE, MODEL_NAME, write_tokenizer
from minimind.data.tokenizer.hf_export import hugging_face_files, special_tokens
from minimind.data.tokenizer.long_texts import runs
from minimind.data.tokenizer.pieces import (
    BYTE,
    CONTROL,
    FILLER,
    FILLER_PREFIX,
    Piece,
    piece_of,
    sizes,
)
from minimind.data.tokenizer.vocabulary import require_learnable, room_for_characters
from minimind.errors import DataError
from minimind.runtime.durable_files import read_small, write_whole

SAMPLE_BYTES = 2**24
LONGEST_AT_ONCE = 2**23  # bytes of a text that is not cut, each of which takes up to 60 of memory
SENTENCE_CHARACTERS = 1000  # SentencePiece drops sentences of more than 4192 bytes in silence

# U+2585 marks unknown characters inside the trainer, which skips sentences that have it.
RESERVED = {"\u2585", "\0"}


class Tokenizer:
    """A SentencePiece model in a `.model` file, or as `tokenizer.model` in a directory."""

    KIND = "SentencePiece"

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        self.path = path / MODEL_NAME if path.is_dir() else path
        try:
            self._model = read_small(self.path, LARGEST_FILE)
        except OSError as error:
            raise DataError(
                f"{self.path}: the tokenizer cannot be read ({error.strerror});"
                f" name a SentencePiece model or a directory with {MODEL_NAME}"
            ) from error
        self._processor = sentencepiece.SentencePieceProcessor()
        self._encoder = TextEncoder(self._processor)
        try:
            self._processor.LoadFromSerializedProto(self._model)
            self._processor.id_to_piece([*range(self.vocab_size)])  # each must be text
        # The latter of a piece that is not UTF-8, or of a message that quotes such a one.
        except (RuntimeError, UnicodeDecodeError) as error:
            raise DataError(
                f"{self.path}: is not a SentencePiece model, or damaged; restore it, or delete"
                " it and leave out --tokenizer to learn one from the data"
            ) from error
        if not 0 <= self.eos_id < self.vocab_size:
            raise DataError(
                f"{self.path}: has no piece for the end of a document; train it with an eos_id"
            )

    @property
    def vocab_size(self) -> int:
        """Pieces, unused ones included."""
        return self._processor.vocab_size()

    @property
    def bos_id(self) -> int:
        """Beginning of text; we never write it. -1 if the model has none."""
        return self._processor.bos_id()

    @property
    def eos_id(self) -> int:
        """End of a document."""
        return self._processor.eos_id()

    @property
    def pad_id(self) -> int:
        """Padding; the end of a document where a model has none."""
        pad = self._processor.pad_id()
        return pad if pad >= 0 else self.eos_id

    @cached_property
    def fingerprint(self) -> str:
        """Sha256 hex digest of the model file."""
        return hashlib.sha256(self._model).hexdigest()

    @cached_property
    def unused(self) -> int:
        """How many pieces only fill the vocabulary: the training text had no more to merge."""
        return sum(piece.kind == FILLER for piece in self.pieces())

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any at its beginning or end."""
        return self.encode_batch([text], threads=1)[0]

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """Ids of each text; the same whatever the number of threads.

        Long texts are cut into chunks, for memory; `long_texts.chunks` says what that may change.
        """
        return self._encoder.lists(texts, threads)

    def encode_arrays(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        """The same as int32, a tenth of the memory of lists, and faster where words come again."""
        return self._encoder.arrays(texts, threads)

    @property
    def longest_at_once(self) -> int | None:
        """Bytes of text that should be encoded at once at most; None where texts are cut."""
        return LONGEST_AT_ONCE if self._encoder.joined is None else None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; control pieces are silent, bytes that are not UTF-8 become U+FFFD."""
        given = ids if isinstance(ids, np.ndarray) else np.fromiter(ids, np.int64)
        parts = [given.tolist()] if self._encoder.joined is None else runs(given, self.pieces)
        return unescape("".join(map(self._processor.decode, parts)))

    def special_tokens(self) -> dict[str, int]:
        """Names of the control pieces, each with its id."""
        return special_tokens(self._processor)

    def piece_bytes(self) -> np.ndarray:
        """UTF-8 bytes of text that each id stands for: int32 (vocab_size,), 0 for control pieces.

        Over the ids of a text they add up to its size, except that the two stand-ins for U+2581,
        which Unicode bars from text that is exchanged, may count twice.
        """
        return sizes(self.pieces())

    def pieces(self) -> list[Piece]:
        """What each id stands for."""
        return [self._piece(i) for i in range(self.vocab_size)]

    def _piece(self, i: int) -> Piece:
        name = self._processor.id_to_piece(i)
        if self._processor.is_control(i) or self._processor.is_unknown(i):
            return Piece(FILLER if name.startswith(FILLER_PREFIX) else CONTROL)
        if self._processor.is_byte(i):
            return Piece(BYTE, bytes([int(name[3:5], 16)]))  # <0x41>
        return piece_of(unescape(name).encode())

    def files(self) -> dict[str, bytes]:
        """What it is read from, by the name each file has in a directory."""
        return {MODEL_NAME: self._model}

    @cached_property
    def exported(self) -> dict[str, bytes]:
        """The same, with what Hugging Face libraries load where that has the same ids."""
        try:
            beside = self.path.with_name(JSON_NAME).read_bytes()
        except OSError:  # none is there, or none for us
            beside = None
        return {**self.files(), **hugging_face_files(self._processor, beside)}

    def save(self, directory: str | Path) -> None:
        """Write `exported`."""
        write_tokenizer(directory, self.exported)


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    path: Path,
    sample_bytes: int = SAMPLE_BYTES,
    seed: int = SEED,
    special: Sequence[str] = (),
) -> None:
    """Learn exactly `vocab_size` byte-pair pieces from a sample of the texts and write them.

    `special` names are pieces behind the built-in specials, which no text is ever made of.

    The same texts give the same file. SentencePiece wants a piece for every character it is shown
    and refuses Chinese verse at 4,096 pieces, so only as many characters are shown, the most
    frequent ones, as fit half the vocabulary together with the byte pieces; the others end a
    sentence, and are written as bytes when they come up.
    """
    require_learnable(vocab_size, special)
    passages = [escape(passage) for passage in sample(texts, sample_bytes, seed)]
    known = alphabet(passages, room_for_characters(vocab_size, len(special)))
    sentences = list(_sentences(passages, known))
    sentences.append(" ")  # Chinese may have none, and without its piece a space would be 3 bytes
    if len(sentences) == 1:
        raise DataError("there is no text to learn a tokenizer from; add documents with text")
    model = _train(sentences, vocab_size, special, fillers=0)
    fillers = 0
    while isinstance(model, int):  # so many pieces at most: the text is too small for more
        fillers += vocab_size - model  # and once more if it holds a filler's name, no text any more
        model = _train(sentences, vocab_size, special, fillers)
    write_whole(path, model)


def alphabet(passages: Iterable[str], room: int) -> set[str]:
    """The `room` most frequent characters, a space always among them."""
    count: Counter[str] = Counter()
    for passage in passages:
        count.update(passage)
    for character in (" ", *RESERVED):
        count.pop(character, None)
    by_frequency = sorted(count, key=lambda character: (-count[character], character))
    return {" ", *by_frequency[: room - 1]}


def _sentences(passages: Iterable[str], known: set[str]) -> Iterator[str]:
    """What the trainer is shown: runs of known characters, newlines at the front of a sentence.

    At the end they would be stripped, and neither a newline nor two in a row would be learnt.
    """
    line = re.compile(r"[\r\n]*[^\r\n]+")
    strangers = set().union(*passages) - known if passages else set()
    cut = re.compile("[" + re.escape("".join(sorted(strangers))) + "]+") if strangers else None
    for passage in passages:
        for run in cut.split(passage) if cut else [passage]:
            for found in line.finditer(run):
                text = found.group()
                for start in range(0, len(text), SENTENCE_CHARACTERS):
                    yield text[start : start + SENTENCE_CHARACTERS]


def _train(
    sentences: list[str], vocab_size: int, special: Sequence[str], fillers: int
) -> bytes | int:
    """The model, or how many pieces are possible when `vocab_size` are too many."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue] (no stubs)
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=1.0,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            control_symbols=[*special, *(f"{FILLER_PREFIX}{i}>" for i in range(fillers))],
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        possible = re.search(r"Vocabulary size too high .* a value <= (\d+)", str(error))
        if not possible:
            raise
        return int(possible.group(1))
    return model.getvalue()
