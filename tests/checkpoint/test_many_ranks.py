"""Checkpoints of a thousand ranks, every rank of which this process plays in turn.

As the shards of ZeRO, of stage 3 and of replicated weights divide a model, with as many elements as
fit little files: values are their own places in the model, so that each one shows where it went.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minimind.checkpoint import tensor_files
from minimind.checkpoint.tensor_files import ShardFiles, write_slices
from minimind.checkpoint.validation import shard_name
from minimind.config.optimizers import ADAM
from minimind.engine.state import MASTER, Fragment, ZeroState

SHAPES = {"embedding": (64, 61), "layer.weight": (37, 41), "layer.norm": (61,), "bias": (1,)}
SIZES = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
FIRST = dict(zip(SIZES, torch.tensor([0, *SIZES.values()]).cumsum(0).tolist(), strict=False))
TOTAL = sum(SIZES.values())
Layout = Callable[[int, int], Iterator[tuple[str, int, int]]]  # name, start and length


def one_vector(rank: int, world_size: int) -> Iterator[tuple[str, int, int]]:
    """Stages 1 and 2: equal parts of all weights in a row, the last ones padding."""
    part = -(-TOTAL // world_size)
    begin, end = rank * part, (rank + 1) * part
    for name, size in SIZES.items():
        start = max(begin - FIRST[name], 0)
        stop = min(end - FIRST[name], size)
        if start < stop:
            yield name, start, stop - start


def each_weight(rank: int, world_size: int) -> Iterator[tuple[str, int, int]]:
    """Stage 3: equal parts of every weight, the last ones padding."""
    for name, size in SIZES.items():
        part = -(-size // world_size)
        start, stop = min(rank * part, size), min((rank + 1) * part, size)
        if start < stop:
            yield name, start, stop - start


def replicated(rank: int, world_size: int) -> Iterator[tuple[str, int, int]]:
    """All of every weight, of which each rank saves a share."""
    for name, size in SIZES.items():
        yield name, 0, size


def state_of(layout: Layout, rank: int, world_size: int, filled: bool) -> ZeroState:
    """What a rank holds: places in the model, or nothing yet."""
    parts = list(layout(rank, world_size))
    owner = torch.zeros(sum(length for _, _, length in parts) or 1, requires_grad=True)
    fragments, offset = [], 0
    for name, start, length in parts:
        is_replicated = layout is replicated
        fragments.append(Fragment(name, start, length, owner, offset, is_replicated))
        offset += length
    base = torch.optim.AdamW([owner])
    if filled:
        places = [torch.arange(length) + FIRST[name] + start for name, start, length in parts]
        values = torch.cat([*places, torch.zeros(0)]).float()
        moments: dict[str, Any] = {"step": torch.tensor(7.0)}
        for number, kind in enumerate((MASTER, *ADAM)):
            target = owner.detach() if kind == MASTER else torch.zeros_like(owner.detach())
            target[: len(values)] = values + number * TOTAL
            moments |= {} if kind == MASTER else {kind: target}
        base.state[owner] = moments
    return ZeroState(base, fragments, lambda: None, lambda: None)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each shard was opened."""
    counts: Counter[str] = Counter()
    real = tensor_files.safe_open

    def counting(path: Path, **options: Any) -> Any:
        counts[Path(path).name] += 1
        return real(path, **options)

    monkeypatch.setattr(tensor_files, "safe_open", counting)
    return counts


def save(folder: Path, layout: Layout, world_size: int) -> None:
    folder.mkdir()
    for rank in range(world_size):
        slices = state_of(layout, rank, world_size, filled=True).slices(rank, world_size)
        write_slices(folder / shard_name(rank, world_size), slices)


def held(state: ZeroState) -> Iterator[tuple[str, str, int, Tensor]]:
    """Kind, name, start and values of all that a rank holds."""
    for fragment in state.fragments:
        for kind, values in state.tensors_of(fragment).items():
            yield kind, fragment.name, fragment.start, values


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "layout", [one_vector, each_weight, replicated], ids=["stage 2", "stage 3", "replicated"]
)
@pytest.mark.parametrize(("saved_by", "read_by"), [(1024, 64), (1024, 3), (64, 3), (3, 1024)])
def test_every_element_arrives_once_on_other_ranks(
    layout: Layout, saved_by: int, read_by: int, opened: Counter[str], tmp_path: Path
):
    save(tmp_path / "step", layout, saved_by)
    first = ShardFiles(tmp_path / "step", saved_by)
    first.require_whole({name: list(shape) for name, shape in SHAPES.items()})
    assert opened.total() == saved_by
    ranks = range(read_by) if layout is not replicated else range(1)  # all hold the same
    seen = {kind: torch.zeros(TOTAL, dtype=torch.int64) for kind in (MASTER, *ADAM)}
    for rank in ranks:
        opened.clear()
        state = state_of(layout, rank, read_by, filled=False)
        state.fill(ShardFiles(tmp_path / "step", saved_by, first.slices).read, 7)
        if layout is one_vector:  # a file twice is a header read twice
            assert opened.total() <= saved_by // read_by + 2
        assert max(opened.values(), default=1) == 1
        for number, kind in enumerate((MASTER, *ADAM)):
            for own, name, start, values in held(state):
                if own == kind:
                    place = FIRST[name] + start
                    expected = torch.arange(place, place + len(values)).float() + number * TOTAL
                    assert torch.equal(values.detach(), expected)
                    seen[kind][place : place + len(values)] += 1
    for counts in seen.values():
        assert counts.eq(1).all()


@pytest.mark.parametrize("layout", [one_vector, each_weight, replicated])
@pytest.mark.parametrize("world_size", [8, 64, 512, 1024])
def test_the_shards_of_all_ranks_are_disjoint_and_whole(layout: Layout, world_size: int):
    """Only keys are read. At stage 3 most ranks hold no part of a small weight."""
    counts = {kind: torch.zeros(TOTAL, dtype=torch.int64) for kind in (MASTER, *ADAM)}
    most = 0
    for rank in range(world_size):
        own = 0
        for key, values in state_of(layout, rank, world_size, True).slices(rank, world_size):
            kind, name, start = key.split("|")
            place = FIRST[name] + int(start)
            counts[kind][place : place + len(values)] += 1
            own += len(values)
        most = max(most, own)
    for found in counts.values():
        assert found.eq(1).all()
    rounded = 1 if layout is one_vector else len(SIZES)
    assert most <= 3 * (TOTAL // world_size + rounded)
