"""A metric and an end of one's own: two functions that `minimind.train` calls.

    python examples/own_run.py --data_path TEXT.jsonl --model tiny --eval_interval 50
    bash run_accelerate.sh examples/own_run.py --data_path TEXT.jsonl --model tiny

    | step 50: 0.82 of the loss of the first line
    | step 50: perplexity 120.1

The words are flags of train_pretrain.py, and so are errors and exit statuses. The run ends at the
first validation with a perplexity below GOOD. docs/own_code.md
"""

from __future__ import annotations

import os
import sys
from typing import Any

import minimind

GOOD = 100.0
train: Any = minimind.train  # a package that is called like a function


class Fall:
    """The loss of a step as a share of the first one that is logged."""

    def __init__(self) -> None:
        self.first = 0.0

    def __call__(self, step: int, numbers: dict[str, Any]) -> None:
        """Print it, on one rank: every rank is called with the same numbers."""
        self.first = self.first or numbers["loss"]
        if os.environ.get("RANK", "0") == "0":
            print(f"step {step}: {numbers['loss'] / self.first:.2f} of the loss of the first line")


def is_good(step: int, numbers: dict[str, Any]) -> bool:
    """Whether the run may end: True ends it, and saves it."""
    if os.environ.get("RANK", "0") == "0":
        print(f"step {step}: perplexity {numbers['val_ppl']:.1f}")
    return numbers["val_ppl"] < GOOD


def main() -> int:
    """Train with the flags of the command line; return the exit status."""
    return train(sys.argv[1:], on_step=Fall(), on_eval=is_good)


if __name__ == "__main__":
    sys.exit(main())
