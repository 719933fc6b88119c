"""A user's script and loss: on_eval of rank 1 ends the run, or fails with --debug."""

import os
import sys
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

import minimind

train: Any = minimind.train  # a package that is called like a function


def on_eval(step: int, numbers: dict[str, float]) -> bool | None:
    if os.environ["RANK"] != "1":
        return None
    print(f"seen {numbers['val_loss']!r}")
    return bool(numbers["val_los"]) if "--debug" in sys.argv else step >= 8


def ce(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


if __name__ == "__main__":
    sys.exit(train(sys.argv[1:], on_eval=on_eval))
