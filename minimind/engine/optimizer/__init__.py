"""Parameter groups, optimizers, and their state as named slices that fit any ZeRO stage.

A DeepSpeed wrapper starts in `adapters.py`, an optimizer with checkpoints in `state.py`.
"""
