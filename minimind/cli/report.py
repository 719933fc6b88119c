"""`minimind report`: runs as a page to look at, or as a few lines in the terminal."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from minimind.errors import UsageError
from minimind.runtime.durable_files import storing

MEND = "free some space, or give another --out"


def add_parser(subs: Any) -> None:
    """`report`."""
    added = subs.add_parser(
        "report",
        help="what a run did: its curves, where its time went, how it was stopped and resumed",
        description="What one run did, or several compared: a summary, or with --out one HTML file"
        " with every curve, which needs no network.",
        example="minimind report out --out out/report.html",
    )
    add = added.add_argument
    told = "a run's out_dir; several are compared"
    add("places", nargs="+", type=Path, metavar="OUT_DIR", help=told)
    add("--out", type=Path, metavar="FILE.html", help="write the page there")
    add("--force", action="store_true", help="replace an earlier report at --out")
    add("--debug", action="store_true", help="show tracebacks")


def run_report(args: argparse.Namespace) -> None:
    """Print the summary of each run, or write the page."""
    from minimind.report.figures import figures_of
    from minimind.report.page import GENERATOR
    from minimind.report.records import read_records
    from minimind.report.runs import runs_of
    from minimind.report.words import as_text
    from minimind.report.write import write_report

    if args.out:
        _require_free(args.out, args.force, GENERATOR)
    places = [place.parent if place.name == "metrics.jsonl" else place for place in args.places]
    if len({place.resolve() for place in places}) < len(places):
        raise UsageError("the same out_dir is given twice; name each run once")
    if args.out:
        size = write_report(places, args.out, MEND)
        print(f"{args.out}: {size / 1024:,.0f} KiB; open it in a browser")
        return
    now, blocks = time.time(), _shows_blocks()
    runs = runs_of([read_records(place) for place in places])
    print("\n\n".join(as_text(run, figures_of(run, now), blocks) for run in runs))


def _require_free(out: Path, force: bool, generator: str) -> None:
    """Nothing, or a UsageError where `out` is taken; with `force` only a report goes."""
    if not os.path.lexists(out):
        return
    if not force:
        raise UsageError(f"--out {out} exists; give another file, or --force to replace it")
    with storing(str(out), MEND):
        is_ours = out.is_file() and not out.is_symlink()
        if is_ours:
            with open(out, encoding="utf-8", errors="replace") as file:
                is_ours = generator in file.read(1000)
    if not is_ours:
        raise UsageError(
            f"--out {out} is no report, and --force replaces nothing else; give another file"
        )


def _shows_blocks() -> bool:
    """Whether the terminal's encoding has more than ASCII."""
    try:
        "▁█×".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
