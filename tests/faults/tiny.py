"""Real checkpoints of a tiny model, saved and resumed in process."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch

from minimind.checkpoint.directory import (
    describe_file,
    published_checkpoints,
    read_manifest,
    step_directory,
    write_manifest,
)
from minimind.checkpoint.reader import Contents
from minimind.checkpoint.resume import Resumed
from minimind.checkpoint.resume import resume as resume_from
from minimind.checkpoint.retention import Rules
from minimind.checkpoint.saver import Saver
from minimind.checkpoint.tensor_files import shard_name, write_slices
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.parse import parse_flags
from minimind.data.tokenizer.sentencepiece import train_tokenizer
from minimind.engine.optimizers import parameter_groups
from minimind.engine.plain_backend import PlainBackend
from minimind.engine.state import ZeroState
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from tests.alone import Alone
from tests.conftest import sentences

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
IDENTITY = {
    "batch": {"rows_per_step": 4, "max_seq_len": 32},
    "schedule": {"min_lr_ratio": 1e-05},  # a flipped bit makes E of the e
    "lr": {"learning_rate": 0.01},
    "data": {"sha256": "d" * 64},
    "seed": {"seed": 1},
}
FACTS = {
    "identity": IDENTITY,
    **{"world_size": 1, "zero_stage": None, "backend": "single", "dtype": "float32"},
    "rows": 400,
    "mixture": None,
    "order": {"step": 0, "rows": 0, "epoch": 0, "offset": 0},
    "versions": {"torch": "2"},
}


class Engine(Alone):
    """One process with a model and AdamW: all that saving and resuming ask of an engine."""

    device = torch.device("cpu")

    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = MiniMindForCausalLM(MiniMindConfig(**SHAPE))
        run = parse_flags(["--dtype", "float32", "--learning_rate", "0.01"])
        groups = parameter_groups(self.model, 0.1)
        self.backend = PlainBackend(self.model, self.model, ResolvedConfig(run, "single"), groups)

    def state(self) -> ZeroState:
        return self.backend.state()

    def train(self, steps: int) -> None:
        rows = torch.arange(2 * 9).view(2, 9) * 7 % SHAPE["vocab_size"]
        for _ in range(steps):
            self.backend.begin(0.01)
            loss = self.model(input_ids=rows, labels=rows).loss
            self.backend.backward(loss)
            self.backend.update(True)


def tokenizer_bytes(folder: Path) -> bytes:
    path = folder / "tokenizer.model"
    train_tokenizer(sentences(1, 50), SHAPE["vocab_size"], path)
    return path.read_bytes()


def new_run(
    out_dir: Path, tokenizer: bytes, steps: tuple[int, ...] = (2, 4), seed: int = 1
) -> Path:
    """A run's folder with a checkpoint of each of `steps`."""
    engine = Engine(seed)
    config = json.dumps(engine.model.config.to_dict(), indent=2).encode()
    texts = {"config.json": config, "tokenizer.model": tokenizer, "ds_config.resolved.json": b"{}"}
    where = out_dir / "checkpoints"
    keeper = Saver(engine, engine, where, Rules(len(steps)), texts)  # type: ignore[arg-type] (a stand-in)
    before = 0
    for step in steps:
        engine.train(step - before)
        before = step
        keeper.begin({**FACTS, "step": step, "tokens": 100 * step})
        keeper.poll(wait=True)
    keeper.close()
    return out_dir


def resume(out_dir: Path, requested: str = "auto", seed: int = 2) -> tuple[Engine, Resumed]:
    engine = Engine(seed)
    found = resume_from(engine, engine, out_dir / "checkpoints", requested, IDENTITY)  # type: ignore[arg-type] (a stand-in)
    return engine, found


def newest(out_dir: Path) -> Path:
    return published_checkpoints(out_dir / "checkpoints")[0]


def vouch(directory: Path, **facts: Any) -> None:
    """Write the manifest anew for the files as they are: what one who forges it can do."""
    known = json.loads((directory / "manifest.json").read_bytes())
    names = [entry["name"] for entry in known["files"]]
    kept = {key: v for key, v in known.items() if key not in ("format", "files", "sha256")}
    files = [describe_file(directory / name) for name in names if (directory / name).exists()]
    write_manifest(directory, {**kept, **facts}, files)


def recut(path: Path, root: Path, world_size: int, stage: int) -> Path:
    """The same state as `world_size` ranks would have saved it, cut at odd places."""
    contents = Contents(path)
    final = step_directory(root, contents.manifest["step"])
    shutil.copytree(path, final)
    (final / shard_name(0, 1)).unlink()
    runs: list[list[tuple[str, torch.Tensor]]] = [[] for _ in range(world_size)]
    for kind in contents.kinds:
        for at, (name, shape) in enumerate(contents.shapes.items()):
            whole, size = contents.read(kind, name).view(-1), math.prod(shape)
            cuts = sorted(
                {0, size, *(size * (3 * r + at % 3) // (3 * world_size) for r in range(world_size))}
            )
            for part, start in enumerate(cuts[:-1]):
                run = whole[start : cuts[part + 1]]
                runs[(part + at) % world_size].append((f"{kind}|{name}|{start}", run))
    for rank, own in enumerate(runs):
        write_slices(final / shard_name(rank, world_size), own)
    manifest = read_manifest(path)
    files = [describe_file(f) for f in sorted(final.iterdir()) if f.name != "manifest.json"]
    kept = {key: v for key, v in manifest.items() if key not in ("format", "files", "sha256")}
    write_manifest(final, {**kept, "world_size": world_size, "zero_stage": stage}, files)
    return final
