#!/usr/bin/env python
"""Pretrain a MiniMind decoder: parse -> build -> train. Started by run_accelerate.sh."""

from minimind.launch.train_pretrain import run

if __name__ == "__main__":
    run()
