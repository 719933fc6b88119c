#!/usr/bin/env bash
# Start train_pretrain.py through `accelerate launch` and exit with the status of the run. Started by
# run_accelerate.sh in the top folder of a checkout, whose header lists flags, environment and exit
# statuses, and by `minimind launch`.
set -euo pipefail

# Any stop signal is passed to the launcher as TERM; the launcher passes it to the workers, which
# save. A second Ctrl-C kills the launcher; its workers notice and end by themselves.
launcher='' stopping=0 received='' scratch=''
# shellcheck disable=SC2317,SC2329 # called by the traps
stop() {
  stopping=$((stopping + 1))
  received=${received:-$1}
  if [[ -n $scratch && ! -e $scratch/stop ]]; then
    echo "$received" >"$scratch/stop" || true # for the workers' messages (minimind/runtime/process.py)
  fi
  if [[ -z $launcher ]]; then
    return 0 # no launcher yet; checked before the launch
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
    echo "run_accelerate.sh: stopped on $received before the first step; run it again to go on" >&2
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
root=$(dirname -- "$(dirname -- "$here")") # the checkout, or site-packages
worker=$root/train_pretrain.py
[[ -e $worker ]] || worker=$here/train_pretrain.py
if [[ $# -eq 0 ]]; then
  set -- --epochs 3 --batch_size 24 --learning_rate 2e-4 --dtype bfloat16 --accumulation_steps 32 \
    --grad_clip 1.0 --log_interval 100 --save_interval 10000 --dim 1024 --n_layers 32 \
    --max_seq_len 1024 --use_flash_attn --profile --profile_interval 10
fi

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
if [[ $python == */* ]]; then # for the tools beside it, such as ninja
  PATH=$(cd -- "$(dirname -- "$python")" && pwd):$PATH
fi

# Flags this script has to know as well.
device=auto debug=0 previous=
for word in "$@"; do
  [[ $previous == --device ]] && word=--device=$word
  [[ $word == --device=* ]] && device=${word#*=}
  [[ $word == --debug ]] && debug=1
  [[ $word == --help || $word == -h ]] && exec "$python" "$worker" --help
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
plan=$(trap '' INT && exec "$python" "$here/plan.py" "$scratch/launch.yaml" "$device")
while IFS= read -r variable; do
  export "${variable?}"
done <<<"$plan"

export MINIMIND_STATUS_FILE=$scratch/status MINIMIND_SCRIPT_PID=$$ MINIMIND_STDERR_ON_STDIN=1
# A worker that stops may need a long step and a save; torch's default timeout is 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

[[ $stopping -eq 0 ]] || exit 75
# The launcher's own traceback and failure table go to a file; the workers get the real stderr back
# through descriptor 0, the only one that reaches them (minimind/runtime/process.py).
# Its own process group keeps the terminal's Ctrl-C from it: this script passes signals on.
set -m
"$python" "$here/accelerate_launch.py" --config_file "$scratch/launch.yaml" \
  --deepspeed_multinode_launcher standard --log_dir "$scratch/torchelastic" \
  "$worker" "$@" 0>&2 2>"$scratch/launcher.log" &
launcher=$!
set +m
[[ $stopping -eq 0 ]] || kill -TERM "$launcher" 2>/dev/null || true # stopped since the check above

code=0
wait "$launcher" 2>/dev/null || code=$? # bash would print a message for a kill
while kill -0 "$launcher" 2>/dev/null; do
  code=0
  wait "$launcher" 2>/dev/null || code=$?
done

# The workers of a killed launcher notice it, print a message and end.
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
  echo "run_accelerate.sh: stopped on $received before the first step or by force; run it again to go on" >&2
elif [[ $code -gt 128 ]]; then
  echo "run_accelerate.sh: the launcher was killed (signal $((code - 128))); run it again" >&2
  code=7
elif [[ $code -ne 0 ]]; then
  debug=1 # no status was recorded: show the launcher's log
  code=70
fi
if [[ $debug -eq 1 && -s $scratch/launcher.log ]]; then
  tr -d '\000-\010\013-\037\177' <"$scratch/launcher.log" >&2 # without terminal escapes
fi
exit "$code"
