"""train_pretrain.py on a rank 1 whose forward pass is late; rank 0 waits for it in collectives."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from minimind.engine import engine
from minimind.launch import train_pretrain

SECONDS = 0.15


def late(*given: Any) -> Any:
    """The loss of a micro-batch, late."""
    time.sleep(SECONDS)
    return compute_loss(*given)


if __name__ == "__main__":
    compute_loss = engine.compute_loss
    if os.environ["RANK"] == "1":
        module: Any = engine
        module.compute_loss = late
    raise SystemExit(train_pretrain.main(sys.argv[1:]))
