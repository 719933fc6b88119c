"""With unequal numbers of targets, losses, gradient norms and weights are those of one process.

Rows of a step are split into 1, 2 or 4 micro-batches of one or two ranks, in two launches of
target_means.py. In one step a rank has no target, in one nobody has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.target_means import TARGETS
from tests.forking import Nursery

pytestmark = pytest.mark.launch
REFERENCE = (1, "None,float32,4")
ALONE = ["None,float32,1", "None,float32,2", REFERENCE[1], "2,float32,4"]
# Stage 3 comes last: it replaces torch's linear function in the whole process.
EXACT = [f"{stage},float32,{n}" for stage in (None, 0, 1, 2, 3) for n in (1, 2, 4)]
ROUNDED = ["None,bfloat16,2", "2,bfloat16,2", "None,float16,2", "2,float16,2"]
EMPTY = [not any(targets) for targets in TARGETS].index(True)


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, nursery: Nursery
) -> dict[tuple[int, str], dict[str, Any]]:
    """What each case saw, by number of ranks and case."""
    seen: dict[tuple[int, str], dict[str, Any]] = {}
    for world, cases in ((1, ALONE), (2, [*ROUNDED, *EXACT])):
        root: Path = tmp_path_factory.mktemp("means")
        words = [str(root), *cases]
        module = "tests.distributed.target_means"
        statuses, _, text = nursery.run(module, words, root / "ranks", world)
        assert statuses == [0] * world, text
        for case in cases:
            seen[world, case] = torch.load(root / f"{case}.pt", weights_only=True)
    return seen


@pytest.mark.parametrize(
    "key", [*((1, case) for case in ALONE if case != REFERENCE[1]), *((2, case) for case in EXACT)]
)
def test_the_split_over_ranks_and_micro_batches_changes_nothing(found, key: tuple[int, str]):
    own, reference = found[key], found[REFERENCE]
    assert own["losses"] == pytest.approx(reference["losses"], rel=2e-6)
    assert own["norms"] == pytest.approx(reference["norms"], rel=2e-6)
    assert own["weights"].keys() == reference["weights"].keys()
    for name, expected in reference["weights"].items():
        difference = (own["weights"][name] - expected).abs().max() / expected.abs().max()
        assert difference <= 2e-6, name


@pytest.mark.parametrize("case", ROUNDED)
def test_losses_of_low_precision_are_near(found, case: str):
    own, reference = found[2, case], found[REFERENCE]
    assert own["losses"] == pytest.approx(reference["losses"], abs=1e-2)
    assert own["norms"] == pytest.approx(reference["norms"], rel=1e-2)


def test_a_step_without_any_target_has_no_gradient_and_is_not_skipped(found):
    for seen in found.values():
        assert seen["losses"][EMPTY] == seen["norms"][EMPTY] == 0.0
        assert seen["skipped"] == 0
