"""`minimind report`: the text summary of runs, or their HTML page."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from minimind.errors import UsageError
from minimind.runtime.durable_files import storing

REMEDY = "free some space, or give another --out"


def add_parser(subs: Any) -> None:
    """Add `report`."""
    parser = subs.add_parser(
        "report",
        help="curves, step times, stops and resumes of a run",
        description="Summarize one run or compare several; with --out, write one HTML file with all"
        " curves, which needs no network.",
        example="minimind report out --out out/report.html",
    )
    add = parser.add_argument
    places = "a run's out_dir; several are compared"
    add("places", nargs="+", type=Path, metavar="OUT_DIR", help=places)
    add("--out", type=Path, metavar="FILE.html", help="HTML file to write")
    add("--force", action="store_true", help="replace an earlier report at --out")
    add("--debug", action="store_true", help="show tracebacks")


def run_report(args: argparse.Namespace) -> None:
    """Print the summary of each run, or write the page."""
    from minimind.report.page import GENERATOR, write_report
    from minimind.report.runs import read_runs
    from minimind.report.summary import Summary

    if args.out:
        _require_free(args.out, args.force, GENERATOR)
    places = [place.parent if place.name == "metrics.jsonl" else place for place in args.places]
    if len({place.resolve() for place in places}) < len(places):
        raise UsageError("the same out_dir is given twice; name each run once")
    if args.out:
        size = write_report(places, args.out, REMEDY)
        print(f"{args.out}: {size / 1024:,.0f} KiB; open it in a browser")
        return
    now = time.time()
    print("\n\n".join(Summary(run, now).as_text(_has_blocks()) for run in read_runs(places)))


def _require_free(out: Path, force: bool, generator: str) -> None:
    """Raise UsageError if `out` exists, unless it is a report and `force` is set."""
    if not os.path.lexists(out):
        return
    if not force:
        raise UsageError(f"--out {out} exists; give another file, or --force to replace it")
    with storing(str(out), REMEDY):
        is_report = False
        if out.is_file() and not out.is_symlink():
            with open(out, encoding="utf-8", errors="replace") as file:
                is_report = generator in file.read(1000)
    if not is_report:
        raise UsageError(
            f"--out {out} is no report, and --force replaces nothing else; give another file"
        )


def _has_blocks() -> bool:
    """Whether the encoding of standard output has more than ASCII."""
    try:
        "▁█×".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
