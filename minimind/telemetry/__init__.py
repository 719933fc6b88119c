"""Logging of a run: metrics, progress, trackers, traces, MFU. Only rank 0 prints.

May import `minimind.engine` and below. A new tracker starts in `trackers.py`, a new value of the
step line in `progress.py`.

mfu              peak FLOPs of the device and model FLOPs utilization
period           the time of a step over all profiles of a start
progress         metrics.jsonl, the step lines and the progress bar
trace            Chrome traces of some steps
trackers         wandb, TensorBoard and others
verdict          what holds a run back, in one sentence
"""
