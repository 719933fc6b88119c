"""One run, saved by other processes under another ZeRO stage: its exports are the same bytes.

The run is trained and saved by one launch; a second launch, of another number of processes and
another stage, resumes it where it ended and saves that step again without taking one, as arithmetic
differs in the last bits between worlds. So the state is the same and nothing else is: who holds
which part of it, gathered from real engines.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from minimind.checkpoint.directory import published_checkpoints, read_manifest
from minimind.cli.main import main
from tests.conftest import Launcher
from tests.distributed.conftest import FP32
from tools.runs import config_of_stage

pytestmark = [pytest.mark.launch, pytest.mark.long]
STEPS = 6
FORMATS = ("minimind", "llama", "gguf")


def saved_by(
    launch: Launcher, folder: Path, processes: int, stage: int, resume: Path | None = None
) -> Path:
    """The step directory of the last step; with `resume` no step is taken before it is saved."""
    folder.mkdir()
    config = config_of_stage(stage, folder)
    flags = f"{FP32} --max_steps {STEPS} --accumulation_steps {4 // processes}"
    flags += f" --deepspeed_config {config} --resume {resume or 'auto'}"
    run = launch.run(folder / "out", flags, processes)
    assert run.status == 0, run.stderr
    assert len(run.events("step")) == (0 if resume else STEPS)
    (step, *_) = published_checkpoints(folder / "out" / "checkpoints")
    output = read_manifest(step)
    assert (output["step"], output["world_size"], output["zero_stage"]) == (STEPS, processes, stage)
    assert len(list(step.glob("shard-*.safetensors"))) == processes
    return step


def exported(step: Path, form: str, out: Path) -> dict[str, bytes]:
    words = ["export", "--checkpoint", step, "--format", form, "--out", out]
    assert main(list(map(str, words))) == 0
    files = (path for path in out.iterdir() if path.name != "README.md")  # which tells of the run
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("trained", "again"), [((2, 3), (1, 2)), ((1, 2), (2, 3))], ids=["2x3-1x2", "1x2-2x3"]
)
def test_an_export_is_the_same_bytes_whoever_saved_the_run(trained, again, launch, tmp_path):
    pytest.importorskip("gguf")
    one = saved_by(launch, tmp_path / "one", *trained)
    other = saved_by(launch, tmp_path / "other", *again, resume=one)
    for form in FORMATS:
        first = exported(one, form, tmp_path / f"one-{form}")
        assert len(first) >= 4
        assert exported(other, form, tmp_path / f"other-{form}") == first
