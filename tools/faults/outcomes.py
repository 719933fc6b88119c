"""What a run recorded, what came of a fault, and the table of it all."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CURVE = ("step", "loss", "lr", "grad_norm", "tokens", "rows")


def events(out_dir: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl records; lines torn by a kill are passed over."""
    path = out_dir / "metrics.jsonl"
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def curve(recorded: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    """What has to be equal bit for bit, a tuple for every step line, in the order written."""
    return [tuple(repr(e[n]) for n in CURVE) for e in recorded if e["event"] == "step"]


def acknowledged(recorded: Iterable[dict[str, Any]]) -> int:
    """The newest step that a `checkpoint_saved` line promised; 0 for none."""
    return max((e["step"] for e in recorded if e["event"] == "checkpoint_saved"), default=0)


def gist(text: str) -> str:
    """The error lines of an output, or else its last lines."""
    lines = [line for line in text.splitlines() if line.strip()]
    reported = [line for line in lines if "error[" in line or "Error" in line]
    return " | ".join(reported or lines[-4:])[:1500] or "(nothing)"


def unfinished(out_dir: Path) -> list[str]:
    """Names of folders under checkpoints/ that a save or a clearing left half done."""
    return sorted(p.name for p in (out_dir / "checkpoints").glob("*.tmp-*"))


@dataclass
class Outcome:
    """One fault: what was seen, and what was wrong about it."""

    fault: str
    status: int | str
    seconds: float  # from the fault to the last process gone
    left: int = 0  # processes that had to be killed afterwards
    lost: int = 0  # acknowledged checkpoints not found again
    deviating: int = 0  # step lines that differ from the unbroken run's
    wrong: list[str] = field(default_factory=list)


def table(outcomes: list[Outcome]) -> Iterator[str]:
    """One line a fault: how often, status seen, time to exit, what was left, lost and deviating."""
    yield (
        f"{'fault':<42}{'times':>6}  {'status':<16}{'to exit s (min/med/max)':>24}"
        f"{'left':>6}{'lost':>6}{'deviating':>11}"
    )
    names = list(dict.fromkeys(o.fault for o in outcomes))
    for name in names:
        of = [o for o in outcomes if o.fault == name]
        seconds = [o.seconds for o in of]
        statuses = " ".join(sorted({str(o.status) for o in of}))
        spread = f"{min(seconds):.1f} / {statistics.median(seconds):.1f} / {max(seconds):.1f}"
        left, lost = sum(o.left for o in of), sum(o.lost for o in of)
        yield (
            f"{name:<42}{len(of):>6}  {statuses:<16}{spread:>24}{left:>6}{lost:>6}"
            f"{sum(o.deviating for o in of):>11}" + ("  WRONG" if any(o.wrong for o in of) else "")
        )


def report(outcomes: list[Outcome]) -> int:
    """Print the table and everything wrong; the number of outcomes that were."""
    print("\n".join(table(outcomes)))
    bad = [o for o in outcomes if o.wrong]
    for outcome in bad:
        for output in outcome.wrong:
            print(f"wrong after {outcome.fault}: {output}", file=sys.stderr)
    return len(bad)
