"""metrics.jsonl: what a run did, one JSON object a line, for programs to read."""

from __future__ import annotations

import errno
import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


class Metrics:
    """Appends one JSON object a line to metrics.jsonl; nothing is ever rewritten.

    Unbuffered: what a full disk refuses must not be written once more, and fail again, at closing.
    """

    def __init__(self, path: Path) -> None:
        require_regular(path)
        self._file = open(path, "ab", buffering=0)
        if path.stat().st_size:
            with open(path, "rb") as written:
                written.seek(-1, 2)
                is_torn = written.read(1) != b"\n"
            if is_torn:  # by a crash: close the line, keep the next whole
                self._append(b"\n")

    def write(self, event: str, **facts: Any) -> None:
        """Append one event; numbers in full precision, non-finite ones as null."""
        line = {"event": event, "time": time.time(), **_finite(facts)}
        self._append((json.dumps(line, ensure_ascii=False) + "\n").encode())

    def _append(self, content: bytes) -> None:
        left = memoryview(content)
        while left:  # a disk that fills up takes a part, and refuses the next
            left = left[self._file.write(left) :]

    def close(self) -> None:
        """Nothing more will be written."""
        self._file.close()


def require_regular(path: Path) -> None:
    """Nothing, or an OSError for what is no file: a pipe would wait for a reader."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is a folder, a pipe or a device, not a file", str(path))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def newest_acknowledged(path: Path) -> int | None:
    """The last step of which `checkpoint_saved` was recorded since the run began at step 0."""
    newest = None
    if not path.exists():
        return None
    with open(path, "rb") as file:
        for raw in file:
            if b'"run_start"' in raw or b'"checkpoint_saved"' in raw:
                with suppress(ValueError):  # a line torn by a crash acknowledges nothing
                    line = json.loads(raw)
                    if line["event"] == "checkpoint_saved":
                        newest = line["step"]
                    elif line["event"] == "run_start" and line["resume_from"] is None:
                        newest = None
    return newest
