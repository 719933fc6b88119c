"""Runs forked from one process that has already imported everything: a start in a second.

Reads one JSON object a line: `{"argv": [...], "environ": {...}, "log": PATH, "stop": WHERE}` forks
a process that calls train_pretrain.main(argv), and answers its pid; `{"wait": PID}` answers its
exit status, negative for a signal. At "start" or before "training" it waits for SIGCONT, so that
strace can attach; with "" it does not wait.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def warm_up() -> None:
    """Import what a run imports; no thread is started, so that forking is safe."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    for module in ("accelerate", "deepspeed", "minimind.train.pretrain", "train_pretrain"):
        import_module(module)


def stop_before_training() -> None:
    """Stop this process once it has come as far as its first step."""
    pretrain = vars(import_module("minimind.train.pretrain"))
    train = pretrain["train"]

    def stopped(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return train(*given)

    pretrain["train"] = stopped


def give_birth(asked: dict[str, Any]) -> int:
    """The pid of a process that runs train_pretrain.py on `argv`."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for new, old in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(new, old)
    os.environ.update(asked["environ"])
    if asked["stop"] == "start":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif asked["stop"] == "training":
        stop_before_training()
    try:
        ended = import_module("train_pretrain").main(asked["argv"])
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:  # whatever it is, this copy must not go on as the nursery
        os.write(2, f"{error!r}\n".encode())
        ended = 99
    os._exit(ended)


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    warm_up()
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        if "wait" in asked:
            _, status = os.waitpid(asked["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = give_birth(asked)
        answers.write(f"{answer}\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
