"""A step on flat partitions holds no more bytes than one by DeepSpeed's own update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.forking import Nursery

pytestmark = pytest.mark.launch
# Stage, dtype, micro-batches, overlap, elements of a bucket; the model has 33,952 weights.
SHORT = ["1,bfloat16,2,overlap,4096", "2,bfloat16,2,no,12288"]
LONG = [
    f"{stage},{dtype},{accumulation},{overlap},{bucket}"
    for stage in (1, 2)
    for dtype in ("bfloat16", "float32")
    for accumulation in (1, 2)
    for overlap in ("overlap", "no")
    for bucket in (4096, 12288, 10**5)
]
CASES = [pytest.param(2, SHORT, id="short")] + [
    pytest.param(ranks, LONG, id=str(ranks), marks=pytest.mark.long) for ranks in (1, 2)
]


def study(nursery: Nursery, out: Path, ranks: int, cases: list[str]) -> dict[str, Any]:
    statuses, _, report = nursery.run(
        "tests.distributed.zero_memory", [str(out), *cases], out, ranks
    )
    assert statuses == [0] * ranks, report[-3000:]
    return json.loads(out.read_text())


def worst(shares: list[dict[str, int]]) -> dict[str, float]:
    """Bytes per weight at each point, on the rank that holds most."""
    points = (point for point in shares[0] if point != "weights")
    return {point: max(s[point] / s["weights"] for s in shares) for point in points}


@pytest.mark.parametrize(("ranks", "cases"), CASES)
def test_no_more_is_held_at_any_point_of_a_step(
    nursery: Nursery, tmp_path: Path, ranks: int, cases: list[str]
):
    found = study(nursery, tmp_path / "held.json", ranks, cases)
    more = []
    for case, by_update in found.items():
        own, ours = (worst(by_update[update]) for update in ("deepspeed", "auto"))
        assert {*own} - {*ours} <= {"at a reduction"}  # a single rank needs none
        print(case, {point: f"{ours[point]:.2f} ({own[point]:.2f})" for point in ours})
        # 0.05: padding, and scalars such as a norm that is kept for a report
        more += [f"{case}: {point}" for point in ours if ours[point] > own[point] + 0.05]
    assert not more


@pytest.mark.long
def test_at_stage_2_a_rank_keeps_its_part_of_the_gradients_only(nursery: Nursery, tmp_path: Path):
    """Between micro-batches, beside weights (2), their fp32 part (2) and its moments (4)."""
    (seen,) = study(nursery, tmp_path / "held.json", 2, ["2,bfloat16,2,no,4096"]).values()
    for ours in seen["auto"]:
        assert ours["between micro-batches"] / ours["weights"] == pytest.approx(8 + 1, abs=0.1)
        assert ours["after the step"] / ours["weights"] == pytest.approx(8, abs=0.1)
