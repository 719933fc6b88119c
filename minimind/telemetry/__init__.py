"""Logging of a run: metrics, progress, trackers, traces, MFU. Only rank 0 prints.

May import `minimind.engine` and below. A new tracker begins in `trackers.py`, a new value of the
step line in `progress.py`.

mfu              peak FLOPs of the device and model FLOPs utilization
progress         metrics.jsonl and the step lines
progress_bar     the progress bar on a terminal
trace            Chrome traces of some steps
trackers         wandb, TensorBoard and others
"""
