"""Shard files against the tokens that were written, with borders in every place."""

import hashlib
import json

import numpy as np
import pytest

from minimind.data.shards import ShardWriter, TokenShards, token_dtype
from minimind.errors import DataError


def write(directory, tokens, dtype, shard_tokens, pieces=7):
    with ShardWriter(directory, "train", np.dtype(dtype), shard_tokens) as writer:
        for part in np.array_split(tokens, pieces):
            writer.add(part.tolist())
        shards = writer.close()
    manifest = {"dtype": np.dtype(dtype).name, "splits": {"train": {"shards": shards}}}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return shards


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


def test_no_tokens_are_no_shard(tmp_path):
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


def test_a_cut_or_missing_shard_is_told(tmp_path):
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
