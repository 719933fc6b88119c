"""Panics of libraries in Rust, which pass every handler of `Exception`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Panic(RuntimeError):
    """A library in Rust panicked, as on input that its author did not think of."""


@contextmanager
def panics_caught() -> Iterator[None]:
    """Raise `Panic` for a panic in the block. Rust itself prints a line about it to stderr."""
    try:
        yield
    except BaseException as error:  # each library has its own class of panic below it
        # They have no common class, so the name is compared; other errors are raised again.
        if type(error).__name__ != "PanicException":
            raise
        raise Panic((str(error).splitlines() or ["panic"])[0]) from error
