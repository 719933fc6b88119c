"""Single bits that flip on one of two ranks, on every kind of backend: found, and on which rank.

All cases run in one launch of flip_bits.py. With --long there are more cases, and more flips and
clean steps of each.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.forking import Nursery

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
SHORT = ("None,float32,deterministic", "None,bfloat16", "3,float32,deterministic")


@pytest.fixture(scope="module")
def courses(
    tmp_path_factory: pytest.TempPathFactory, nursery: Nursery, request: pytest.FixtureRequest
) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("flips")
    is_long = request.config.getoption("--long")
    numbers, cases = (("200", "340"), CASES) if is_long else (("12", "6"), SHORT)
    words = [str(root / "results.json"), *numbers, *cases]
    module, minutes = "tests.distributed.flip_bits", 30
    statuses, _, text = nursery.run(module, words, root / "ranks", seconds=60 * minutes)
    assert statuses == [0, 0], text
    return {one["case"]: one for one in json.loads((root / "results.json").read_text())}


def flips_of(course: dict[str, Any], what: str) -> list[dict[str, Any]]:
    flips = [one for one in course["flips"] if one["what"] == what]
    assert flips, course["case"]
    return flips


def test_clean_steps_raise_no_alarm(courses: dict[str, dict[str, Any]]):
    assert [seen["alarms"] for seen in courses.values()] == [[]] * len(courses)


def test_every_flipped_weight_is_found(courses: dict[str, dict[str, Any]]):
    for case, seen in courses.items():
        flips = flips_of(seen, "weight")
        assert all(one["rank"] in one["named"] for one in flips), case
        if case != "None,float32,deterministic":  # there two ranks differ, and no third one
            assert all(one["named"] == [one["rank"]] for one in flips), case


def test_every_flip_of_replicated_state_is_found(courses: dict[str, dict[str, Any]]):
    for case in (case for case in courses if CASES[case] == "all"):
        flips = flips_of(courses[case], "state")
        assert all(one["rank"] in one["named"] for one in flips), case


def test_a_flip_in_a_computation_is_that_of_a_named_rank(courses: dict[str, dict[str, Any]]):
    for case, seen in courses.items():
        found = [one for one in flips_of(seen, "activation") if one["named"]]
        assert found, case
        assert all(one["rank"] in one["named"] for one in found), case
        # Only a rank that differs from itself is named alone: two ranks have no third one.
        assert all(one["either"] == (len(one["named"]) == 2) for one in found), case
        assert any(one["named"] == [one["rank"]] for one in found), case
