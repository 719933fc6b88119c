"""Weights of a checkpoint as a dict of tensors."""

from pathlib import Path

import torch

from minimind.checkpoint.reader import Contents
from minimind.engine.state import MASTER


def load_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Read all fp32 parameters of a checkpoint, without DeepSpeed."""
    contents = Contents(directory)
    return {name: contents.read(MASTER, name) for name in contents.shapes}
