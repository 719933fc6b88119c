"""Text <-> token ids with a tokenizer.json, the file of Hugging Face's fast tokenizers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tokenizers

from minimind.data.tokenizer.escaping import require_unicode
from minimind.data.tokenizer.files import (
    CONFIG_NAME,
    JSON_NAME,
    LARGEST_FILE,
    SPECIALS_NAME,
    write_tokenizer,
)
from minimind.data.tokenizer.pieces import (
    BYTE,
    CONTROL,
    FILLER,
    FILLER_PREFIX,
    Piece,
    bytes_of_letters,
    piece_of,
    sizes,
)
from minimind.errors import DataError
from minimind.runtime.durable_files import fingerprint, read_small

# For a tokenizer.json that comes without the files that say so; GPT-2's never did.
KNOWN_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")
ANCHOR = "a"
LONGEST_AT_ONCE = 2**21  # bytes of text, each of which takes up to 280 of memory
BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")


class HuggingFaceTokenizer:
    """A tokenizer.json, or the directory that has one; the same surface as `Tokenizer`.

    Text is text: special tokens are neither added to it nor looked for in it. What the file says of
    truncation, padding and dropout is left out. Whether a text comes back as it was is up to the
    file: many normalise it. Texts are not cut into chunks, whatever their length.
    """

    KIND = "Hugging Face"
    longest_at_once = LONGEST_AT_ONCE

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        self.path = path / JSON_NAME if path.is_dir() else path
        self._files = {JSON_NAME: _content(self.path)}
        self._told = _object(self.path, self._files[JSON_NAME])
        self._tokenizer = _loaded(self.path, self._files[JSON_NAME])
        names: dict[str, Any] = {}
        for name in (SPECIALS_NAME, CONFIG_NAME):  # the latter is the newer one, and wins
            file = self.path.with_name(name)
            if file.exists():
                self._files[name] = _content(file)
                names |= _object(file, self._files[name])
        eos = self._special(names, "eos_token")
        self.eos_id: int = self._known_end() if eos is None else eos
        bos, pad = self._special(names, "bos_token"), self._special(names, "pad_token")
        self.bos_id: int = -1 if bos is None else bos
        self.pad_id: int = self.eos_id if pad is None else pad
        if CONFIG_NAME not in self._files:
            end = self._tokenizer.id_to_token(self.eos_id)
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
            config["split_special_tokens"] = True  # as here: what looks like one in a text is text
            self._files[CONFIG_NAME] = json.dumps(config, indent=1).encode()

    def _special(self, names: dict[str, Any], role: str) -> int | None:
        """The id of a token that the files beside give a role; None where they do not."""
        token = names.get(role)
        if isinstance(token, dict):  # with flags of how it is met in text
            token = token.get("content")
        if token is None:
            return None
        found = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        if found is None:
            raise DataError(
                f"{self.path}: has no token {token!r}, the {role} of the files beside it;"
                f" correct {CONFIG_NAME}"
            )
        return found

    def _known_end(self) -> int:
        added = self._tokenizer.get_added_tokens_decoder()
        found = [i for i, token in added.items() if token.content in KNOWN_ENDS]
        if len(found) != 1:
            raise DataError(
                f"{self.path}: nothing says which token ends a document; put"
                f' {{"eos_token": "..."}} into {self.path.with_name(CONFIG_NAME)}'
            )
        return found[0]

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, of added tokens too."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Sha256 hex digest of what ids depend on: the file, and which of them are special."""
        content = hashlib.sha256(self._files[JSON_NAME]).hexdigest()
        return fingerprint([content, self.bos_id, self.eos_id, self.pad_id])

    @cached_property
    def unused(self) -> int:
        """How many ids below `vocab_size` have no token, or one that only fills it."""
        return sum(piece.kind == FILLER for piece in self.pieces())

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any at its beginning or end."""
        return self.encode_batch([text], threads=1)[0]

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """Ids of each text; the same whatever the number of threads.

        With more than one, the library takes as many as RAYON_NUM_THREADS says or the machine has.
        """
        try:
            if threads == 1:
                return [self._tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
            found = self._tokenizer.encode_batch_fast([*texts], add_special_tokens=False)
        except TypeError:  # what the library says of half a character
            for text in texts:
                require_unicode(text)
            raise
        return [one.ids for one in found]

    def encode_arrays(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        """The same as int32, one text after the other: what the library holds of each is large."""
        return [np.array(self.encode(text), dtype=np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens are silent, bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def special_tokens(self) -> dict[str, int]:
        """Names of the tokens that no text is made of, each with its id."""
        added = sorted(self._tokenizer.get_added_tokens_decoder().items())
        pieces = self.pieces()
        return {token.content: i for i, token in added if pieces[i].kind == CONTROL}

    def piece_bytes(self) -> np.ndarray:
        """UTF-8 bytes of text that each id stands for: int32 (vocab_size,), 0 for special tokens.

        Over the ids of a text they add up to its size where the tokenizer loses nothing of it.
        """
        return sizes(self.pieces())

    def pieces(self) -> list[Piece]:
        """What each id stands for."""
        pieces = [Piece(FILLER)] * self.vocab_size
        is_of_bytes = "ByteLevel" in json.dumps(self._told.get("decoder"))
        for name, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            pieces[i] = self._piece(name, is_of_bytes)
        for i, added in self._tokenizer.get_added_tokens_decoder().items():
            filler = added.content.startswith(FILLER_PREFIX)
            silent = Piece(FILLER if filler else CONTROL)
            pieces[i] = silent if added.special else piece_of(added.content.encode())
        return pieces

    def _piece(self, name: str, is_of_bytes: bool) -> Piece:
        if is_of_bytes:
            return piece_of(bytes_of_letters(name))
        byte = BYTE_NAME.fullmatch(name)
        if byte and self._told["model"].get("byte_fallback"):
            return Piece(BYTE, bytes([int(byte[1], 16)]))
        decoder = self._tokenizer.decoder
        # Behind another piece, for some decoders take away what stands first in a text.
        text = decoder.decode([ANCHOR, name]).removeprefix(ANCHOR) if decoder else name
        return piece_of(text.encode())

    def files(self) -> dict[str, bytes]:
        """What it is read from, by the name each file has in a directory."""
        return dict(self._files)

    @property
    def exported(self) -> dict[str, bytes]:
        """The same files; AutoTokenizer loads them as it would the original."""
        return self.files()

    def save(self, directory: str | Path) -> None:
        """Write `exported`."""
        write_tokenizer(directory, self.exported)


def _content(path: Path) -> bytes:
    try:
        return read_small(path, LARGEST_FILE)
    except OSError as error:
        raise DataError(
            f"{path}: the tokenizer cannot be read ({error.strerror}); check the file"
        ) from error


def _object(path: Path, content: bytes) -> dict[str, Any]:
    try:
        told = json.loads(content)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"not JSON ({error})", error)
    if not isinstance(told, dict):
        _refuse(path, "no JSON object")
    return told


def _loaded(path: Path, content: bytes) -> tokenizers.Tokenizer:
    """Set so that ids depend on the text alone."""
    try:
        loaded = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library has no kind of its own for what it cannot read
        _refuse(path, f"no tokenizer of Hugging Face ({error})", error)
    loaded.no_truncation()
    loaded.no_padding()
    if getattr(loaded.model, "dropout", None):
        loaded.model.dropout = None  # pyright: ignore[reportAttributeAccessIssue] (of BPE alone)
    loaded.encode_special_tokens = True
    return loaded


def _refuse(path: Path, what: str, error: BaseException | None = None) -> NoReturn:
    raise DataError(
        f"{path}: is {what}; restore it, or write it with save_pretrained again"
    ) from error
