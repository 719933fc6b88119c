"""Each example by each launcher, as a person would start it; `make examples` prints the times."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"
# Port 0: any that is free. The rest keeps accelerate from warning of its defaults.
ACCELERATE = (
    "-m accelerate.commands.launch --num_machines 1 --mixed_precision no --dynamo_backend no"
    " --main_process_port 0 --num_processes"
).split()
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node".split()
LAUNCHES = [(launcher, count) for launcher in ("accelerate", "torchrun") for count in (1, 2)]
by_every_launcher = pytest.mark.parametrize(("launcher", "processes"), LAUNCHES)

Start = Callable[..., str]


def command(launcher: str, processes: int) -> list[str]:
    """What stands before the script's name."""
    if launcher == "torchrun":
        return [sys.executable, *TORCHRUN, str(processes)]
    several = ["--multi_gpu"] if processes > 1 else []  # CPU processes too, where no GPU is
    return [sys.executable, *ACCELERATE, str(processes), *several]


def environment(place: Path) -> dict[str, str]:
    """Ours, one thread, and no accelerate config of this machine's user."""
    own = {"OMP_NUM_THREADS": "1", "HF_HOME": str(place), "HF_HUB_OFFLINE": "1"}
    # Unbuffered, print writes a line and its end apart, and those of two processes mix. torchrun
    # starts `python -u`, so what several processes of a script print is written in one go.
    return {n: value for n, value in os.environ.items() if n != "PYTHONUNBUFFERED"} | own


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """start(example, flags, launcher, processes, VARIABLE=value) -> what it printed."""

    def run(
        name: str, flags: str = "", launcher: str = "torchrun", processes: int = 1, **more: str
    ) -> str:
        line = [*command(launcher, processes), str(EXAMPLES / name), *flags.split()]
        options = {"capture_output": True, "text": True, "timeout": 300, "cwd": tmp_path}
        done = subprocess.run(line, env=environment(tmp_path / "hf") | more, **options)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines(keepends=True)
        return "".join(line for line in lines if "[real_accelerator.py:" not in line)  # DeepSpeed's

    return run


@pytest.fixture(scope="session")
def tuned(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run fine-tuned on conversations."""
    return fine_tuned(tmp_path_factory.mktemp("tuned"), corpus)


def fine_tuned(place: Path, corpus: Path, **shape: int) -> Path:
    """A run in `place`, pretrained on `corpus` and fine-tuned on conversations."""
    import minimind.train as training
    from tests.train.test_fine_tuning import BASE, conversations, write

    train: Any = training  # a package that is called like a function
    shared = {"cache_dir": str(place / "cache"), "device": "cpu", "deepspeed_config": "none"}
    base = {**BASE, **shape, **shared, "data_path": str(corpus), "max_steps": 20}
    assert train(base, out_dir=str(place / "base")) == 0
    talk = write(place / "talk.jsonl", conversations(400))
    flags = {**shared, "task": "sft", "init_from": str(place / "base"), "data_path": str(talk)}
    flags |= {"max_steps": 400, "batch_size": 4, "learning_rate": 5e-3, "dtype": "float32"}
    assert train(flags, out_dir=str(place / "tuned")) == 0
    return place / "tuned"


@pytest.fixture(scope="session")
def exported(tuned: Path) -> Path:
    """Its export as a Llama."""
    from minimind.cli.main import main as minimind

    place = tuned.with_name("llama")
    words = ["export", "--checkpoint", str(tuned), "--format", "llama", "--out", str(place)]
    assert minimind(words) == 0
    return place


def needs_trl() -> None:
    """Skip the test where the extra is not installed."""
    for name in ("peft", "trl"):
        pytest.importorskip(name, reason="needs the extra: pip install -e '.[examples]'")


def losses_of(report: str) -> list[float]:
    """The first and the last loss that a script with TRL prints."""
    (found,) = re.findall(r"^loss (\S+), then (\S+)$", report, re.MULTILINE)
    return [float(loss) for loss in found]


def shape(text: str) -> list[str]:
    """Lines with every number as N: figures depend on the machine, and on the Python's library."""
    return [re.sub(r"-?\d[\d.]*(e[+-]\d+)?", "N", line.strip()) for line in text.splitlines()]


def promised(name: str) -> list[str]:
    """The shape of the output that an example's docstring shows."""
    report = ast.get_docstring(ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))) or ""
    return shape("\n".join(re.findall(r"^    \| (.*)$", report, re.MULTILINE)))
