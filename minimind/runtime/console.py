"""console.log of an out_dir: what its runs printed, start by start."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from minimind.runtime.durable_files import require_regular
from minimind.runtime.terminal import printable

CONSOLE = "console.log"
BEFORE = "console.log.1"  # the lines before the newest MOST bytes, at most as many
MOST = 16 * 2**20  # bytes
HEAD = "=== 20"  # how each start begins, with a date


class Console:
    """Appends lines, each written at once; raises OSError.

    Where standard output is the very file, it has them already.
    """

    def __init__(self, out_dir: Path) -> None:
        self._path = out_dir / CONSOLE
        require_regular(self._path)
        self._file = open(self._path, "ab", buffering=0)
        self._is_output = False
        with suppress(OSError):  # standard output is closed
            self._is_output = os.path.sameopenfile(self._file.fileno(), 1)

    def begin(self, what: str) -> None:
        """Append a line with the date; `what` begins or ends."""
        blank = "\n" if self._file.tell() else ""  # which also ends a line that a crash left
        self.write(f"{blank}{HEAD}{datetime.now(UTC):%y-%m-%d %H:%M:%S} UTC: {what} ===")

    def write(self, text: str) -> None:
        line = f"{printable(text)}\n".encode()
        if self._is_output:
            return
        if 0 < MOST - len(line) < self._file.tell():
            self._file.close()
            os.replace(self._path, self._path.with_name(BEFORE))
            self._file = open(self._path, "ab", buffering=0)
        self._file.write(line)

    def close(self) -> None:
        self._file.close()
