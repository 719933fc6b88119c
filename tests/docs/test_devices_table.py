"""The table of devices in docs/launching.md is what its command writes, from results there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import device_reference
from scripts.device_reference import (
    COLUMNS,
    COMMAND,
    MARKED,
    PAGE,
    ROWS,
    cell,
    passed_parts,
    with_table,
)
from tools.gpu.parts import PARTS


def test_the_table_is_what_its_command_writes():
    text = PAGE.read_text(encoding="utf-8")
    assert len(MARKED.findall(text)) == 1
    assert with_table(text) == text, f"run: {COMMAND}"


def test_a_column_is_shown_by_parts_that_exist():
    assert {part for parts in COLUMNS.values() for part in parts} <= {*PARTS}


def test_only_a_part_that_passed_and_checked_something_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    row = {"is_right": True}
    parts = {
        "losses": {"status": "passed", "findings": [row]},
        "kernels": {"status": "failed", "findings": [row]},
        "ranks": {"status": "passed", "findings": [{"is_right": None}]},
    }
    machines = {"cuda": [{"capability": [8, 6]}], "mps": [], "cpu": []}
    for device, gpus in machines.items():
        document = {"machine": {"device": device, "gpus": gpus}, "parts": parts}
        (folder / f"gpu-parts-{device}.json").write_text(json.dumps(document))
    monkeypatch.setattr(device_reference, "ROOT", tmp_path)
    passed = passed_parts()
    assert passed == {
        ("cpu", None): {"losses"},
        ("cuda", (8, 6)): {"losses"},
        ("mps", None): {"losses"},
    }
    assert [cell(row, "trains, bf16", passed) for row in ROWS if row.device == "cpu"] == [
        "run",
        "read",
    ]
    (apple,) = (row for row in ROWS if row.device == "mps")
    assert cell(apple, "trains, bf16", passed) == "run"
    assert cell(apple, "several", passed) == "no"
    (rtx,) = (row for row in ROWS if row.capability == (8, 6))
    cells = {column: cell(rtx, column, passed) for column in COLUMNS}
    assert cells.pop("trains, bf16") == "run"
    assert {*cells.values()} == {"read"}
