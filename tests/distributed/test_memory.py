"""The plan's arithmetic against two real gloo processes: bytes held and bytes communicated.

Stages 2 and 3 are measured in one launch, by measure_memory.py; DDP, the other stages, the other
precision of each, and other optimizers than AdamW, in another, which is long.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minimind.architecture.costs import Layout, bytes_sent, memory
from minimind.architecture.shape import Shape, shape_of
from minimind.config.optimizers import OPTIMIZERS
from minimind.config.parse import parse_flags
from tools.forking import Nursery

pytestmark = pytest.mark.launch
# Stage 3 comes last: it replaces torch's linear function in the whole process.
FROZEN = "--freeze *embed_tokens* model.layers.[02].*"  # more than half of the weights
CASES = [(2, "bfloat16", 2, f"adamw {FROZEN}"), (3, "bfloat16", 2, "adamw")]
OTHERS = [
    *((None, "bfloat16", 1, "adamw"), (1, "bfloat16", 1, "adamw"), (2, "bfloat16", 2, "adamw")),
    *((0, "float32", 1, "adamw"), (2, "float32", 1, "adamw")),
    *((None, "float32", 1, "adamw"), (0, "bfloat16", 1, "adamw"), (1, "float32", 1, "adamw")),
    *((2, "bfloat16", 1, "adamw"), (2, "float32", 2, "adamw"), (None, "bfloat16", 1, "sgd")),
    *((0, "float32", 1, "lion"), (2, "bfloat16", 1, "muon")),
    *((None, "float32", 1, "adamw_8bit"), (2, "bfloat16", 1, "adamw_8bit")),
    (3, "bfloat16", 1, "adamw_8bit"),
    *((None, "bf16-mixed", 1, "adamw"), (1, "bf16-mixed", 1, "adamw")),
    *((None, "bfloat16", 1, f"adamw {FROZEN}"), (0, "bfloat16", 1, f"lion {FROZEN}")),
    *((1, "float32", 1, f"adamw {FROZEN}"), (2, "bfloat16", 1, f"muon {FROZEN}")),
    *((2, "bf16-mixed", 2, "adamw"), (3, "float32", 1, "adamw"), (3, "bfloat16", 1, "muon")),
    (3, "bfloat16", 2, "adamw --freeze model.layers.[02].*"),
]
Measured = dict[tuple[Any, ...], dict[str, Any]]


def measured_in_one_launch(
    nursery: Nursery, directory: Path, cases: list[tuple[Any, ...]]
) -> Measured:
    out, words = directory / "held.json", [",".join(map(str, case)) for case in cases]
    statuses, _, report = nursery.run("tools.measure_memory", [str(out), *words], out)
    assert statuses == [0, 0], report
    return {tuple(found["of"]): found for found in json.loads(out.read_text())}


@pytest.fixture(
    scope="module",
    params=[CASES, pytest.param(OTHERS, marks=pytest.mark.long)],
    ids=["two", "others"],
)
def measured(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Measured:
    return measured_in_one_launch(nursery, tmp_path_factory.mktemp("memory"), request.param)


def tiny(case: tuple[Any, ...]) -> Shape:
    return shape_of(parse_flags(f"--model tiny --optimizer {case[3]}".split()))


def layout_of_case(case: tuple[Any, ...], found: dict[str, Any]) -> Layout:
    stage, dtype, accumulation, flags = case
    optimizer = flags.split()[0]
    bucket, overlap = found["reduce_bucket"], found["overlap"]
    # No look sees what bitsandbytes copies within an update on a CPU (tests/engine/test_eight_bit).
    device = "cuda" if optimizer == "adamw_8bit" else "cpu"
    layout = Layout(stage, 2, dtype, 1, accumulation, bucket, overlap, device=device)
    layout = replace(layout, param_persistence_threshold=found["persistence_threshold"])
    return replace(layout, optimizer=optimizer, moments=len(OPTIMIZERS[optimizer].state))


def test_the_state_held_is_as_predicted(measured: Measured):
    """Weights, optimizer, gradients, buffers: the larger of backward and update, within 5 %."""
    for case, found in measured.items():
        held = memory(tiny(case), layout_of_case(case, found))
        predicted = held.weights + held.optimizer + max(held.gradients + held.buffers, held.update)
        assert max(found["held"]) == pytest.approx(predicted, rel=0.05), case


def test_the_bytes_sent_are_as_predicted(measured: Measured):
    """An all-reduce of S bytes sends, of two processes by each, S; the other two S / 2.

    What DDP's own C++ sends cannot be watched from here.
    """
    for case in (case for case in measured if case[0] is not None):
        through = measured[case]["through"]
        sent = sum(size * (1 if name == "all_reduce" else 0.5) for name, size in through.items())
        predicted = bytes_sent(tiny(case), layout_of_case(case, measured[case]))
        assert sent == pytest.approx(predicted, rel=0.01), case
