"""A prepared directory against the text it was made of, and one build against the next."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minimind.data import prepare as module
from minimind.data.prepare import prepare, split_of
from minimind.data.tokenizer import Tokenizer
from minimind.errors import DataError, StorageError, UsageError

TEXTS = [f"document {i}: " + "the quick brown fox " * (i % 7 + 1) + "春眠\n" for i in range(400)]
ROOT = Path(__file__).resolve().parents[2]


def write_lines(path, texts):
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def make(paths, cache, tokenizer_path=None, vocab_size=512, val_fraction=0.1, limit=10_000):
    return prepare(
        paths,
        tokenizer_path=tokenizer_path,
        vocab_size=vocab_size,
        val_fraction=val_fraction,
        max_document_bytes=limit,
        cache_dir=cache,
        progress=True,
    )


@pytest.fixture
def corpus(tmp_path):
    return write_lines(tmp_path / "text.jsonl", TEXTS)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    """A tokenizer to give, so that most tests need not learn one."""
    place = tmp_path_factory.mktemp("given")
    return str(make([write_lines(place / "a.jsonl", TEXTS)], place / "cache").tokenizer.path)


def documents_of(prepared, split):
    shards = getattr(prepared, split)
    ids = shards.read_rows(np.arange(shards.rows(1)), 1).ravel()
    ends = np.flatnonzero(ids == prepared.tokenizer.eos_id)
    assert len(ids) == ends[-1] + 1  # each document is followed by the end
    return [prepared.tokenizer.decode(part[:-1]) for part in np.split(ids, ends[:-1] + 1)]


def names(cache):
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def no_build(*_):
    raise AssertionError("built again")


def test_the_shards_hold_every_document_in_its_split(corpus, tmp_path):
    other = tmp_path / "b.txt"
    other.write_text("a file\nis one document\n")
    prepared = make([corpus, other], tmp_path / "cache")
    texts = [*TEXTS, "a file\nis one document\n"]
    for split in ("train", "val"):
        expected = [text for text in texts if split_of(text.encode(), 0.1) == split]
        assert documents_of(prepared, split) == expected
        counts = prepared.manifest["splits"][split]
        assert counts["documents"] == len(expected)
        assert counts["tokens"] == len(getattr(prepared, split))
        assert counts["text_bytes"] == sum(len(text.encode()) for text in expected)
    assert 20 < prepared.manifest["splits"]["val"]["documents"] < 60
    manifest = prepared.manifest
    assert [(s["file"], s["documents"]) for s in manifest["sources"]] == [
        ("text.jsonl", 400),
        ("b.txt", 1),
    ]
    assert manifest["tokenizer"] == prepared.tokenizer.fingerprint
    assert manifest["fingerprint"] in prepared.directory.name
    assert (manifest["dtype"], manifest["eos_id"], manifest["vocab_size"]) == ("uint16", 2, 512)
    assert prepared.tokenizer.vocab_size == 512


def test_the_second_call_builds_nothing(corpus, tmp_path, monkeypatch):
    first = make([corpus], tmp_path / "cache")
    monkeypatch.setattr(module, "_write_tokens", no_build)
    monkeypatch.setattr(module, "train_tokenizer", no_build)
    moved = corpus.rename(tmp_path / "moved.jsonl")  # content is what counts
    second = make([moved], tmp_path / "cache")
    assert second.manifest == first.manifest
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint


def test_what_decides_the_tokens_is_in_the_key(corpus, tmp_path, tokenizer_path):
    def directory(paths=(corpus,), tokenizer=tokenizer_path, **options):
        return make(paths, tmp_path / "cache", tokenizer, **options).directory

    seen = [directory(), directory(val_fraction=0.2), directory(limit=9_999)]
    seen += [directory([corpus, corpus]), directory(tokenizer=None, vocab_size=513)]
    write_lines(corpus, [*TEXTS, "one more"])
    seen.append(directory())
    assert len(set(seen)) == len(seen)
    assert {path.name for path in seen} <= set(names(tmp_path / "cache"))


def test_held_out_documents_stay_when_others_are_added(corpus, tmp_path, tokenizer_path):
    before = make([corpus], tmp_path / "cache", tokenizer_path)
    write_lines(corpus, ["a new first one", *TEXTS[:200], "another", *TEXTS[200:]])
    after = make([corpus], tmp_path / "cache", tokenizer_path)
    new = {"a new first one", "another"}
    for split in ("train", "val"):
        kept = [text for text in documents_of(after, split) if text not in new]
        assert kept == documents_of(before, split)


def test_two_processes_at_once_build_once(corpus, tmp_path):
    code = f"""
import time
from pathlib import Path
from minimind.data import prepare as module
write = module._write_tokens
def told(*arguments):
    print("built", flush=True)
    time.sleep(0.5)  # the other one has to wait
    write(*arguments)
module._write_tokens = told
made = module.prepare([{str(corpus)!r}], tokenizer_path=None, vocab_size=512, val_fraction=0.1,
    max_document_bytes=10_000, cache_dir=Path({str(tmp_path / "cache")!r}), progress=False)
print(len(made.train), made.directory, made.tokenizer.fingerprint)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    started = [subprocess.Popen(command, **pipes) for _ in range(2)]
    ended = [process.communicate(timeout=60) for process in started]
    assert [error for _, error in ended] == ["", ""]
    said = sorted(out.splitlines() for out, _ in ended)
    assert [len(lines) for lines in said] in ([1, 2], [2, 1])
    assert said[0][-1] == said[1][-1]
    assert len(names(tmp_path / "cache")) == 2


def test_a_build_that_is_cut_leaves_nothing_and_the_next_one_cleans_up(
    corpus, tmp_path, tokenizer_path, monkeypatch
):
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_durably", no_build)  # when all but the manifest is there
        with pytest.raises(AssertionError, match="built again"):
            make([corpus], cache, tokenizer_path)
    assert names(cache) == []
    lock = next(cache.glob("*.lock"))
    leftover = cache / f"{lock.stem}.tmp-dead"  # what a killed process leaves
    leftover.mkdir()
    (leftover / "train-00000.bin").write_bytes(b"half")
    prepared = make([corpus], cache, tokenizer_path)
    assert names(cache) == [prepared.directory.name]


def test_a_mistake_in_the_text_leaves_nothing(corpus, tmp_path, tokenizer_path):
    with open(corpus, "a") as file:
        file.write('{"text": 3}\n')
    for tokenizer in (None, tokenizer_path):
        with pytest.raises(DataError, match=r"text\.jsonl:401 "):
            make([corpus], tmp_path / "cache", tokenizer)
    assert names(tmp_path / "cache") == []


def test_a_file_that_changes_while_it_is_read_is_told(
    corpus, tmp_path, tokenizer_path, monkeypatch
):
    def growing(path, limit):
        write_lines(Path(path), [*TEXTS, "more"])
        return iter(TEXTS)

    monkeypatch.setattr(module, "read_documents", growing)
    with pytest.raises(DataError, match="changed while it was read"):
        make([corpus], tmp_path / "cache", tokenizer_path)


def test_nothing_left_to_train_on_is_told(corpus, tmp_path, tokenizer_path):
    for tokenizer in (None, tokenizer_path):
        with pytest.raises(DataError, match="no document is left to train on"):
            make([corpus], tmp_path / "cache", tokenizer, val_fraction=1.0)
    prepared = make([corpus], tmp_path / "cache", tokenizer_path, val_fraction=0)
    assert len(prepared.val) == 0


def test_a_given_tokenizer_is_the_one_in_force(corpus, tmp_path, tokenizer_path):
    for path in (tokenizer_path, str(Path(tokenizer_path).parent)):
        prepared = make([corpus], tmp_path / "cache", path, vocab_size=6400)
        assert prepared.tokenizer.fingerprint == Tokenizer(tokenizer_path).fingerprint
        assert prepared.manifest["vocab_size"] == 512


def test_too_few_pieces_are_refused_before_anything_is_read(tmp_path):
    with pytest.raises(UsageError, match="vocab_size = 100"):
        make([tmp_path / "missing.jsonl"], tmp_path / "cache", vocab_size=100)


def test_a_cache_that_cannot_be_written_is_told_but_can_be_read(
    corpus, tmp_path, tokenizer_path, monkeypatch
):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="--cache_dir"):
        make([corpus], tmp_path / "file" / "cache", tokenizer_path)
    make([corpus], tmp_path / "cache", tokenizer_path)
    monkeypatch.setattr("fcntl.flock", no_build)  # no lock is needed for what is complete
    make([corpus], tmp_path / "cache", tokenizer_path)


def test_a_full_disk_is_told_and_leaves_nothing(corpus, tmp_path, tokenizer_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        make([corpus], tmp_path / "cache", tokenizer_path)
    assert names(tmp_path / "cache") == []
