#!/usr/bin/env bash
# Start train_pretrain.py on all GPUs, or on two CPU processes, through Accelerate: under DeepSpeed,
# or without it where CONFIG_FILE says distributed_type: MULTI_GPU, MULTI_CPU or NO.
#
#   bash run_accelerate.sh [FLAGS of train_pretrain.py ...]
#
# Environment: CONFIG_FILE (configs/accelerate_config.yaml), OMP_NUM_THREADS (CPU cores / processes),
# PYTHON (that of .venv here, whichever conda or virtual environment is active; else the active one),
# and, before the same field of CONFIG_FILE, NUM_PROCESSES (over all hosts; all GPUs, else 2 a host),
# MAIN_PORT (a free one), and on several hosts NUM_MACHINES, MACHINE_RANK and MAIN_IP.
# Exit status: the run's own (0 done, 2 usage, 3 data, 4 checkpoint, 5 storage, 6 numeric, 7 peer,
# 8 in use, 9 port, 10 out of memory, 70 bug, 75 stopped and saved: run it again), not torchrun's 1.
# Works from any directory. docs/launching.md: several hosts, Slurm, other launchers.
set -euo pipefail

# Whatever asks this script to stop, the launcher is told TERM; it hands that on to the workers, and
# they save. Workers end by themselves soon after a launcher that is killed, so a second Ctrl-C does
# that.
launcher='' stopping=0 asked='' scratch=''
# shellcheck disable=SC2317,SC2329 # called by the traps
stop() {
  stopping=$((stopping + 1))
  asked=${asked:-$1}
  if [[ -n $scratch && ! -e $scratch/stop ]]; then
    echo "$asked" >"$scratch/stop" || true # for the workers' messages (minimind/runtime/process.py)
  fi
  if [[ -z $launcher ]]; then
    return 0 # nobody to tell yet; looked at before the launch
  elif [[ $stopping -eq 1 ]]; then
    kill -TERM "$launcher" 2>/dev/null || true
  elif [[ $1 == Ctrl-C ]]; then
    kill -KILL "$launcher" 2>/dev/null || true
  fi
}
# shellcheck disable=SC2317,SC2329
leave() {
  local code=$?
  [[ -z $scratch ]] || rm -rf -- "$scratch"
  if [[ $stopping -gt 0 && -z $launcher ]]; then
    echo "run_accelerate.sh: stopped on $asked before the first step; run it again to go on" >&2
    code=75
  fi
  exit "$code"
}
for name in TERM USR1 HUP; do
  # shellcheck disable=SC2064 # the name of now
  trap "stop SIG$name" "$name"
done
trap 'stop Ctrl-C' INT
trap leave EXIT

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
if [[ $# -eq 0 ]]; then
  set -- --epochs 3 --batch_size 24 --learning_rate 2e-4 --dtype bfloat16 --accumulation_steps 32 \
    --grad_clip 1.0 --log_interval 100 --save_interval 10000 --dim 1024 --n_layers 32 \
    --max_seq_len 1024 --use_flash_attn --profile --profile_interval 10
fi

# The checkout's own environment, unless PYTHON names another. An active one (conda's base is active
# in many shells) is used only where there is no .venv: its versions were not tested together.
python=${PYTHON:-}
if [[ -z $python && -e $here/.venv ]]; then
  python=$here/.venv/bin/python
elif [[ -z $python ]]; then
  python=$(command -v python || command -v python3) || python=python
fi
if ! command -v "$python" >/dev/null; then
  way_out="make -B -C '$here' setup"
  [[ -z ${PYTHON:-} ]] || way_out="unset PYTHON, or name another"
  echo "run_accelerate.sh: $(printf '%q' "$python") cannot be run; $way_out" >&2
  exit 2
fi
if [[ $python == */* ]]; then # for the tools beside it, such as ninja
  PATH=$(cd -- "$(dirname -- "$python")" && pwd):$PATH
fi

# Flags this script has to know as well.
device=auto debug=0 previous=
for word in "$@"; do
  [[ $previous == --device ]] && word=--device=$word
  [[ $word == --device=* ]] && device=${word#*=}
  [[ $word == --debug ]] && debug=1
  [[ $word == --help || $word == -h ]] && exec "$python" "$here/train_pretrain.py" --help
  previous=$word
done

# The YAML for `accelerate launch`, made of CONFIG_FILE and the environment, both checked there.
# Ctrl-C goes to all that the terminal runs; this script alone answers it.
if ! scratch=$(mktemp -d 2>/dev/null); then
  scratch=''
  echo "run_accelerate.sh: error[E_STORAGE] rank=0 step=0: no folder can be made in" \
    "$(printf '%q' "${TMPDIR:-/tmp}") (TMPDIR); free some space, or name another there" >&2
  exit 5
fi
plan=$(trap '' INT && exec "$python" "$here/scripts/launch_plan.py" "$scratch/launch.yaml" "$device")
while IFS= read -r variable; do
  export "${variable?}"
done <<<"$plan"

export MINIMIND_STATUS_FILE=$scratch/status MINIMIND_SCRIPT_PID=$$ MINIMIND_STDERR_ON_STDIN=1
# A worker told to stop may need a long step and a save; torch's own patience is 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

[[ $stopping -eq 0 ]] || exit 75
# The launcher's own traceback and failure table go to a file; the workers get the real stderr back
# through descriptor 0, the only one that reaches them (minimind/runtime/process.py).
# A process group of its own keeps the terminal's Ctrl-C from it: this script decides what it is told.
set -m
"$python" "$here/scripts/accelerate_launch.py" --config_file "$scratch/launch.yaml" \
  --deepspeed_multinode_launcher standard --log_dir "$scratch/torchelastic" \
  "$here/train_pretrain.py" "$@" 0>&2 2>"$scratch/launcher.log" &
launcher=$!
set +m
[[ $stopping -eq 0 ]] || kill -TERM "$launcher" 2>/dev/null || true # asked since the line above

code=0
wait "$launcher" 2>/dev/null || code=$? # bash would tell of a kill
while kill -0 "$launcher" 2>/dev/null; do
  code=0
  wait "$launcher" 2>/dev/null || code=$?
done

# The workers of a launcher that was killed notice it, say so, and end.
for _ in {1..100}; do
  workers=$(awk '{ print $2 }' "$scratch"/worker-* 2>/dev/null) || true
  # shellcheck disable=SC2086 # several numbers
  if [[ -z $workers ]] || ! kill -0 $workers 2>/dev/null; then
    break
  fi
  sleep 0.1
done

if [[ -s $MINIMIND_STATUS_FILE ]]; then
  read -r code _ <"$MINIMIND_STATUS_FILE"
elif [[ $stopping -gt 0 ]]; then
  code=75
  echo "run_accelerate.sh: stopped on $asked before the first step or by force; run it again to go on" >&2
elif [[ $code -gt 128 ]]; then
  echo "run_accelerate.sh: the launcher was killed (signal $((code - 128))); run it again" >&2
  code=7
elif [[ $code -ne 0 ]]; then
  debug=1 # nobody took the blame, so the launcher's log is all there is
  code=70
fi
if [[ $debug -eq 1 && -s $scratch/launcher.log ]]; then
  tr -d '\000-\010\013-\037\177' <"$scratch/launcher.log" >&2 # without terminal escapes
fi
exit "$code"
