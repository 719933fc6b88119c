"""`minimind report`, `doctor` and `scaling`: what runs did, and the law of losses."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from minimind.cli.command import PLACES, OfPlaces, OfRun, OutputFile, argument
from minimind.errors import UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import storing
from minimind.runtime.installed import require_extra
from minimind.runtime.terminal import fitted

if TYPE_CHECKING:
    from minimind.sweep.scaling import Answer

REMEDY = "give another --out"
LABELED = 14  # column of the text of a summary


@dataclass(kw_only=True)
class Report(OfPlaces, OutputFile):
    """Show curves, step times, stops and resumes of a run.

    Several runs are compared. --out writes one HTML file, which needs no network; --watch serves a
    page on this host and updates it as the runs go on.
    """

    example = "minimind report out --out out/report.html"
    origins: ClassVar = OfRun.origins
    place: Any = argument((), **PLACES)
    """a run's out_dir; several are compared"""
    out: Path | None = argument(None, parse=Path, metavar="FILE.html")
    """HTML file to write"""
    watch: bool = argument(False, excludes={"out": "the page is served or written"})
    """serve the page on this host until Ctrl-C; it follows runs in progress and later ones (needs
    the extra serve)"""
    port: int | None = argument(None, ge=0, le=65535, needs="watch", unset=8010)
    """port of 127.0.0.1; 0: any that is free"""

    def execute(self) -> None:
        from minimind.report.figures import Summary
        from minimind.report.history import read_runs
        from minimind.report.page import write_report

        if self.out:
            self.require_free(self.out, _is_page)
        places = [_run_dir(place) for place in self.checkpoint]
        if len({disk.resolve(place) for place in places}) < len(places):
            raise UsageError("the same out_dir is given twice; name each run once")
        if self.watch:
            require_extra("serve", "--watch", "starlette", "uvicorn")
            from minimind.report.watch import watch

            watch(places, self.in_force("port"))
        if self.out:
            size = write_report(places, self.out, REMEDY)
            print(f"{self.out}: {size / 1024:,.0f} KiB; open it in a browser")
            return
        now = time.time()
        text = "\n\n".join(Summary(run, now).as_text(_has_blocks()) for run in read_runs(places))
        print(fitted(text, LABELED))


@dataclass(kw_only=True)
class Doctor(OfRun):
    """Say what stands out in a run, and what to do about it.

    Each finding says what was seen in the metrics, why it matters, which flag to change, and how
    sure that is. The status is 1 if anything is certain or likely, else 0.
    """

    example = "minimind doctor out"
    json: bool = argument(False)
    """print a JSON object"""

    def execute(self) -> int:
        from minimind.report.findings import diagnose
        from minimind.report.history import read_runs
        from minimind.report.placement import placement

        place = _run_dir(self.checkpoint)
        (run,) = read_runs([place])
        for warning in run.warnings:
            print(f"note: {warning}", file=sys.stderr)
        findings, placed = diagnose(run, time.time()), placement(run)
        if self.json:
            found = [{"kind": one.kind, "sure": one.sure, "text": one.text} for one in findings]
            print(json.dumps({"findings": found, "placement": placed}, ensure_ascii=False))
        else:
            lines = [f"{one.kind} ({one.sure}): {one.text}" for one in findings] or [
                "nothing stands out"
            ]
            text = "\n".join([str(place), *(f"  {line}" for line in [*lines, placed] if line)])
            print(fitted(text))
        return int(any(one.counts for one in findings))


@dataclass(kw_only=True)
class Scaling(OutputFile):
    """Fit the loss over parameters and tokens, and print the best model size for a budget.

    L = E + A/N^alpha + B/D^beta is fitted to the final validation losses of finished runs, with
    confidence intervals; the best size is the compute-optimal one. `minimind scaling run SPEC.yaml
    --out_dir DIR` trains the runs first, one for each size and number of tokens, and compares a run
    that is not in the fit with its prediction. The same command continues after a stop or a kill.
    """

    example = "minimind scaling out/sweep --flops 1e18 --out scaling.html"
    places: list[Path] = argument(nargs="+", parse=Path, metavar="DIR", is_positional=True)
    """a run's out_dir, or a folder of runs, such as a sweep's; or `run SPEC.yaml`: flags, sizes and
    tokens of runs to train"""
    flops: list[float] = argument((), nargs="+", gt=0)
    """training budgets in FLOPs, counted as by --max_flops; prints the best model size for each"""
    tokens: list[float] = argument((), nargs="+", gt=0)
    """token counts; prints the best model size for each"""
    json: bool = argument(False)
    """print a JSON object"""
    out: Path | None = argument(None, parse=Path, metavar="FILE.html")
    """page of tables and plots to write; not with `run`"""
    out_dir: Path | None = argument(None, metavar="DIR")
    """with `run`: folder of the runs and of the page; a folder that has some is continued"""
    parallel: int | None = argument(None, ge=1)
    """with `run`: runs at the same time (default: one per free GPU, one on a CPU)"""
    dry_run: bool = argument(False)
    """with `run`: only print the runs"""
    force: bool = argument(False, needs="out")
    """replace a page that this command wrote there; not with `run`"""

    def execute(self) -> int:
        first, *others = self.places
        is_spec = len(others) == 1 and others[0].suffix in (".yaml", ".yml")
        trains = first == Path("run") and is_spec  # else `run` is a folder
        require_extra("sweep", "minimind scaling", "scipy")
        from minimind.report.page import write_page
        from minimind.sweep.scaling import answer, as_text, collect, render

        page = self.out
        if trains:
            result = self._train_ladder(str(others[0]))
            if isinstance(result, int):
                return result
            page = self.out_dir and self.out_dir / "scaling.html"
        else:
            for name in ("out_dir", "parallel", "dry_run"):
                if getattr(self, name):
                    raise UsageError(f"--{name} has no effect without run SPEC.yaml; remove it")
            if page:
                self.require_free(page, _is_page)
            result = answer(collect(self.places), self.flops, self.tokens)
        print(json.dumps(result.found, ensure_ascii=False) if self.json else as_text(result))
        if page:
            size = write_page(render(result), page, REMEDY)
            if not self.json:
                print(f"\n{page}: {size / 1024:,.0f} KiB; open it in a browser")
        return 0

    def _train_ladder(self, path: str) -> Answer | int:
        """The answer of the runs of SPEC.yaml, or the status if they have not all ended."""
        from minimind.sweep.ladder import run_ladder

        if self.out:
            raise UsageError(
                "--out has no effect with run SPEC.yaml, whose page is in --out_dir; remove it"
            )
        if not (self.out_dir or self.dry_run):
            raise UsageError("minimind scaling run needs a folder for the runs; give --out_dir DIR")
        place = None if self.dry_run else self.out_dir
        with ExitStack() as stack:
            stack.enter_context(storing(f"--out_dir {self.out_dir}", "give another --out_dir"))
            if self.json:  # is what standard output gets
                stack.enter_context(redirect_stdout(sys.stderr))
            return run_ladder(path, place, self.parallel, self.flops, self.tokens)


def _run_dir(place: str) -> Path:
    """The folder of a run, of which the metrics may be named."""
    path = Path(place)
    return path.parent if path.name == "metrics.jsonl" else path


def _is_page(head: str) -> bool:
    from minimind.report.page import GENERATOR

    return GENERATOR in head[:1000]


def _has_blocks() -> bool:
    """Whether the encoding of standard output has more than ASCII."""
    try:
        "▁█×".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
