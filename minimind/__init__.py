"""MiniMind pretraining on DeepSpeed: text in, a trained decoder and its checkpoints out."""

import sys

if sys.platform == "win32":
    raise ImportError("minimind needs Linux or macOS; on Windows install and run it under WSL 2")

from minimind import train

__version__ = "0.1.0"  # of the distribution minimind-deepspeed

__all__ = ["__version__", "train"]
