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
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

import numpy as np
import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue] (made at import)

from minimind.data.text.sample import SEED, sample
from minimind.data.tokenizer.base import Tokenizer
from minimind.data.tokenizer.bounds import require_bounded_model
from minimind.data.tokenizer.hf_export import (
    NEVER_TEXT,
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
    RESERVED_PIECES,
    SMALLEST_ALPHABET,
    SPACE_SIGN,
    TEMPLATE_KEY,
    TOKEN_ROLES,
    Piece,
    as_it_is,
    dump_json,
    escape,
    formatting_as_trained,
    piece_of,
    read_configuration,
    read_file,
    require_learnable,
    require_unicode,
    unescape,
)
from minimind.errors import DataError
from minimind.runtime import disk
from minimind.runtime.durable_files import read_small, write_whole
from minimind.runtime.file_kinds import SENTENCEPIECE, kind_of_content

CHUNK_CHARACTERS = 2**9
LONGEST_CHUNK = LONGEST_WHOLE = 2**16
CHUNK_TOKENS = 2**16
SAMPLE_BYTES = 2**24
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


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model in a `.model` file, or as `tokenizer.model` in a directory."""

    KIND = "SentencePiece"
    LONGEST_AT_ONCE = 2**23  # each byte takes up to 60 of memory

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        self.path = path / MODEL_NAME if disk.is_dir(path) else path
        self._model = read_file(self.path)
        beside = read_configuration(self.path)
        self._beside, self.templates = beside.files, beside.templates
        self.token_names = beside.token_names
        self._processor = processor = sentencepiece.SentencePieceProcessor()
        try:
            require_bounded_model(self.path, self._proto)
            processor.LoadFromSerializedProto(self._model)
            processor.id_to_piece([*range(processor.vocab_size())])  # each must be UTF-8
        # UnicodeDecodeError: a piece is not UTF-8, or an error message quotes such a piece.
        except (RuntimeError, UnicodeDecodeError, DecodeError) as error:
            kind = kind_of_content(self._model, SENTENCEPIECE)
            what = f"{kind}," if kind else "damaged, or"
            raise DataError(
                f"{self.path}: is {what} not a SentencePiece model; restore it, or delete it and"
                " remove --tokenizer to train one from the data"
            ) from error
        self.vocab_size, self.unk_id = processor.vocab_size(), processor.unk_id()
        self.bos_id, self.eos_id = processor.bos_id(), processor.eos_id()
        self.pad_id = self.eos_id if processor.pad_id() < 0 else processor.pad_id()
        if not 0 <= self.eos_id < self.vocab_size:
            raise DataError(
                f"{self.path}: has no piece for the end of a document; train it with an eos_id"
            )
        self.fingerprint = hashlib.sha256(self._model).hexdigest()
        self.is_lossless = is_plain_bpe(processor)  # such a model has all bytes

    @property
    def _proto(self) -> ModelProto:  # it cannot be pickled
        return ModelProto.FromString(self._model)

    @cached_property
    def _pairs(self) -> frozenset[str]:
        return adjacent_pairs(name.replace(SPACE_SIGN, " ") for name in normal_pieces(self._proto))

    def encode_arrays(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        """Ids of each text; see the base. Long texts are encoded in `chunks` to bound memory."""
        parts = [
            [*chunks(escape(text), self._pairs)]
            if len(text) > LONGEST_WHOLE and self.is_lossless
            else [escape(text)]
            for text in texts
        ]
        try:
            ids = iter(
                self._processor.encode(
                    [*chain.from_iterable(parts)], num_threads=threads, return_type="numpy"
                )
            )
        except (RuntimeError, TypeError):  # the library's errors for text that is not Unicode
            for text in texts:
                require_unicode(text)
            raise
        each = ([*islice(ids, len(part))] for part in parts)
        return [arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for arrays in each]

    def decode(self, ids: Iterable[int]) -> str:
        array = ids if isinstance(ids, np.ndarray) else np.fromiter(ids, np.int64)
        parts = id_chunks(array, self.pieces) if self.is_lossless else [array.tolist()]
        return unescape("".join(map(self._processor.decode, parts)))

    def special_tokens(self) -> dict[str, int]:
        return special_tokens(self._proto)

    def piece_id(self, name: str) -> int | None:
        i = self._processor.piece_to_id(name)  # the unknown id for any other
        return i if self._processor.id_to_piece(i) == name else None

    def piece_name(self, i: int) -> str | None:
        return self._processor.id_to_piece(i)

    def pieces(self) -> list[Piece]:
        return [_piece(piece.piece, piece.type) for piece in self._proto.pieces]

    def files(self) -> dict[str, bytes]:
        files = {MODEL_NAME: self._model, **self._beside}
        return files if self.is_lossless and CONFIG_NAME not in files else as_it_is(files)

    @cached_property
    def exported(self) -> dict[str, bytes]:
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


def _piece(name: str, kind: int) -> Piece:
    if kind in NEVER_TEXT:
        return Piece(FILLER if name.startswith(FILLER_PREFIX) else CONTROL)
    if kind == ModelProto.SentencePiece.BYTE:
        return Piece(BYTE, bytes([int(name[3:5], 16)]))  # <0x41>
    return piece_of(unescape(name).encode())


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
    # With bytes and specials, the characters take half of the vocabulary.
    most = max(vocab_size // 2 - RESERVED_PIECES - len(special), SMALLEST_ALPHABET)
    known = alphabet(passages, most)
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
        tokenizer = SentencePieceTokenizer(folder)
    except DataError:
        return False
    files = {path.name: read_small(path, LARGEST_FILE) for path in disk.entries(folder)}
    spec = tokenizer._proto.trainer_spec
    is_ours = all(getattr(spec, name) == value for name, value in SETTINGS.items())
    del files[MODEL_NAME]
    return is_ours and files == hugging_face_files(tokenizer._processor, files.get(JSON_NAME))


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
