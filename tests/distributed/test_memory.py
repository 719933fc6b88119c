"""The plan's arithmetic against two real gloo processes: bytes held and bytes communicated.

DDP and all four stages in both precisions are measured in one launch, by measure_memory.py; other
optimizers than AdamW in another, which is long.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minimind.architecture.costs import Layout, bytes_sent, memory
from minimind.architecture.plan import shape_of
from minimind.config.optimizers import OPTIMIZERS
from minimind.config.parse import parse_flags
from tests.forking import Nursery

pytestmark = pytest.mark.launch
TINY = shape_of(parse_flags(["--model", "tiny"]))
# Stage 3 comes last: it replaces torch's linear function in the whole process.
CASES = [
    *(
        (stage, dtype, accumulation, "adamw")
        for stage, accumulation in ((None, 1), (0, 1), (1, 1), (2, 1), (2, 2))
        for dtype in ("bfloat16", "float32")
    ),
    *((3, "bfloat16", 1, "adamw"), (3, "float32", 1, "adamw")),
]
OTHERS = [
    *((None, "bfloat16", 1, "sgd"), (0, "float32", 1, "lion"), (2, "bfloat16", 1, "muon")),
    (3, "bfloat16", 1, "muon"),
]
ALL = [*CASES, *OTHERS]
Measured = dict[tuple[Any, ...], dict[str, Any]]


def marked(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(c, marks=pytest.mark.long) if c in OTHERS else c for c in cases]


def measured_in_one_launch(
    nursery: Nursery, directory: Path, cases: list[tuple[Any, ...]]
) -> Measured:
    out, words = directory / "held.json", [",".join(map(str, case)) for case in cases]
    statuses, _, report = nursery.run("tests.distributed.measure_memory", [str(out), *words], out)
    assert statuses == [0, 0], report
    return {tuple(found["of"]): found for found in json.loads(out.read_text())}


@pytest.fixture(scope="module")
def of_adamw(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return measured_in_one_launch(nursery, tmp_path_factory.mktemp("memory"), CASES)


@pytest.fixture(scope="module")
def of_others(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return measured_in_one_launch(nursery, tmp_path_factory.mktemp("memory"), OTHERS)


@pytest.fixture
def measured(request: pytest.FixtureRequest, case: tuple[Any, ...]) -> Measured:
    return request.getfixturevalue("of_adamw" if case in CASES else "of_others")


def layout_of_case(case: tuple[int | None, str, int, str], found: dict[str, Any]) -> Layout:
    stage, dtype, accumulation, optimizer = case
    bucket, overlap = found["reduce_bucket"], found["overlap"]
    layout = Layout(stage, 2, dtype, 1, accumulation, bucket, overlap, device="cpu")
    return replace(layout, optimizer=optimizer, moments=len(OPTIMIZERS[optimizer].state))


@pytest.mark.parametrize("case", marked(ALL), ids=str)
def test_the_state_held_is_as_predicted(measured, case):
    """Weights, optimizer, gradients, buffers: the larger of backward and update, within 5 %."""
    held = memory(TINY, layout_of_case(case, measured[case]))
    predicted = held.weights + held.optimizer + max(held.gradients + held.buffers, held.update)
    assert max(measured[case]["held"]) == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("case", marked(c for c in ALL if c[0] is not None), ids=str)
def test_the_bytes_sent_are_as_predicted(measured, case):
    """An all-reduce of S bytes sends, of two processes by each, S; the other two S / 2.

    What DDP's own C++ sends cannot be watched from here.
    """
    through = measured[case]["through"]
    sent = sum(size * (1 if name == "all_reduce" else 0.5) for name, size in through.items())
    assert sent == pytest.approx(bytes_sent(TINY, layout_of_case(case, measured[case])), rel=0.01)
