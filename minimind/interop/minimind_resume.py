"""MiniMind's `*_resume.pth`: weights in float16, the state of AdamW, and counters of its loop."""

from __future__ import annotations

from pathlib import Path

import torch

from minimind.errors import CheckpointError
from minimind.interop.deepspeed_checkpoint import (
    ForeignCheckpoint,
    as_laid_out,
    count,
    load_pickle,
    normalized,
    read_replicated,
    require_complete,
)
from minimind.interop.job import EMBEDDING, HEAD, REPLACE


def read_minimind_resume(file: Path) -> ForeignCheckpoint:
    """The checkpoint; its step is the updates of AdamW, as the loop counts micro-batches."""
    state = load_pickle(file)
    if type(state) is not dict or not {"model", "optimizer", "world_size"} <= {*state}:
        raise CheckpointError(f"{file}: is not a *_resume.pth of MiniMind; {REPLACE}")
    with as_laid_out(file):
        module = dict(state["model"])
        if {HEAD, EMBEDDING} <= {*module} and torch.equal(module[HEAD], module[EMBEDDING]):
            module.pop(HEAD)  # it is tied, and was copied
        found = ForeignCheckpoint(
            file.parent,
            file,
            "MiniMind",
            processes=count(state["world_size"]),
            unknown=("lr", "dtype"),
            has_schedule=True,
        )
        read_replicated(found, module, state["optimizer"])
        found.groups = normalized(found.groups)
        require_complete(found)
        found.step = found.updates or 0
    return found
