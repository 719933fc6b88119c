"""With unequal numbers of targets, losses, gradients and weights are those of a plain float64 loop,
also where targets of some sources count more than others in the loss, and with a teacher.

Rows of a step are split into 1, 2 or 4 micro-batches of one, two or four ranks, in a launch of
target_means.py for each number of ranks. In one step a rank has no target, in one nobody has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.model.dropout import row_keys
from tests.distributed.target_means import (
    RATES,
    SHARE,
    SOURCES,
    TARGETS,
    TEMPERATURE,
    WEIGHTS,
    rows_of,
    teacher_model,
)
from tools.engines import LENGTH, TINY
from tools.forking import Nursery

pytestmark = pytest.mark.launch
DROPOUT = 0.2
ALONE = [f"None,float32,4,{DROPOUT}"]
ALONE += ["None,float32,1,0", "None,float32,2,0", "None,float32,4,0", "2,float32,4,0"]
# Stage 3 comes last: it replaces torch's linear function in the whole process.
EXACT = [
    f"{stage},float32,{n},{dropout}"
    for stage in (None, 0, 1, 2, 3)
    for n in (1, 2, 4)
    for dropout in (0, DROPOUT)
]
SHORT = ["None,float32,4,0", "2,float32,1,0", f"None,float32,2,{DROPOUT}"]
SHORT += [f"{stage},float32,2,0" for stage in (None, 0, 1, 2, 3)]
SHORT += [f"3,float32,1,{DROPOUT}"]
WEIGHTED = [f"None,float32,2,{DROPOUT},full", "2,float32,4,0,chunked"]
DISTILLED = [f"None,float32,2,{DROPOUT},distilled", "2,float32,4,0,distilled"]
DISTILLED_SHARDED = "3,float32,2,0,distilled"
ROUNDED = ["None,bfloat16,2,0", "2,bfloat16,2,0", "None,float16,2,0", "2,float16,2,0"]
ROUNDED += [f"2,bfloat16,2,{DROPOUT}", f"None,float16,2,{DROPOUT}"]
ON_FOUR = [f"{stage},float32,{n},0" for stage in (None, 0, 1, 2, 3) for n in (1, 2)]
ON_FOUR += [f"3,float32,1,{DROPOUT}"]
EMPTY = [not any(targets) for targets in TARGETS].index(True)
Found = dict[str, Any]


@pytest.fixture(scope="module")
def reference() -> dict[str, Found]:
    """What every case without weights is compared to, by dropout."""
    return {str(dropout): computed([1.0] * len(SOURCES), dropout) for dropout in (0, DROPOUT)}


def computed(weights: list[float], dropout: float, teacher: Any = None) -> Found:
    """Sums over the targets of a step, which count by the weights of their rows, divided by what
    all of them count. Nothing of the engine, and the loss of torch.
    """
    torch.manual_seed(1)
    model = MiniMindForCausalLM(MiniMindConfig(**TINY, max_seq_len=LENGTH)).double()
    found: Found = {"losses": [], "norms": []}
    for step, rate in enumerate(RATES):
        rows = rows_of(step)
        drops: Any = {}
        if dropout:
            drops = {"dropout_keys": row_keys(42, step, 0, len(rows), rows.device)}
            drops["dropout"] = dropout
        ids = torch.where(rows < 0, ~rows % 2**31, rows)[:, :-1]
        logits = model(input_ids=ids, **drops).logits
        labels = torch.where(rows < 0, -100, rows)[:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        if teacher is not None:
            with torch.no_grad():
                wanted = (teacher(input_ids=ids).logits / TEMPERATURE).softmax(-1)
            own = (logits / TEMPERATURE).log_softmax(-1)
            kl = F.kl_div(own, wanted, reduction="none").sum(-1) * (labels >= 0)
            losses = (1 - SHARE) * losses + SHARE * TEMPERATURE**2 * kl
        of_rows = torch.tensor(weights, dtype=torch.float64)
        loss = of_rows @ losses.sum(1) / max(float(of_rows @ (labels >= 0).sum(1).double()), 1.0)
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p -= rate * gradient
        assert loss.dtype == torch.float64
        found["losses"].append(loss.item())
        found["norms"].append(torch.nn.utils.get_total_norm(gradients).item())
        found["gradients"] = dict(zip(dict(model.named_parameters()), gradients, strict=True))
    return {**found, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def launched(nursery: Nursery, root: Path, world: int, cases: list[str]) -> dict[str, Found]:
    """What each case saw on so many ranks."""
    module, words = "tests.distributed.target_means", [str(root), *cases]
    statuses, _, text = nursery.run(module, words, root / "ranks", world)
    assert statuses == [0] * world, text
    return {case: torch.load(root / f"{case}.pt", weights_only=True) for case in cases}


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, nursery: Nursery, request: pytest.FixtureRequest
) -> dict[tuple[int, str], Found]:
    """What each case saw, by number of ranks and case."""
    exact = EXACT if request.config.getoption("--long") else SHORT
    exact = [*DISTILLED, *exact, DISTILLED_SHARDED]
    return {
        (world, case): seen
        for world, cases in (
            (1, [WEIGHTED[0], DISTILLED[0], *ALONE, WEIGHTED[1], DISTILLED[1]]),
            (2, [*ROUNDED, *WEIGHTED, *exact]),
        )
        for case, seen in launched(nursery, tmp_path_factory.mktemp("means"), world, cases).items()
    }


def require_equal(own: Found, reference: Found, case: str) -> None:
    """Losses and norms within 2e-6, and each tensor within 2e-6 of its largest number."""
    assert own["losses"] == pytest.approx(reference["losses"], rel=2e-6), case
    assert own["norms"] == pytest.approx(reference["norms"], rel=2e-6), case
    for kind in ("gradients", "weights"):
        assert own[kind].keys() == reference[kind].keys()
        for name, expected in reference[kind].items():
            difference = (own[kind][name] - expected.flatten()).abs().max() / expected.abs().max()
            assert difference <= 2e-6, f"{case}: {kind} {name}"


def test_the_split_over_ranks_and_micro_batches_changes_nothing(found, reference):
    for key, own in found.items():
        if key[1] not in (*ROUNDED, *WEIGHTED) and not key[1].endswith("distilled"):
            require_equal(own, reference[key[1].split(",")[-1]], str(key))


def test_dropout_changes_the_losses(reference):
    plain, dropped = (reference[str(rate)]["losses"] for rate in (0, DROPOUT))
    gaps = [abs(a - b) for a, b in zip(plain, dropped, strict=True)]
    assert [gap > 1e-3 for gap in gaps] == [step != EMPTY for step in range(len(gaps))]


def test_a_target_counts_by_the_weight_of_its_source(found, reference):
    weights = [WEIGHTS[source] for source in SOURCES]
    expected = {str(dropout): computed(weights, dropout) for dropout in (0, DROPOUT)}
    assert expected["0"]["losses"][0] != pytest.approx(reference["0"]["losses"][0], rel=1e-3)
    for key, own in found.items():
        if key[1] in WEIGHTED:
            require_equal(own, expected[key[1].split(",")[3]], str(key))


def test_a_teacher_has_its_share_in_the_loss_of_every_target(found, reference):
    weights = [WEIGHTS[source] for source in SOURCES]
    teacher = teacher_model().double()
    expected = {str(rate): computed(weights, rate, teacher) for rate in (0, DROPOUT)}
    cases = [key for key in found if key[1].endswith("distilled")]
    assert {world for world, _ in cases} == {1, 2}
    for key in cases:
        require_equal(found[key], expected[key[1].split(",")[3]], str(key))


@pytest.mark.long
def test_on_four_ranks_too(reference, nursery: Nursery, tmp_path: Path):
    seen = launched(nursery, tmp_path, 4, ON_FOUR)
    for case, own in seen.items():
        require_equal(own, reference[case.split(",")[-1]], case)


def test_losses_of_low_precision_are_near(found, reference):
    for case in ROUNDED:
        own, expected = found[2, case], reference[case.split(",")[-1]]
        assert own["losses"] == pytest.approx(expected["losses"], abs=1e-2), case
        assert own["norms"] == pytest.approx(expected["norms"], rel=1e-2), case


def test_a_step_without_any_target_has_no_gradient_and_is_not_skipped(found):
    for seen in found.values():
        assert seen["losses"][EMPTY] == seen["norms"][EMPTY] == 0.0
        assert seen["skipped"] == 0
