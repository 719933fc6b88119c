"""Lines that name what a start is doing, for the parts of it that take long."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Timer

from minimind.runtime.environment import rank_of

LONG = 2.0  # seconds


@contextmanager
def phase(what: str, after: float = LONG, on_any_rank: bool = False) -> Iterator[None]:
    """Print `what` to stderr once the body has taken `after` seconds, and nothing if it is faster.

    On rank 0; `on_any_rank` is for work that one process does for all. A decorator as well.
    """
    if not on_any_rank and rank_of(os.environ) != 0:
        yield
        return
    timer = Timer(after, _say, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(what: str) -> None:
    from tqdm import tqdm  # only when there is something to say: most commands are over sooner

    with suppress(OSError, ValueError):  # stderr is full or closed: the work does not need it
        tqdm.write(f"{what} ...", file=sys.stderr)  # above a progress bar, if one is there
        sys.stderr.flush()
