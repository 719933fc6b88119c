"""What is asked of all ranks once they have met: do they see the same files?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minimind.config.parse import parse_flags
from minimind.data.rows.order import Order
from minimind.errors import DataError, StorageError
from minimind.train.build import require_same_files

PREPARED: Any = SimpleNamespace(
    manifest={"fingerprint": "text"}, tokenizer=SimpleNamespace(fingerprint="pieces")
)


class TwoHosts:
    """Rank 0 here, rank 1 on a host whose answer is given."""

    rank, world_size = 0, 2

    def __init__(self, sees: bool, text: tuple[Any, ...], numbers: dict[str, Any]) -> None:
        self.theirs = ("node2", sees, text, numbers)
        self.found_here: list[bool] = []

    def from_rank_0(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        self.found_here.append(value[1])
        return [("node1", *value[1:]), self.theirs]

    def barrier(self) -> None:
        pass


SAME = ("text", "pieces", (), {})


NUMBERS = {
    **{"batch_size": 8, "learning_rate": 5e-4, "warmup_steps": None, "weight_decay": 0.1},
    "accumulation_steps": 1,
}


def check(out_dir: Path, sees: bool = True, text: tuple[Any, ...] = SAME, **numbers: Any) -> None:
    engine: Any = TwoHosts(sees, text, NUMBERS | numbers)
    order, run = Order(64, 8, seed=0), parse_flags(["--out_dir", str(out_dir)])
    require_same_files(engine, run, PREPARED, order)
    assert engine.found_here == [True]


def test_hosts_that_share_everything_pass_and_nothing_is_left_behind(tmp_path):
    check(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_host_with_another_out_dir_is_named(tmp_path):
    with pytest.raises(StorageError, match="a different folder on node2 than on node1"):
        check(tmp_path, sees=False)
    assert list(tmp_path.iterdir()) == []


def test_a_host_with_other_text_is_named(tmp_path):
    stages = {"schedule": {"stages": [8]}}
    for number, other in ((1, "other pieces"), (2, ((3, 4),)), (3, stages)):
        text = (*SAME[:number], other, *SAME[number + 1 :])
        with pytest.raises(DataError, match="is different on node2 than on node1"):
            check(tmp_path, text=text)


def test_a_host_that_decided_another_number_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"learning_rate = 0\.002 on node2 and 0\.0005 on node1"):
        check(tmp_path, learning_rate=0.002)
