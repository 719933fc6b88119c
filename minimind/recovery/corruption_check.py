"""The check of --verify_interval: state is compared between ranks, and rows are computed again."""

from __future__ import annotations

import random
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minimind.checkpoint.directory import published_checkpoints, set_aside, step_of
from minimind.checkpoint.identity import hardware
from minimind.config.run_config import RunConfig
from minimind.data.loader.batches import Batches
from minimind.engine.engine import Engine
from minimind.engine.replay import (
    Replay,
    master_checksums,
    replay,
    replicated_checksums,
    weight_checksums,
)
from minimind.errors import CorruptionError
from minimind.recovery.corruption import Fault, Finding, Holding, faults, owners
from minimind.runtime.collectives import on_rank_0
from minimind.telemetry.progress import RunLogger

SHARE = 6  # a check computes at most 1 / SHARE of the rows of a step, three times


@dataclass
class CorruptionCheck:
    """Checks the state before a step, and computes some of the rows of that step."""

    run: RunConfig
    engine: Engine
    last_passed: int | None = None  # step; None: none since the start
    seconds: float = 0.0  # that the last check took
    hosts: list[str] = field(default_factory=list)  # by rank, after a check
    _is_cost_known: bool = False

    def is_due(self, step: int, first: int) -> bool:
        """Whether to check before step `step` + 1 of a loop that began at `first`."""
        interval = self.run.verify_interval
        return interval > 0 and step > first and step % interval == 0

    def rows_of_check(self, step: int) -> tuple[int, slice, bool]:
        """A micro-batch of the step after `step`, rows of it, and whether these are all.

        The same on every rank, and after a resume.
        """
        run, choose = self.run, random.Random(f"{self.run.seed} {step}")
        size = run.micro_batch_rows(self.engine.world_size)
        rows = max(1, min(size, size * run.accumulation_steps // SHARE))
        number, first = choose.randrange(run.accumulation_steps), choose.randrange(size - rows + 1)
        return number, slice(first, first + rows), rows == size

    def check(self, step: int, batches: Batches) -> list[Fault]:
        """Everything that is wrong, on every rank (collective)."""
        engine, run, started = self.engine, self.run, time.perf_counter()
        before = (engine.rank - 1) % engine.world_size
        own = (self._replay(step, batches, engine.rank), self._replay(step, batches, engine.rank))
        neighbour = own[0] if before == engine.rank else self._replay(step, batches, before)
        name = f"{hardware(engine.device)} {torch.backends.cpu.get_cpu_capability()}"
        holding = Holding(
            socket.gethostname(),
            f"{name} {torch.get_num_threads()}",
            replicated_checksums(engine),
            master_checksums(engine),
        )
        holdings = engine.gather(holding)
        self.hosts = [one.host for one in holdings]
        owner_of = owners(holdings)
        # Of replicated masters every rank has its own.
        expected = {key: holdings[rank].masters[key] for key, rank in owner_of.items()}
        expected |= holding.masters
        found = weight_checksums(engine, expected)
        stale = [key for key, one in found.items() if one != expected[key]]
        findings = engine.gather(Finding(stale, own, neighbour))
        is_tf32 = run.tf32 and run.dtype == "float32" and engine.device.type == "cuda"
        dtype = "tf32" if is_tf32 else run.dtype
        wrong = faults(holdings, findings, dtype, run.deterministic)
        self.seconds = time.perf_counter() - started
        if not wrong:
            self.last_passed = step
        return wrong

    def _replay(self, step: int, batches: Batches, rank: int) -> Replay:
        number, part, is_whole = self.rows_of_check(step)
        rows = batches.micro_batch_of(step, rank, number)[part]
        return replay(self.engine, rows, rank, is_whole)

    def report(
        self, found: list[Fault], step: int, logger: RunLogger, root: Path, pace: float | None
    ) -> None:
        """Log a check; with --on_corruption stop raise CorruptionError on every rank if it failed.

        `root` holds the checkpoints, `pace` is the seconds per step if they are known.
        """
        logger.event("verified", step=step, seconds=self.seconds, passed=not found)
        if not found:
            if pace is not None and not self._is_cost_known:
                self._is_cost_known = True
                interval = self.run.verify_interval
                share = self.seconds / (pace * interval + self.seconds)
                logger.print(
                    f"step {step}: checked for corruption in {self.seconds:.2g} s,"
                    f" {share:.1%} of the time with --verify_interval {interval}"
                )
            return
        text = "; ".join(map(self.sentence, found))
        logger.event("corruption", step=step, faults=[self.fields(fault) for fault in found])
        if self.run.on_corruption != "stop":
            logger.print(f"warning: corruption at step {step}: {text}; the run goes on")
            return
        raise CorruptionError(f"{text}; {self._remedy(root)}", cause_rank=found[0].ranks[0])

    def _remedy(self, root: Path) -> str:
        """What to do after a failed check (collective); sets newer checkpoints aside."""
        exclude = "take that GPU or host out"
        step = self.last_passed
        if step is None:
            return f"{exclude}, and train again: no check has passed since the start"
        passed = f"the last check that passed, at step {step}"
        good = on_rank_0(self.engine, lambda: _abandon_after(root, step))
        if good is None:
            return f"{exclude}, and train again: no checkpoint is left from before {passed}"
        return f"{exclude} and go on from {good} (--resume), saved before {passed}"

    def sentence(self, fault: Fault) -> str:
        """`rank 1 (host b) holds ...`."""
        names = [f"rank {rank} (host {self.hosts[rank]})" for rank in fault.ranks]
        return f"{(' or ' if fault.is_either else ' and ').join(names)} {fault.text}"

    def fields(self, fault: Fault) -> dict[str, Any]:
        """The fault in a `corruption` event."""
        hosts = [self.hosts[rank] for rank in fault.ranks]
        return {"kind": fault.kind, "ranks": fault.ranks, "hosts": hosts} | {
            "is_either": fault.is_either,
            "text": self.sentence(fault),
        }


def _abandon_after(root: Path, step: int) -> Path | None:
    """The newest checkpoint up to `step`; sets aside those after it, unless there is none."""
    paths = published_checkpoints(root)
    good = [path for path in paths if step_of(path) <= step]
    for path in paths[: -len(good)] if good else ():
        set_aside(path, "abandoned")
    return good[0] if good else None
