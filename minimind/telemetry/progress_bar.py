"""The bar that shows at a terminal how far a run is; it reads no tensor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, overload

from torch import Tensor
from tqdm import tqdm

REDRAW = 0.1  # seconds between two redraws at steps
WITHIN = 2.0  # seconds without one after which a micro-batch redraws, in a step of many


class ProgressBar:
    """A tqdm bar on standard error that counts optimizer steps, from `step` to `total`."""

    def __init__(self, step: int, total: int) -> None:
        # miniters: tqdm would otherwise skip steps by the speed of those before.
        self._bar = tqdm(
            total=total,
            initial=step,
            unit="step",
            dynamic_ncols=True,
            mininterval=REDRAW,
            miniters=1,
        )
        self._drawn = time.monotonic()
        self._text = ""

    def show(self, text: str) -> None:
        """Have `text` stand behind the bar from its next redraw on."""
        self._text = text
        self._bar.set_postfix_str(text, refresh=False)

    def advance(self) -> None:
        """Count one step."""
        self._bar.set_postfix_str(self._text, refresh=False)
        self._bar.update()
        self._drawn = time.monotonic()

    def reach(self, micro_batch: int, of: int) -> None:
        """Show which micro-batch of a step is computed, unless the bar was redrawn just before."""
        now = time.monotonic()
        if now - self._drawn >= WITHIN:
            self._drawn = now
            parts = filter(None, (self._text, f"micro-batch {micro_batch}/{of}"))
            self._bar.set_postfix_str(", ".join(parts))

    def close(self) -> None:
        """Leave it on the screen as it is."""
        self._bar.close()


class TrackedMicroBatches(Sequence[Tensor]):
    """The micro-batches of a step; iterating over them tells `bar` which one is reached."""

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
