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
    """The inputs of a forward pass, late."""
    time.sleep(SECONDS)
    return text_inputs(*given)


if __name__ == "__main__":
    text_inputs = engine.text_inputs
    if os.environ["RANK"] == "1":
        module: Any = engine
        module.text_inputs = late
    raise SystemExit(train_pretrain.main(sys.argv[1:]))
