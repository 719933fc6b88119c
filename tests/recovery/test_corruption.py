"""What is concluded from what ranks hold and compute."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from minimind.recovery.corruption import Fault, RankCheck, RankState, Replay, faults

GOOD = Replay(rows=5, loss=2.5, norms=[1.0, 0.5], sums=[1, 2, 3])
BAD = replace(GOOD, loss=2.75, sums=[9, 2, 3])
KEYS = [("a", 0, 4), ("a", 4, 4)]


def ranks(n: int) -> tuple[list[RankState], list[RankCheck]]:
    """Of `n` ranks that agree; the first ones hold a slice of the masters each."""
    holdings = [
        RankState(
            f"host{n}", "cpu", {"fp32|b": 7, "exp_avg|b": 8}, {key: 1 for key in KEYS[n : n + 1]}
        )
        for n in range(n)
    ]
    return holdings, [RankCheck([], (GOOD, GOOD), GOOD) for _ in range(n)]


def found(
    holdings: list[RankState],
    findings: list[RankCheck],
    is_exact: bool = True,
    dtype: str = "float32",
) -> list[Any]:
    """Kind, ranks and is_either of each fault."""
    every = faults(holdings, findings, dtype, is_exact)
    assert all(isinstance(one, Fault) and one.text for one in every)
    return [(one.kind, one.ranks, one.is_either) for one in every]


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_ranks_that_agree_are_sound(n: int):
    assert found(*ranks(n)) == found(*ranks(n), is_exact=False) == []


def test_the_minority_is_named_and_without_one_both_are():
    holdings, findings = ranks(3)
    holdings[1] = replace(holdings[1], replicated={"fp32|b": 6, "exp_avg|b": 8})
    assert found(holdings, findings) == [("state", [1], False)]
    assert found(holdings[:2], findings[:2]) == [("state", [0, 1], True)]
    (fault,) = faults(holdings, findings, "float32", True)
    assert fault.text == "holds a different fp32 of b from the other ranks"


def test_state_is_compared_on_the_same_hardware_only():
    holdings, findings = ranks(4)
    for rank in (2, 3):
        other = {"fp32|b": 6, "exp_avg|b": 8}
        holdings[rank] = replace(holdings[rank], hardware="gpu", replicated=other)
    assert found(holdings, findings) == []


def test_weights_that_are_not_the_master_are_those_of_their_rank():
    holdings, findings = ranks(3)
    findings[2] = replace(findings[2], stale=[KEYS[0]])
    assert found(holdings, findings) == [("weights", [2], False)]


def test_a_master_that_no_rank_has_is_that_of_its_owner():
    holdings, findings = ranks(3)
    assert found(holdings, [replace(one, stale=[KEYS[1]]) for one in findings]) == [
        ("weights", [1], False)
    ]


def test_a_stale_weight_decides_which_of_two_ranks_holds_another_state():
    holdings, findings = ranks(2)
    holdings[1] = replace(holdings[1], replicated={"fp32|b": 6, "exp_avg|b": 8})
    findings[1] = replace(findings[1], stale=[KEYS[1]])
    assert found(holdings, findings) == [("weights", [1], False), ("state", [1], False)]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_rank_that_computes_another_value_the_second_time_is_named(n: int):
    holdings, findings = ranks(n)
    for own in ((GOOD, BAD), (BAD, GOOD)):
        findings[n - 1] = replace(findings[n - 1], own=own)
        assert found(holdings, findings) == [("computation", [n - 1], False)]
        assert found(holdings, findings, is_exact=False) == [("computation", [n - 1], False)]


@pytest.mark.parametrize("n", [3, 4, 5])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_rank_that_always_computes_wrongly_is_between_two_differences(n: int, bad: int):
    holdings, findings = ranks(n)
    findings[bad] = RankCheck([], (BAD, BAD), BAD)  # its own rows, and those of the rank before
    assert found(holdings, findings) == [("computation", [bad], False)]


@pytest.mark.parametrize("n", [3, 4, 8])
def test_of_a_single_difference_either_rank_may_be_wrong(n: int):
    holdings, findings = ranks(n)
    findings[2] = replace(findings[2], neighbour=BAD)
    assert found(holdings, findings) == [("computation", [1, 2], True)]
    holdings, findings = ranks(n)  # the same as seen from rank 1, which is wrong twice
    findings[1] = replace(findings[1], own=(BAD, BAD))
    assert found(holdings, findings) == [("computation", [1, 2], True)]


def test_every_difference_is_reported():
    holdings, findings = ranks(8)
    findings[3] = RankCheck([], (BAD, BAD), BAD)
    findings[6] = replace(findings[6], own=(BAD, BAD))
    assert found(holdings, findings) == [("computation", [3], False), ("computation", [6, 7], True)]


def test_of_two_ranks_that_compute_different_values_either_may_be_wrong():
    for own in ((BAD, BAD), (GOOD, GOOD)):
        holdings, findings = ranks(2)
        findings[1] = RankCheck([], own, BAD)
        assert found(holdings, findings) == [("computation", [0, 1], True)]


def test_wrong_weights_explain_another_loss():
    holdings, findings = ranks(3)
    findings[1] = RankCheck([KEYS[0]], (BAD, BAD), BAD)
    assert found(holdings, findings) == [("weights", [1], False)]


def test_other_token_ids_are_a_fault_of_reading():
    holdings, findings = ranks(3)
    findings[1] = replace(findings[1], neighbour=replace(BAD, rows=6))
    assert found(holdings, findings) == [("rows", [0, 1], True)]


def test_bits_count_with_deterministic_kernels_on_the_same_hardware():
    last_bit = replace(GOOD, sums=[1, 2, 4])
    holdings, findings = ranks(2)
    findings[1] = replace(findings[1], neighbour=last_bit)
    assert found(holdings, findings) == [("computation", [0, 1], True)]
    assert found(holdings, findings, is_exact=False) == []
    holdings[1] = replace(holdings[1], hardware="gpu")
    assert found(holdings, findings) == []
    findings[1] = replace(findings[1], own=(GOOD, last_bit))
    assert found(holdings, findings) == [("computation", [1], False)]


@pytest.mark.parametrize(
    ("dtype", "of_loss", "of_norm"),
    [
        ("float32", 1e-5, 1e-4),
        ("tf32", 1e-3, 1e-2),
        ("bfloat16", 1e-3, 3e-2),
        ("float16", 1e-3, 1e-2),
    ],
)
def test_otherwise_up_to_the_rounding_of_the_precision(dtype: str, of_loss: float, of_norm: float):
    for times, expected in ((0.9, []), (1.1, [("computation", [0], False)])):
        loss = replace(GOOD, loss=2.5 * (1 + times * of_loss))
        norm = replace(GOOD, norms=[1.0, 0.5 * (1 + times * of_norm)])
        for other in (loss, norm):
            holdings, findings = ranks(1)
            findings[0] = replace(findings[0], own=(GOOD, other))
            assert found(holdings, findings, False, dtype) == expected


def test_tiny_gradients_may_differ_more():
    for small, expected in ((1e-5, []), (1e-2, [("computation", [0], False)])):
        holdings, findings = ranks(1)
        pair = tuple(replace(GOOD, norms=[1.0, small * by]) for by in (1.0, 1.005))
        findings[0] = replace(findings[0], own=pair)
        assert found(holdings, findings, is_exact=False) == expected


@pytest.mark.parametrize(
    ("first", "second", "is_fault"),
    [
        (math.nan, math.nan, False),
        (math.inf, math.inf, False),
        (math.nan, 1.0, True),
        (1.0, math.inf, True),
        (math.inf, -math.inf, True),
        (math.inf, math.nan, True),
    ],
)
def test_values_that_are_not_finite_have_to_be_the_same(
    first: float, second: float, is_fault: bool
):
    for change in ("loss", "norms"):
        pair = [
            replace(GOOD, **({"loss": one} if change == "loss" else {"norms": [1.0, one]}))
            for one in (first, second)
        ]
        holdings, findings = ranks(1)
        findings[0] = replace(findings[0], own=(pair[0], pair[1]))
        assert bool(found(holdings, findings, is_exact=False)) == is_fault
