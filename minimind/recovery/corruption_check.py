"""The check of --verify_interval: state is compared between ranks, and rows are computed again."""

from __future__ import annotations

import random
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minimind.checkpoint.directory import is_due, published_checkpoints, set_aside, step_of
from minimind.checkpoint.identity import hardware
from minimind.config.run_config import RunConfig
from minimind.data.rows.batches import Batches
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

WHOLE = 4  # micro-batches of a step, from which on a check computes a whole one
SHARE = 6  # otherwise the part of the rows of a step that it computes


@dataclass
class CorruptionCheck:
    """Checks the state after a step, and computes some of the rows of the next step."""

    run: RunConfig
    engine: Engine
    first: int = 0  # step from which the run goes on
    last_passed: int | None = None  # step; None: none since `first`
    seconds: float = 0.0  # that the last check took
    places: list[str] = field(default_factory=list)  # of the ranks, after a check
    _checks: int = 0
    _is_cost_known: bool = False

    @property
    def good(self) -> int:
        """The last step known to be good, or at which the run started."""
        return self.first if self.last_passed is None else self.last_passed

    def is_due(self, step: int, last: int) -> bool:
        """Whether to check after a step; the last one of a run is always checked."""
        return self.run.verify_interval > 0 and is_due(step, self.run.verify_interval, last)

    def go_back(self, first: int) -> None:
        """Go on from an earlier step: checks after it no longer count."""
        if self.last_passed is not None and self.last_passed > first:
            self.last_passed = None
        self.first = first

    def rows_of_check(self, step: int) -> tuple[int, slice, bool]:
        """A micro-batch of the step after `step`, rows of it, and whether these are all.

        The same on every rank, and after a resume.
        """
        run, choose = self.run, random.Random(f"{self.run.seed} {step}")
        size = run.micro_batch_rows(self.engine.world_size)
        is_whole = run.accumulation_steps >= WHOLE
        rows = size if is_whole else max(1, size * run.accumulation_steps // SHARE)
        number, first = choose.randrange(run.accumulation_steps), choose.randrange(size - rows + 1)
        return number, slice(first, first + rows), rows == size

    def check(self, step: int, batches: Batches) -> list[Fault]:
        """Everything that is wrong, on every rank (collective)."""
        engine, run = self.engine, self.run
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        started, before = time.perf_counter(), (engine.rank - 1) % engine.world_size
        own = (self._replay(step, batches, engine.rank), self._replay(step, batches, engine.rank))
        neighbour = own[0] if before == engine.rank else self._replay(step, batches, before)
        holding = Holding(
            place_of(engine.device),
            kind_of(engine.device),
            replicated_checksums(engine),
            master_checksums(engine),
        )
        holdings = engine.gather(holding)
        self.places = [one.place for one in holdings]
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
        self._checks += 1
        if not wrong:
            self.last_passed = step
        return wrong

    def _replay(self, step: int, batches: Batches, rank: int) -> Replay:
        number, part, is_whole = self.rows_of_check(step)
        rows = batches.micro_batch_of(step, rank, number)[part]
        return replay(self.engine, rows, rank, is_whole)

    def report(self, found: list[Fault], step: int, logger: RunLogger, is_timed: bool) -> None:
        """Log a check; `is_timed`: the logger knows the time of a step."""
        logger.event("verified", step=step, seconds=self.seconds, passed=not found)
        if found:
            logger.event("corruption", step=step, faults=[self.fields(fault) for fault in found])
            if self.run.on_corruption != "stop":
                text = self.text(found)
                logger.print(f"warning: corruption at step {step}: {text}; the run goes on")
        elif is_timed and self._checks > 1 and not self._is_cost_known:  # now warm
            self._is_cost_known = True
            interval = self.run.verify_interval
            share = self.seconds / (logger.seconds_per_step() * interval + self.seconds)
            logger.print(
                f"step {step}: checked for corruption in {self.seconds:.2g} s,"
                f" {share:.1%} of the time with --verify_interval {interval}"
            )

    def error(self, found: list[Fault], root: Path) -> CorruptionError:
        """The error of --on_corruption stop (collective).

        Sets the checkpoints in `root` aside that are newer than the last good step.
        """
        exclude, step = "take that GPU or host out", self.last_passed
        path = on_rank_0(self.engine, lambda: _abandon_after(root, self.good))
        passed = f"the last check that passed, at step {step}"
        if step is None:
            passed = f"step {self.first}, where this run started; no check has passed since"
        remedy = f"{exclude} and train again: no checkpoint is left from before {passed}"
        if path is not None:
            remedy = f"{exclude} and go on from {path} (--resume), saved before {passed}"
        return CorruptionError(f"{self.text(found)}; {remedy}", cause_rank=found[0].ranks[0])

    def text(self, found: list[Fault]) -> str:
        """`rank 1 (host b, cuda:1) holds ...; rank 2 ...`."""
        return "; ".join(map(self._sentence, found))

    def _sentence(self, fault: Fault) -> str:
        names = [f"rank {rank} (host {self.places[rank]})" for rank in fault.ranks]
        return f"{(' or ' if fault.is_either else ' and ').join(names)} {fault.text}"

    def fields(self, fault: Fault) -> dict[str, Any]:
        """The fault in a `corruption` event."""
        hosts = [self.places[rank] for rank in fault.ranks]
        return {"kind": fault.kind, "ranks": fault.ranks, "hosts": hosts} | {
            "is_either": fault.is_either,
            "text": self._sentence(fault),
        }


def place_of(device: torch.device) -> str:
    """Host and GPU of this rank: `b, cuda:1`, on a CPU `b`."""
    gpu = f", {device}" if device.type == "cuda" else ""
    return f"{socket.gethostname()}{gpu}"


def kind_of(device: torch.device) -> str:
    """What decides how this rank rounds: ranks of one kind compute the same bits."""
    versions = f"torch {torch.__version__}"
    if device.type == "cuda":
        return f"{hardware(device)}, {versions}, cuDNN {torch.backends.cudnn.version()}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{hardware(device)}, {capability}, {torch.get_num_threads()} threads, {versions}"


def _abandon_after(root: Path, step: int) -> Path | None:
    """The newest checkpoint up to `step`; sets aside all that are newer."""
    paths = published_checkpoints(root)
    good = [path for path in paths if step_of(path) <= step]
    for path in paths[: len(paths) - len(good)]:
        set_aside(path, "abandoned")
    return good[0] if good else None
