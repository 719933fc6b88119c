"""What a run tells: metrics.jsonl for programs, a bar or lines for people. Rank 0 alone speaks."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from minimind.engine.phase_clock import SHOWN, mean_ms, median_ms, profile_table, ranks_table
from minimind.runtime.durable_files import Metrics, storing
from minimind.runtime.terminal import for_stdout
from minimind.telemetry.progress_bar import TrackedMicroBatches, ProgressBar
from minimind.telemetry.trackers import Trackers

PAUSES: tuple[str, ...] = ("evaluate", "checkpoint", "sample", "trace", "gc")
ABRUPT = 3.0  # seconds that a tracker gets when a run ends by an error


class RunLogger:
    """Rank 0's voice. Other ranks hold one too, and stay silent."""

    def __init__(
        self,
        out_dir: Path,
        total_steps: int,
        device: torch.device,
        is_rank_0: bool,
        is_profiling: bool,
        mfu_per_speed: float | None = None,
    ) -> None:
        """mfu_per_speed is by what tokens/s are multiplied to give MFU; None: no peak is known."""
        self._path = out_dir / "metrics.jsonl"
        self._metrics = Metrics(self._path) if is_rank_0 else None
        self._is_speaker = is_rank_0
        self._is_heard = True
        self._is_profiling = is_profiling
        self._mfu_per_speed = mfu_per_speed
        self._device = device
        self._total = total_steps
        self._bar: ProgressBar | None = None
        self._since = time.perf_counter()
        self._steps = 0  # since `begin`
        self._first_end = 0.0  # of the first of them
        self._since_line: list[dict[str, float]] = []  # phase times of the steps since then
        self._since_table: list[dict[str, float]] = []
        self._pauses: dict[str, float] = {}  # ms between the steps of a table, by cause
        self._between_lines: dict[str, float] = {cause: 0.0 for cause in PAUSES}
        self.trackers = Trackers()

    def print(self, text: str) -> None:
        """Print for people, past the progress bar."""
        if self._is_speaker and self._is_heard:
            with storing("standard output", "free some space, or send it somewhere else"):
                try:
                    tqdm.write(for_stdout(text), file=sys.stdout)
                    sys.stdout.flush()
                except BrokenPipeError:  # whoever read is gone (`| head`, or Ctrl-C at `| tee`)
                    self._is_heard = False

    def event(self, name: str, **facts: Any) -> None:
        """Append to metrics.jsonl, and hand on to the trackers."""
        if self._metrics:
            with storing(str(self._path), "free some space, or mend the path of --out_dir"):
                self._metrics.write(name, **facts)
            self.trackers.event(name, facts)

    def begin(self, step: int) -> None:
        """Show the bar from `step` on (terminals only) and start the clock of tokens/s."""
        self._since = time.perf_counter()
        if self._is_speaker and sys.stderr.isatty():
            self._bar = ProgressBar(step, self._total)

    def track(self, micro_batches: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The same micro-batches; at a terminal the bar shows which one a long step has reached."""
        return TrackedMicroBatches(micro_batches, self._bar) if self._bar else micro_batches

    def advance(self) -> None:
        """Move the bar by one step."""
        self._steps += 1
        if self._steps == 1:
            self._first_end = time.perf_counter()
        if self._bar:
            self._bar.advance()

    def seconds_per_step(self) -> float:
        """By the host's clock, of the steps after the first, which may compile; two are needed."""
        return (time.perf_counter() - self._first_end) / (self._steps - 1)

    def add_phase_times(self, steps: list[dict[str, float]]) -> None:
        """Take note of the phase times of some steps."""
        if self._is_speaker:
            self._since_line += steps
        self._since_table += steps if self._is_profiling else []

    def step(self, line: dict[str, Any], tokens_per_step: int) -> None:
        """One `step` event, with the phase times since the last one."""
        now = time.perf_counter()
        steps, self._since_line = self._since_line, []
        between, self._between_lines = self._between_lines, {cause: 0.0 for cause in PAUSES}
        speed = len(steps) * tokens_per_step / max(1e-9, now - self._since)
        self._since = now
        line = {
            **line,
            **mean_ms(steps),
            **{f"{cause}_ms": spent / max(1, len(steps)) for cause, spent in between.items()},
            "tokens_per_second": speed,
            "mfu": None if self._mfu_per_speed is None else speed * self._mfu_per_speed,
            "memory_mib": self._memory_mib(),
        }
        self.event("step", **line)
        shown = f"loss {line['loss']:.4f}  lr {line['lr']:.2e}  {speed:,.0f} tokens/s"
        if line["mfu"] is not None:
            shown += f"  MFU {line['mfu']:.1%}"
        if self._bar:
            self._bar.show(f"loss {line['loss']:.4f}")
        left = (self._total - line["step"]) * line["step_ms"] / 1e3
        self.print(f"step {line['step']}/{self._total}  {shown}  ETA {duration(left)}")

    def add_pause(self, cause: str, milliseconds: float) -> None:
        """Time spent between steps, which no step is charged for."""
        self._pauses[cause] = self._pauses.get(cause, 0.0) + milliseconds
        self._between_lines[cause] += milliseconds
        self._since += milliseconds / 1e3
        self._first_end += milliseconds / 1e3

    def unlogged_pauses(self) -> dict[str, float]:
        """Milliseconds by cause, as `CAUSE_ms`, of the pauses that no step line has told."""
        return _named({cause: ms for cause, ms in self._between_lines.items() if ms})

    def medians(self) -> dict[str, float]:
        """What this rank tells the others of its steps, and all pauses, since the last profile."""
        pauses, memory = _named(self._pauses), {"memory_mib": self._memory_mib()}
        return {**median_ms(self._since_table), **pauses, **memory}

    def profile(self, step: int, ranks: Sequence[dict[str, float]]) -> None:
        """The tables of where the time since the last one went, and the same as an event.

        `ranks` has the medians of every rank.
        """
        steps, self._since_table = self._since_table, []
        pauses, self._pauses = self._pauses, {}
        if not self._is_speaker:
            return
        told = f"profile, {len(steps)} steps up to step {step}:\n{profile_table(steps, pauses)}"
        alone = f"  {SHOWN['memory_mib']:<12}{self._memory_mib():>10.1f}  at most so far"
        self.print(f"{told}\n{ranks_table(ranks) if len(ranks) > 1 else alone}")
        spent = _named(pauses)
        by_rank = {name: [rank[name] for rank in ranks] for name in ranks[0]}
        self.event("profile", step=step, steps=len(steps), **mean_ms(steps), **spent, ranks=by_rank)

    def close(self, patience: float = ABRUPT) -> None:
        """Leave the terminal as it was; nothing more will be recorded.

        Trackers get `patience` seconds to finish.
        """
        self.trackers.close(patience)
        if self._metrics:
            self._metrics.close()
            self._metrics = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _memory_mib(self) -> float:
        """Peak of this process: device memory on a GPU, resident memory on a CPU."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 2**20
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _named(pauses: dict[str, float]) -> dict[str, float]:
    """The same as events have it: by `CAUSE_ms`."""
    return {f"{cause}_ms": spent for cause, spent in pauses.items()}


def duration(seconds: float) -> str:
    """`4:05`, or `1:04:05` from an hour on."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
