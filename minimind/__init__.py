"""MiniMind pretraining on DeepSpeed: text in, a trained decoder and its checkpoints out."""
