"""Checkpoints of random bytes, which are published as a run does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from minimind.checkpoint.directory import (
    describe_file,
    publish,
    published_checkpoints,
    step_directory,
    write_manifest,
)

SIZES = {"shard-0-of-1.safetensors": 300_000, "buffers.safetensors": 900, "state.json": 2_000}


def facts_of(run: Path) -> dict[str, Any]:
    """What the manifests of a run say beside step and files."""
    path = published_checkpoints(run / "checkpoints")[0] / "manifest.json"
    found = json.loads(path.read_bytes())
    return {name: found[name] for name in found if name not in ("format", "files", "sha256")}


def save(root: Path, step: int, facts: dict[str, Any]) -> Path:
    """Publish a checkpoint of random bytes."""
    tmp, final = root / f"step_{step:08d}.tmp-x", step_directory(root, step)
    tmp.mkdir(parents=True)
    for name, size in SIZES.items():
        (tmp / name).write_bytes(os.urandom(size))
    write_manifest(tmp, {**facts, "step": step}, [describe_file(tmp / name) for name in SIZES])
    publish(tmp, final)
    return final
