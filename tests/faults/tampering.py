"""A real checkpoint to tamper with, and seals that fit what was done to it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import minimind.train as training
from minimind.checkpoint.directory import MANIFEST, describe_file, published_checkpoints, with_sum
from minimind.checkpoint.resume import resume, resume_order
from minimind.cli.main import main
from minimind.config.flags import CHANGEABLE
from minimind.config.parse import parse_flags
from minimind.data.rows.order import Order
from minimind.engine.deepspeed_backend import DeepSpeedBackend
from minimind.engine.optimizers import optimizer_of, parameter_groups
from minimind.engine.state import ZeroState
from minimind.errors import RunError
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.runtime.terminal import one_line
from tests.alone import Alone

train: Any = training  # a package that is called like a function
FLAGS = {
    **{"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "accumulation_steps": 1, "max_steps": 2},
    **{"eval_rows": 0, "device": "cpu", "save_interval": 1, "keep_last": 9},
}


def trained(corpus: Path, folder: Path, **flags: Any) -> Path:
    """The out_dir of a run of one process in `folder/run`, with checkpoints of steps 1 and 2."""
    places = {"data_path": str(corpus), "cache_dir": str(folder / "cache")}
    assert train({**FLAGS, **places, **flags}, out_dir=str(folder / "run")) == 0
    return folder / "run"


def copied(run: Path, place: Path) -> tuple[Path, Path]:
    """Older and newer checkpoint of a copy of `run` at `place`."""
    newer, older = published_checkpoints(Path(shutil.copytree(run, place)) / "checkpoints")
    return older, newer


def files_of(checkpoint: Path) -> list[str]:
    """Names of all its files, sorted; the manifest's among them."""
    return sorted(p.name for p in checkpoint.iterdir())


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """What the manifest says, nothing of it checked."""
    return json.loads((checkpoint / MANIFEST).read_bytes())


def seal(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with the hash that fits it, as one who knows how can."""
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    (checkpoint / MANIFEST).write_bytes(with_sum(body))


def reseal(checkpoint: Path) -> None:
    """Bring the manifest's sizes and hashes up to what the files are now."""
    manifest = manifest_of(checkpoint)
    entries = [describe_file(checkpoint / entry["name"]) for entry in manifest["files"]]
    seal(checkpoint, {**manifest, "files": entries})


def flipped(content: bytes, draw: random.Random) -> bytes:
    """The content with one random bit the other way."""
    changed = bytearray(content)
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def truncated(content: bytes, draw: random.Random) -> bytes:
    """The content up to a random place before its end."""
    return content[: draw.randrange(len(content))]


class OneProcess(Alone):
    """An engine of one process around the model of a run, as far as resuming needs one."""

    def __init__(self) -> None:
        run = parse_flags([])
        shape = {name: FLAGS[name] for name in ("dim", "n_layers", "n_heads", "n_kv_heads")}
        positions = {"max_seq_len": FLAGS["max_seq_len"], "vocab_size": FLAGS["vocab_size"]}
        self.model = MiniMindForCausalLM(MiniMindConfig(**shape, **positions))
        optimizer = optimizer_of(parameter_groups(self.model, 0.1), run)
        self.backend = DeepSpeedBackend(
            SimpleNamespace(
                module=self.model,
                optimizer=optimizer,
                fp16_enabled=lambda: False,
                gradient_accumulation_steps=lambda: 1,
                train_batch_size=lambda: 2,
                lr_scheduler=None,
            )
        )

    def state(self) -> ZeroState:
        return self.backend.state()


def resumed(run: Path) -> int:
    """0 once a run's newest usable checkpoint is loaded, whatever it says that it was."""
    engine: Any = OneProcess()
    found = resume(engine, engine, run / "checkpoints", "auto", {}, frozenset(CHANGEABLE))
    assert found.path is not None  # never a silent step 0
    resume_order(Order(n_rows=100, rows_per_step=4, seed=1), found)
    return 0


def command(words: str) -> Callable[[Path], int]:
    """`minimind WORDS`, `RUN` standing for a run's out_dir, `OUT` for a folder; its exit status."""

    def ask(run: Path) -> int:
        places = {"RUN": str(run), "OUT": str(run.parent / "out")}
        return main([places.get(word, word) for word in words.split()])

    return ask


COMMANDS: dict[str, Callable[[Path], int]] = {
    "resume": resumed,
    "generate": command("generate --checkpoint RUN --prompt a --max_new_tokens 2"),
}
# These look at all checkpoints, or at what training does not read.
TOOLS: dict[str, Callable[[Path], int]] = {
    "list": command("checkpoint list RUN"),
    "list --verify": command("checkpoint list RUN --verify"),
    "verify": command("checkpoint verify RUN"),
    "diff": command("checkpoint diff RUN RUN"),
    "consolidate": command("checkpoint consolidate RUN --out OUT --force"),
    "prune": command("checkpoint prune RUN --keep_last 1"),
}


def ending(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status of a command, and what it said on stderr; what is no RunError is not caught."""
    capsys.readouterr()
    try:
        status = {**COMMANDS, **TOOLS}[name](run)
    except RunError as error:
        return error.status, one_line(name, error)
    return status, capsys.readouterr().err
