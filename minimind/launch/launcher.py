"""Starts a run through `accelerate launch`, hands signals on, starts again after a lost rank.

Run as `launcher.py PYTHON FLAGS...` by run_accelerate.sh and `minimind launch`. Exits with the
status of the run, which a worker writes to a file: torchrun always exits with 1.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # held until `Signals` takes them, rather than end the imports below
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

if not __package__:  # run as a script: the package is that of this folder, whichever is installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import_module("minimind")
    del sys.path[0]
from minimind.errors import (
    CURES,
    HALVED,
    PREEMPTED,
    Interrupted,
    MemoryFull,
    PeerError,
    RunError,
    StorageError,
    UsageError,
    known_error,
)
from minimind.launch.plan import PROJECT, SCRATCH, require_installed, write_plan
from minimind.runtime import disk
from minimind.runtime.event_log import parse_event
from minimind.runtime.exit import log_end
from minimind.runtime.heartbeat import is_alive, read_layout, registered_workers
from minimind.runtime.panics import panics_caught
from minimind.runtime.process import (
    CAUGHT,
    NAME,
    SCRIPT_PID,
    STATUS_FILE,
    STDERR_ON_STDIN,
    kill_tree,
    read_claim,
    record_stop,
    stop_reason,
)
from minimind.runtime.terminal import one_line, print_traceback
from minimind.runtime.urls import masked_text

HERE = Path(__file__).resolve().parent
WITHOUT_FLAGS = (
    "--epochs 3 --batch_size 24 --learning_rate 2e-4 --dtype bfloat16 --accumulation_steps 32"
    " --grad_clip 1.0 --log_interval 100 --save_interval 10000 --dim 1024 --n_layers 32"
    " --max_seq_len 1024 --use_flash_attn --profile --profile_interval 10"
)
TAIL = 2**20  # bytes of metrics.jsonl in which its last step is
WORKERS_END = 10.0  # seconds in which the workers of a killed launcher end by themselves


class Signals:
    """Hands the first stop signal on to torchrun as TERM, whose workers save.

    A second Ctrl-C kills all of them, so that none is left to tell of the others' end.
    """

    def __init__(self) -> None:
        self.reason = ""  # the first signal
        self.torchrun: subprocess.Popen[bytes] | None = None  # from the first launch on
        self.ends_wait = False  # a signal ends what this process waits for
        self.ends_at_once = False  # the second Ctrl-C
        for number in CAUGHT:
            if signal.getsignal(number) != signal.SIG_IGN:  # as by nohup
                signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_first, self.reason = not self.reason, self.reason or stop_reason(number)
        record_stop(self.reason)  # for the workers' messages
        if self.ends_wait and is_first:
            raise SystemExit(PREEMPTED)
        if self.torchrun and is_first:
            self.torchrun.terminate()
        elif self.torchrun and number == signal.SIGINT and self.torchrun.poll() is None:
            self.ends_at_once = True
            kill_tree(self.torchrun.pid)

    def run(self, words: Sequence[str], log: Path) -> int:
        """Run torchrun's process to its end; its own output goes to `log`."""
        with open(log, "wb") as errors:
            # Tracebacks and the table of failures go to the log; workers get the real stderr back
            # by descriptor 0, the only one that reaches them (runtime/process.py). The terminal's
            # Ctrl-C does not come to a process group of its own.
            self.torchrun = subprocess.Popen(words, stdin=2, stderr=errors, process_group=0)
            if self.reason:  # since the check before it
                self.torchrun.terminate()
            return self.torchrun.wait()


def main(python: str, flags: Sequence[str]) -> int:
    """Start a run on this host; return its status.

    It starts again after status 7, as MAX_RESTARTS says, and with smaller micro-batches. Before the
    flags may stand a user's script, which every worker then runs.
    """
    signals = Signals()
    script = flags[0] if flags and flags[0].endswith(".py") else ""
    flags = flags[bool(script) :]
    for at, word in enumerate(flags):
        if word in ("--help", "-h"):
            os.execvp(python, [python, *_worker(script), *flags[at : at + 2]])
    if os.sep in python:  # for the tools beside it, such as ninja
        beside = os.path.abspath(os.path.dirname(python))
        os.environ["PATH"] = f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    scratch, moment, restarts = None, "before the first step", 0
    words = [*flags] if flags or script else WITHOUT_FLAGS.split()
    try:
        scratch = make_scratch()
        status, launched, halved = start(signals, python, script, words, scratch / "0")
        most, number, first, added = int(os.environ["MAX_RESTARTS"]), 0, 0, list[str]()
        fewest = math.inf
        # Any other end would come again, or was asked for.
        while not signals.reason:
            if halved is not None and halved < fewest:
                words, added = [*words, *added, *flags_to_resume(scratch / str(number))], []
                fewest, number = halved, number + 1
                first = number
                moment, signals.torchrun = "before it started again", None
                _say("out of memory; starting again with smaller micro-batches (--batch_size auto)")
            elif status == PeerError.status and restarts < most:
                restarts, number = restarts + 1, number + 1
                moment, signals.torchrun = f"before restart {restarts}", None
                places = [scratch / str(one) for one in range(first, number)]
                added = prepare_restart(signals, places, restarts, launched)
            else:
                break
            place = scratch / str(number)
            status, launched, halved = start(signals, python, script, [*words, *added], place)
        if status == PeerError.status and not signals.reason and most:
            _say(f"no restart is left of MAX_RESTARTS={most}; run the same command again")
    except Exception as fault:  # a RunError, or one of the disk
        error = known_error(fault) or RunError(str(fault) or type(fault).__name__)
        if error.code == RunError.code or "--debug" in words:
            print_traceback(fault)
        if not signals.reason:
            last = f"{NAME}: {error}" if error.status == PREEMPTED else one_line(NAME, error)
            print(*map(masked_text, error.table), last, sep="\n", file=sys.stderr)
        status = error.status
    except SystemExit as stopped:
        status = PREEMPTED if signals.reason else stopped.code
    finally:
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)
    if signals.reason and signals.torchrun is None:
        _say(f"stopped on {signals.reason} {moment}; run it again to continue")
        return PREEMPTED
    assert isinstance(status, int)
    return status


def start(
    signals: Signals, python: str, script: str, words: Sequence[str], place: Path
) -> tuple[int, Mapping[str, Any], int | None]:
    """One launch, whose files are in `place`; its status, and what the plan says of it.

    A `script` has words of its own, so that only its workers know all flags. Last, the rows of the
    micro-batch that was out of memory if a start takes fewer.
    """
    place.mkdir()
    os.environ |= {STATUS_FILE: str(place / "status"), SCRIPT_PID: str(os.getpid())}
    require_installed(os.environ)
    # They import yaml: after the check that it is installed.
    from minimind.checkpoint.directory import ended_at_once
    from minimind.checkpoint.run_folder import require_out_dir
    from minimind.config.parse import parse_flags
    from minimind.config.paths import naming_flags
    from minimind.train.inputs import require_inputs

    if script and not disk.is_file(Path(script)):
        raise UsageError(f"{script}: there is no such file; give the path of your script, or none")
    run = parse_flags(words)
    launched, exports, message = write_plan(place / "launch.yaml", run.device)
    # The other hosts would wait for one that ends here: there the workers look at the paths.
    if launched["num_machines"] == 1 and not script:
        with panics_caught(), naming_flags(vars(run)):
            require_inputs(run)
            require_out_dir(run)
    print(message, file=sys.stderr, flush=True)
    os.environ |= {STDERR_ON_STDIN: "1", **{name: str(value) for name, value in exports.items()}}
    # A worker that stops may need a long step and a save; torch's default is 30 s.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    if signals.reason:
        raise SystemExit(PREEMPTED)
    log, metrics = place / "launcher.log", Path(run.out_dir) / "metrics.jsonl"
    known = disk.stat(metrics).st_size if disk.exists(metrics) else 0
    command = [python, str(HERE / "accelerate_launch.py"), "--config_file", f"{place}/launch.yaml"]
    command += ["--deepspeed_multinode_launcher", "standard", "--log_dir", f"{place}/torchelastic"]
    code = signals.run([*command, *_worker(script), *words], log)
    _await_workers(place)
    status, shows_log = code, "--debug" in words
    if claim := read_claim():
        status = claim.status
    elif signals.ends_at_once:
        print(end="\n" if sys.stderr.isatty() else "", file=sys.stderr)  # below the progress bar
        reason = ended_at_once(Path(run.out_dir))
        _say(reason)
        if launched["num_machines"] == 1:  # else ranks of the other hosts record an end
            log_end_at_once(place, reason)
        status = Interrupted.status
    elif signals.reason:
        _say(
            f"stopped on {signals.reason} before the first step or by force; run it again to"
            " continue"
        )
        status = PREEMPTED
    elif code < 0:
        _say(f"the launcher was killed (signal {-code}); run it again")
        status = PeerError.status
    elif code:
        status, shows_log = RunError.status, True  # no status was recorded
    if shows_log:
        text = log.read_text(encoding="utf-8", errors="replace")
        sys.stderr.write(re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text))  # no terminal escapes
        sys.stderr.flush()
    is_full = status in (MemoryFull.status, PeerError.status)  # 7: of a rank on another host
    return status, launched, halved_rows(metrics, known) if is_full else None


def halved_rows(metrics: Path, known: int) -> int | None:
    """The rows of a micro-batch that a rank has recorded as halved, None if none has.

    Of metrics.jsonl the first `known` bytes are older. After a record of a process that went on by
    itself it has another run_start.
    """
    rows = None
    with suppress(OSError), open(metrics, "rb") as file:  # it may be gone
        file.seek(known)
        for event in filter(None, map(parse_event, file)):
            if event["event"] == HALVED and type(event.get("micro_batch_rows")) is int:
                rows = event["micro_batch_rows"]
            elif event["event"] == "run_start":
                rows = None
    return rows


def flags_to_resume(place: Path) -> list[str]:
    """The flags that resume the run of a launch from its newest checkpoint; none without one."""
    from minimind.checkpoint.directory import published_checkpoints

    layout = read_layout(place)  # None before the start of the run
    is_saved = layout and published_checkpoints(Path(layout.out_dir) / "checkpoints")
    return ["--resume", "auto"] if layout and is_saved and layout.resume != "auto" else []


def log_end_at_once(place: Path, reason: str) -> None:
    """Record the end of a run whose ranks were killed by a second Ctrl-C, unless one did.

    `place` is that of the launch. None of the ranks is left to write. A run that had not begun has
    no end.
    """
    if (layout := read_layout(place)) is None:
        return
    out_dir = Path(layout.out_dir)
    with suppress(OSError), open(out_dir / "metrics.jsonl", "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        events = [event for event in map(parse_event, file) if event]
        if events and events[-1]["event"] == "exit":
            return
        steps = (event["step"] for event in reversed(events) if event.get("step") is not None)
        end = {"code": Interrupted.code, "status": Interrupted.status, "reason": reason}
        log_end(out_dir, {**end, "step": next(steps, 0)}, f"{NAME}: {reason}")


def prepare_restart(
    signals: Signals, places: Sequence[Path], number: int, launched: Mapping[str, Any]
) -> list[str]:
    """Wait for restart `number`, in which the hosts that are left agree; return flags to append.

    `places` are those of the launches of this command.
    """
    from minimind.launch.restart import next_launch  # pydantic and more

    signals.ends_wait = True
    try:
        if signals.reason:
            raise SystemExit(PREEMPTED)
        variables, flags = next_launch(places, number, launched)
    finally:
        signals.ends_wait = False
    os.environ |= {name: str(value) for name, value in variables.items()}
    return flags


def make_scratch() -> Path:
    """Make the folder of this command in TMPDIR; raise StorageError."""
    folder = os.environ.get("TMPDIR") or "/tmp"
    try:
        return Path(tempfile.mkdtemp(prefix=SCRATCH, dir=folder))
    except OSError as error:
        cure = f"{CURES[error.errno]}, or " if error.errno in CURES else ""
        raise StorageError(
            f"no folder can be made in {folder} (TMPDIR): {error.strerror}; {cure}name another"
            " there"
        ) from error


def _await_workers(place: Path) -> None:
    """Wait until the workers of a launcher that was killed have noticed it, and ended."""
    deadline = time.monotonic() + WORKERS_END
    while any(is_alive(worker.pid) for worker in registered_workers(place)):
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)


def _worker(script: str) -> list[str]:
    """The program of a worker: the user's script, or that of the checkout, or of the package."""
    if script:
        return [str(HERE / "own_script.py"), script]
    own = PROJECT / "train_pretrain.py"
    return [str(own if disk.exists(own) else HERE / "train_pretrain.py")]


def _say(text: str) -> None:
    print(f"{NAME}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    status = main(sys.argv[1], sys.argv[2:])
    # The interpreter gives up its handlers before it ends: a signal then would be the status.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    sys.exit(status)
