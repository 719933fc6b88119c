"""Flat partitions train to the same bits as DeepSpeed's own update, or leave it to DeepSpeed.

One launch of zero_updates.py per number of ranks studies all cases; most are long.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from tests.distributed.zero_updates import OPTIONS, PAIRS, SAVED, TENSOR, UPDATES
from tools.forking import Nursery
from tools.matrix import WITHIN, difference

pytestmark = pytest.mark.launch
Found = dict[str, dict[str, Any]]
SHORT = {2: ["2, fp16", "2, bf16, overlap, small buckets"]}
ALONE = [name for name in PAIRS if name not in TENSOR and "sp2" not in name]
# Four ranks share the 8 rows of a step in two micro-batches at most.
OF_FOUR = [n for n, one in PAIRS.items() if n not in OPTIONS and one.case.accumulation <= 2]
NAMES = {1: ALONE, 2: list(PAIRS), 4: OF_FOUR}
# Among four ranks DeepSpeed reduces what is larger than a bucket in slices, and each has its own
# order of sums.
IN_SLICES = [name for name in PAIRS if "small buckets" in name]
CASES = [
    pytest.param(ranks, name, marks=[] if name in SHORT.get(ranks, []) else pytest.mark.long)
    for ranks, names in NAMES.items()
    for name in names
]
CROSSINGS = {"deepspeed -> auto", "auto -> deepspeed"}
PATIENCE = 1800.0  # seconds; the long launches compile, too
every_case = pytest.mark.parametrize(("ranks", "name"), CASES)


@pytest.fixture(scope="module")
def launched(
    nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, str], Found]:
    """What was found by a launch of so many ranks: `short`, `long`, or `tp2`."""

    @cache
    def studied(ranks: int, which: str) -> Found:
        names = {
            "short": SHORT.get(ranks, []),
            "long": [n for n in NAMES[ranks] if n not in TENSOR and n not in SHORT.get(ranks, [])],
            "tp2": list(TENSOR),
        }[which]
        out = tmp_path_factory.mktemp("updates") / "found.json"
        # What is compiled comes last.
        words = [str(out), *sorted(names, key=lambda name: "compiled" in name)]
        place = out.parent / "ranks"
        statuses, _, report = nursery.run(
            "tests.distributed.zero_updates", words, place, ranks, PATIENCE
        )
        assert statuses == [0] * ranks, report[-3000:]
        return json.loads(out.read_text())

    return studied


@pytest.fixture
def seen(launched: Callable[[int, str], Found], ranks: int, name: str) -> dict[str, Any]:
    """What was found of one case."""
    is_short = name in SHORT.get(ranks, [])
    return launched(ranks, "short" if is_short else "tp2" if name in TENSOR else "long")[name]


@every_case
def test_both_updates_train_to_the_same_bits(seen: dict[str, Any], ranks: int, name: str):
    """Losses, norms, counters and scales of every step; weights, moments and averages at the end.

    Each also resumes a checkpoint of the other.
    """
    known, (own, ours) = PAIRS[name], (seen[update] for update in UPDATES)
    reason = ", ".join(filter(None, (known.but, known.among_ranks * (ranks > 1))))
    assert own["update"] == UPDATES["deepspeed"]
    assert ours["update"] == (f"by DeepSpeed ({reason})" if reason else UPDATES["auto"])
    if ranks > 2 and name in IN_SLICES:
        dtype = known.case.dtype
        assert difference(dtype, steps_of(ours), steps_of(own)) < WITHIN[dtype]
        return
    assert as_text(ours["course"]) == as_text(own["course"])
    assert not seen["differing"]
    unbroken = as_text([step for step in own["course"] if step["step"] >= SAVED])
    assert set(seen["crossed"]) == (CROSSINGS if known.is_crossed else set())
    for course, differing in seen["crossed"].values():
        assert as_text(course) == unbroken
        assert not differing


@every_case
def test_what_is_compared_happens(seen: dict[str, Any], ranks: int, name: str):
    """Updates are skipped for a gradient and for a norm, the loss scale moves, losses fall."""
    known = PAIRS[name]
    for update in UPDATES:
        steps = steps_of(seen[update])
        assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
        if known.case.dtype == "float16" and steps[0]["scale"]:
            scales = [step["scale"] for step in steps]
            assert any(b > a for a, b in pairwise(scales))
            assert any(b < a for a, b in pairwise(scales))
        else:
            assert seen[update]["skipped"] == 1 + known.is_guarded
            assert steps[-1]["skipped"] == 1


def as_text(course: list[Any]) -> str:
    """In which numbers that are not finite are equal to themselves."""
    return json.dumps(course)


def steps_of(one: dict[str, Any]) -> list[Any]:
    """Its steps, without the evaluation."""
    return [step for step in one["course"] if "loss" in step]
