#!/usr/bin/env python
"""Pretrain a MiniMind decoder: parse -> build -> train. Started by run_accelerate.sh."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # under PYTHONSAFEPATH as well
from minimind.launch.train_pretrain import run

if __name__ == "__main__":
    run()
