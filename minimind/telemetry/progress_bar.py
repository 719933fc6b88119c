"""The progress bar on a terminal; it reads no tensor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, overload

from torch import Tensor
from tqdm import tqdm

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

    def advance(self) -> None:
        """Count one step."""
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


class TrackedMicroBatches(Sequence[Tensor]):
    """Micro-batches of a step; iterating over them updates the progress bar."""

    def __init__(self, micro_batches: Sequence[Tensor], bar: ProgressBar) -> None:
        self._micro_batches = micro_batches
        self._bar = bar

    def __len__(self) -> int:
        return len(self._micro_batches)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._micro_batches[index]

    def __iter__(self) -> Iterator[Tensor]:
        for number, rows in enumerate(self._micro_batches, 1):
            self._bar.reach(number, len(self))
            yield rows
