"""Starting a run: the launch script, the launcher under it, and the program each worker executes.

May import everything but `minimind.cli`. A new launch field starts in `plan.py`; the order of
signals, processes and exit statuses is in `run_accelerate.sh`. `run_accelerate.sh` and
`train_pretrain.py` of a checkout start the files of the same name here.

accelerate_launch     `accelerate launch` with one orderly stop, recording how workers end
host_facts            versions, hardware and disk of this host
hosts_left            the hosts that are left after a lost one agree on it
plan                  CONFIG_FILE and environment, checked, as the YAML to launch
restart               hosts, processes and flags of the next start after status 7
train_pretrain        the program of a worker: parse, build, train, exit status
"""
