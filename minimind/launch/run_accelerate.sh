#!/usr/bin/env bash
# Start train_pretrain.py through `accelerate launch` and exit with the status of the run. Started by
# run_accelerate.sh in the top folder of a checkout, whose header lists flags, environment and exit
# statuses, and by `minimind launch`.
set -euo pipefail

# Any stop signal is passed to the launcher as TERM; the launcher passes it to the workers, which
# save. A second Ctrl-C kills the launcher; its workers notice and end by themselves.
launcher='' stopping=0 received='' scratch='' place='' moment='before the first step'
# shellcheck disable=SC2317,SC2329 # called by the traps
stop() {
  stopping=$((stopping + 1))
  received=${received:-$1}
  if [[ -n $place && ! -e $place/stop ]]; then
    echo "$received" >"$place/stop" || true # for the workers' messages (minimind/runtime/process.py)
  fi
  if [[ -z $launcher ]]; then
    return 0 # no launcher; checked before each launch
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
    echo "run_accelerate.sh: stopped on $received $moment; run it again to go on" >&2
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

# The folder of the script itself, not of a link to it; readlink -f is GNU's.
unset CDPATH
script=${BASH_SOURCE[0]}
while [[ -L $script ]]; do
  folder=$(dirname -- "$script") script=$(readlink -- "$script")
  [[ $script == /* ]] || script=$folder/$script
done
here=$(cd -- "$(dirname -- "$script")" && pwd)
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

# plan.py records there whose it is, and removes those of scripts that were killed.
if ! scratch=$(LC_ALL=C mktemp -d "${TMPDIR:-/tmp}/minimind-launch-XXXXXXXX" 2>&1); then
  reason=${scratch##*: } scratch='' way_out='name another there'
  case $reason in
    *space* | *quota*) way_out="free some space, or $way_out" ;;
    *ermi*) way_out="correct its permissions, or $way_out" ;;
  esac
  echo "run_accelerate.sh: error[E_STORAGE] rank=0 step=0: no folder can be made in" \
    "$(printf '%q' "${TMPDIR:-/tmp}") (TMPDIR): $reason; $way_out" >&2
  exit 5
fi

# Until the launcher has ended, through signals that this script gets meanwhile; sets `code`.
await_launcher() {
  code=0
  wait "$launcher" 2>/dev/null || code=$? # bash would print a message for a kill
  while kill -0 "$launcher" 2>/dev/null; do
    code=0
    wait "$launcher" 2>/dev/null || code=$?
  done
}

# One launch with the flags given; sets `code`, the status of the run. Its files are in a folder of
# their own, $scratch/0, or $scratch/N for restart N.
start() {
  local plan variable workers
  place=$scratch/$restarts
  mkdir -- "$place"
  # The YAML for `accelerate launch`, made of CONFIG_FILE and the environment, both checked there.
  # Ctrl-C goes to all that the terminal runs; this script alone answers it.
  plan=$(trap '' INT && exec "$python" "$here/plan.py" "$place/launch.yaml" "$device")
  while IFS= read -r variable; do
    export "${variable?}"
  done <<<"$plan"

  export MINIMIND_STATUS_FILE=$place/status MINIMIND_SCRIPT_PID=$$ MINIMIND_STDERR_ON_STDIN=1
  # A worker that stops may need a long step and a save; torch's default timeout is 30 s.
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

  [[ $stopping -eq 0 ]] || exit 75
  # The launcher's own traceback and failure table go to a file; the workers get the real stderr back
  # through descriptor 0, the only one that reaches them (minimind/runtime/process.py).
  # Its own process group keeps the terminal's Ctrl-C from it: this script passes signals on.
  set -m
  "$python" "$here/accelerate_launch.py" --config_file "$place/launch.yaml" \
    --deepspeed_multinode_launcher standard --log_dir "$place/torchelastic" \
    "$worker" "$@" 0>&2 2>"$place/launcher.log" &
  launcher=$!
  set +m
  [[ $stopping -eq 0 ]] || kill -TERM "$launcher" 2>/dev/null || true # stopped since the check above
  await_launcher

  # The workers of a killed launcher notice it, print a message and end.
  for _ in {1..100}; do
    workers=$(awk '{ print $2 }' "$place"/worker-* 2>/dev/null) || true
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
  if [[ $debug -eq 1 && -s $place/launcher.log ]]; then
    tr -d '\000-\010\013-\037\177' <"$place/launcher.log" >&2 # without terminal escapes
  fi
}

# Waits before restart N, in which the hosts that are left agree; sets `flags`, to be appended. In
# the background, like the launcher, so that a signal reaches this script at once.
prepare_restart() {
  local variable
  moment="before restart $restarts"
  set -m
  "$python" "$here/restart.py" "$scratch" "$restarts" >"$scratch/restart" &
  launcher=$!
  set +m
  [[ $stopping -eq 0 ]] || kill -TERM "$launcher" 2>/dev/null || true
  await_launcher
  launcher=''
  [[ $stopping -eq 0 ]] || exit 75
  [[ $code -eq 0 ]] || exit "$code"
  while IFS= read -r variable; do
    export "${variable?}"
  done <"$scratch/restart"
  read -r -a flags <<<"$RESTART_FLAGS"
}

# After status 7 alone: any other end would come again, or was asked for.
restarts=0 code=0 flags=()
start "$@"
while [[ $code -eq 7 && $stopping -eq 0 && $restarts -lt $MAX_RESTARTS ]]; do
  restarts=$((restarts + 1))
  prepare_restart
  start "$@" ${flags[@]+"${flags[@]}"}
done
if [[ $code -eq 7 && $stopping -eq 0 && $MAX_RESTARTS -gt 0 ]]; then
  echo "run_accelerate.sh: no restart is left of MAX_RESTARTS=$MAX_RESTARTS; run the same command again" >&2
fi
exit "$code"
