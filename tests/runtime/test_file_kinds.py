"""Files of another kind than their name says, in every reader: each is named with the way out."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
import zstandard
from pyarrow import parquet
from safetensors.torch import save

from minimind.architecture.select import hugging_face
from minimind.data.prepare.chat_tokenizer import read_template
from minimind.data.text.documents import Rejection
from minimind.data.text.formats import segments_of
from minimind.data.tokenizer.load import load_tokenizer
from minimind.errors import CheckpointError, DataError, UsageError
from minimind.inference.prompts import read_text
from minimind.interop.foreign_config import ShapeFlags, read_llama_config, read_minimind2_config
from minimind.interop.tensor_sources import open_tensors
from minimind.runtime.file_kinds import kind_of_content
from tests.data.text.reading import read

LINES = b'{"text": "one"}\n{"text": "two"}\n'
OID = "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
TABLE = pyarrow.table({"text": ["one", "two"]})


def _zip(name: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(name, LINES)
    return packed.getvalue()


def _tar() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        about = tarfile.TarInfo("a.jsonl")
        about.size = len(LINES)
        archive.addfile(about, io.BytesIO(LINES))
    return packed.getvalue()


def _into(write: Callable[[Any], object]) -> bytes:
    content = io.BytesIO()
    write(content)
    return content.getvalue()


def _torch(legacy: bool) -> bytes:
    values = {"a": torch.zeros(2)}
    return _into(lambda to: torch.save(values, to, _use_new_zipfile_serialization=not legacy))


def _arrow(new: Any) -> bytes:
    def write(to: Any) -> None:
        with new(to, TABLE.schema) as writer:
            writer.write_table(TABLE)

    return _into(write)


# By what messages call it.
CONTENTS: dict[str, list[bytes]] = {
    "a Git LFS pointer": [f"version https://git-lfs.github.com/spec/v1\n{OID}".encode()],
    "a git-annex pointer": [b"/annex/objects/SHA256E-s5--abc.jsonl\n", b"../.git/annex/objects/a"],
    "a page of HTML": [
        b"<!DOCTYPE html>\n<html><body>404</body></html>\n",
        b"\n\n  <HTML lang='en'>\n<head></head>",
        b"\xef\xbb\xbf<!doctype HTML><title>Sign in</title>",
        b"<!-- a page -->\n<!doctype html>",
        b"<center><h1>502 Bad Gateway</h1></center>",
    ],
    "XML": [b'<?xml version="1.0"?>\n<rss></rss>', b"<ListBucketResult><Name>b</Name>"],
    "an error message": [
        b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>',
        b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>\n",
        b"Entry not found",
        b"404: Not Found",
        b"Invalid username or password.",
        b"Access to dataset a/b is restricted. You must be authenticated to access it.",
        b"Bad Gateway\n",
        b"Forbidden",
        b"File not found.\n",
    ],
    "UTF-16": [LINES.decode().encode("utf-16"), b"\xfe\xff" + LINES.decode().encode("utf-16-be")],
    "UTF-16 without a byte order mark": [
        LINES.decode().encode("utf-16-le"),
        LINES.decode().encode("utf-16-be"),
    ],
    "UTF-32": [LINES.decode().encode("utf-32")],
    "gzip": [gzip.compress(LINES, mtime=0)],
    "zstd": [
        zstandard.compress(LINES),
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstandard.compress(LINES),
    ],
    "bzip2": [bz2.compress(LINES), bz2.compress(b"")],
    "xz": [lzma.compress(LINES)],
    "a zip archive": [_zip("a.jsonl")],
    "a tar archive": [_tar()],
    "a file of torch.save": [_torch(legacy=False)],
    "Parquet": [_into(lambda to: parquet.write_table(TABLE, to))],
    "Arrow": [_arrow(pyarrow.ipc.new_file), _arrow(pyarrow.ipc.new_stream)],
    "a PDF": [b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n"],
    "GGUF": [b"GGUF\3\0\0\0" + b"\0" * 40],
    "safetensors": [save({"a": torch.zeros(2)})],
    "a pickle of Python": [
        _torch(legacy=True),
        *(pickle.dumps({"a": [1, "b"]}, protocol) for protocol in (2, 3, 4, 5)),
        *(pickle.dumps([1, 2], protocol) for protocol in (2, 4)),
    ],
    "a vocabulary of tiktoken": [b"IQ== 0\nIg== 1\nIw== 2\n"],
    "one JSON list over many lines": [
        json.dumps([{"text": "one"}, {"text": "two"}], indent=2).encode(),
        b'[{"text": "one"},\n {"text": "two"}]\n',
        b'\n[\n{"text": "one"},\n{"text": "two"}\n]\n',
    ],
}
LIST = "one JSON list over many lines"
TEXTS = {"a page of HTML", "XML", "a vocabulary of tiktoken", LIST}


def _rejected(path: Path) -> str:
    """What is said of a file of text as a whole, or of its first line."""
    try:
        (first, *_) = read(path)
    except DataError as error:
        return str(error)
    assert isinstance(first, Rejection)
    return str(first)


def _refused(path: Path, load: Callable[[], object]) -> str:
    with pytest.raises((DataError, CheckpointError, UsageError)) as caught:
        load()
    assert str(path) in str(caught.value)
    return str(caught.value)


READERS: dict[str, Callable[[Path], str]] = {
    "a.jsonl": _rejected,
    "a.jsonl.gz": _rejected,
    "a.jsonl.zst": _rejected,
    "a.txt": _rejected,
    "a.parquet": lambda path: _refused(path, lambda: segments_of(path, 10**9)),
    "config.json": lambda path: _refused(path, lambda: read_llama_config(path, {}, ShapeFlags())),
    "config.json of MiniMind2": lambda path: _refused(
        path, lambda: read_minimind2_config(path, {}, ShapeFlags())
    ),
    "config.json of hf:": lambda path: _refused(path, lambda: hugging_face(path)),
    "tokenizer.json": lambda path: _refused(path, lambda: load_tokenizer(path)),
    "tokenizer.model": lambda path: _refused(path, lambda: load_tokenizer(path)),
    "model.safetensors": lambda path: _refused(path, lambda: open_tensors(path)),
    "model.safetensors.index.json": lambda path: _refused(path, lambda: open_tensors(path.parent)),
    "pytorch_model.bin": lambda path: _refused(path, lambda: open_tensors(path)),
}
OWN = {  # what a reader reads
    "a.jsonl.gz": "gzip",
    "a.jsonl.zst": "zstd",
    "a.parquet": "Parquet",
    "model.safetensors": "safetensors",
    "pytorch_model.bin": "a file of torch.save",
}
PAIRS = [
    (kind, reader)
    for kind in CONTENTS
    for reader in READERS
    if OWN.get(reader) != kind
    and not (reader == "a.txt" and kind in TEXTS)
    and not ("json" in reader and reader[:2] != "a." and kind == LIST)  # JSON, and no object
]


@pytest.mark.parametrize(("kind", "reader"), PAIRS)
def test_it_is_named_with_the_way_out(kind: str, reader: str, tmp_path: Path):
    path = tmp_path / reader.split(" ")[0]
    for content in CONTENTS[kind]:
        found = kind_of_content(content)
        assert found is not None
        assert found.name == kind
        path.write_bytes(content)
        report = READERS[reader](path)
        if (kind, reader) == ("GGUF", "pytorch_model.bin"):  # which is written here
            assert "is GGUF, which this program writes but does not read; name what" in report
        else:
            assert f"is {kind}" in report
            assert found.remedy in report


def test_a_sentencepiece_model_elsewhere(tiny_tokenizer: bytes, tmp_path: Path):
    content = tiny_tokenizer
    for reader in ("a.jsonl", "a.parquet", "config.json", "tokenizer.json", "model.safetensors"):
        path = tmp_path / reader
        path.write_bytes(content)
        assert "is a SentencePiece model" in READERS[reader](path)
        path.unlink()


def test_inside_a_packed_file(tmp_path: Path):
    for kind in ("a page of HTML", "UTF-16", "one JSON list over many lines", "a Git LFS pointer"):
        for content in CONTENTS[kind]:
            (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
            assert f"the file is {kind}; " in _rejected(tmp_path / "a.jsonl.gz")


def test_a_file_of_a_dataset(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["one"]}).save_to_disk(tmp_path / "set")
    (arrow,) = (tmp_path / "set").glob("*.arrow")
    arrow.write_bytes(CONTENTS["a Git LFS pointer"][0])
    report = _refused(arrow, lambda: segments_of(tmp_path / "set", 10**9))
    assert f"{arrow}: is a Git LFS pointer; fetch the file itself" in report


def test_a_template_and_what_is_beside_a_tokenizer(tiny_tokenizer: bytes, tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizer)
    for name in ("chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"):
        for kind in ("a Git LFS pointer", "UTF-16", "gzip"):
            (tmp_path / name).write_bytes(CONTENTS[kind][0])
            report = _refused(tmp_path / name, lambda: load_tokenizer(tmp_path))
            assert f"{tmp_path / name}: is {kind} (" in report
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x\x9c is a letter and no stream",
        b"x^2 + y^2",
        b"x\xda" + b"?" * 50,
        b"BZh is no archive",
        b"[1, 2]\n[3]\n",
        b'["text"]\n',
        b"[ x\n",
        b"\xff\xfe",
        b"\xff\xfe\xff\xff",
        b"\xff" * 64,
        b"a\0b\0",
        b"\0" * 100,
        b"version 1 of a text",
        b"PK means a penalty kick",
        "春眠不覺曉\n處處聞啼鳥\n".encode(),
        b"\x80 is no pickle",
        b"Rarely",
        b"<|im_start|>user",
        b"< 3",
        b"500 Days of Summer",
        b"Not found guilty",
        b"one\r\ntwo\r\n",
        b"one\ntwo\r",
        b"ORDER BY",
        b"\n\x0e\n\x05<s>",
    ],
)
def test_other_content_is_not_named(content: bytes):
    assert kind_of_content(content) is None


@pytest.mark.parametrize("content", [b'{"text": "a\rb"}\n', b'{"error": 1}\n[1]\n', b'{"n": "\r'])
def test_json_is_not_named_otherwise(content: bytes):
    assert kind_of_content(content, "JSON") is None


def test_prompts_and_a_template_of_flags(tmp_path: Path):
    for kind in ("UTF-16", "gzip", "zstd", "a zip archive"):
        (tmp_path / "a").write_bytes(CONTENTS[kind][0])
        report = _refused(tmp_path / "a", lambda: read_text(str(tmp_path / "a"), "--prompts"))
        assert f"is {kind}, not text; " in report
        report = _refused(tmp_path / "a", lambda: read_template(str(tmp_path / "a")))
        assert f"cannot be read (it is {kind} (" in report


@pytest.mark.parametrize("kind", sorted(TEXTS))
def test_a_text_may_be_of_such_a_kind(kind: str, tmp_path: Path):
    """Its own fault is told, not that it is a page."""
    for content in CONTENTS[kind]:
        (tmp_path / "a.txt").write_bytes(content.removeprefix(b"\xef\xbb\xbf") + b"\0")
        assert "holds a NUL byte" in _rejected(tmp_path / "a.txt")


def test_good_lines_are_read_whatever_they_begin_with(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(LINES + b"<!doctype html>\n")
    *_, bad = read(tmp_path / "a.jsonl")
    assert "is not JSON (" in str(bad)
    for content in (b"<html>a page</html>", b"[\n1\n]", b"IQ== 0\nIg== 1\n", b"x^2"):
        (tmp_path / "a.txt").write_bytes(content)
        assert read(tmp_path / "a.txt") == [content.decode()]
