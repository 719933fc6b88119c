"""The reader of metrics.jsonl; `Metrics` in durable_files writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minimind.runtime import disk
from minimind.runtime.checked_json import MAX_BYTES, MAX_DEPTH, MAX_INTEGER, is_deeper


class EventLog:
    """Reads the events of a metrics.jsonl, on from where the last reading ended.

    Lines that cannot be read are left out and counted in `unread`. A file that is missing has none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin(None)

    def _begin(self, file_id: tuple[int, int] | None) -> None:
        self.unread = 0
        self.is_torn = False  # the last line is not whole, and may still be written
        self._file_id, self._offset = file_id, 0

    @property
    def position(self) -> tuple[Any, int]:
        """What changes with every line that is read, and with another file."""
        return self._file_id, self._offset

    def begins_anew(self) -> bool:
        """Whether the file is another than at the last reading, or was cut; then begin with it."""
        try:
            status = disk.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            file_id, size = None, 0
        else:
            file_id, size = (status.st_dev, status.st_ino), status.st_size
        if file_id == self._file_id and size >= self._offset:
            return False
        self._begin(file_id)
        return True

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the events since the last reading, after `begins_anew`; raise OSError."""
        if self._file_id is None:
            return
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            self.is_torn = False
            while raw := file.readline(MAX_BYTES):
                size, is_blank = len(raw), not raw.strip()
                event = parse_event(raw)
                while len(raw) == MAX_BYTES and not raw.endswith(b"\n"):  # one that is too long
                    raw = file.readline(MAX_BYTES)
                    size += len(raw)
                    event = None
                if event is None and not raw.endswith(b"\n"):
                    self.is_torn = True
                    return
                self._offset += size
                if event is not None:  # whole, also where its newline is still to come
                    yield event
                elif not is_blank:
                    self.unread += 1

    def events(self, *names: str) -> Iterator[dict[str, Any]]:
        """Yield the events of these names, which all have a step; one without cannot be read."""
        self.begins_anew()
        for event in self.new():
            if event["event"] in names:
                if is_count(event.get("step")):
                    yield event
                else:
                    self.unread += 1

    def warning(self) -> str:
        """State how many lines cannot be read; empty if there is none."""
        return left_out(self.unread, self.path)


def left_out(lines: int, path: Path | str) -> str:
    """State how many lines of a metrics.jsonl cannot be read; empty if there is none."""
    if lines == 1:
        return f"1 line of {path} cannot be read and is left out"
    return f"{lines:,} lines of {path} cannot be read and are left out" if lines else ""


def parse_event(raw: bytes) -> dict[str, Any] | None:
    """The event of a line; None if it has no name, or its step is no count.

    Runs that crashed, disks that decay and other programs leave torn lines, blocks of zeros, and
    JSON of any kind.
    """
    try:
        event = json.loads(raw.decode())
    except (ValueError, RecursionError):
        return None
    if type(event) is not dict or type(event.get("event")) is not str:
        return None
    if event.get("step") is not None and not is_count(event["step"]):
        return None
    # The check of every value costs as much as the parser; few lines have so many brackets.
    is_deep = raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and is_deeper(event, MAX_DEPTH)
    return None if is_deep else event


def is_count(value: Any) -> bool:
    """Whether a value of JSON is a whole number that counts steps."""
    return type(value) is int and 0 <= value <= MAX_INTEGER
