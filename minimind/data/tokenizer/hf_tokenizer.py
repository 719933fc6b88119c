"""The tokenizer of a tokenizer.json of Hugging Face."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers

from minimind.data.tokenizer.as_transformers import Reading, is_literal
from minimind.data.tokenizer.base import Tokenizer
from minimind.data.tokenizer.bounds import require_bounded_json
from minimind.data.tokenizer.vocabulary import (
    BYTE,
    BYTE_NAMES,
    BYTE_OF_LETTER,
    CONFIG_NAME,
    CONTROL,
    FILLER,
    FILLER_PREFIX,
    JSON_NAME,
    MODEL_NAME,
    SPECIALS_NAME,
    Piece,
    as_it_is,
    decode_byte_level,
    dump_json,
    name_of,
    parse_object,
    piece_of,
    read_configuration,
    read_file,
    refuse,
    require_unicode,
)
from minimind.errors import DataError
from minimind.runtime import disk
from minimind.runtime.durable_files import fingerprint
from minimind.runtime.panics import Panic, panics_caught
from minimind.runtime.terminal import shorten_line

# For a tokenizer.json without a tokenizer_config.json, such as GPT-2's.
KNOWN_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")
ANCHOR = "a"
MOST_IDS = 2**24  # each takes memory for its piece
SHOWN = 40  # characters of a text in a message
BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, or a directory that has one.

    Special tokens are neither added to a text nor matched in it; truncation, padding and dropout of
    the file are disabled. Whether a text round-trips depends on the file. Texts are not chunked.
    """

    KIND = "Hugging Face"
    LONGEST_AT_ONCE = 2**21  # each byte takes up to 280 of memory
    is_lossless = False  # not known

    def __init__(self, path: str | Path, reading: Reading | None = None) -> None:
        """`reading` is what AutoTokenizer makes of the directory, instead of its files."""
        path = Path(path)
        self.path = path / JSON_NAME if disk.is_dir(path) else path
        beside = read_configuration(self.path)
        if reading:
            beside = reading.beside(beside)
        content = reading.json if reading else read_file(self.path)
        self._json = parse_object(self.path, content)
        require_bounded_json(self.path, self._json)
        self._tokenizer = _load(self.path, content)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        if self.vocab_size > MOST_IDS:
            raise DataError(
                f"{self.path}: has the id {self.vocab_size - 1:,}, above the limit of {MOST_IDS:,};"
                " give another tokenizer"
            )
        self.templates, self.token_names = beside.templates, beside.token_names
        self._named = beside.values
        eos, bos, pad = map(self._special, ("eos_token", "bos_token", "pad_token"))
        self.eos_id = self._known_eos() if eos is None else eos
        self.bos_id = -1 if bos is None else bos
        self.pad_id = self.eos_id if pad is None else pad
        model = self._json["model"]
        name = model.get("unk_token")
        unk = self.piece_id(name) if isinstance(name, str) else model.get("unk_id")
        self.unk_id = -1 if unk is None else unk
        digest = hashlib.sha256(content).hexdigest()
        self.fingerprint = fingerprint([digest, self.bos_id, self.eos_id, self.pad_id])
        files = {JSON_NAME: content, **beside.files, **self._model_beside()}
        if CONFIG_NAME not in files:
            eos_token = self.piece_name(self.eos_id)
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token}
            config["split_special_tokens"] = True  # nor does text match special tokens here
            files[CONFIG_NAME] = dump_json(config)
        self._files = as_it_is(files)

    def _model_beside(self) -> dict[str, bytes]:
        """The SentencePiece model with the same pieces, which programs without tokenizer.json read.

        Empty if there is none.
        """
        path = self.path.with_name(MODEL_NAME)
        if not disk.lexists(path):
            return {}
        from google.protobuf.message import DecodeError
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue] (made at import)

        content = read_file(path)
        try:
            pieces = ModelProto.FromString(content).pieces
        except DecodeError:  # AutoTokenizer leaves it unread too
            return {}
        vocab = self._tokenizer.get_vocab(with_added_tokens=False)
        is_same = vocab == {piece.piece: i for i, piece in enumerate(pieces)}
        return {MODEL_NAME: content} if is_same and self.vocab_size == len(pieces) else {}

    def _special(self, role: str) -> int | None:
        """Id of the token with this role in the configuration; None if it has none."""
        token = name_of(self._named.get(role))
        if token is None:
            return None
        token_id = self.piece_id(token) if isinstance(token, str) else None
        if token_id is None:
            raise DataError(
                f"{self.path}: has no token {token!r}, the {role} of the files beside it;"
                f" correct {CONFIG_NAME} or {SPECIALS_NAME}"
            )
        return token_id

    def _known_eos(self) -> int:
        added = self._tokenizer.get_added_tokens_decoder()
        ids = [i for i, token in added.items() if token.content in KNOWN_EOS]
        if len(ids) != 1:
            raise DataError(
                f"{self.path}: no configuration names the token that ends a document; put"
                f' {{"eos_token": "..."}} into {self.path.with_name(CONFIG_NAME)}'
            )
        return ids[0]

    @contextmanager
    def _answering(self, what: str, text: str = "") -> Iterator[None]:
        """Convert errors and panics of the library, and those of text that is not Unicode."""
        try:
            with panics_caught():
                yield
        except TypeError:  # raised for a lone surrogate
            require_unicode(text)
            raise
        except Exception as error:  # the library raises plain Exception
            if type(error) not in (Exception, Panic):
                raise
            said = f"{what} {shorten_line(text[: 2 * SHOWN], SHOWN)!r}" if text else what
            raise DataError(
                f"{self.path}: the tokenizer fails {said} ({error}); give another tokenizer"
            ) from error

    @property
    def is_literal(self) -> bool:
        """Whether AutoTokenizer surely takes the file as it is; see `as_transformers`."""
        added = {token["content"]: token for token in self._json.get("added_tokens") or ()}
        return is_literal(self.path.parent, self._named, added)

    @property
    def is_exported(self) -> bool:
        """Whether `hf_export` has written the file."""
        from minimind.data.tokenizer.hf_export import escaping  # it loads SentencePiece

        return self._json.get("normalizer") == escaping()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens; raise DataError for one that it fails on."""
        with self._answering("on the text", text):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_arrays(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        # One text at a time: the library's encodings are large.
        return [np.array(self.encode(text), dtype=np.int32) for text in texts]

    @cached_property
    def _matching(self) -> tokenizers.Tokenizer:
        """The same, which matches special tokens in a text."""
        matching = _load(self.path, self._files[JSON_NAME])
        matching.encode_special_tokens = False
        return matching

    def encode_written(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a text in which special tokens are matched, int32, and where each stands in it.

        The second array is (ids, 2): begin and end in characters. Text after a special token is
        encoded as AutoTokenizer does, which may put no space before it, or drop one.
        """
        with self._answering("on the text", text):
            encoding = self._matching.encode(text, add_special_tokens=False)
        places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return np.array(encoding.ids, dtype=np.int32), places

    @cached_property
    def matched(self) -> dict[int, tokenizers.AddedToken]:
        """The special tokens by id that `encode_written` matches.

        Fillers are among them, and not the token that also stands for unknown text.
        """
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {i: token for i, token in added if token.special and i != self.unk_id}

    def decode(self, ids: Iterable[int]) -> str:
        array = ids.tolist() if isinstance(ids, np.ndarray) else [*map(int, ids)]
        with self._answering("to decode its tokens"):
            return self._tokenizer.decode(array, skip_special_tokens=True)

    @cached_property
    def drops_unknown(self) -> bool:
        """Whether a character without a piece leaves no token, and other tokens lose their place.

        Merging pieces does so without bytes for the rest and without a token for them.
        """
        model = self._json["model"]
        if model.get("type", "BPE") != "BPE" or self.unk_id >= 0:
            return False
        steps = json.dumps([self._json.get(part) for part in ("normalizer", "pre_tokenizer")])
        is_byte_level = "ByteLevel" in steps
        needed = (
            BYTE_OF_LETTER if is_byte_level else BYTE_NAMES if model.get("byte_fallback") else "a"
        )
        return not model["vocab"].keys() >= {*needed}

    @property
    def lacks_decoder(self) -> bool:
        is_byte_level = "ByteLevel" in json.dumps(self._json.get("pre_tokenizer"))
        return is_byte_level and self._json.get("decoder") is None

    def special_tokens(self) -> dict[str, int]:
        added = sorted(self._tokenizer.get_added_tokens_decoder().items())
        pieces = self.pieces()
        return {token.content: i for i, token in added if pieces[i].kind == CONTROL}

    def piece_id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)

    def piece_name(self, i: int) -> str | None:
        return self._tokenizer.id_to_token(i)

    def pieces(self) -> list[Piece]:
        pieces = [Piece(FILLER)] * self.vocab_size
        is_byte_level = "ByteLevel" in json.dumps(self._json.get("decoder"))
        with self._answering("to decode its tokens"):
            for name, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
                pieces[i] = self._piece(name, is_byte_level)
        for i, added in self._tokenizer.get_added_tokens_decoder().items():
            is_filler = added.content.startswith(FILLER_PREFIX)
            special = Piece(FILLER if is_filler else CONTROL)
            pieces[i] = special if added.special else piece_of(added.content.encode())
        if self.unk_id >= 0:
            pieces[self.unk_id] = Piece(CONTROL)
        return pieces

    def _piece(self, name: str, is_byte_level: bool) -> Piece:
        if is_byte_level:
            return piece_of(decode_byte_level(name))
        byte = BYTE_NAME.fullmatch(name)
        if byte and self._json["model"].get("byte_fallback"):
            return Piece(BYTE, bytes([int(byte[1], 16)]))
        decoder = self._tokenizer.decoder
        # The piece stands after another one, because some decoders strip the start of a text.
        text = decoder.decode([ANCHOR, name]).removeprefix(ANCHOR) if decoder else name
        return piece_of(text.encode())

    def files(self) -> dict[str, bytes]:
        return dict(self._files)


def _load(path: Path, content: bytes) -> tokenizers.Tokenizer:
    """Load with truncation, padding and dropout disabled."""
    try:
        with panics_caught():
            loaded = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises plain Exception
        refuse(path, f"not a tokenizer of Hugging Face ({error})", error)
    loaded.no_truncation()
    loaded.no_padding()
    if getattr(loaded.model, "dropout", None):
        loaded.model.dropout = None  # pyright: ignore[reportAttributeAccessIssue] (of BPE alone)
    loaded.encode_special_tokens = True
    return loaded
