"""examples/notebook.ipynb: kept without outputs; run from the first cell to the last, it draws."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.examples.conftest import EXAMPLES, environment

NOTEBOOK = EXAMPLES / "notebook.ipynb"


def test_it_is_kept_as_no_one_has_run_it():
    kept = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in kept["cells"] if cell["cell_type"] == "code"]
    assert len(code) == 4
    assert [cell["outputs"] for cell in code] == [[]] * 4
    assert {cell["execution_count"] for cell in code} == {None}
    assert kept["metadata"]["kernelspec"]["name"] == "python3"


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize("processes", [1, 2])
def test_it_trains_and_draws_the_loss(processes: int, tmp_path: Path):
    import nbformat
    from nbclient import NotebookClient

    shutil.copy(EXAMPLES / "stdlib_corpus.py", tmp_path)
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert "PROCESSES = 2" in text
    text = text.replace("PROCESSES = 2", f"PROCESSES = {processes}")
    notebook: Any = nbformat.reads(text, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place)
    client.execute(env=environment(tmp_path / "hf") | {"PYTHONPATH": str(ROOT)})
    lines = (tmp_path / "out/notebook/run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    (started,) = [event for event in events if event["event"] == "run_start"]
    assert (started["backend"], started["world_size"]) == ("deepspeed", processes)
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert len(losses) == 48
    assert losses[-1] < losses[0] - 1
    report, drawn = (
        cell["outputs"] for cell in notebook["cells"] if cell["id"] in ("read", "draw")
    )
    assert report[0]["text"] == f"48 steps, loss {losses[0]:.2f} to {losses[-1]:.2f}\n"
    (image,) = [output["data"]["image/png"] for output in drawn if "data" in output]
    assert base64.b64decode(image).startswith(b"\x89PNG")
