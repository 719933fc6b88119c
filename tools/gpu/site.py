"""Where a part runs: its device, its folder and time, and the processes it starts.

A part is a generator of findings that runs in the process of the command and touches no GPU there:
whatever does is a process of its own, which can crash or hang, and is ended with all its children
when the time of the part is over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from minimind.config.flags import ALONE
from tools.gpu.findings import PartError
from tools.runs import (
    PACE,
    ROOT,
    SHAPE,
    Launcher,
    Run,
    config_of_stage,
    end_with_children,
    sentences,
)

LOG = 3000  # characters of a process's output that are kept with an error
WITHOUT = "--deepspeed_config none"


@dataclass
class Site:
    """What a part is given."""

    device: str  # cuda, mps or cpu
    folder: Path  # of this part alone
    shared: Path  # of all parts: text, shards, the reference
    deadline: float  # time.monotonic() at which the time of this part is over
    gpus: int = 0

    @property
    def seconds_left(self) -> float:
        """Until this part is ended."""
        return self.deadline - time.monotonic()

    @property
    def environment(self) -> dict[str, str]:
        """Of every process that a part starts."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        return {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": path}

    def python(self, module: str, *words: str, **environ: str) -> str:
        """The standard output of `python -m module words`; PartError if it fails or takes long."""
        log = self.folder / f"{module.rpartition('.')[2]}-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", module, *words]
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command,
                env={**self.environment, **environ},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            try:
                output, _ = process.communicate(timeout=max(0.0, self.seconds_left))
            except subprocess.TimeoutExpired:
                what = f"the time of this part ran out in python -m {module}"
                raise PartError(what, tail(log)) from None
            finally:
                end_with_children(process.pid)
        if process.returncode:
            raise PartError(
                f"python -m {module} ended with {process.returncode}", f"{output[-LOG:]}{tail(log)}"
            )
        return output

    @cached_property
    def launcher(self) -> Launcher:
        """Real starts by run_accelerate.sh, on a small text and one cache for all parts."""
        path = self.shared / "text.jsonl"
        if not path.exists():
            lines = (json.dumps({"text": text}, ensure_ascii=False) for text in sentences(1, 400))
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return Launcher(path, self.shared / "cache")

    def stage(self, stage: int | None) -> str:
        """The flag for a ZeRO stage of the shipped file, or for none, as where it cannot run."""
        if stage is None or self.device in ALONE:
            return WITHOUT
        return f"--deepspeed_config {config_of_stage(stage, self.shared)}"

    def train(
        self,
        runs: Mapping[str, str],
        device: str = "",
        base: str = f"{SHAPE} {PACE}",
        keeps: bool = False,
    ) -> dict[str, Trained]:
        """Runs of these flags by name, one after another in one process (tools.gpu.trainings).

        Those without DeepSpeed have to come first, those at stage 3 last. Another error than one
        of a run is a PartError; which runs ended well is for the caller to look at. Checkpoints are
        removed unless `keeps`: those of the larger models are gigabytes.
        """
        folder = self.folder / f"runs-{time.monotonic_ns()}"
        folder.mkdir()
        launcher = self.launcher
        places = ["--data_path", str(launcher.corpus), "--cache_dir", str(launcher.cache)]
        outs = {name: folder / str(number) for number, name in enumerate(runs)}
        common = [*places, *base.split(), "--device", device or self.device]
        words = {
            name: [*common, *flags.split(), "--out_dir", str(outs[name])]
            for name, flags in runs.items()
        }
        plan = folder / "plan.json"
        plan.write_text(json.dumps(words))
        ended, failure = plan.with_suffix(".ended.json"), ""
        try:
            self.python("tools.gpu.trainings", str(plan), *["keep"] * keeps)
        except PartError as error:  # what has ended until then counts
            if not ended.exists():
                raise
            failure = f"{error.log}\n{error}"
        lost = {name: {"status": -1, "error": failure, "words": words[name]} for name in runs}
        found = {**lost, **json.loads(ended.read_text())}
        return {name: Trained(outs[name], **found[name]) for name in runs}


@dataclass(frozen=True)
class Trained:
    """How a run in a process shared with others ended."""

    out_dir: Path
    status: int
    error: str
    words: list[str]
    allocated: int = 0  # bytes on the GPU before it began, of the runs before
    peak: int = 0  # bytes on the GPU at most, those included

    @property
    def run(self) -> Run:
        """As the tests look at runs."""
        return Run(self.out_dir, self.status, "", self.error)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Of metrics.jsonl; a PartError if the run failed."""
        if self.status:
            raise PartError(f"a run ended with {self.status}: {last_line(self.error)}", self.error)
        return self.run.events(name)


def tail(log: Path) -> str:
    """The end of a log."""
    return log.read_text(encoding="utf-8", errors="replace")[-LOG:]


def last_line(text: str) -> str:
    """The last one that says something."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def launched(site: Site, out_dir: Path, flags: str, processes: int = 1, **options: Any) -> Run:
    """A finished run of run_accelerate.sh; a PartError if it did not end well."""
    run = site.launcher.run(
        out_dir, flags, processes=processes, timeout=max(0.0, site.seconds_left), **options
    )
    if run.status:
        raise PartError(
            f"a run ended with {run.status}: {last_line(run.stderr)}", run.stderr[-LOG:]
        )
    return run
