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
    except BaseException as error:
        # Each library has its own class below BaseException, so the name is compared.
        if type(error).__name__ != "PanicException":
            raise
        raise Panic((str(error).splitlines() or ["panic"])[0]) from error
