#!/usr/bin/env python
"""train_pretrain.py by the name that it has in tutorials, with a notice."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # under PYTHONSAFEPATH as well
from minimind.launch.train_pretrain import run
from minimind.runtime.environment import rank_of

if __name__ == "__main__":
    if rank_of(os.environ) == 0:
        print("train_pretrain_accelerate.py runs train_pretrain.py", file=sys.stderr)
    run()
