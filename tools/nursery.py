"""Runs forked from one process that has already imported everything: a start in a second.

Reads one JSON object a line: `{"module": NAME, "argv": [...], "environ": {...}, "out": PATH, "err":
PATH, "stop": WHERE}` forks a process that runs the module as `python -m` would, and answers its
pid; `{"wait": PID}` answers its exit status, negative for a signal. At "start" or before "training"
it waits for SIGCONT, so that strace can attach; with "" it does not wait.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from minimind.runtime.exit import leave

WARM = (
    "torch.utils.cpp_extension",  # first: its setuptools replaces distutils
    *("accelerate", "deepspeed", "minimind.train.pretrain", "train_pretrain"),
    # What DeepSpeed imports as it builds an engine, torch's compiler among it: 2 s in each rank.
    *("deepspeed.runtime.zero.muon.muon_optimizer", "minimind.engine.deepspeed_backend"),
    *("minimind.engine.flat_partitions", "minimind.engine.op_build_lock"),
    # What a run imports as it prepares its text, and at its end.
    *("minimind.data.prepare.prepare", "minimind.data.tokenizer.hf_tokenizer"),
    *("minimind.report.page", "minimind.report.charts", "minimind.train.floors"),
    "plotly.offline",
)


def warm_up() -> None:
    """Import what a run imports; no thread is started, so that forking is safe."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    for module in WARM:
        import_module(module)
    assert import_module("deepspeed").ops.__compatible_ops__  # asks a compiler, and is kept
    gc.collect()
    gc.freeze()  # a fork that collected garbage would copy every page of it


def stop_before_training() -> None:
    """Stop this process once it has come as far as its first step."""
    pretrain = vars(import_module("minimind.train.pretrain"))
    train = pretrain["train"]

    def stopped(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return train(*given)

    pretrain["train"] = stopped


def give_birth(request: dict[str, Any]) -> int:
    """The pid of a process that runs a module."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for place, old in ((request["out"], 1), (request["err"], 2)):
        os.dup2(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND), old)
    os.environ.update(request["environ"])
    if request["stop"] == "start":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif request["stop"] == "training":
        stop_before_training()
    sys.argv = [request["module"], *request["argv"]]
    ended: Any = 99
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        ended = 0
    except SystemExit as error:
        ended = error.code or 0
    except BaseException:  # whatever it is, this copy must not go on as the nursery
        traceback.print_exc()
    leave(ended, at_once=ended != 0)  # as a program that nobody calls


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    warm_up()
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = give_birth(request)
        answers.write(f"{answer}\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
