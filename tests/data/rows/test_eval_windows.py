"""Windows over documents: every token once, each predicted from what stands before it."""

import numpy as np
import pytest

from minimind.data.rows.batches import windows_of
from minimind.data.shards.token_shards import TokenShards
from minimind.errors import DataError
from tests.data.made import describe, write

EOS = 2


@pytest.mark.parametrize("length", [1, 4, 5, 100])
@pytest.mark.parametrize("apart", [True, False])
def test_every_token_is_predicted_once_from_the_one_before(tmp_path, length, apart):
    write(tmp_path, np.arange(100, 131), "<u2", 12, pieces=3)  # shards of 12, 12 and 7 tokens
    shards = TokenShards(tmp_path, "train")
    windows = windows_of(shards, length, EOS, apart)
    rows = [windows.tokens(n) for n in range(len(windows))]
    assert np.concatenate([row[1:] for row in rows]).tolist() == list(range(100, 131))
    begins = {0, *shards.document_ends().tolist()} if apart else {0}
    for row in rows:
        assert 1 <= len(row) - 1 <= length
        assert row[0] == (EOS if row[1] - 100 in begins else row[1] - 1)
        inner = {int(token) - 100 for token in row[2:]}
        assert not apart or not inner & begins  # no document reads of the one before


def test_of_a_source_so_many_windows_are_read_spread_over_it(tmp_path):
    shards = write(tmp_path, np.arange(40), "<u2", 20, pieces=2)  # documents of 10 tokens
    shards = [{**shard, "source": n} for n, shard in enumerate(shards)]
    describe(tmp_path, "<u2", shards, weights=(None, None))
    read = TokenShards(tmp_path, "train")
    windows = windows_of(read, 4, EOS, most=2)  # of six in each source
    assert windows.starts.tolist() == [8, 10, 28, 30]
    assert windows.lengths.tolist() == [2, 4, 2, 4]
    assert windows.sources.tolist() == [0, 0, 1, 1]
    assert [windows.tokens(n)[0] for n in range(4)] == [7, EOS, 27, EOS]
    for most in (1, 3, 6, 9):
        assert (
            np.bincount(windows_of(read, 4, EOS, most=most).sources).tolist() == [min(6, most)] * 2
        )
    assert windows_of(read, 4, EOS, apart=False, most=2).starts.tolist() == [0, 8, 20, 28]


def test_an_index_that_does_not_fit_its_tokens_is_reported(tmp_path):
    write(tmp_path, np.arange(40), "<u2", 20)
    read = TokenShards(tmp_path, "train")
    index = tmp_path / "train-00001.idx"
    index.write_bytes(np.array([3, 19], dtype="<u8").tobytes())
    with pytest.raises(DataError, match=r"train-00001\.idx: was changed after"):
        read.document_ends()
    index.unlink()
    with pytest.raises(DataError, match=r"train-00001\.idx: cannot be read"):
        read.document_ends()
