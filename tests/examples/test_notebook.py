"""The notebooks of examples/: kept without outputs; run from the first cell to the last."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.examples.conftest import EXAMPLES, environment

NOTEBOOK = EXAMPLES / "notebook.ipynb"
TOUR = EXAMPLES / "tour.ipynb"


@pytest.mark.parametrize(("path", "cells"), [(NOTEBOOK, 4), (TOUR, 12)], ids=["notebook", "tour"])
def test_it_is_kept_as_no_one_has_run_it(path: Path, cells: int):
    kept = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in kept["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in code] == [[]] * cells
    assert {cell["execution_count"] for cell in code} == {None}
    assert kept["metadata"]["kernelspec"]["name"] == "python3"


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize("processes", [1, 2])
def test_it_trains_and_draws_the_loss(processes: int, tmp_path: Path):
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert "PROCESSES = 2" in text
    outputs = run(text.replace("PROCESSES = 2", f"PROCESSES = {processes}"), tmp_path)
    lines = (tmp_path / "out/notebook/run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    (started,) = [event for event in events if event["event"] == "run_start"]
    assert (started["backend"], started["world_size"]) == ("deepspeed", processes)
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert len(losses) == 48
    assert losses[-1] < losses[0] - 1
    report = f"48 steps, loss {losses[0]:.2f} to {losses[-1]:.2f}\n"
    assert outputs["read"][0]["text"] == report
    require_image(outputs["draw"])


@pytest.mark.long
def test_the_tour_trains_and_resumes_bit_equal(tmp_path: Path):
    outputs = run(TOUR.read_text(encoding="utf-8"), tmp_path)
    text = {name: "".join(one.get("text", "") for one in found) for name, found in outputs.items()}
    first, last = re.findall(r"\d+\.\d+", text["train"])
    assert float(last) < float(first) - 1
    assert re.findall(r"rank (\d): 65,696 of 131,392", text["zero"]) == ["0", "1"]
    assert "transformers is imported: False" in text["positions"]
    assert text["stop"].startswith("stopped on SIGTERM after step 60; damage: None\n")
    equal = [f"step 60, resumed by {ranks} of 2 ranks: bit-equal True" for ranks in (2, 1)]
    assert text["resume"].splitlines() == equal
    require_image(outputs["draw_positions"])
    require_image(outputs["documents"])


def run(text: str, place: Path) -> dict[str, list[Any]]:
    """The outputs of each code cell of a notebook that runs in `place`."""
    import nbformat
    from nbclient import NotebookClient

    shutil.copy(EXAMPLES / "stdlib_corpus.py", place)
    notebook: Any = nbformat.reads(text, as_version=4)
    resources = {"metadata": {"path": str(place)}}
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources)
    client.execute(env=environment(place / "hf") | {"PYTHONPATH": str(ROOT)})
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return {cell["id"]: cell["outputs"] for cell in code}


def require_image(outputs: list[Any]) -> None:
    """Assert that a cell has drawn a PNG."""
    (image,) = [output["data"]["image/png"] for output in outputs if "data" in output]
    assert base64.b64decode(image).startswith(b"\x89PNG")
