"""Tensor-parallel ranks train like one process, and their checkpoints are anyone's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minimind.architecture.costs import Layout, gathered_bytes, own_part
from minimind.architecture.shape import shape_of
from minimind.config.parse import parse_flags
from minimind.recovery.compare import Side, compare, described
from tests.distributed.tensor_parallel import CLIP, SAVED, SPOILT
from tools.forking import Nursery

pytestmark = pytest.mark.launch
WITHIN = 2e-6
Found = dict[str, Any]


def study(root: Path, nursery: Nursery, ranks: int, stages: tuple[int, ...]) -> Found:
    """What one process, tensor-parallel ranks, and one process after them have found."""
    seen = {}
    for phase, size in (("whole", 1), ("divided", ranks), ("returned", 1)):
        place = root / f"{phase}-{size}"
        words = [str(root), phase, *map(str, stages)]
        statuses, _, text = nursery.run("tests.distributed.tensor_parallel", words, place, size)
        assert statuses == [0] * size, text
        seen[phase] = json.loads((root / f"{phase}-{size}.json").read_text())
    return seen


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, (2,)), id="2 ranks, ZeRO-2"),
        pytest.param((2, (0, 1)), id="2 ranks, other stages", marks=pytest.mark.long),
        pytest.param((4, (0, 1, 2)), id="4 ranks", marks=pytest.mark.long),
    ],
)
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, nursery: Nursery
) -> tuple[Found, int]:
    """The study of a group of two ranks, or of two such groups; and the number of ranks."""
    return study(tmp_path_factory.mktemp("tensor"), nursery, *request.param), request.param[0]


def require_alike(steps: list[Any], expected: list[Any]) -> None:
    """Rows are equal, losses and gradient norms within 2e-6."""
    assert [step["rows"] for step in steps] == [step["rows"] for step in expected]
    for name in ("loss", "norm"):
        values = [step[name] for step in expected]
        assert [step[name] for step in steps] == pytest.approx(values, rel=WITHIN)


def test_losses_and_norms_are_those_of_one_process(found: tuple[Found, int]):
    unbroken, divided = found[0]["whole"]["course"], found[0]["divided"]
    assert max(step["norm"] for step in unbroken) > CLIP
    for stage, seen in divided.items():
        require_alike(seen["course"], unbroken)
        require_alike(seen["of one process"], unbroken[SAVED:])
        assert len({*seen["copies"]}) == 1, stage


def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(found: tuple[Found, int]):
    for stage, seen in found[0]["divided"].items():
        assert seen["resumed"] == seen["course"][SAVED:], stage
        assert seen["differing"] == [], stage
        assert seen["shapes"]["exp_avg|model.layers.1.mlp.down_proj.weight"] == 32 * 128, stage


def test_a_save_gathers_what_a_plan_counts(found: tuple[Found, int]):
    seen, ranks = found
    shape = shape_of(parse_flags("--dim 32 --n_layers 2 --hidden_dim 128 --vocab_size 512".split()))
    for stage, one in seen["divided"].items():
        layout = Layout(int(stage), ranks, "float32", rows=1, averages=True, tensor=2)
        counted = gathered_bytes(*own_part(shape, layout)) * ranks
        gathered = sum(one["gathered"])
        assert gathered == pytest.approx(counted, rel=0.05), stage  # no rows at borders


def test_fingerprints_are_those_of_one_process(found: tuple[Found, int]):
    whole = found[0]["whole"]["fingerprint"]
    for stage, one in found[0]["divided"].items():
        recorded = one["fingerprint"]
        a, b = (Side("", dtype="float32", steps={1: fields}) for fields in (whole, recorded))
        result = compare(a, b)
        assert result.step is None, f"{stage}: {described(result)}"
        for kind, places in whole["numbers"].items():
            assert [*recorded["numbers"][kind]] == [*places]


def test_every_rank_skips_a_step_that_one_spoils(found: tuple[Found, int]):
    seen, ranks = found
    for stage, one in seen["divided"].items():
        assert one["spoilt"] == [[True, True]] * ranks * len(SPOILT), stage


def test_one_process_goes_on_from_the_checkpoints(found: tuple[Found, int]):
    unbroken = found[0]["whole"]["course"][SAVED:]
    assert len(found[0]["returned"]) == 2 * len(found[0]["divided"])
    for steps in found[0]["returned"].values():
        require_alike(steps, unbroken)
