"""What the fault tests share: real starts, their processes, and what they must repeat.

A start is the very command a user would type, in a process group of its own, its output in files.
Its processes are known by a word in their environment, so that none can hide in another group or
under another parent.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tools.faults.outcomes import Outcome, acknowledged, curve, events, gist
from tools.runs import PACE, ROOT, SHAPE, sentences

MARK = "MINIMIND_FAULT_START"
FLAGS = f"{SHAPE} {PACE} --max_steps 120 --save_interval 3"
PATIENCE = 15.0  # how long a start may take to vanish; longer where the machine is slow


class Start:
    """One start of the software and all processes that came of it."""

    def __init__(self, command: list[str], out_dir: Path, logs: Path, **environ: str) -> None:
        self.out_dir = out_dir
        self.word = f"{MARK}={uuid.uuid4().hex}"
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = [logs / f"{self.word[-32:]}.{name}" for name in ("out", "err")]
        self.before = len(events(out_dir))
        name, value = self.word.split("=")
        with open(self._logs[0], "wb") as out, open(self._logs[1], "wb") as err:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environ, name: value},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.started = time.monotonic()

    @property
    def stdout(self) -> str:
        return self._logs[0].read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._logs[1].read_text(errors="replace")

    def recorded(self) -> list[dict[str, Any]]:
        """The events of this start alone."""
        return events(self.out_dir)[self.before :]

    def family(self) -> dict[int, str]:
        """Every process of this start that is alive: pid -> script, launcher, worker or other."""
        word, found = self.word.encode(), {}
        for name in os.listdir("/proc"):
            if not name.isdecimal():
                continue
            try:
                if word not in Path(f"/proc/{name}/environ").read_bytes():
                    continue
                words = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:  # gone meanwhile
                continue
            found[int(name)] = self._role(int(name), words)
        return found

    def _role(self, pid: int, words: bytes) -> str:
        if pid == self.process.pid:
            return "script"
        if b"accelerate" in words and b"launch" in words:
            return "launcher"
        return "worker" if b"train_pretrain.py" in words else "other"

    def alive(self, role: str) -> list[int]:
        """The pids of one role."""
        return sorted(pid for pid, found in self.family().items() if found == role)

    def wait_until(self, reached: Callable[[], bool], limit: float, poll: float = 0.02) -> bool:
        """Whether `reached` came true while the start was alive; TimeoutError after `limit`."""
        deadline = time.monotonic() + limit
        while not reached():
            if self.process.poll() is not None:
                return reached()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.out_dir}: not there after {limit:.0f} s\n{self.stderr}")
            time.sleep(poll)
        return True

    def has_begun(self) -> bool:
        """Whether this start has got as far as its `run_start` line."""
        return any(e["event"] == "run_start" for e in self.recorded())

    def wait_gone(self, limit: float) -> tuple[float, int]:
        """(seconds until the last process was gone, how many had to be killed at `limit`)."""
        began = time.monotonic()
        while (self.process.poll() is None) | bool(left := self.family()):
            if time.monotonic() - began > limit:
                self.kill(left)
                self.process.wait()
                return time.monotonic() - began, len(left)
            time.sleep(0.02)
        return time.monotonic() - began, 0

    @staticmethod
    def kill(pids: Iterable[int]) -> None:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
        self.kill(self.family())
        self.process.wait()


class Site:
    """A corpus, a cache, a clean start's time, and a place for runs."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.draw = random.Random(seed)
        self.corpus = root / "text.jsonl"
        root.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"text": text}, ensure_ascii=False) for text in sentences(1, 400))
        self.corpus.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._opened: list[Start] = []
        self._runs = 0
        self.clean_start = 0.0
        self.reference: dict[int, tuple[str, ...]] = {}
        self.final: list[dict[str, Any]] = []

    def new_run(self, name: str) -> Path:
        """A folder for one more run."""
        self._runs += 1
        return self.root / f"{self._runs:03d}-{name}"

    def places(self, out_dir: Path, cache: Path | None = None) -> list[str]:
        cache = cache or self.root / "cache"
        given = ["--data_path", str(self.corpus), "--cache_dir", str(cache)]
        return [*given, "--out_dir", str(out_dir)]

    def start(
        self,
        out_dir: Path,
        flags: str = "",
        cache: Path | None = None,
        prefix: tuple[str, ...] = (),
        **environ: str,
    ) -> Start:
        """The run of the unbroken curve, begun or gone on with; `flags` come last and win."""
        words = [*self.places(out_dir, cache), *FLAGS.split(), *flags.split()]
        command = [*prefix, "bash", str(ROOT / "run_accelerate.sh"), *words]
        scratch = self.root / "tmp"  # what killed launchers leave there goes with the site
        scratch.mkdir(exist_ok=True)
        given = {"NUM_PROCESSES": "2", "TMPDIR": str(scratch), "PYTHON": sys.executable, **environ}
        start = Start(command, out_dir, self.root / "logs", **given)
        self._opened.append(start)
        return start

    def finish(self, out_dir: Path, flags: str = "", **options: Any) -> Start:
        """The same, waited for."""
        start = self.start(out_dir, flags, **options)
        _, left = start.wait_gone(max(300.0, 20 * self.clean_start))
        assert not left, f"{out_dir} did not end: {gist(start.stderr)}"
        return start

    def measure(self) -> None:
        """Train without a fault: the curve all others must repeat, and what a start costs here."""
        out_dir = self.new_run("unbroken")
        whole = self.start(out_dir)
        whole.wait_until(lambda: bool(curve(whole.recorded())), 300)
        self.clean_start = time.monotonic() - whole.started
        whole.wait_gone(300)
        assert whole.process.returncode == 0, whole.stderr
        self.reference = {int(line[0]): line for line in curve(whole.recorded())}
        assert len(self.reference) == 120
        self.final = self.tensors(out_dir)

    @staticmethod
    def tensors(out_dir: Path) -> list[dict[str, Any]]:
        """Name, size and hash of the last checkpoint's tensor files."""
        last = max((out_dir / "checkpoints").glob("step_*[0-9]"))
        files = json.loads((last / "manifest.json").read_bytes())["files"]
        return [f for f in files if f["name"].endswith(".safetensors")]

    @property
    def patience(self) -> float:
        """How long a start may take to vanish."""
        return max(PATIENCE, 1.5 * self.clean_start)

    def deviating(self, recorded: Iterable[dict[str, Any]]) -> int:
        """How many step lines are not those of the unbroken run."""
        return sum(line != self.reference.get(int(line[0])) for line in curve(recorded))

    def check_whole(self, out_dir: Path, last: Start) -> list[str]:
        """What is wrong with a run that was broken, gone on with, and has ended."""
        wrong = []
        recorded = events(out_dir)
        if last.process.returncode != 0:
            wrong.append(
                f"{out_dir.name}: ended with {last.process.returncode}: {gist(last.stderr)}"
            )
        if {int(line[0]) for line in curve(recorded)} != set(self.reference):
            wrong.append(f"{out_dir.name}: has not the steps of the unbroken run")
        if bad := self.deviating(recorded):
            wrong.append(f"{out_dir.name}: {bad} step lines deviate")
        if not wrong and self.tensors(out_dir) != self.final:
            wrong.append(f"{out_dir.name}: the last checkpoint's tensors differ")
        return wrong

    def go_on(self, out_dir: Path, outcome: Outcome, flags: str = "", **options: Any) -> Start:
        """Start again to the end, and add to `outcome` whatever is then wrong."""
        promised = acknowledged(events(out_dir))
        again = self.finish(out_dir, flags, **options)
        found = [e["step"] for e in again.recorded() if e["event"] == "run_start"]
        if not found or found[0] < promised:
            outcome.lost += 1
            outcome.wrong.append(f"{out_dir.name}: step {promised} was promised, found {found}")
        outcome.deviating += self.deviating(again.recorded())
        outcome.wrong += self.check_whole(out_dir, again)
        return again

    def close(self) -> None:
        """End every process of every start, also of those that went wrong."""
        for start in self._opened:
            start.close()
