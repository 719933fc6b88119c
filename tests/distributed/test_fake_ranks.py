"""The plan against DeepSpeed and DDP as one rank of up to 1,024: bytes sent, bytes of state.

benchmarks/fake_ranks.py plays the first and the last rank in a process group that sends nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.forking import Nursery

# test_memory.py holds the same arithmetic against two real ranks.
pytestmark = [pytest.mark.launch, pytest.mark.long]


@pytest.mark.parametrize(
    "words",
    [
        "--ranks 1024",
        # No size is a multiple of the number of ranks.
        "--ranks 1000 --n_layers 1 --dim 100 --n_heads 5 --n_kv_heads 5 --vocab_size 1001",
        "--ranks 8 64 512",
        "--ranks 512 --accumulation_steps 2",
        "--ranks 512 --optimizer muon",
        "--ranks 512 --dtype float32",
        "--ranks 8 --n_layers 12 --gradient_checkpointing",
    ],
)
def test_a_rank_of_many_sends_and_keeps_what_the_plan_says(
    nursery: Nursery, tmp_path: Path, words: str
):
    out = tmp_path / "found.json"
    argv = [*words.split(), "--out", str(out)]
    statuses, _, report = nursery.run("benchmarks.fake_ranks", argv, out, 1)
    assert statuses == [0], report
    table = json.loads(out.read_text())["table"]
    assert {(row["of"]["stage"], row["of"]["rank"] == 0) for row in table} == {
        (stage, is_first) for stage in (None, 1, 2, 3) for is_first in (True, False)
    }
    for row in table:
        assert row["state"]["counted"] == row["state"]["plan"], row
        assert row["sent"]["counted"] == pytest.approx(row["sent"]["plan"], rel=1e-3), row
