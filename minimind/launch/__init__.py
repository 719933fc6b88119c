"""Starting a run: the launcher, `accelerate launch` under it, and the program each worker executes.

A new launch field starts in `plan.py`; the order of signals, processes and exit statuses is in
`launcher.py`, which run_accelerate.sh and `minimind launch` run.
"""
