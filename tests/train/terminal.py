"""A stand-in for a terminal, and what it shows in the end."""

from __future__ import annotations

import io


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def scrollback(written: str) -> list[str]:
    """The lines that stay: after a carriage return a line is written over, column by column."""
    shown = []
    for line in written.split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        shown.append("".join(cells).rstrip())
    return shown
