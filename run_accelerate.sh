#!/usr/bin/env bash
# Start train_pretrain.py on all GPUs, or on two CPU processes, through Accelerate: under DeepSpeed,
# or without it where CONFIG_FILE says distributed_type: MULTI_GPU, MULTI_CPU or NO.
#
#   bash run_accelerate.sh [MY_RUN.py] [FLAGS of train_pretrain.py ...]
#
# Environment: CONFIG_FILE (configs/accelerate_config.yaml), OMP_NUM_THREADS (CPU cores / processes),
# PYTHON (that of .venv here, whichever conda or virtual environment is active; else the active one),
# and, before the same field of CONFIG_FILE, NUM_PROCESSES (over all hosts; all GPUs, else 2 a host),
# MAIN_PORT (a free one), and on several hosts NUM_MACHINES, MACHINE_RANK and MAIN_IP. MAX_RESTARTS (0)
# starts again after status 7, first after RESTART_WAIT (5) seconds, with what is left of the hosts.
# Exit status: the run's own (0 done, 2 usage, 3 data, 4 checkpoint, 5 storage, 6 numeric, 7 peer,
# 8 in use, 9 port, 10 out of memory, 11 corruption, 70 bug, 75 stopped and saved: run it again, 130
# Ctrl-C twice), not torchrun's 1.
# Works from any directory. docs/launching.md: several hosts, Slurm, other launchers. Where the
# package is installed without a checkout, `minimind launch` starts the same launcher. MY_RUN.py is a
# script that calls minimind.train (docs/own_code.md); all processes run it instead.
set -euo pipefail

# The folder of the script itself, not of a link to it; readlink -f is GNU's.
unset CDPATH
script=${BASH_SOURCE[0]}
while [[ -L $script ]]; do
  folder=$(dirname -- "$script") script=$(readlink -- "$script")
  [[ $script == /* ]] || script=$folder/$script
done
root=$(cd -- "$(dirname -- "$script")" && pwd)

# The checkout's own environment, unless PYTHON names another. An active one (conda's base is active
# in many shells) is used only where there is no .venv: its versions were not tested together.
python=${PYTHON:-}
if [[ -z $python && -e $root/.venv ]]; then
  python=$root/.venv/bin/python
elif [[ -z $python ]]; then
  python=$(command -v python || command -v python3) || python=python
fi
if ! command -v "$python" >/dev/null; then
  way_out="make -B -C '$root' setup"
  [[ -z ${PYTHON:-} ]] || way_out="unset PYTHON, or name another"
  echo "run_accelerate.sh: $(printf '%q' "$python") cannot be run; $way_out" >&2
  exit 2
fi
exec "$python" "$root/minimind/launch/launcher.py" "$python" "$@"
