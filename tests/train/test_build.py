"""What is asked of all ranks once they have met: do they see the same out_dir?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minimind.errors import StorageError
from minimind.train.agreement import require_shared_folder


class TwoHosts:
    """Rank 0 here, rank 1 on a host whose answer is given."""

    rank, world_size = 0, 2

    def __init__(self, sees: bool) -> None:
        self.theirs = ("node2", sees)
        self.found_here: list[bool] = []

    def from_rank_0(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        self.found_here.append(value[1])
        return [("node1", *value[1:]), self.theirs]


def check(out_dir: Path, sees: bool = True) -> None:
    engine: Any = TwoHosts(sees)
    require_shared_folder(engine, out_dir)
    assert engine.found_here == [True]


def test_hosts_that_share_everything_pass_and_nothing_is_left_behind(tmp_path):
    check(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_host_with_another_out_dir_is_named(tmp_path):
    with pytest.raises(StorageError, match="a different folder on node2 than on node1"):
        check(tmp_path, sees=False)
    assert list(tmp_path.iterdir()) == []
