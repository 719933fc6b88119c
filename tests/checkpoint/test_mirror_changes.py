"""What a mirror lacks or has too much: `changes` as a table, and over random states."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from minimind.checkpoint.mirror import Change, both_know, changes
from minimind.checkpoint.retention import Rules, Saved, kept, unknown

LAST_2 = Rules(2)
BEST = Rules(1, keep_best=1, compared_every=1)
DAMAGED = "does not match its own sha256"


def of(*steps: int, **values: float) -> dict[int, Saved]:
    """Checkpoints; `s40=3.1` is the value of step 40."""
    return {step: Saved(step, values.get(f"s{step}")) for step in steps}


# What is here, what is there, the rules, the step of the last save; what is to be done.
TABLE: dict[str, tuple[Any, Any, Rules, int, list[str]]] = {
    "nothing": ({}, {}, LAST_2, 0, []),
    "the first": (of(1), {}, LAST_2, 1, ["upload 1"]),
    "equal": (of(1, 2), of(1, 2), LAST_2, 2, []),
    "the newest before older ones": (of(1, 2), {}, LAST_2, 2, ["upload 2", "upload 1"]),
    "one too many": (of(2, 3), of(1, 2, 3), LAST_2, 3, ["delete 1"]),
    "only those that are there count": (of(2, 3), of(1, 2), LAST_2, 3, ["upload 3"]),
    "saved, and not reported": (of(1, 2, 3), of(1, 2), LAST_2, 2, []),
    "gone back from": (of(1), of(1, 2, 3), LAST_2, 1, ["abandon 2", "abandon 3"]),
    "a wiped disk": (of(5), of(4, 5), LAST_2, 5, []),
    "a fresh start": ({}, of(4, 5), LAST_2, -1, ["abandon 4", "abandon 5"]),
    "interrupted": (of(2), {1: None, 2: None}, LAST_2, 2, ["delete 1", "upload 2"]),
    "interrupted, of another course": (of(2), of(2) | {7: None}, LAST_2, 2, ["delete 7"]),
    "validated since": (of(3, s3=3.0), of(3), BEST, 3, ["record 3"]),
    "validated, and not newest": (of(2, 3, s2=3.0), of(2, 3), BEST, 3, ["record 2"]),
    "the best is there alone": (
        of(4, 5, s4=3.0, s5=3.5),
        of(1, 4, 5, s1=2.0),
        BEST,
        5,
        ["record 4", "record 5", "delete 4"],
    ),
    "its value is unknown": (of(5), of(4, 5), BEST, 5, []),
    "its record is damaged": (of(5), {4: Saved(4, fault=DAMAGED)} | of(5), BEST, 5, []),
    "a damaged record is mended": (
        of(4, 5, s4=3.0),
        {4: Saved(4, fault=DAMAGED)} | of(5),
        BEST,
        5,
        ["record 4"],
    ),
    "damaged here": ({4: Saved(4, fault=DAMAGED)} | of(5), of(4, 5, s4=3.0), BEST, 5, []),
    "deleted here by the rules": (
        of(3, 5, s3=2.0),
        {4: Saved(4, math.inf)} | of(3, 5, s3=2.0),
        BEST,
        5,
        ["delete 4"],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name: str):
    here, there, rules, last, found = TABLE[name]
    listed = changes(here, there, rules, None, last)
    assert [f"{change.what} {change.step}" for change in listed] == found


def applied(here: dict[int, Saved], there: dict[int, Saved | None], change: Change) -> None:
    if change.what in ("upload", "record"):
        there[change.step] = here[change.step]
    else:
        del there[change.step]


@pytest.mark.parametrize("seed", range(300))
def test_from_any_state_the_mirror_comes_to_hold_what_the_rules_keep(seed: int):
    draw = random.Random(seed)
    rules = Rules(
        draw.randint(1, 3), draw.choice((0, 3)), draw.randint(0, 2), draw.choice((0, 4)),
        compared_every=draw.choice((0, 1, 2)),
    )  # fmt: skip
    last, good = draw.randint(5, 12), draw.choice((None, draw.randint(0, 12)))
    values = {step: draw.choice((None, math.inf, draw.uniform(2, 4))) for step in range(15)}

    def side(most: int) -> dict[int, Saved]:
        return {
            step: Saved(step, fault=DAMAGED) if draw.random() < 0.1 else Saved(step, values[step])
            for step in range(1, most)
            if draw.random() < 0.6
        }

    here = side(last + 1)
    there: dict[int, Saved | None] = {**side(15)}
    there |= {step: None for step in there if draw.random() < 0.1}
    of_run = {step: saved for step, saved in both_know(here, there).items() if step <= last}
    here = {step: saved for step, saved in here.items() if step <= last}
    both = here | of_run
    wanted = {step for step, why in kept(both.values(), rules, good).items() if why}
    for _ in range(40):
        todo = changes(here, there, rules, good, last)
        for change in todo[: draw.randint(1, 3)]:  # a failure ends the round
            # What is deleted is neither kept by the rules nor the only one of an unknown value.
            assert change.what != "delete" or change.step not in wanted
            assert change.what != "abandon" or change.step > last
            assert change.what != "upload" or change.step in wanted
            applied(here, there, change)
    assert changes(here, there, rules, good, last) == []
    complete = {step for step, saved in there.items() if saved}
    assert wanted <= complete
    now = kept(both_know(here, there).values(), rules, good)
    assert {step for step, why in now.items() if why} | {*unknown(here.values(), rules)} >= complete
