"""Starting a run: the launch script, the launcher under it, and the program each worker executes.

A new launch field starts in `plan.py`; the order of signals, processes and exit statuses is in
`run_accelerate.sh`. `run_accelerate.sh` and `train_pretrain.py` of a checkout start the files of
the same name here.
"""
