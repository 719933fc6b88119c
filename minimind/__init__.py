"""MiniMind pretraining on DeepSpeed: text in, a trained decoder and its checkpoints out."""

from minimind import train

__all__ = ["train"]
