"""minimind import --from deepspeed: the state to the last bit, and the losses that follow."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from minimind.checkpoint.directory import read_manifest
from minimind.checkpoint.reader import Contents
from minimind.checkpoint.resume import resume
from minimind.cli.main import main
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.parse import parse_flags
from minimind.engine.optimizers import parameter_groups
from minimind.engine.plain_backend import PlainBackend
from minimind.interop.weights import load_weights_from, read_checkpoint_weights
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.rotary import half_to_interleaved
from tests.faults import tiny
from tests.interop.hostile import good_folder

STEPS, RATE, ROWS, LENGTH = 3, 1e-2, 4, 16  # of deepspeed_runs.py, which imports DeepSpeed
DTYPES = {"f": "float32", "b": "bfloat16"}
BOUNDS = {"float32": 1e-6, "bfloat16": 2e-2}  # of a loss of 6.4
KINDS = ("fp32", "exp_avg", "exp_avg_sq")
Written = Callable[[int, tuple[str, ...]], Path]


def cases(*names: str) -> list[tuple[str, int, str]]:
    """`2f` -> stage 2 in float32."""
    return [(name, int(name[0]), DTYPES[name[1]]) for name in names]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_folder(tmp_path_factory.mktemp("model") / "source")


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Checkpoints that DeepSpeed writes on so many processes, by their cases; each once."""
    made: dict[tuple[int, tuple[str, ...]], Path] = {}

    def write(processes: int, names: tuple[str, ...]) -> Path:
        if (processes, names) in made:
            return made[processes, names]
        out = made[processes, names] = tmp_path_factory.mktemp("deepspeed")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [sys.executable, "-m", "tests.interop.deepspeed_runs", source, out]
        ranks = []
        for rank in range(processes):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env = os.environ | {name: str(value) for name, value in place.items()}
            command = [*map(str, words), json.dumps(cases(*names))]
            with open(out / f"rank-{rank}.log", "wb") as log:
                ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        assert [rank.wait(500) for rank in ranks] == [0] * processes, (
            out / "rank-0.log"
        ).read_text()[-3000:]
        return out

    return write


FEW = ("2f", "3b", "0b", "1f")
ALL = tuple(f"{stage}{dtype}" for stage in range(4) for dtype in "fb")
BIG = [pytest.param(n, ALL, name, marks=pytest.mark.long) for n in (1, 2, 4) for name in ALL]


def import_run(place: Path, source: Path, out: Path, *more: object) -> int:
    words = ("import", "--from", "deepspeed", place, "--out", out, "--tokenizer", source, *more)
    return main([str(word) for word in words])


class Engine(tiny.Engine):
    """One process with the model of a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        config = read_checkpoint_weights(checkpoint).config
        dtype = read_manifest(checkpoint)["identity"]["dtype"]["dtype"]
        self.model = MiniMindForCausalLM(config).to(getattr(torch, dtype))
        run = parse_flags(["--dtype", dtype, "--learning_rate", str(RATE), "--grad_clip", "1"])
        groups = parameter_groups(self.model, 0.1)
        self.backend = PlainBackend(self.model, self.model, ResolvedConfig(run, "single"), groups)

    def losses(self, first: int, last: int) -> list[float]:
        found = []
        for step in range(first, last):
            ids = torch.randint(
                5, 512, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step)
            )
            self.backend.begin(RATE)
            loss = self.model(input_ids=ids, labels=ids).loss
            self.backend.backward(loss)
            self.backend.update(True)
            found.append(float(loss.detach()))
        return found


@pytest.mark.launch
@pytest.mark.parametrize(("processes", "names", "name"), [*((2, FEW, name) for name in FEW), *BIG])
def test_a_run_of_deepspeed_goes_on(
    processes: int,
    names: tuple[str, ...],
    name: str,
    written: Written,
    source: Path,
    tmp_path: Path,
):
    place, out = written(processes, names) / name, tmp_path / "run"
    assert import_run(place, source, out) == 0
    (path,) = (out / "checkpoints").iterdir()
    contents, after = Contents(path), torch.load(place / "after.pt")
    ((_, stage, dtype),) = cases(name)
    updates = STEPS + (name == "0b")  # there DeepSpeed allocates the moments by an update
    assert (path.name, contents.state["optimizer_step"]) == ("step_00000003", updates)
    assert contents.manifest["identity"]["dtype"] == {"dtype": dtype}
    assert contents.kinds == [*KINDS]
    for kind in KINDS:  # at stage 0 DeepSpeed has no function that says them
        assert len(after[kind]) == (len(contents.shapes) if stage else 0)
        for weight, value in after[kind].items():
            if re.search(r"[qk]_(proj|norm)", weight):
                value = half_to_interleaved(value, 8)
            assert torch.equal(contents.read(kind, weight), value), (kind, weight)
    engine = Engine(path)
    identity = contents.manifest["identity"]
    found = resume(engine, engine, out / "checkpoints", "auto", identity)  # type: ignore[arg-type] (a stand-in)
    assert (found.state.step, found.state.tokens) == (STEPS, 0)
    losses = torch.tensor(engine.losses(STEPS, STEPS + 5))
    expected = torch.tensor(after["losses"][STEPS:])
    assert (losses - expected).abs().max() <= BOUNDS[dtype]
    assert expected[0] - expected[-1] != 0
