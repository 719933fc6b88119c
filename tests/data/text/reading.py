"""Whole files read for a test, in as many segments as it asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minimind.data.text.documents import ReadOptions, Rejection
from minimind.data.text.formats import in_file, read_segment, segments_of

WHOLE = 2**62


def read(path: Path, unit_bytes: int = WHOLE, **reading: Any) -> list[str | Rejection]:
    """Documents and rejections in order."""
    how = ReadOptions(**reading)
    found = [one for part in segments_of(path, unit_bytes) for one in read_segment(part, how)]
    return [in_file(one) if isinstance(one, Rejection) else one[0] for one in found]


def documents_of(path: Path, **reading: Any) -> list[str]:
    """The documents of a file that has nothing else."""
    found = read(path, **reading)
    assert not [one for one in found if isinstance(one, Rejection)]
    return [one for one in found if isinstance(one, str)]
