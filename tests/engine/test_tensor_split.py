"""Parts of weights under tensor parallelism, without processes: runs of the whole, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minimind.engine.state import TensorSplit, layer_specs
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig

BY_ROWS, BY_COLUMNS, WHOLE = (
    f"model.layers.0.{name}.weight" for name in ("mlp.up_proj", "mlp.down_proj", "input_layernorm")
)
MATRIX = torch.arange(6 * 12, dtype=torch.float32).view(6, 12)


class Group(list[TensorSplit]):
    """The ranks of a group in one process: a gathered value is computed for each of them."""

    def __init__(self, size: int) -> None:
        shapes = {BY_ROWS: (6 // size, 12), BY_COLUMNS: (6, 12 // size)}
        super().__init__(TensorSplit(rank, size, None, shapes) for rank in range(size))

    def part(self, rank: int, name: str) -> Tensor:
        """What a rank holds of the matrix, as a vector."""
        dim = 0 if name == BY_ROWS else 1
        return MATRIX.chunk(len(self), dim)[rank].reshape(-1)

    def runs(
        self, monkeypatch: pytest.MonkeyPatch, name: str, start: int, length: int
    ) -> list[tuple[int, Tensor]]:
        """The runs of all ranks for the same elements of their parts."""
        width = 12 // len(self)
        first, last = -(-start // width), (start + length) // width
        complete = [self.part(rank, name).view(-1, width)[first:last] for rank in range(len(self))]
        monkeypatch.setattr(TensorSplit, "_gather", lambda self, values: complete)
        parts = [self.part(rank, name)[start : start + length] for rank in range(len(self))]
        pairs = zip(self, parts, strict=True)
        return [run for split, part in pairs for run in split.runs(name, start, part)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", [BY_ROWS, BY_COLUMNS])
def test_the_runs_of_a_group_are_the_whole_weight_wherever_its_partitions_were_cut(
    monkeypatch: pytest.MonkeyPatch, size: int, name: str
) -> None:
    group, length = Group(size), 72 // size
    for cut in range(length + 1):
        found = group.runs(monkeypatch, name, 0, cut)
        found += group.runs(monkeypatch, name, cut, length - cut)
        found.sort(key=lambda run: run[0])
        ends = [start + len(values) for start, values in found if len(values)]
        assert [start for start, values in found if len(values)] == [0, *ends[:-1]], cut
        assert torch.equal(torch.cat([values for _, values in found]), MATRIX.view(-1)), cut


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", [BY_ROWS, BY_COLUMNS])
def test_a_rank_reads_any_elements_of_its_part_from_the_whole_weight(size: int, name: str) -> None:
    group, length = Group(size), 72 // size
    for rank, split in enumerate(group):
        part = group.part(rank, name)
        for start in range(0, length, 5):
            for count in (1, 4, 11, length - start):
                count = min(count, length - start)
                read = split.read(lambda at, n: MATRIX.view(-1)[at : at + n], name, start, count)
                assert torch.equal(read, part[start : start + count]), (rank, start, count)


def test_whole_weights_are_their_own_run() -> None:
    split = Group(2)[1]
    assert next(split.runs(WHOLE, 3, torch.ones(2)))[0] == 3
    read = split.read(lambda at, n: torch.arange(at, at + n), WHOLE, 3, 2)
    assert torch.equal(read, torch.tensor([3, 4]))


def test_shapes_of_the_whole() -> None:
    split = Group(3)[0]
    assert split.whole_shape(BY_ROWS, (2, 12)) == [6, 12]
    assert split.whole_shape(BY_COLUMNS, (6, 4)) == [6, 12]
    assert split.whole_shape(WHOLE, (12,)) == [12]


def test_every_matrix_of_a_block_is_divided_and_no_other_weight() -> None:
    model = MiniMindForCausalLM(MiniMindConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=2))
    split = TensorSplit.of(model, 0, 2, None)
    matrices = {n for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n}
    assert set(split.shapes) == matrices
    specs: list[dict[str, Any]] = layer_specs()["layer_specs"]
    assert [spec["partition_type"] for spec in specs] == ["column", "row"]
