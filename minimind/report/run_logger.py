"""Logging of a run on rank 0: metrics.jsonl, printed lines and the progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from minimind.engine.clocks import (
    LABELS,
    PhaseClock,
    mean_ms,
    median_ms,
    profile_table,
    ranks_table,
)
from minimind.report.formats import PAUSES, clock_time
from minimind.report.slowness import Setting, Verdicts
from minimind.report.usage import Usage
from minimind.runtime.console import CONSOLE, Console
from minimind.runtime.device import device_kind
from minimind.runtime.durable_files import Metrics, storing
from minimind.runtime.terminal import for_stdout

if TYPE_CHECKING:
    from minimind.report.trackers import Trackers

ERROR_TIMEOUT = 3.0  # seconds that a tracker gets to finish when a run ends by an error
REDRAW_INTERVAL = 0.1  # seconds, between steps
MICRO_BATCH_INTERVAL = 2.0  # seconds, within a step of many micro-batches


class ProgressBar:
    """A tqdm bar on standard error that counts optimizer steps, from `step` to `total`."""

    def __init__(self, step: int, total: int) -> None:
        # miniters=1: otherwise tqdm skips redraws by the speed of earlier steps.
        self._bar = tqdm(
            total=total,
            initial=step,
            unit="step",
            dynamic_ncols=True,
            mininterval=REDRAW_INTERVAL,
            miniters=1,
        )
        self._last_redraw = time.monotonic()
        self._text = ""

    def show(self, text: str) -> None:
        """Show `text` behind the bar from its next redraw on."""
        self._text = text
        self._bar.set_postfix_str(text, refresh=False)

    def end_at(self, total: int) -> None:
        self._bar.total = total

    def advance(self) -> None:
        self._bar.set_postfix_str(self._text, refresh=False)
        self._bar.update()
        self._last_redraw = time.monotonic()

    def reach(self, micro_batch: int, of: int) -> None:
        """Show the current micro-batch of a long step, at most every MICRO_BATCH_INTERVAL."""
        now = time.monotonic()
        if now - self._last_redraw >= MICRO_BATCH_INTERVAL:
            self._last_redraw = now
            parts = filter(None, (self._text, f"micro-batch {micro_batch}/{of}"))
            self._bar.set_postfix_str(", ".join(parts))

    def close(self) -> None:
        """Stop updating; the bar stays on the screen."""
        self._bar.close()


class TrackedMicroBatches(list[Tensor]):
    """Micro-batches of a step; iterating over them, but not over a slice, updates the bar."""

    def __init__(self, micro_batches: Sequence[Tensor], bar: ProgressBar) -> None:
        super().__init__(micro_batches)
        self._bar = bar

    def __iter__(self) -> Iterator[Tensor]:
        for number, rows in enumerate(super().__iter__(), 1):
            self._bar.reach(number, len(self))
            yield rows


class RunLogger:
    """Prints and records on rank 0; on other ranks the same calls do nothing."""

    def __init__(
        self,
        out_dir: Path,
        total_steps: int,
        device: torch.device,
        is_rank_0: bool,
        is_profiling: bool,
        mfu_per_speed: Mapping[str, float] | None = None,
    ) -> None:
        """mfu_per_speed has the factor from tokens/s to MFU by stage, where the peak is known."""
        self._path = out_dir / "metrics.jsonl"
        self._console: Console | None = None  # from the first line on
        self._has_begun = False
        self._keeps_console = is_rank_0
        self._metrics = Metrics(self._path) if is_rank_0 else None
        self._is_rank_0 = is_rank_0
        self._is_stdout_open = sys.stdout is not None  # None: closed by whoever started us
        self._is_profiling = is_profiling
        self._mfu_per_speed = mfu_per_speed or {}
        self._device = device
        self.clock = PhaseClock(device)  # that of the loop from `begin` on
        self._total = total_steps
        self._bar: ProgressBar | None = None
        self._usage: Usage | None = None  # on rank 0, from `begin` on
        self._start = time.perf_counter()  # when the steps of the next step line began
        self._steps = 0  # since `begin`
        self._tokens = 0  # up to the last step line
        self._first_end = 0.0  # when the first of them ended
        self._line_times: list[dict[str, float]] = []  # phase times since the last step line
        self._table_times: list[dict[str, float]] = []  # phase times since the last profile
        self._table_pauses: dict[str, float] = {}  # ms by cause, since the last profile
        self._line_pauses: dict[str, float] = dict.fromkeys(PAUSES, 0.0)
        self.trackers: Trackers | None = None  # trackers of --report_to
        self.verdicts = Verdicts(Setting())

    def print(self, text: str) -> None:
        """Print on rank 0, and append to console.log, which a run can do without."""
        if self._keeps_console:
            try:
                self._console = self._console or Console(self._path.parent)
                if not self._has_begun:
                    self._console.begin("start")
                    self._has_begun = True
                self._console.write(text)
            except OSError as error:
                self._keeps_console = False
                why = f"{error.strerror}; what the run prints is no longer kept there"
                print(f"warning: {self._path.with_name(CONSOLE)}: {why}", file=sys.stderr)
        if self._is_rank_0 and self._is_stdout_open:
            with storing("standard output", "send it somewhere else"):
                try:
                    tqdm.write(for_stdout(text), file=sys.stdout)
                    sys.stdout.flush()
                except BrokenPipeError:  # the reader is gone (`| head`, or Ctrl-C at `| tee`)
                    self._is_stdout_open = False

    def event(self, name: str, **fields: Any) -> None:
        """Append an event to metrics.jsonl and pass it to the trackers."""
        if self._metrics:
            with storing(str(self._path), "correct the path of --out_dir"):
                self._metrics.write(name, **fields)
            if self.trackers:
                self.trackers.event(name, fields)

    def begin(self, step: int, tokens: int = 0, clock: PhaseClock | None = None) -> None:
        """Show the progress bar from `step` on (terminals only) and start the tokens/s clock.

        `tokens` were trained on before. `clock` is that of the steps.
        """
        self.clock = clock or self.clock
        self._start, self._steps, self._tokens = time.perf_counter(), 0, tokens
        self._line_times, self._line_pauses = [], dict.fromkeys(PAUSES, 0.0)
        self._usage = Usage(self._device) if self._is_rank_0 else None
        if self._bar:  # the run has gone back
            self._bar.close()
        if self._is_rank_0 and sys.stderr.isatty():
            self._bar = ProgressBar(step, self._total)

    def end_at(self, total_steps: int) -> None:
        """Count the steps that are left up to another last one."""
        self._total = total_steps
        if self._bar:
            self._bar.end_at(total_steps)

    def track(self, micro_batches: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the micro-batches; iterating over them updates the bar during a long step."""
        return TrackedMicroBatches(micro_batches, self._bar) if self._bar else micro_batches

    def advance(self) -> None:
        self._steps += 1
        if self._steps == 1:
            self._first_end = time.perf_counter()
        if self._bar:
            self._bar.advance()

    def seconds_per_step(self) -> float:
        """Mean wall time of the steps after the first, which may compile; needs two steps."""
        return (time.perf_counter() - self._first_end) / (self._steps - 1)

    def add_phase_times(self, steps: list[dict[str, float]]) -> None:
        """Add the phase times of some steps to the next step line and profile."""
        if self._is_rank_0:
            self._line_times += steps
        self._table_times += steps if self._is_profiling else []

    def step(self, line: dict[str, Any]) -> dict[str, Any]:
        """Log a `step` event with mean phase times since the last one, and print the step line.

        Return the fields of the event.
        """
        now = time.perf_counter()
        times, self._line_times = self._line_times, []
        pauses, self._line_pauses = self._line_pauses, dict.fromkeys(PAUSES, 0.0)
        speed = (line["tokens"] - self._tokens) / max(1e-9, now - self._start)
        self._start, self._tokens = now, line["tokens"]
        factor = self._mfu_per_speed.get(line.get("stage", ""))
        mfu = None if factor is None else speed * factor
        line = {
            **line,
            **mean_ms(times),
            **{f"{cause}_ms": ms / max(1, len(times)) for cause, ms in pauses.items()},
            "tokens_per_second": speed,
            "mfu": mfu,
            "memory_mib": self._memory_mib(),
            **(self._usage.since_last() if self._usage else {}),
        }
        self.event("step", **line)
        text = f"loss {line['loss']:.4f}  lr {line['lr']:.2e}  {speed:,.0f} tokens/s"
        if mfu is not None:
            text += f"  MFU {mfu:.1%}"
        if self._bar:
            self._bar.show(f"loss {line['loss']:.4f}")
        left = (self._total - line["step"]) * line["step_ms"] / 1e3
        self.print(f"step {line['step']}/{self._total}  {text}  ETA {clock_time(left)}")
        return line

    def add_pause(self, cause: str, milliseconds: float) -> None:
        """Exclude time spent between steps from the step times."""
        self._table_pauses[cause] = self._table_pauses.get(cause, 0.0) + milliseconds
        self._line_pauses[cause] += milliseconds
        self._start += milliseconds / 1e3
        self._first_end += milliseconds / 1e3

    @contextmanager
    def pausing(self, cause: str, name: str = "") -> Iterator[None]:
        """Time the block and add it as a pause; peers call a rank that hangs there `name`."""
        clock, started = self.clock, time.perf_counter()
        phase, clock.phase = clock.phase, name or cause
        yield
        clock.phase = phase
        self.add_pause(cause, (time.perf_counter() - started) * 1e3)

    def unlogged_pauses(self) -> dict[str, float]:
        """Pauses since the last step line, in ms by `CAUSE_ms`; zeros are left out."""
        return _by_ms({cause: ms for cause, ms in self._line_pauses.items() if ms})

    def medians(self) -> dict[str, float]:
        """This rank's median phase times, pauses and memory since the last profile."""
        memory = {"memory_mib": self._memory_mib()}
        return {**median_ms(self._table_times), **_by_ms(self._table_pauses), **memory}

    def profile(self, step: int, ranks: Sequence[dict[str, float]], is_last: bool = False) -> None:
        """Print the profile since the last one and log it as an event; then a new verdict.

        `ranks` holds the medians of every rank. After the last profile the verdict is repeated.
        """
        times, self._table_times = self._table_times, []
        pauses, self._table_pauses = self._table_pauses, {}
        if not self._is_rank_0:
            return
        table = f"profile, {len(times)} steps up to step {step}:\n{profile_table(times, pauses)}"
        memory = f"  {LABELS['memory_mib']:<12}{self._memory_mib():>10.1f}  at most so far"
        self.print(f"{table}\n{ranks_table(ranks) if len(ranks) > 1 else memory}")
        by_rank = {name: [rank[name] for rank in ranks] for name in ranks[0]}
        means = {**mean_ms(times), **_by_ms(pauses)}
        profile = {"step": step, "steps": len(times), **means, "ranks": by_rank}
        self.event("profile", **profile)
        if found := self.verdicts.after(profile, is_last):
            self.event(
                "verdict", step=step, kind=found.kind, text=found.text, figures=found.figures
            )
            self.print(f"verdict  {found.text}")

    def close(self, timeout: float = ERROR_TIMEOUT) -> None:
        """Close trackers, files and the bar; trackers get `timeout` seconds to finish."""
        if self.trackers:
            self.trackers.close(timeout)
        if self._metrics:
            self._metrics.close()
            self._metrics = None
        if self._console:  # a later line opens it again
            self._console.close()
            self._console = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _memory_mib(self) -> float:
        """Peak of this process: device memory on a GPU, resident memory on a CPU."""
        return device_kind(self._device).peak_memory(self._device) / 2**20


def _by_ms(pauses: dict[str, float]) -> dict[str, float]:
    return {f"{cause}_ms": ms for cause, ms in pauses.items()}
