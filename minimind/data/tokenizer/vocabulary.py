"""Pieces of a vocabulary, its limits and special tokens; the files of a tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from minimind.errors import DataError, UsageError
from minimind.runtime import disk
from minimind.runtime.checked_json import is_deeper
from minimind.runtime.durable_files import read_small, storing, write_whole
from minimind.runtime.file_kinds import JSON_TEXT, kind_of_content

if TYPE_CHECKING:
    import numpy as np

# SentencePiece writes a space as U+2581 and cannot tell them apart when decoding. Two Unicode
# noncharacters replace it: MARK stands for U+2581, GUARD escapes MARK and GUARD in the text. All
# three take 3 bytes in UTF-8, so U+2581 keeps its size.
SPACE_SIGN, MARK, GUARD = "\u2581", "\ufdd0", "\ufdd1"
ESCAPES = {ord(SPACE_SIGN): MARK, ord(MARK): GUARD + MARK, ord(GUARD): GUARD + GUARD}
ESCAPED = re.compile(f"{GUARD}([{MARK}{GUARD}])|{MARK}")


def escape(text: str) -> str:
    """Replace every U+2581."""
    if SPACE_SIGN in text or MARK in text or GUARD in text:
        return text.translate(ESCAPES)
    return text


def unescape(text: str) -> str:
    """Undo `escape`, and turn U+2581 into the space that it stands for."""
    text = text.replace(SPACE_SIGN, " ")
    return ESCAPED.sub(lambda match: match.group(1) or SPACE_SIGN, text)


def require_unicode(text: str) -> None:
    """Raise DataError if the text cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"a text is not Unicode: a lone surrogate at character {error.start};"
            " check its encoding"
        ) from error


CONTROL, FILLER, BYTE, CHARACTER, LONGER = "control", "filler", "byte", "character", "longer"
KINDS = {
    CONTROL: "never met in text: the end of a document, padding, ...",
    FILLER: "ids that nothing uses",
    BYTE: "one byte of a character that has no piece",
    CHARACTER: "one character",
    LONGER: "several characters, or parts of them",
}
FILLER_PREFIX = "<unused_"


@dataclass(frozen=True)
class Piece:
    """Kind of an id, and the bytes of text it stands for (empty for `control` and `filler`)."""

    kind: str
    content: bytes = b""


def piece_of(content: bytes) -> Piece:
    """Return the piece of some bytes of text."""
    if len(content) == 1 and content >= b"\x80":
        return Piece(BYTE, content)
    try:
        is_character = len(content.decode()) == 1
    except UnicodeDecodeError:
        is_character = False
    return Piece(CHARACTER if is_character else LONGER, content)


def sizes(pieces: Sequence[Piece]) -> np.ndarray:
    """Bytes of text of each piece, int32 (pieces,)."""
    import numpy as np  # not needed by commands that only name the files of a tokenizer

    return np.array([len(piece.content) for piece in pieces], dtype=np.int32)


def decode_byte_level(name: str) -> bytes:
    """Bytes of a piece of a byte-level vocabulary: each letter stands for one byte.

    Printable Latin-1 letters stand for themselves; the other 68 bytes, in order, for U+0100 and on.
    """
    return b"".join(BYTE_OF_LETTER.get(letter, letter.encode()) for letter in name)


def _letters() -> dict[str, bytes]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = {chr(byte): bytes([byte]) for byte in printable}
    return letters | {chr(0x100 + at): bytes([byte]) for at, byte in enumerate(others)}


BYTE_OF_LETTER = _letters()


SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 512, 2**20
BUILT_IN = ("<unk>", "<s>", "</s>", "<pad>")
BYTE_NAMES = tuple(f"<0x{byte:02X}>" for byte in range(256))
SMALLEST_ALPHABET = 120  # leaves room for ASCII and as many merges in 512 pieces
RESERVED_PIECES = len(BUILT_IN) + len(BYTE_NAMES)


def require_learnable(vocab_size: int, special: Sequence[str] = ()) -> None:
    """Raise UsageError if such a vocabulary cannot be learnt."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise UsageError(
            f"vocab_size = {vocab_size} is less than {SMALLEST_VOCABULARY}, of which"
            f" {RESERVED_PIECES} are bytes and specials; raise --vocab_size"
        )
    if vocab_size > LARGEST_VOCABULARY:
        raise UsageError(
            f"vocab_size = {vocab_size} is more than the {LARGEST_VOCABULARY} that can be learnt;"
            " lower --vocab_size"
        )
    for at, name in enumerate(special):
        if error := name_error(name, special[:at]):
            raise UsageError(f"--special_tokens: {name!r} {error}; give another name, or remove it")
    limit = vocab_size - RESERVED_PIECES - SMALLEST_ALPHABET
    if len(special) > limit:
        raise UsageError(
            f"--special_tokens: {len(special)} are more than the {limit} that vocab_size ="
            f" {vocab_size} has room for; raise --vocab_size, or name fewer"
        )


def name_error(name: str, before: Sequence[str]) -> str:
    """Return why `name` cannot name a special token, after the names `before`; empty if it can."""
    if not name:
        return "is empty"
    if name in before:
        return "is named twice"
    if name in BUILT_IN or name in BYTE_NAMES:
        return "is built in"
    if name.startswith(FILLER_PREFIX):
        return f"begins with {FILLER_PREFIX}, the prefix of fillers"
    if len(name) == 1:
        return "is one character, which occurs in text"
    if not name.isprintable() or " " in name:
        return "holds whitespace, or a character that cannot be printed"
    if SPACE_SIGN in name:
        return "holds U+2581, which stands for a space in pieces"
    return ""


MODEL_NAME = "tokenizer.model"
JSON_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
SPECIALS_NAME = "special_tokens_map.json"
TEMPLATE_NAME = "chat_template.jinja"  # transformers' name for it
TEMPLATE_FOLDER = "additional_chat_templates"
PROCESSOR_TEMPLATE_NAME = "chat_template.json"
TEMPLATE_KEY = "chat_template"  # key of the JSON files
LISTED = "added_tokens_decoder"  # all added tokens, in a tokenizer_config.json by transformers 4
SPECIAL = {  # flags of a special token in a tokenizer.json
    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
    "special": True,
}
AS_IT_IS = "ids_of_minimind"  # key of a tokenizer_config.json that we have written
DEFAULT = "default"  # name of the template that formats conversations
TOKEN_ROLES = tuple(f"{role}_token" for role in "bos eos unk sep pad cls mask".split())
TOKENIZER_FILES = (MODEL_NAME, JSON_NAME, CONFIG_NAME, SPECIALS_NAME, TEMPLATE_NAME)
LARGEST_TEMPLATE = 2**20  # bytes
MOST_TEMPLATES = 100
DEEPEST = 100  # levels of JSON; the library reads 128
LARGEST_FILE = 2**28  # bytes; a million pieces take a tenth of it


@dataclass(frozen=True)
class ChatTemplates:
    """The chat templates of a folder by name, and the file that they are from."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""

    @property
    def default(self) -> str | None:
        """The template of conversations; None without one, or if none of several is the default."""
        return self.by_name.get(DEFAULT)


@dataclass(frozen=True)
class Configuration:
    """Content of the files next to a tokenizer."""

    files: Mapping[str, bytes]  # content by name, to be kept with the tokenizer
    values: Mapping[str, Any]  # values of its JSON files, merged like by AutoTokenizer
    templates: ChatTemplates

    @property
    def token_names(self) -> dict[str, str]:
        """Names of tokens by role, such as `bos_token`."""
        names = {}
        for role in TOKEN_ROLES:
            token = name_of(self.values.get(role))
            if isinstance(token, str):
                names[role] = token
        return names


def name_of(token: Any) -> Any:
    """A token of a configuration without its flags, if it has any."""
    return token.get("content") if isinstance(token, dict) else token


def read_configuration(path: Path) -> Configuration:
    """Read the files next to a tokenizer; raise DataError for one that cannot be read."""
    files, parsed = {}, {CONFIG_NAME: {}, SPECIALS_NAME: {}}
    for name in parsed:
        if disk.lexists(file := path.with_name(name)):
            files[name] = read_file(file)
            parsed[name] = parse_object(file, files[name])
    config, specials = parsed.values()
    if not isinstance(config.get(LISTED) or {}, dict):
        raise DataError(
            f"{path.with_name(CONFIG_NAME)}: {LISTED!r} is not an object of tokens by id; correct"
            " it, or give another tokenizer"
        )
    if LISTED in config:  # AutoTokenizer then leaves the other file unread
        files.pop(SPECIALS_NAME, None)
        specials = {}
    templates = _find_templates(path.parent, config, specials)
    if TEMPLATE_KEY in specials:  # it would win over what is written beside it
        others = {name: specials[name] for name in specials if name != TEMPLATE_KEY}
        files[SPECIALS_NAME] = dump_json(others)
    kept = dict(config)
    if templates.origin != CONFIG_NAME:
        kept.pop(TEMPLATE_KEY, None)  # it is not read
        if [*templates.by_name] == [DEFAULT]:
            files[TEMPLATE_NAME] = templates.by_name[DEFAULT].encode()
        elif templates.by_name:  # listed in a file, as folders of ours are flat
            named = [{"name": name, "template": text} for name, text in templates.by_name.items()]
            kept[TEMPLATE_KEY] = named
    if kept != config:
        files[CONFIG_NAME] = dump_json(kept)
    return Configuration(files, config | specials, templates)


def _find_templates(
    folder: Path, config: Mapping[str, Any], specials: Mapping[str, Any]
) -> ChatTemplates:
    """The chat templates that AutoTokenizer finds in a folder with these JSON files.

    The one of special_tokens_map.json, where it is read, wins over all others. Where there is none,
    that which only processors of transformers read (chat_template.json).
    """
    if TEMPLATE_KEY in specials:
        path, value = folder / SPECIALS_NAME, specials[TEMPLATE_KEY]
    else:
        path, value = folder / CONFIG_NAME, config.get(TEMPLATE_KEY)
        if (templates := _find_template_files(folder)).by_name:
            return templates
    if value is None and _is_there(path := folder / PROCESSOR_TEMPLATE_NAME):
        value = parse_object(path, read_file(path)).get(TEMPLATE_KEY) or None
    if value is None:
        return ChatTemplates()
    return ChatTemplates(_templates_by_name(path, value), path.name)


def _find_template_files(folder: Path) -> ChatTemplates:
    jinja = folder / TEMPLATE_NAME
    files = {DEFAULT: jinja} if _is_there(jinja) else {}
    more = sorted(filter(_is_there, disk.matching(folder / TEMPLATE_FOLDER, "*.jinja")))
    if len(more) > MOST_TEMPLATES:
        raise DataError(
            f"{folder / TEMPLATE_FOLDER}: has {len(more):,} templates, more than {MOST_TEMPLATES};"
            " remove those that are not needed"
        )
    files |= {file.name.removesuffix(".jinja"): file for file in more}
    origin = TEMPLATE_NAME if [*files.values()] == [jinja] else TEMPLATE_FOLDER
    return ChatTemplates({name: _read_template(file) for name, file in files.items()}, origin)


def _is_there(template: Path) -> bool:
    """Whether it is a file, or a link that leads nowhere, which is then reported."""
    return disk.lexists(template) and not disk.is_dir(template)


def _templates_by_name(path: Path, value: Any) -> dict[str, str]:
    """The templates of a JSON file: one text, or several by name."""
    if isinstance(value, str):
        return {DEFAULT: value}
    with suppress(TypeError, KeyError):  # refused below
        if not isinstance(value, dict):
            value = {one["name"]: one["template"] for one in value}
        if all(isinstance(text, str) for text in (*value, *value.values())):
            return value
    what = 'neither a text nor a list of {"name": ..., "template": ...}'
    refuse(path, f"not a configuration of a tokenizer (its {TEMPLATE_KEY} is {what})")


def _read_template(path: Path) -> str:
    """The text of a template, with universal newlines as transformers reads it."""
    content = read_file(path, LARGEST_TEMPLATE)
    kind = kind_of_content(content)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        refuse(path, f"{kind}, not a template" if kind else "not UTF-8", error)
    if kind and kind.is_pointer:
        refuse(path, f"{kind}, not a template")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_file(path: Path, most: int = LARGEST_FILE) -> bytes:
    """A file of a tokenizer; raise DataError if it cannot be read."""
    try:
        return read_small(path, most)
    except OSError as error:
        raise DataError(
            f"{path}: the tokenizer cannot be read ({error.strerror}); check the file"
        ) from error


def parse_object(path: Path, content: bytes) -> dict[str, Any]:
    """The JSON object in a file of a tokenizer; raise DataError for anything else."""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        kind = kind_of_content(content, JSON_TEXT)
        refuse(path, f"{kind}, not JSON" if kind else f"not JSON ({error})", error)
    if not isinstance(parsed, dict):
        refuse(path, "not a JSON object")
    if is_deeper(parsed, DEEPEST):
        refuse(path, f"nested deeper than {DEEPEST}")
    return parsed


def refuse(path: Path, what: str, error: BaseException | None = None) -> NoReturn:
    """Raise DataError for a file that is not what its name says."""
    raise DataError(
        f"{path}: is {what}; restore it, or write it with save_pretrained again"
    ) from error


def dump_json(values: Any, indent: int = 1) -> bytes:
    """JSON of a tokenizer's file."""
    return json.dumps(values, ensure_ascii=False, indent=indent).encode()


def as_it_is(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files, such that `load_tokenizer` reads them to the same ids beside any config.json.

    AutoTokenizer, as which it reads a folder of others, selects a class by the type of the model.
    """
    config = json.loads(files.get(CONFIG_NAME, b"{}"))
    return {**files, CONFIG_NAME: dump_json(config | {AS_IT_IS: True})}


def formatting_as_trained(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files, such that transformers formats conversations to the ids of training.

    It renders a chat template to one text and encodes that. With a template, special tokens are
    therefore matched in texts, those that a user writes too; without one they are not.
    """
    config = json.loads(files.get(CONFIG_NAME, b"{}"))
    if CONFIG_NAME not in files or not (TEMPLATE_NAME in files or config.get(TEMPLATE_KEY)):
        return dict(files)
    return {**files, CONFIG_NAME: dump_json(config | {"split_special_tokens": False})}


def with_length(files: Mapping[str, bytes], positions: Any) -> dict[str, bytes]:
    """The files, such that transformers truncates to the positions of a model where it is asked to.

    A smaller `model_max_length` stays.
    """
    if CONFIG_NAME not in files or not isinstance(positions, int):
        return dict(files)
    config = json.loads(files[CONFIG_NAME])
    given = config.get("model_max_length")
    if isinstance(given, int) and 0 < given <= positions:
        return dict(files)
    return {**files, CONFIG_NAME: dump_json(config | {"model_max_length": positions})}


def write_tokenizer(directory: str | Path, files: Mapping[str, bytes]) -> None:
    """Write each file atomically and remove those of another tokenizer."""
    directory = Path(directory)
    with storing(f"{directory}: cannot write the tokenizer", "correct the path"):
        directory.mkdir(parents=True, exist_ok=True)
        for name in TOKENIZER_FILES:
            for leftover in disk.matching(directory, f"{name}.tmp-*"):  # a killed process left it
                leftover.unlink(missing_ok=True)
            if name in files:
                write_whole(directory / name, files[name])
            else:
                (directory / name).unlink(missing_ok=True)
