"""`minimind report`: runs as a page to look at, or as a few lines in the terminal."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from minimind.errors import UsageError
from minimind.files import storing, write_whole

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
    from minimind.report.configuration import read_configuration
    from minimind.report.figures import figures_of
    from minimind.report.page import GENERATOR, page
    from minimind.report.records import read_records
    from minimind.report.runs import runs_of
    from minimind.report.words import as_text

    if args.out:
        _require_free(args.out, args.force, GENERATOR)
    places = [place.parent if place.name == "metrics.jsonl" else place for place in args.places]
    if len({place.resolve() for place in places}) < len(places):
        raise UsageError("the same out_dir is given twice; name each run once")
    runs = runs_of([read_records(place) for place in places])
    now = time.time()
    each = [figures_of(run, now) for run in runs]
    if not args.out:
        blocks = _shows_blocks()
        print("\n\n".join(as_text(*one, blocks) for one in zip(runs, each, strict=True)))
        return
    text = page(runs, each, [read_configuration(place) for place in places], now)
    content = text.encode(errors="backslashreplace")  # a folder's name may not be UTF-8
    with storing(str(args.out), MEND, needed=len(content)):
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(args.out, content)
    print(f"{args.out}: {len(content) / 1024:,.0f} KiB; open it in a browser")


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
