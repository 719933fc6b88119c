"""Shard files against the tokens that were written, with borders in every place."""

import hashlib
import os
from contextlib import closing

import numpy as np
import pytest

from minimind.data.shards.token_shards import ShardWriter, TokenShards, token_dtype
from minimind.errors import DataError
from tests.data.made import describe, write


@pytest.mark.parametrize("shard_tokens", [1, 3, 10, 64, 1000])
@pytest.mark.parametrize(("dtype", "largest"), [("<u2", 2**16), ("<u4", 2**18)])
def test_rows_come_back_across_the_borders_of_shards(tmp_path, shard_tokens, dtype, largest):
    tokens = np.random.default_rng(1).integers(0, largest, 103)
    shards = write(tmp_path, tokens, dtype, shard_tokens)
    assert len(shards) == -(-103 // shard_tokens)
    read = TokenShards(tmp_path, "train")
    assert len(read) == 103
    for row_tokens in (1, 5, 10, 103):
        rows = read.rows(row_tokens)
        assert rows == 103 // row_tokens
        indices = np.random.default_rng(2).permutation(rows)
        expected = tokens[: rows * row_tokens].reshape(rows, row_tokens)[indices]
        result = read.read_rows(indices, row_tokens)
        assert result.dtype == np.int64
        np.testing.assert_array_equal(result, expected)


def test_a_shard_is_raw_little_endian_ids_and_its_hash_is_right(tmp_path):
    shards = write(tmp_path, np.array([1, 2, 65535, 4]), "<u2", 3)
    assert (tmp_path / "train-00000.bin").read_bytes() == bytes([1, 0, 2, 0, 255, 255])
    assert [(s["name"], s["tokens"], s["bytes"]) for s in shards] == [
        ("train-00000.bin", 3, 6),
        ("train-00001.bin", 1, 2),
    ]
    for shard in shards:
        content = (tmp_path / shard["name"]).read_bytes()
        assert shard["sha256"] == hashlib.sha256(content).hexdigest()


def test_the_dtype_is_the_smallest_that_holds_every_id():
    assert token_dtype(65536) == np.dtype("<u2")
    assert token_dtype(65537) == np.dtype("<u4")


def test_an_index_names_where_each_document_ends(tmp_path):
    with closing(ShardWriter(tmp_path, "train-00000", np.dtype("<u2"))) as writer:
        for ids, lengths in (([5, 6, 2, 2], [3, 1]), ([], []), ([7, 2], [2])):
            writer.add(np.array(ids, dtype=int), np.array(lengths, dtype=int))
        shard = writer.finish()
    assert shard
    assert (shard["tokens"], shard["documents"]) == (6, 3)
    content = (tmp_path / "train-00000.idx").read_bytes()
    assert np.frombuffer(content, "<u8").tolist() == [3, 4, 6]
    assert shard["index_sha256"] == hashlib.sha256(content).hexdigest()


def test_no_tokens_are_no_shard(tmp_path):
    with closing(ShardWriter(tmp_path, "none", np.dtype("<u2"))) as writer:
        assert writer.finish() is None
    assert list(tmp_path.iterdir()) == []
    assert write(tmp_path, np.array([], dtype=int), "<u2", 3) == []
    read = TokenShards(tmp_path, "train")
    assert len(read) == read.rows(4) == 0
    assert read.read_rows(np.array([], dtype=int), 4).shape == (0, 4)


def test_a_row_that_is_not_there_is_refused(tmp_path):
    write(tmp_path, np.arange(10), "<u2", 4)
    read = TokenShards(tmp_path, "train")
    for index in (-1, 3):
        with pytest.raises(IndexError):
            read.read_rows(np.array([0, index]), 3)


def test_a_cut_or_missing_shard_is_reported(tmp_path):
    write(tmp_path, np.arange(10), "<u2", 4)
    path = tmp_path / "train-00001.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"train-00001\.bin: has 7 bytes, its manifest says 8"):
        TokenShards(tmp_path, "train")
    path.unlink()
    with pytest.raises(DataError, match=r"train-00001\.bin: cannot be read"):
        TokenShards(tmp_path, "train")
    for content in ("{", "{}", "[]"):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(DataError, match=r"manifest\.json"):
            TokenShards(tmp_path, "train")


def test_an_id_beyond_the_vocabulary_is_reported_with_its_file_and_place(tmp_path):
    tokens = np.arange(100) % 50
    tokens[[63, 64]] = 50, 999
    shards = write(tmp_path, tokens, "<u2", 30)
    describe(tmp_path, "<u2", shards, vocab_size=50)
    read = TokenShards(tmp_path, "train")
    assert read.read_rows(np.array([11, 0, 5, 13]), 5).shape == (4, 5)
    report = r"train-00002\.bin: token 3 \(counted from 0\) is 50, and the vocabulary has 50 ids; "
    with pytest.raises(DataError, match=report):
        read.read_rows(np.array([3, 12, 0]), 5)
    with pytest.raises(DataError, match=report):
        read.read_rows(np.array([1]), 40)  # a row that lies in two shards
    describe(tmp_path, "<u2", shards, vocab_size=1000)
    assert TokenShards(tmp_path, "train").read_rows(np.array([12]), 5)[0, 4] == 999


def test_a_shard_that_was_changed_or_removed_under_the_reader_is_reported(tmp_path):
    write(tmp_path, np.arange(10), "<u2", 4)
    read = TokenShards(tmp_path, "train")
    path, other = tmp_path / "train-00001.bin", tmp_path / "other"
    content, state = path.read_bytes(), path.stat()

    def dated(file):
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))

    def restored():
        path.write_bytes(content)
        dated(path)
        read.require_unchanged()

    restored()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))
    report = r"train-00001\.bin: was changed or removed"
    with pytest.raises(DataError, match=report):
        read.require_unchanged()
    restored()
    path.write_bytes(content[:-2])
    dated(path)
    with pytest.raises(DataError, match=report):
        read.require_unchanged()
    restored()
    other.write_bytes(content)  # the same to the last byte, but another file
    dated(other)
    os.replace(other, path)
    with pytest.raises(DataError, match=report):
        read.require_unchanged()
    path.unlink()
    with pytest.raises(DataError, match=report):
        read.require_unchanged()


def test_a_row_lies_within_one_source_however_its_shards_are_cut(tmp_path):
    draw = np.random.default_rng(4)
    sources = [draw.integers(0, 9000, size) for size in (103, 7, 240)]
    cuts = [(0, [50, 53]), (1, [7]), (2, [1, 100, 139])]
    shards = []
    for source, sizes in cuts:
        for part in np.split(sources[source], np.cumsum(sizes)[:-1]):
            with closing(
                ShardWriter(tmp_path, f"train-{len(shards):05d}", np.dtype("<u2"))
            ) as writer:
                writer.add(part, np.array([len(part)]))
                made = writer.finish()
            assert made
            shards.append({**made, "source": source})
    describe(tmp_path, "<u2", shards, weights=(2.0, 1.0, 0.5))
    read = TokenShards(tmp_path, "train")
    assert (len(read), read.weights) == (350, (2.0, 1.0, 0.5))
    for row_tokens in (1, 5, 8, 60):
        rows = [
            tokens[: len(tokens) // row_tokens * row_tokens].reshape(-1, row_tokens)
            for tokens in sources
        ]
        assert read.sizes(row_tokens) == tuple(map(len, rows))
        expected = np.concatenate(rows)
        indices = draw.permutation(len(expected))
        np.testing.assert_array_equal(read.read_rows(indices, row_tokens), expected[indices])
