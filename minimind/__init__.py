"""MiniMind pretraining on DeepSpeed: text in, a trained decoder and its checkpoints out."""

from minimind import train

__version__ = "0.1.0"  # of the distribution minimind-deepspeed

__all__ = ["__version__", "train"]
