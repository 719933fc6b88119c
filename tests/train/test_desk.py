"""What a run leaves behind in its process: nothing frozen but what was before it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import minimind.train as training
from minimind.train.desk import WARM_UP, Spared

train: Any = training  # a package that is called like a function
FLAGS: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "device": "cpu", "eval_rows": 0},
    **{"save_interval": 100, "deepspeed_config": "none"},
}


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_the_first_steps_built_is_spared_and_given_back():
    spared = Spared()
    spared.settle()
    assert gc.get_freeze_count() > 0
    spared.thaw()
    assert gc.get_freeze_count() == 0


def test_what_a_notebook_froze_by_itself_stays_frozen(corpus: Path, tmp_path: Path):
    flags = {**FLAGS, "data_path": [str(corpus)], "cache_dir": str(tmp_path / "cache")}
    gc.freeze()
    assert train({**flags, "max_steps": WARM_UP + 1}, out_dir=str(tmp_path / "out")) == 0
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    assert train({**flags, "max_steps": WARM_UP + 1}, out_dir=str(tmp_path / "again")) == 0
    assert gc.get_freeze_count() == 0
