"""The first updates by flat partitions are compared with the gradients; DeepSpeed takes over.

One launch of tests/distributed/flat_checks.py for each number of ranks trains all cases.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from minimind.engine.flat_partitions import CHECKED
from tests.distributed.flat_checks import CASES, STEPS, WAYS
from tools.forking import Nursery

pytestmark = pytest.mark.launch
DIVIDED = [name for name in CASES if "tensor parallel" in name]
BY_RANKS = {1: [name for name in CASES if name not in DIVIDED], 2: list(CASES), 4: DIVIDED}
SHORT = {
    2: [
        *("1, bf16, 2 micro-batches", "2, bf16, 2 micro-batches, overlap"),
        *("2, fp32, unused", "1, fp32, NaN", "2, fp32, tensor parallel"),
    ]
}
FLAT = "by flat partitions"
FELL_BACK = "by DeepSpeed (flat partitions differed from the gradients, which were taken instead)"


@pytest.fixture(scope="module")
def launches(
    nursery: Nursery, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[int, dict[str, Any]]:
    """What was found, by number of ranks and case."""
    found, place = {}, tmp_path_factory.mktemp("checks")
    chosen = BY_RANKS if request.config.getoption("--long") else SHORT
    for ranks, names in chosen.items():
        out = place / f"{ranks}.json"
        words = [str(out), *names]
        run = nursery.run("tests.distributed.flat_checks", words, place / str(ranks), ranks)
        assert run[0] == [0] * ranks, run[2][-3000:]
        found[ranks] = json.loads(out.read_text())
    return found


CHOSEN = [
    pytest.param(ranks, name, marks=[] if name in SHORT.get(ranks, ()) else pytest.mark.long)
    for ranks, names in BY_RANKS.items()
    for name in names
]


@pytest.mark.parametrize(("ranks", "name"), CHOSEN)
def test_a_run_whose_first_updates_are_compared(launches: Any, ranks: int, name: str):
    """Bit for bit DeepSpeed's: not compared, compared, and with a copy that is broken."""
    by_way = launches[ranks][name]
    own = by_way["deepspeed"]
    assert own["course"][-1]["skipped"] == ("NaN" in name)
    for way in WAYS:
        seen = by_way[way]
        assert (seen["course"], seen["end"]) == (own["course"], own["end"]), way
    assert own["updates"] == [["by DeepSpeed (--zero_update)"] * (STEPS + 1)] * ranks
    for way, checks in (("unchecked", 0), ("checked", CHECKED)):
        assert by_way[way]["checks"] == checks
        assert by_way[way]["updates"] == [[FLAT] * (STEPS + 1)] * ranks
        assert by_way[way]["changes"] == [[""] * STEPS] * ranks
    broken = by_way["broken"]
    assert broken["checks"] == 1
    assert broken["updates"] == [[FLAT, *[FELL_BACK] * STEPS]] * ranks
    assert broken["changes"] == [[FELL_BACK, *[""] * (STEPS - 1)]] * ranks


@pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=[] if n in SHORT else pytest.mark.long) for n in BY_RANKS]
)
def test_an_engine_that_was_released_is_freed(launches: Any, ranks: int):
    """Its weights and moments, by whichever update: what a hook refers to is not collected."""
    assert launches[ranks]["alive"] == 0
