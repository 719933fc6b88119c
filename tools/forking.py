"""Ranks forked from a process that has imported everything: what a launcher does, in a second.

For what is not about the launcher: each rank gets the environment that torchrun would give it, and
is sent SIGTERM when another has failed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from tools.runs import ROOT, Launcher, Run

SILENT = 300.0  # seconds after which ranks count as stuck


class Nursery:
    """The process that ranks are forked from."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.nursery"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **question: Any) -> int:
        """What it answers."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        stdin.write(json.dumps(question) + "\n")
        stdin.flush()
        return int(stdout.readline())

    def fork(
        self,
        module: str,
        argv: list[str],
        stops: list[str],
        out: Path,
        err: Path,
        of_last: tuple[list[str], dict[str, str]] = ([], {}),
    ) -> list[int]:
        """The pids of as many ranks of `python -m module` as there are `stops`.

        The last one has words and variables of its own.
        """
        world, port, pids = len(stops), str(free_port()), []
        for rank, stop in enumerate(stops):
            environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank)}
            environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            environ |= {"LOCAL_WORLD_SIZE": str(world)}  # a run in this process has set it to 1
            words, variables = of_last if rank == world - 1 else ([], {})
            environ = environ if world > 1 else {}
            request: dict[str, Any] = {"module": module, "argv": [*argv, *words], "stop": stop}
            request |= {"environ": environ | variables}
            request |= {"out": str(out), "err": str(err)}
            pids.append(self.ask(**request))
        return pids

    def wait(self, pids: list[int], seconds: float = SILENT) -> tuple[list[int], float]:
        """Exit statuses, and seconds between the first end and the last."""
        statuses: dict[int, int] = {}
        began, first = time.monotonic(), 0.0
        while len(statuses) < len(pids):
            for pid in pids:
                if pid in statuses or state_of(pid) not in "ZX":
                    continue  # alive; its parent, the nursery, has not asked for its status yet
                statuses[pid] = self.ask(wait=pid)
                first = first or time.monotonic()
                for other in set(pids) - set(statuses) if statuses[pid] not in (0, 75) else ():
                    os.kill(other, signal.SIGTERM)
            if time.monotonic() - (first or began) > seconds:
                raise TimeoutError(f"stuck; ended were {statuses} of {pids}")
            time.sleep(0.01)
        return [statuses[pid] for pid in pids], time.monotonic() - first

    def run(
        self,
        module: str,
        argv: list[str],
        place: Path,
        processes: int = 2,
        seconds: float = SILENT,
        of_last: tuple[list[str], dict[str, str]] = ([], {}),
    ) -> tuple[list[int], str, str]:
        """Exit statuses of ranks, and all they printed, which is also in files at `place`."""
        place.parent.mkdir(parents=True, exist_ok=True)
        out, err = place.with_suffix(".out.txt"), place.with_suffix(".err.txt")
        out.unlink(missing_ok=True)
        err.unlink(missing_ok=True)
        pids = self.fork(module, argv, [""] * processes, out, err, of_last)
        try:
            statuses, _ = self.wait(pids, seconds)
        except BaseException:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise
        return statuses, out.read_text(), err.read_text()

    def close(self) -> None:
        """Let it end."""
        self._process.kill()
        self._process.communicate()


class Forked(Launcher):
    """A Launcher whose ranks are forked."""

    def __init__(self, launcher: Launcher, nursery: Nursery) -> None:
        super().__init__(launcher.corpus, launcher.cache)
        self._nursery = nursery

    def run(self, out_dir: Path, flags: str = "", processes: int = 2, **options: Any) -> Run:
        """A finished run; its status is that of the first rank that did not end well."""
        words = self._words(out_dir, flags)
        statuses, out, err = self._nursery.run("train_pretrain", words, out_dir, processes)
        return Run(out_dir, next((status for status in statuses if status), 0), out, err)

    def run_until(
        self, out_dir: Path, flags: str, words: str, number: int = signal.SIGKILL
    ) -> tuple[list[int], str]:
        """A run of two ranks that get a signal once they have written `words` to metrics.jsonl.

        Return their statuses and what they printed.
        """
        metrics, log = out_dir / "metrics.jsonl", out_dir.with_suffix(".signalled.txt")
        argv, known = self._words(out_dir, flags), metrics.stat().st_size if metrics.exists() else 0
        log.unlink(missing_ok=True)
        pids = self._nursery.fork("train_pretrain", argv, ["", ""], log, log)
        deadline = time.monotonic() + SILENT
        while not (metrics.exists() and words.encode() in metrics.read_bytes()[known:]):
            assert all(state_of(pid) not in "ZX" for pid in pids), log.read_text()
            assert time.monotonic() < deadline, "the run never got that far"
            time.sleep(0.01)
        for pid in pids:
            os.kill(pid, number)
        return self._nursery.wait(pids)[0], log.read_text()

    def _words(self, out_dir: Path, flags: str) -> list[str]:
        named = ["--deepspeed_config", str(DEFAULT_DEEPSPEED_CONFIG)]  # which the YAML names
        return [*named, *self.command(out_dir, flags)[2:]]  # without `bash run_accelerate.sh`


def free_port() -> int:
    """One on which nobody listens just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def state_of(pid: int) -> str:
    """The letter of a process's state in /proc."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
