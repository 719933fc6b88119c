"""A report as a file: of `minimind report --out`, and of every run at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from minimind.report.configuration import read_configuration
from minimind.report.figures import figures_of
from minimind.report.page import page
from minimind.report.records import read_records
from minimind.report.runs import runs_of
from minimind.runtime.durable_files import storing, write_whole

NAME = "report.html"  # in the out_dir of a run


def write_report(places: Sequence[Path], out: Path, remedy: str) -> int:
    """Write the page of the runs in `places` to `out`; its size in bytes. Raises a StorageError."""
    now = time.time()
    runs = runs_of([read_records(place) for place in places])
    each = [figures_of(run, now) for run in runs]
    text = page(runs, each, [read_configuration(place) for place in places], now)
    content = text.encode(errors="backslashreplace")  # a folder's name may not be UTF-8
    with storing(str(out), remedy, needed=len(content)):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, content)
    return len(content)
