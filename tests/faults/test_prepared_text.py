"""Bits and cuts of prepared text and of the cache, with times kept: caught, or harmless."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minimind.train as training
from minimind.cli.main import main
from minimind.data.prepare.prepare import PrepareRequest, prepare_for_run
from minimind.data.prepare.prepared import Prepared, open_text
from minimind.data.prepare.remote import local_text
from minimind.data.shards.block_sums import BLOCK_BYTES
from minimind.data.shards.manifest import require_document_ends
from minimind.data.text.inputs import Source
from minimind.errors import DataError
from minimind.runtime.object_cache import open_cache, record_path
from tests.conftest import SMALL, sentences

train: Any = training  # a package that is called like a function
ROW = 32


def change(path: Path, alter: Callable[[bytearray], Any]) -> None:
    """Alter a file and keep its times, as a disk does."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    altered = alter(content)
    path.write_bytes(content if altered is None else altered)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flip(draw: random.Random, content: bytearray) -> None:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def cut(draw: random.Random, content: bytearray) -> bytearray:
    return content[: draw.randrange(len(content))]


def seen(prepared: Prepared) -> list[Any]:
    """All that a run, its validation and its tasks take from the text."""
    require_document_ends(prepared.directory, prepared.manifest)
    found: list[Any] = [prepared.manifest["fingerprint"], prepared.tokenizer.fingerprint]
    for shards in (prepared.train, prepared.val):
        rows = shards.read_rows(np.arange(shards.rows(ROW)), ROW)
        found += [rows.tobytes(), shards.stretch(0, len(shards)).tobytes()]
        found.append(shards.document_ends().tobytes())
    return [*found, prepared.tokenizer.decode(prepared.train.stretch(0, 40).tolist())]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "t.jsonl"
    lines = (json.dumps({"text": text}, ensure_ascii=False) for text in sentences(1, 1500))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    words = [str(text), "--vocab_size", "520", "--val_fraction", "0.1", "--shard_bytes", "65536"]
    assert main(["prepare", *words, "--out", str(out)]) == 0
    return out


@pytest.fixture
def out(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "out")  # as cp -a: with times
    return tmp_path / "out"


@pytest.mark.parametrize("place", ["folder", "cache"])
def test_every_damage_is_caught_or_harmless(
    place: str, text: Path, whole: Path, tmp_path: Path, request: pytest.FixtureRequest
):
    there = tmp_path / place
    source = Source("text", (str(text),))
    asked = PrepareRequest((source,), vocab_size=520, progress=False)
    if place == "folder":
        shutil.copytree(whole, there)

    def read() -> list[Any]:
        return seen(open_text(there) if place == "folder" else prepare_for_run(asked, there))

    expected = read()
    files = sorted(path for path in there.rglob("*") if path.is_file())
    assert {"sums.bin", "train-00000.bin", "tokenizer.model"} <= {path.name for path in files}
    draw, caught = random.Random(place), 0
    for trial in range(200 if request.config.getoption("--long") else 3 * len(files)):
        path = files[trial % len(files)]
        size = path.stat().st_size
        if not size:  # a lock
            continue
        kept = path.read_bytes()
        change(path, partial(cut if trial % 4 == 3 else flip, draw))
        before = {one: one.stat().st_mtime_ns for one in there.iterdir()}
        try:
            harmless, told = read() == expected, ""
        except DataError as error:
            harmless, told = False, str(error)
            caught += 1
        assert harmless or str(there) in told, path
        assert before.keys() == {*there.iterdir()}, f"{path}: prepared anew"
        change(path, partial(lambda kept, _: kept, kept))
    assert caught > 100 or not request.config.getoption("--long")
    assert read() == expected


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_bit_in_a_shard_ends_the_run_before_the_next_save(split: str, out: Path, tmp_path: Path):
    shard = out / f"{split}-00000.bin"
    size = shard.stat().st_size
    change(shard, lambda content: content[:-7] + bytes([content[-7] ^ 1]) + content[-6:])
    flags = {**SMALL, "data_path": [str(out)], "out_dir": str(tmp_path / "run")}
    flags |= {"save_interval": 1, "max_steps": 10**4, "eval_interval": 2, "eval_rows": 10**4}
    blocks = -(-size // BLOCK_BYTES)
    with pytest.raises(DataError) as caught:
        train(flags)
    begin = (blocks - 1) * BLOCK_BYTES
    assert str(caught.value) == (
        f"{shard}: was changed after it was prepared: bytes {begin:,} to {size - 1:,} (block"
        f" {blocks} of {blocks}) are not those that were written; restore it, or delete {out} to"
        " build it again"
    )
    assert caught.value.status == 3
    if split == "val":
        assert not [*(tmp_path / "run" / "checkpoints").glob("step_00000003")]


def test_a_block_is_summed_once(out: Path, monkeypatch: pytest.MonkeyPatch):
    import minimind.data.shards.block_sums as module

    read = open_text(out).train
    rows = np.arange(read.rows(ROW))
    first = read.read_rows(rows, ROW)
    monkeypatch.setattr(module.zlib, "crc32", lambda *_: pytest.fail("summed again"))
    assert (read.read_rows(rows[::-1], ROW)[::-1] == first).all()


def test_fetched_text_that_decays_is_not_tokenized_anew(text: Path, tmp_path: Path):
    with open_cache(str(tmp_path), None) as cache:
        (path,) = map(Path, local_text([f"file://{text}"], cache))
    asked = PrepareRequest((Source("text", (str(path),)),), vocab_size=520, progress=False)
    prepare_for_run(asked, tmp_path)
    path.write_bytes(path.read_bytes().replace(b"a", b"e", 1))
    record = json.loads(record_path(path).read_bytes())
    status = path.stat()  # as if no write had been seen
    now = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    record_path(path).write_text(json.dumps({**record, "state": now}))
    with pytest.raises(DataError, match=r"was changed after it was fetched; delete .*t\.jsonl to"):
        prepare_for_run(asked, tmp_path)
