"""What a run reports while it runs: metrics, progress, trackers, traces, MFU. Rank 0 alone prints.

May import `minimind.engine` and below. A new tracker begins in `trackers.py`, a new value of the
step line in `progress.py`.

mfu              the peak of the device, and model FLOPs utilization
progress         metrics.jsonl and the step lines
progress_bar     the bar at a terminal
trace            Chrome traces of some steps
trackers         wandb, TensorBoard and others
"""
