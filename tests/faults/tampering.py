"""A real checkpoint to tamper with, and seals that fit what was done to it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import minimind.train as training
from minimind.files import fingerprint
from minimind.train.checkpoint import MANIFEST, candidates, describe_file, manifest_text

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
    newer, older = candidates(Path(shutil.copytree(run, place)) / "checkpoints")
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
    body["sha256"] = fingerprint(body)
    (checkpoint / MANIFEST).write_bytes(manifest_text(body))


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
