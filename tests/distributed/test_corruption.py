"""Single bits that flip on one of two ranks, on every kind of backend: found, and on which rank.

All cases run in one launch of flip_bits.py. With --long there are more flips and clean steps.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.forking import Nursery

pytestmark = pytest.mark.launch
# Stage 3 comes last: it replaces torch's linear function in the whole process.
CASES = {
    "None,float32,deterministic": "all",  # what every rank holds
    "None,bfloat16": "all",
    "0,bfloat16,deterministic": "all",
    "1,float32,deterministic": "weights",
    "2,bfloat16,deterministic": "weights",
    "3,float32,deterministic": "weights",
}


@pytest.fixture(scope="module")
def courses(
    tmp_path_factory: pytest.TempPathFactory, nursery: Nursery, request: pytest.FixtureRequest
) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("flips")
    numbers = ["200", "340"] if request.config.getoption("--long") else ["18", "12"]
    words = [str(root / "results.json"), *numbers, *CASES]
    module, minutes = "tests.distributed.flip_bits", 30
    statuses, _, text = nursery.run(module, words, root / "ranks", seconds=60 * minutes)
    assert statuses == [0, 0], text
    return {one["case"]: one for one in json.loads((root / "results.json").read_text())}


@pytest.mark.parametrize("case", CASES)
def test_clean_steps_raise_no_alarm(courses: dict[str, dict[str, Any]], case: str):
    assert courses[case]["alarms"] == []


@pytest.mark.parametrize("case", CASES)
def test_every_flipped_weight_is_found(courses: dict[str, dict[str, Any]], case: str):
    flips = [one for one in courses[case]["flips"] if one["what"] == "weight"]
    assert flips
    assert all(one["rank"] in one["named"] for one in flips)
    if case != "None,float32,deterministic":  # there two ranks hold different weights, no third one
        assert all(one["named"] == [one["rank"]] for one in flips)


@pytest.mark.parametrize("case", [case for case, held in CASES.items() if held == "all"])
def test_every_flip_of_replicated_state_is_found(courses: dict[str, dict[str, Any]], case: str):
    flips = [one for one in courses[case]["flips"] if one["what"] == "state"]
    assert flips
    assert all(one["rank"] in one["named"] for one in flips)


@pytest.mark.parametrize("case", CASES)
def test_a_flip_in_a_computation_is_that_of_a_named_rank(
    courses: dict[str, dict[str, Any]], case: str
):
    flips = [one for one in courses[case]["flips"] if one["what"] == "activation"]
    found = [one for one in flips if one["named"]]
    assert found
    assert all(one["rank"] in one["named"] for one in found)
    # Only a rank that differs from itself is named alone: two ranks have no third one.
    assert all(one["either"] == (len(one["named"]) == 2) for one in found)
    assert any(one["named"] == [one["rank"]] for one in found)
