"""Real runs of a small model on a small text, started as a user starts them, and their ends."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG

ROOT = Path(__file__).resolve().parents[1]
# Small enough that a launch costs more than the training.
SHAPE = "--dim 64 --n_layers 2 --n_heads 4 --n_kv_heads 2 --max_seq_len 64 --vocab_size 600"
PACE = (
    "--batch_size 2 --accumulation_steps 2 --max_steps 20 --log_interval 1 --device cpu"
    " --learning_rate 2e-3 --val_fraction 0.05"
)
# Where processes that are never started would meet.
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ENDLESS = "--max_steps 90000 --log_interval 1"


def sentences(seed: int, documents: int) -> list[str]:
    """Documents with something to learn: 90 % of the time one of two fixed words follows a word."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(80)]
    words += ["春眠", "不覺", "曉處", "處聞", "啼鳥", "夜來", "風雨", "聲花"]
    after = {word: draw.choices(words, k=2) for word in words}
    texts = []
    for _ in range(documents):
        word, line = draw.choice(words), []
        for _ in range(draw.randint(30, 120)):
            line.append(word)
            word = draw.choice(after[word]) if draw.random() < 0.9 else draw.choice(words)
        texts.append(" ".join(line) + ".\n")
    return texts


def events(out_dir: Path, *names: str) -> list[dict[str, Any]]:
    """What a run recorded: the events of these names, or all."""
    lines = (out_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    recorded = [json.loads(line) for line in lines]
    return [event for event in recorded if event["event"] in names or not names]


@dataclass(frozen=True)
class Run:
    """A finished run: its exit status, what it printed, and what it recorded."""

    out_dir: Path
    status: int
    stdout: str
    stderr: str

    def events(self, name: str) -> list[dict[str, Any]]:
        return events(self.out_dir, name)

    def curve(self) -> list[tuple[Any, ...]]:
        """Values that must be bit-identical in an uninterrupted and a resumed run."""
        names = ("step", "loss", "lr", "grad_norm", "tokens", "rows")
        return [tuple(map(repr, (line[n] for n in names))) for line in self.events("step")]

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.events("step")]


class Launcher:
    """Starts run_accelerate.sh on the small corpus, one cache for all."""

    def __init__(self, corpus: Path, cache: Path) -> None:
        self.corpus = corpus
        self.cache = cache

    def command(self, out_dir: Path, flags: str) -> list[str]:
        pace = PACE
        if "--global_batch_size" in flags:  # it decides the micro-batches
            pace = PACE.replace("--accumulation_steps 2", "")
        given = f"{SHAPE} {pace} {flags}".split()
        places = ["--data_path", str(self.corpus), "--cache_dir", str(self.cache)]
        return ["bash", str(ROOT / "run_accelerate.sh"), *places, "--out_dir", str(out_dir), *given]

    @staticmethod
    def environment(processes: int = 2) -> dict[str, str]:
        variables = {
            "NUM_PROCESSES": str(processes),
            "OMP_NUM_THREADS": "1",
            "PYTHON": sys.executable,
        }
        return {**os.environ, **variables}

    def run(self, out_dir: Path, flags: str = "", processes: int = 2, **options: Any) -> Run:
        done = subprocess.run(
            self.command(out_dir, flags),
            env=self.environment(processes),
            capture_output=True,
            text=True,
            **{"timeout": 300, **options},
        )
        return Run(out_dir, done.returncode, done.stdout, done.stderr)

    def start(
        self, out_dir: Path, flags: str = "", processes: int = 2, script: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """A run in a process group of its own, to be killed; `script`: a user's, if it runs one."""
        shell, program, *words = self.command(out_dir, flags)
        return subprocess.Popen(
            [shell, program, *script, *words],
            env=self.environment(processes),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def config_of_stage(stage: int, directory: Path) -> Path:
    """The shipped DeepSpeed file with another stage, and nothing else, in it."""
    shipped = DEFAULT_DEEPSPEED_CONFIG.read_text()
    assert shipped.count('"stage": 2') == 1
    path = directory / f"stage{stage}.json"
    path.write_text(shipped.replace('"stage": 2', f'"stage": {stage}'))
    return path


def wait_for(started: subprocess.Popen[str], out_dir: Path, words: str) -> None:
    """Until metrics.jsonl holds `words`."""
    metrics = out_dir / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and words in metrics.read_text()):
        assert started.poll() is None, started.communicate()
        assert time.monotonic() < deadline, "the run never got that far"
        time.sleep(0.01)


def kill_all(started: subprocess.Popen[str]) -> None:
    """kill -9 of the script, the launcher and the workers, which torch puts in other groups."""
    end_with_children(started.pid)
    started.communicate()


def end_with_children(pid: int) -> None:
    """Kill a process and whatever it has started, in whichever process groups."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                one.kill()


def workers(script: int) -> dict[int, psutil.Process]:
    """The worker processes below run_accelerate.sh, by rank."""
    found = {}
    for process in psutil.Process(script).children(recursive=True):
        try:
            words = " ".join(process.cmdline())
            if "train_pretrain.py" in words and "accelerate_launch.py" not in words:
                found[int(process.environ()["RANK"])] = process
        except psutil.NoSuchProcess:
            continue
    return found


def left_over(out_dir: Path, seconds: float = 60.0) -> list[list[str]]:
    """Command lines of processes that still name this run, so long after it ended."""
    deadline = time.monotonic() + seconds
    while True:
        listed = psutil.process_iter(["cmdline", "status"])
        alive = [p.info for p in listed if p.info["status"] != psutil.STATUS_ZOMBIE]
        found = [info["cmdline"] for info in alive if str(out_dir) in (info["cmdline"] or [])]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
