"""Text <-> token ids with SentencePiece: byte-pair pieces that lose nothing.

Ids: 0 unknown (never produced), 1 beginning, 2 end of a document, 3 padding, then the 256 byte
pieces and the learnt ones. Any text comes back as it was: characters without a piece become bytes.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import sentencepiece

from minimind.data.sample import sample
from minimind.errors import DataError, UsageError
from minimind.files import storing, write_whole

MODEL_NAME = "tokenizer.model"
SMALLEST_VOCABULARY = 512
SPECIAL_PIECES = 4
BYTE_PIECES = 256
SMALLEST_ALPHABET = 120  # of 512 pieces 252 are left: room for ASCII and as many merges
SAMPLE_BYTES = 2**24
SENTENCE_CHARACTERS = 1000  # SentencePiece drops sentences of more than 4192 bytes in silence

# SentencePiece writes a space as U+2581 and cannot tell the two apart afterwards. Two characters
# that Unicode keeps for a program's own use stand in: MARK for U+2581, and GUARD before either of
# them where the text has it. All three take 3 bytes in UTF-8, so U+2581 keeps its size.
SPACE_SIGN, MARK, GUARD = "\u2581", "\ufdd0", "\ufdd1"
ESCAPES = {ord(SPACE_SIGN): MARK, ord(MARK): GUARD + MARK, ord(GUARD): GUARD + GUARD}
ESCAPED = re.compile(f"{GUARD}([{MARK}{GUARD}])|{MARK}")
# U+2585 marks unknown characters inside the trainer, which skips sentences that have it.
RESERVED = {"\u2585", "\0"}


class Tokenizer:
    """A SentencePiece model in a `.model` file, or as `tokenizer.model` in a directory."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        self.path = path / MODEL_NAME if path.is_dir() else path
        try:
            self._model = self.path.read_bytes()
        except OSError as error:
            raise DataError(
                f"{self.path}: the tokenizer cannot be read ({error.strerror});"
                f" name a SentencePiece model or a directory with {MODEL_NAME}"
            ) from error
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(self._model)
        except RuntimeError as error:
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
        pieces = (self._processor.id_to_piece(i) for i in self._ids(self._processor.is_control))
        return sum(piece.startswith("<unused_") for piece in pieces)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any at its beginning or end."""
        return self.encode_batch([text], threads=1)[0]

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """Ids of each text; the same whatever the number of threads."""
        escaped = [_escape(text) for text in texts]
        try:
            return self._processor.encode(escaped, num_threads=threads)
        except (RuntimeError, TypeError):  # what SentencePiece says of half a character
            for text in texts:
                _require_unicode(text)
            raise

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; control pieces are silent, bytes that are not UTF-8 become U+FFFD."""
        return _unescape(self._processor.decode([int(i) for i in ids]))

    def piece_bytes(self) -> np.ndarray:
        """UTF-8 bytes of text that each id stands for: int32 (vocab_size,), 0 for control pieces.

        Over the ids of a text they add up to its size, except that the two stand-ins for U+2581,
        which Unicode bars from text that is exchanged, may count twice.
        """
        sizes = np.zeros(self.vocab_size, dtype=np.int32)
        silent = {*self._ids(self._processor.is_control), *self._ids(self._processor.is_unknown)}
        single = self._ids(self._processor.is_byte)
        sizes[single] = 1
        for i in set(range(self.vocab_size)) - silent - set(single):
            sizes[i] = len(_unescape(self._processor.id_to_piece(i)).encode())
        return sizes

    def save(self, directory: str | Path) -> None:
        """Write `tokenizer.model`, whole or not at all."""
        directory = Path(directory)
        with storing(f"{directory}: cannot write the tokenizer", "free space, or mend the path"):
            directory.mkdir(parents=True, exist_ok=True)
            write_whole(directory / MODEL_NAME, self._model)

    def _ids(self, holds: Callable[[int], bool]) -> list[int]:
        return [i for i in range(self.vocab_size) if holds(i)]


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Learn exactly `vocab_size` byte-pair pieces from a sample of the texts and write them.

    The same texts give the same file. SentencePiece wants a piece for every character it is shown
    and refuses Chinese verse at 4,096 pieces, so only as many characters are shown, the most
    frequent ones, as fit half the vocabulary together with the byte pieces; the others end a
    sentence, and are written as bytes when they come up.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UsageError(
            f"vocab_size = {vocab_size} is less than {SMALLEST_VOCABULARY}, of which"
            f" {SPECIAL_PIECES + BYTE_PIECES} are bytes and specials; raise --vocab_size"
        )
    passages = [_escape(passage) for passage in sample(texts, SAMPLE_BYTES)]
    room = max(vocab_size // 2 - BYTE_PIECES - SPECIAL_PIECES, SMALLEST_ALPHABET)
    sentences = list(_sentences(passages, alphabet(passages, room)))
    sentences.append(" ")  # Chinese may have none, and without its piece a space would be 3 bytes
    if len(sentences) == 1:
        raise DataError("there is no text to learn a tokenizer from; add documents with text")
    model = _train(sentences, vocab_size, fillers=0)
    if isinstance(model, int):  # so many pieces at most: the text is too small for more
        model = _train(sentences, vocab_size, fillers=vocab_size - model)
    assert isinstance(model, bytes), f"{model} pieces instead of {vocab_size}"
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


def _train(sentences: list[str], vocab_size: int, fillers: int) -> bytes | int:
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
            control_symbols=[f"<unused_{i}>" for i in range(fillers)],
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        possible = re.search(r"Vocabulary size too high .* a value <= (\d+)", str(error))
        if not possible:
            raise
        return int(possible.group(1))
    return model.getvalue()


def _escape(text: str) -> str:
    present = SPACE_SIGN in text or MARK in text or GUARD in text
    return text.translate(ESCAPES) if present else text


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"a text is not Unicode: half a surrogate pair at character {error.start};"
            " check its encoding"
        ) from error


def _unescape(text: str) -> str:
    """The text itself. A U+2581 here is a space that a given model has no piece for."""
    text = text.replace(SPACE_SIGN, " ")
    return ESCAPED.sub(lambda found: found.group(1) or SPACE_SIGN, text)
