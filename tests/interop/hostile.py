"""A small Llama folder as the hub has it, and what a stranger may have done to its files."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue] (made at import)

from minimind.data.tokenizer.load import load_tokenizer
from tests.faults import tiny
from tests.model.references import as_reference, build

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '</s>' }}{% endgeneration %}"
    "{% else %}{{ '<s>' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
JSON, CONFIG = "tokenizer.json", "tokenizer_config.json"
Change = Callable[[Path], object]
ALL = ("import", "init_from", "chat", "tokenizer")
MODEL = ("import", "init_from", "chat")  # read weights too
TALK = ("chat",)  # asks for a template
TEXT = '{"text": "春眠不覺曉, a word and another"}\n'
COMMANDS = {
    "import": "import --from llama {folder} --out {out}",
    "init_from": "train --init_from {folder} --data_path {text} --out_dir {out} --cache_dir {cache}"
    " --device cpu --deepspeed_config none --dry_run",
    "chat": "chat --model {folder} --once hello --max_new_tokens 2",
    "tokenizer": "prepare {text} --tokenizer {folder} --out {out}",
}
# A bad tokenizer in a model's folder refuses the model, one of --tokenizer refuses the data.
STATUSES = {"import": {4}, "init_from": {3, 4}, "chat": {4}, "tokenizer": {3}}


@dataclass(frozen=True)
class Case:
    """A change of the folder, the file that is named, and the readers that refuse it."""

    change: Change
    named: str
    readers: tuple[str, ...] = ALL


def words(reader: str, folder: Path) -> list[str]:
    here = folder.parent
    places = {"folder": folder, "text": here / "text.jsonl", "cache": here / "cache"}
    return COMMANDS[reader].format(**places, out=here / reader).split()


def good_folder(folder: Path) -> Path:
    """A Llama with random weights, its tokenizer, templates, and files that nothing reads."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.model").write_bytes(tiny.tokenizer_bytes(folder))
    load_tokenizer(folder).save(folder)
    (folder / "tokenizer.model").unlink()
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    sizes = {"vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    as_reference(build(**sizes)).save_pretrained(folder)
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


def _instead(name: str, put: Change) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(exist_ok=True)
        put(folder / name)

    return change


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path.name)
    os.chdir(here)


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(2**34)


def _text(content: str | bytes) -> Change:
    return lambda path: path.write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def _bytes(make: Callable[[], bytes]) -> Change:
    return lambda path: path.write_bytes(make())


SPECIAL: dict[str, Change] = {
    "a pipe": os.mkfifo,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to /dev/urandom": lambda path: path.symlink_to("/dev/urandom"),
    "a link to a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a folder": lambda path: path.mkdir(),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a socket": _socket,
    "16 GiB of nothing": _sparse,
}
NESTED: dict[str, Change] = {
    "100,000 lists": _text("[" * 100_000),
    "100,000 objects": _text('{"a":' * 100_000 + "1" + "}" * 100_000),
    "900 objects": _text('{"a":' * 900 + "1" + "}" * 900),
    "150 lists in an object": _text('{"a":' + "[" * 150 + "]" * 150 + "}"),
}


def header(content: Any, size: int | None = None, data: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def empty_tensors(count: int, name: str = "t{}") -> bytes:
    about = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return header({name.format(n): about for n in range(count)})


def _json(name: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        kept = json.loads(path.read_bytes())
        path.write_text(json.dumps({**kept, **values}))

    return change


def _model(**values: Any) -> Change:
    def change(folder: Path) -> None:
        kept = json.loads((folder / JSON).read_bytes())
        _json(JSON, model={**kept["model"], **values})(folder)

    return change


def _normalizer(*steps: dict[str, Any]) -> Change:
    return _json(JSON, normalizer={"type": "Sequence", "normalizers": [*steps]})


def _replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _split(pattern: str) -> Change:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _json(JSON, pre_tokenizer=step)


def table(form: bytes) -> bytes:
    """A table of normalization without entries but with a form."""
    return struct.pack("<I", 4) + b"\0" * 4 + form + b"\0"


def _sentencepiece(edit: Callable[[Any], object]) -> Change:
    def change(folder: Path) -> None:
        other = folder / "other"
        other.mkdir()
        proto = ModelProto.FromString(tiny.tokenizer_bytes(other))
        shutil.rmtree(other)
        edit(proto)
        (folder / "tokenizer.model").write_bytes(proto.SerializeToString())

    return change


def _forms(proto: Any) -> None:
    proto.normalizer_spec.precompiled_charsmap = table(b"x" * 10**6)


def _back_forms(proto: Any) -> None:
    proto.denormalizer_spec.precompiled_charsmap = table(b"x" * 10**6)


def _unigram(proto: Any) -> None:
    proto.trainer_spec.model_type = proto.trainer_spec.UNIGRAM
    proto.pieces.add(piece="a" * 10**6, score=-1.0)


def _sharded(put: Change) -> Change:
    """The weights in two files, of which the second is replaced."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        names = sorted(tensors)
        halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, own in halves.items():
            save_file({name: tensors[name] for name in own}, folder / file)
        (folder / WEIGHTS).unlink()
        listed = {name: file for file, own in halves.items() for name in own}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))
        _instead("b.safetensors", put)(folder)

    return change


def _pickled(put: Change) -> Change:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        put(folder / "pytorch_model.bin")

    return change


def _with_template_folder(count: int) -> Change:
    def change(folder: Path) -> None:
        (folder / "additional_chat_templates").mkdir()
        for number in range(count):
            (folder / "additional_chat_templates" / f"{number}.jinja").write_text(TEMPLATE)

    return change


def _large_pickle(path: Path) -> None:
    torch.save({"a": torch.zeros(2).expand(10**9, 2)}, path)


def cases() -> dict[str, Case]:
    """By what is wrong."""
    found: dict[str, Case] = {}

    def add(name: str, change: Change, named: str, readers: tuple[str, ...] = ALL) -> None:
        found[name] = Case(change, named, readers)

    for kind, put in SPECIAL.items():
        for name in (WEIGHTS, "config.json"):
            add(f"{name} is {kind}", _instead(name, put), name, MODEL)
        for name in (JSON, "tokenizer.model", CONFIG):
            add(f"{name} is {kind}", _instead(name, put), name)
    for kind in ("a pipe", "a link to /dev/zero", "a folder"):
        put = SPECIAL[kind]
        add(f"the index is {kind}", _instead(INDEX, put), INDEX, MODEL)
        add(f"a shard is {kind}", _sharded(put), "b.safetensors", MODEL)
        add(f"pytorch_model.bin is {kind}", _pickled(put), "pytorch_model.bin", MODEL)
        add(
            f"special_tokens_map.json is {kind}",
            _instead("special_tokens_map.json", put),
            "special",
        )
    for kind in ("a pipe", "a link to /dev/zero", "a link to nothing", "16 GiB of nothing"):
        put, more = SPECIAL[kind], "additional_chat_templates/x.jinja"
        add(f"the template is {kind}", _instead("chat_template.jinja", put), "chat_template.jinja")
        add(f"another template is {kind}", _instead(more, put), more)
    for kind, put in NESTED.items():
        for name in ("config.json", INDEX):
            add(f"{name} has {kind}", _instead(name, put), name, MODEL)
        for name in (JSON, CONFIG, "special_tokens_map.json"):
            add(f"{name} has {kind}", _instead(name, put), name)

    weights: dict[str, Callable[[], bytes]] = {  # of up to 90 MB, so none before its test
        "300,000 empty tensors": lambda: empty_tensors(300_000),
        "300,000 empty layers": lambda: empty_tensors(
            300_000, "model.layers.{}.mlp.up_proj.weight"
        ),
        "60,000 empty layers": lambda: empty_tensors(60_000, "model.layers.{}.mlp.up_proj.weight"),
        "a header of 2**63 bytes": lambda: header({}, 2**63),
        "a header of 99 MB": lambda: header({}, 99_000_000),
        "a header of 90 MB of spaces": lambda: header(b"{" + b" " * 90_000_000 + b"}"),
        "a header nested 100,000 deep": lambda: header(b'{"a":' * 100_000),
        "one tensor of 2**60 numbers": lambda: header(
            {"a": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}}
        ),
    }
    for kind, make in weights.items():
        named = "config.json" if kind == "60,000 empty layers" else WEIGHTS
        add(f"the weights have {kind}", _instead(WEIGHTS, _bytes(make)), named, MODEL)
    add("a pickle that is expanded", _pickled(_large_pickle), "pytorch_model.bin", MODEL)
    add("layers of a billion", _json("config.json", num_hidden_layers=10**9), "config.json", MODEL)
    add("a vocabulary of 10**12", _json("config.json", vocab_size=10**12), "", MODEL)
    add("positions of 2**52", _json("config.json", max_position_embeddings=2**52), "", MODEL)
    add("10,000 templates", _with_template_folder(10_000), "additional_chat_templates")

    doubling = [_replace("aa", String="a")] * 60
    growing: dict[str, Change] = {
        "60 doublings": _normalizer(*doubling),
        "60 doublings by a pattern": _normalizer(*[_replace("aa", Regex="a")] * 60),
        "a chain": _normalizer(
            *(_replace(b * 9, String=a) for a, b in zip("abcdefgh", "bcdefghi", strict=True))
        ),
        "a megabyte for each letter": _normalizer(_replace("x" * 10**6, Regex=".")),
        "a megabyte at each place": _normalizer(_replace("x" * 10**6, Regex="")),
        "a megabyte beside each letter": _normalizer(_replace("x" * 10**6, Regex="(?=a)")),
        "a megabyte for nothing": _normalizer(_replace("x" * 10**6, String="")),
        "a megabyte before a text": _normalizer({"type": "Prepend", "prepend": "x" * 10**6}),
        "a nested sequence": _normalizer({"type": "Sequence", "normalizers": doubling}),
        "a table": _normalizer(
            {"type": "Precompiled", "precompiled_charsmap": b64encode(table(b"x" * 10**6)).decode()}
        ),
        "a decoder": _json(JSON, decoder={"type": "Sequence", "decoders": doubling}),
        "an unknown token of a megabyte": _model(unk_token="x" * 10**6),
        "a prefix of a megabyte": _model(continuing_subword_prefix="x" * 10**6),
    }
    slow: dict[str, Change] = {
        "nested repetitions": _split(r"(?:.{0,12}){0,12}\d|."),
        "nested repetitions of letters": _split(r"(?:\w{0,14}){0,14}!|\w"),
        "optional letters": _split(r"(?:a?b?){0,9}(?:a?){0,99}(?:a?){0,99}c|a"),
        "a piece of a megabyte": _model(type="Unigram", vocab=[["</s>", 0.0], ["a" * 10**6, -1.0]]),
        "words of any length": _model(type="WordPiece", max_input_chars_per_word=10**9),
    }
    for kind, change in growing.items():
        add(f"the tokenizer has {kind}", change, JSON)
    for number, (kind, change) in enumerate(slow.items()):  # seconds each
        add(f"the tokenizer has {kind}", change, JSON, ALL if number == 0 else ALL[3:])
    edits = {"a table": _forms, "a table to decode": _back_forms, "a long piece": _unigram}
    for kind, edit in edits.items():
        add(f"tokenizer.model has {kind}", _sentencepiece(edit), "tokenizer.model")
    return found


def _linked(folder: Path) -> None:
    blobs = folder.parent / f"{folder.name}-blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.move(path, blobs / str(number))
        path.symlink_to(blobs / str(number))


def _beside_a_model(put: Change) -> Change:
    """A tokenizer.model, and a tokenizer.json beside it that is not needed."""

    def change(folder: Path) -> None:
        _sentencepiece(lambda _: None)(folder)
        _instead(JSON, put)(folder)

    return change


HARMLESS: dict[str, Change] = {
    **{
        f"tokenizer.json beside tokenizer.model is {kind}": _beside_a_model(SPECIAL[kind])
        for kind in ("a pipe", "a link to /dev/zero", "a folder", "16 GiB of nothing")
    },
    **{
        f"{name} is {kind}": _instead(name, SPECIAL[kind])
        for name in ("generation_config.json", "vocab.json", "merges.txt", "README.md")
        for kind in ("a pipe", "a link to /dev/zero")
    },
    "links as in a hub's cache": _linked,
}
