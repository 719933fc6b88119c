"""Conversations in rows: whole, in order, with their targets, for any length of a row."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from minimind.data.shards.conversation_shards import (
    DTYPE,
    SOURCE,
    START,
    ConversationShards,
    marked,
)
from minimind.data.shards.token_shards import ShardWriter
from minimind.errors import DataError
from tests.data.made import describe

EOS = 2
Conversation = tuple[list[int], list[bool]]


def conversation(choose: np.random.Generator, turns: int) -> Conversation:
    """A user turn and an assistant turn, some times, and the end of the document.

    Turns may hold the token that ends documents, as templates may end turns with it.
    """
    ids: list[int] = []
    targets: list[bool] = []
    for _ in range(turns):
        for is_target in (False, True):
            length = int(choose.integers(1, 6))
            ids += choose.integers(EOS, 12, length).tolist()
            targets += [is_target] * length
    return [*ids, EOS], [*targets, False]


def write(folder: Path, sources: list[list[Conversation]]) -> ConversationShards:
    """A shard for each source."""
    entries = []
    for number, conversations in enumerate(sources):
        with closing(ShardWriter(folder, f"train-{number:05d}", DTYPE)) as writer:
            for ids, targets in conversations:
                writer.add(marked(np.array(ids), np.array(targets)), np.array([len(ids)]))
            entry = writer.finish()
        entries.append({**(entry or {}), "source": number})
    describe(folder, "<u4", entries, [None] * len(sources), vocab_size=1000)
    return ConversationShards(folder, "train", EOS)


def parts_of(row: np.ndarray) -> list[Conversation]:
    """The conversations of a row; padding is left out."""
    ids, targets = np.where(row < 0, ~row % START, row), row >= 0
    starts = np.flatnonzero(~row >= START)
    assert starts[0] == 0
    parts = zip(np.split(ids, starts[1:]), np.split(targets, starts[1:]), strict=True)
    found = [(part.tolist(), marks.tolist()) for part, marks in parts]
    is_padded = set(found[-1][0]) == {EOS}
    return found[: len(found) - is_padded]


@pytest.mark.parametrize("row_tokens", [80, 121, 400])
def test_rows_hold_whole_conversations_in_order(tmp_path: Path, row_tokens: int):
    choose = np.random.default_rng(row_tokens)
    sources = [[conversation(choose, int(n)) for n in choose.integers(1, 7, 60)] for _ in (0, 1)]
    shards = write(tmp_path, sources)
    sizes = shards.sizes(row_tokens)
    rows = shards.read_rows(np.arange(shards.rows(row_tokens)), row_tokens)
    assert rows.shape == (sum(sizes), row_tokens)
    for number, (source, own) in enumerate(zip(sources, np.split(rows, [sizes[0]]), strict=True)):
        assert (~own[:, 0] // SOURCE == number).all()
        read = [part for row in own for part in parts_of(row)]
        assert read == source
        lengths = [sum(len(ids) for ids, _ in parts_of(row)) for row in own]
        firsts = [len(parts_of(row)[0][0]) for row in own]
        for length, first in zip(lengths, firsts[1:], strict=False):
            assert length + first > row_tokens  # the next one would not have fitted
    packing = shards.packing(row_tokens)
    assert (packing.conversations, packing.cut, packing.dropped) == (120, 0, 0)
    assert packing.tokens == len(shards)
    assert shards.targets(row_tokens) == sum(
        sum(targets) for source in sources for _, targets in source
    )
    stops = shards.row_stops(np.arange(len(rows)), row_tokens)
    starts = shards.row_starts(np.arange(len(rows)), row_tokens)
    for start in range(0, len(shards), 7):
        over = [n for n, (a, b) in enumerate(zip(starts, stops, strict=True)) if a <= start < b]
        assert [*shards.rows_over(start, start + 1, row_tokens)] == over


def test_a_long_conversation_is_cut_after_an_assistant_turn_or_dropped(tmp_path: Path):
    short = ([5, 6, EOS], [False, True, False])
    three_turns = ([10, 11, 12, 13, 14, 15, EOS], [False, True, True, False, False, True, False])
    no_answer = ([20, 21, 22, 23, 24, EOS], [False] * 4 + [True, False])
    shards = write(tmp_path, [[short, three_turns, no_answer, short]])
    packing = shards.packing(4)
    assert (packing.conversations, packing.cut, packing.dropped) == (4, 1, 1)
    assert shards.too_long(4) == (2,)
    rows = shards.read_rows(np.arange(3), 4).tolist()
    five, ten, padding = (~(token + START) for token in (5, 10, EOS))
    assert rows == [[five, 6, ~EOS, padding], [ten, 11, 12, padding], [five, 6, ~EOS, padding]]
    assert (packing.tokens, shards.targets(4)) == (9, 4)
    assert shards.packing(7).cut == 0
    shards = write(tmp_path, [[short], [three_turns, short], [no_answer, three_turns]])
    assert (shards.too_long(4), shards.too_long(7)) == ((0, 1, 2), (0, 0, 0))


def test_ids_come_without_marks_and_unknown_ones_are_refused(tmp_path: Path):
    shards = write(tmp_path, [[([5, 6, EOS], [False, True, False])]])
    assert shards.stretch(0, 3).tolist() == [5, 6, EOS]
    with pytest.raises(IndexError):
        shards.stretch(1, 3)
    shards = write(tmp_path, [[([5, 10**6, EOS], [False, True, False])]])
    with pytest.raises(DataError, match=r"token 1 .* is 1000000"):
        shards.read_rows(np.array([0]), 4)
