"""`minimind report` and `minimind scaling`: what runs did, and the law of their losses."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minimind.config.arguments import positive
from minimind.errors import UsageError
from minimind.runtime.durable_files import storing

REMEDY = "free some space, or give another --out"


def add_parsers(subs: Any) -> None:
    """Add the commands."""
    _add_report(subs)
    parser = subs.add_parser(
        "scaling",
        help="fit loss over parameters and tokens; the best size for a budget",
        description="Fit L = E + A/N^alpha + B/D^beta to the final validation losses of finished"
        " runs, with confidence intervals, and print the compute-optimal size for a budget.",
        example="minimind scaling out/sweep --flops 1e18 --out scaling.html",
    )
    add = parser.add_argument
    places = "a run's out_dir, or a folder of runs, such as a sweep's"
    add("places", nargs="+", type=Path, metavar="DIR", help=places)
    text = "budgets of training, counted as --max_flops does"
    add("--flops", nargs="+", type=positive, default=[], help=text)
    text = "numbers of tokens to find the size for, for which each is compute-optimal"
    add("--tokens", nargs="+", type=positive, default=[], help=text)
    add("--json", action="store_true", help="print a JSON object")
    add("--out", type=Path, metavar="FILE.html", help="page of tables and plots to write")
    add("--force", action="store_true", help="replace an earlier page at --out")
    add("--debug", action="store_true", help="show tracebacks")


def _add_report(subs: Any) -> None:
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
    from minimind.report.history import read_runs
    from minimind.report.page import GENERATOR, write_report
    from minimind.report.summary import Summary

    if args.out:
        require_free(args.out, args.force, GENERATOR)
    places = [place.parent if place.name == "metrics.jsonl" else place for place in args.places]
    if len({place.resolve() for place in places}) < len(places):
        raise UsageError("the same out_dir is given twice; name each run once")
    if args.out:
        size = write_report(places, args.out, REMEDY)
        print(f"{args.out}: {size / 1024:,.0f} KiB; open it in a browser")
        return
    now = time.time()
    print("\n\n".join(Summary(run, now).as_text(_has_blocks()) for run in read_runs(places)))


def run_scaling(args: argparse.Namespace) -> None:
    """Print the law and the optima, and write the page."""
    if find_spec("scipy") is None:
        raise UsageError(
            "minimind scaling needs the package scipy, which is not installed; pip install scipy"
        )
    from minimind.report.page import GENERATOR
    from minimind.sweep.scaling import answer, as_object, as_text, collect, write_page

    if args.out:
        require_free(args.out, args.force, GENERATOR)
    result = answer(collect(args.places), args.flops, args.tokens)
    print(json.dumps(as_object(result), ensure_ascii=False) if args.json else as_text(result))
    if args.out:
        size = write_page(result, args.out, REMEDY)
        if not args.json:
            print(f"\n{args.out}: {size / 1024:,.0f} KiB; open it in a browser")


def require_free(out: Path, force: bool, generator: str) -> None:
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
