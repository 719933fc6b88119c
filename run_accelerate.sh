#!/usr/bin/env bash
# Start train_pretrain.py on all GPUs, or on two CPU processes, under DeepSpeed through Accelerate.
#
#   bash run_accelerate.sh [FLAGS of train_pretrain.py ...]
#
# Environment: NUM_PROCESSES (all GPUs, else 2), CONFIG_FILE (configs/accelerate_config.yaml),
# MAIN_PORT (a free one), OMP_NUM_THREADS (CPU cores / processes). Works from any directory.
# Exit status: the run's own (0 done, 2 usage, 3 data, 4 checkpoint, 5 storage, 6 numeric, 7 peer,
# 8 in use, 9 port, 70 bug, 75 stopped and saved: run it again), not torchrun's 1.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

if [[ $# -eq 0 ]]; then
  set -- --epochs 3 --batch_size 24 --learning_rate 2e-4 --dtype bfloat16 --accumulation_steps 32 \
    --grad_clip 1.0 --log_interval 100 --save_interval 10000 --dim 1024 --n_layers 32 \
    --max_seq_len 1024 --use_flash_attn --profile --profile_interval 10
fi

# The project's own environment, unless another one is active.
if [[ -z ${VIRTUAL_ENV:-} && -z ${CONDA_PREFIX:-} && -x $here/.venv/bin/accelerate ]]; then
  PATH=$here/.venv/bin:$PATH
fi
if ! command -v accelerate >/dev/null; then
  echo "run_accelerate.sh: accelerate is not installed; run: make -C '$here' setup" >&2
  exit 2
fi

# Flags this script has to know as well.
cpu=0 debug=0 previous=
for word in "$@"; do
  [[ $previous == --device ]] && word=--device=$word
  [[ $word == --device=* ]] && cpu=$([[ $word == *=cpu ]] && echo 1 || echo 0)
  [[ $word == --debug ]] && debug=1
  [[ $word == --help || $word == -h ]] && exec python "$here/train_pretrain.py" --help
  previous=$word
done

gpus=0
if [[ $cpu -eq 0 ]]; then
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    gpus=$(awk -F, '{ print ($0 == "" || $1 < 0) ? 0 : NF }' <<<"$CUDA_VISIBLE_DEVICES")
  elif command -v nvidia-smi >/dev/null; then
    gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
  fi
fi
[[ $gpus -eq 0 ]] && export DS_ACCELERATOR=cpu
processes=${NUM_PROCESSES:-$((gpus > 0 ? gpus : 2))}
if ! [[ $processes =~ ^[1-9][0-9]*$ ]]; then
  echo "run_accelerate.sh: NUM_PROCESSES=$processes is not a positive whole number; change it" >&2
  exit 2
fi
cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}

port=${MAIN_PORT:-0}
if ! [[ $port =~ ^[0-9]{1,5}$ && $((10#$port)) -le 65535 ]]; then
  echo "run_accelerate.sh: MAIN_PORT=$port is not a port number; unset it for a free port" >&2
  exit 2
fi
# Bound and released: a free one, or the answer that MAIN_PORT is taken.
if ! port=$(python -c 'import socket, sys
probe = socket.socket()
probe.bind(("", int(sys.argv[1])))
print(probe.getsockname()[1])' "$port" 2>/dev/null); then
  echo "run_accelerate.sh: MAIN_PORT=$MAIN_PORT is in use; unset it for a free port" >&2
  exit 9
fi

config=${CONFIG_FILE:-$here/configs/accelerate_config.yaml}
if [[ ! -f $config || ! -r $config ]]; then
  echo "run_accelerate.sh: CONFIG_FILE=$config is no readable file; name an Accelerate YAML" >&2
  exit 2
fi
python - "$here" "$config" <<'PY' || exit 2
import sys

sys.path.insert(0, sys.argv[1])
from minimind.errors import UsageError, one_line
from minimind.flags import load_yaml

try:
    load_yaml(sys.argv[2], "CONFIG_FILE")
except UsageError as error:
    sys.exit(one_line("run_accelerate.sh", error))
PY

scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT
export MINIMIND_STATUS_FILE=$scratch/status MINIMIND_SCRIPT_PID=$$ MINIMIND_STDERR_ON_STDIN=1
# A worker told to stop may need a long step and a save; torch's own patience is 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

# The launcher's own traceback and failure table go to a file; the workers get the real stderr back
# through descriptor 0, the only one that reaches them (minimind/process.py).
# A process group of its own keeps the terminal's Ctrl-C from it: this script decides what it is told.
set -m
accelerate launch \
  --config_file "$config" \
  --num_processes "$processes" --main_process_port "$port" \
  "$here/train_pretrain.py" "$@" 0>&2 2>"$scratch/launcher.log" &
launcher=$!
set +m

# Whatever asks this script to stop, torchrun is told TERM, once: it hands that on to the workers,
# and they save, while a second one would interrupt its waiting for them. Workers end by themselves
# soon after a launcher that is killed, so a second Ctrl-C does that.
stopping=0
stop() {
  stopping=$((stopping + 1))
  if [[ $stopping -eq 1 ]]; then
    kill -TERM "$launcher" 2>/dev/null || true
  elif [[ $1 == INT ]]; then
    kill -KILL "$launcher" 2>/dev/null || true
  fi
}
trap 'stop TERM' TERM USR1
trap 'stop INT' INT

code=0
wait "$launcher" || code=$?
while kill -0 "$launcher" 2>/dev/null; do
  code=0
  wait "$launcher" || code=$?
done

if [[ -s $MINIMIND_STATUS_FILE ]]; then
  read -r code _ <"$MINIMIND_STATUS_FILE"
elif [[ $stopping -gt 0 ]]; then
  code=75
  echo "run_accelerate.sh: stopped before the first step or by force; run it again to go on" >&2
elif [[ $code -ne 0 ]]; then
  debug=1 # nobody took the blame, so the launcher's log is all there is
  code=70
fi
if [[ $debug -eq 1 && -s $scratch/launcher.log ]]; then
  cat -- "$scratch/launcher.log" >&2
fi
exit "$code"
