"""Rows divided over 2 and 4 ranks by position: losses, gradients and weights of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.divided_rows import STEPS
from tools.forking import Nursery

pytestmark = pytest.mark.launch
KINDS = ("plain", "documents", "recomputed", "chunked", "sft", "dropout")
STAGES = (None, 0, 1, 2, 3)  # stage 3 comes last: it replaces torch's linear function
WITHIN_BF16 = 2e-3
FEW = ["2,2,plain", "None,2,sft", "2,2,dropout"]
EVERY = {
    2: [f"{stage},2,{kind}" for stage in STAGES for kind in KINDS],
    4: [f"{stage},{n},{kind}" for stage in STAGES for n in (2, 4) for kind in KINDS],
}
Found = dict[str, dict[str, Any]]


def results(nursery: Nursery, root: Path, world: int, cases: list[str]) -> Found:
    """What each case saw."""
    root.mkdir(parents=True, exist_ok=True)
    module = "tests.distributed.divided_rows"
    statuses, _, text = nursery.run(module, [str(root), *cases], root / "ranks", world)
    assert statuses == [0] * world, text
    return {case: torch.load(root / f"{case}.pt", weights_only=True) for case in cases}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Found:
    """The courses of one process."""
    root = tmp_path_factory.mktemp("whole")
    return results(nursery, root, 1, [f"None,1,{kind}" for kind in KINDS])


def require_equal(found: Found, whole: Found) -> None:
    """Every course is that of one process."""
    for case, own in found.items():
        reference = whole[f"None,1,{case.split(',')[2]}"]
        assert len(own["losses"]) == STEPS
        assert own["losses"] == pytest.approx(reference["losses"], rel=2e-6), case
        assert own["norms"] == pytest.approx(reference["norms"], rel=1e-5), case
        assert own["held_out"] == pytest.approx(reference["held_out"], rel=2e-6), case
        for name, expected in reference["weights"].items():
            difference = (own["weights"][name] - expected).abs().max() / expected.abs().max()
            assert difference <= 1e-5, (case, name)


def require_exact(gaps: dict[str, float]) -> None:
    """Attention and its gradients, in float64, are those of whole rows."""
    assert len(gaps) == 8
    assert max(gaps.values()) < 1e-12, gaps


def test_two_ranks_with_half_of_each_row_train_as_one(
    whole: Found, nursery: Nursery, tmp_path: Path
):
    found = results(nursery, tmp_path, 2, [FEW[0], "attention", *FEW[1:]])
    require_exact(found.pop("attention"))
    require_equal(found, whole)


@pytest.mark.long
@pytest.mark.parametrize("world", EVERY)
def test_every_stage_and_group_trains_as_one_process(
    world: int, whole: Found, nursery: Nursery, tmp_path: Path
):
    found = results(nursery, tmp_path, world, [*EVERY[world], "attention"])
    require_exact(found.pop("attention"))
    require_equal(found, whole)


@pytest.mark.long
def test_in_bfloat16_losses_are_as_far_from_float32_as_those_of_one_process(
    whole: Found, nursery: Nursery, tmp_path: Path
):
    exact = whole["None,1,plain"]["losses"]
    one = results(nursery, tmp_path / "one", 1, ["None,1,bfloat16"])["None,1,bfloat16"]
    cases = [f"{stage},2,bfloat16" for stage in STAGES]
    found = results(nursery, tmp_path / "two", 2, cases)
    assert one["losses"] == pytest.approx(exact, rel=WITHIN_BF16)
    for case, own in found.items():
        assert own["losses"] == pytest.approx(exact, rel=WITHIN_BF16), case
        assert own["losses"] == pytest.approx(one["losses"], rel=WITHIN_BF16), case
        assert own["norms"] == pytest.approx(one["norms"], rel=2e-2), case
