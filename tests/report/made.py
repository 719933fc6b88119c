"""metrics.jsonl written by hand, and what a page draws read back from its HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from minimind.cli.main import main
from minimind.report.records import read_records
from minimind.report.runs import Run, runs_of

NOW = 1_800_100_000.0
PHASES = {"data_ms": 1.0, "forward_ms": 29.0, "backward_ms": 60.0, "optimizer_ms": 10.0}
PAUSES = {"evaluate_ms": 0.0, "checkpoint_ms": 0.0, "sample_ms": 0.0}


def run_start(step: int = 0, at: float = 1_800_000_000.0, **facts: Any) -> dict[str, Any]:
    told = {
        **{"event": "run_start", "time": at, "step": step, "world_size": 1, "backend": "ddp"},
        **{"resume_from": f"checkpoints/step_{step:08}" if step else None, "zero_stage": None},
        **{"dtype": "float32", "device": "cpu", "parameters": 1000, "tokens_per_step": 100},
        **{"total_steps": 40, "versions": {"torch": "2.13.0"}, "commit": "abc"},
    }
    return {**told, **facts}


def step_line(step: int, at: float = 1_800_000_000.0, **facts: Any) -> dict[str, Any]:
    told = {
        **{"event": "step", "time": at + step / 10, "step": step, "loss": 9.0 - step / 8},
        **{"lr": 1e-3 / step, "grad_norm": 0.5, "clipped": False, "tokens": 100 * step},
        **{"step_ms": 100.0, **PHASES, **PAUSES, "comm_ms": None, "mfu": None},
        **{"tokens_per_second": 1000.0, "memory_mib": 300.0 + step},
    }
    return {**told, **facts}


def evaluation(step: int, loss: float) -> dict[str, Any]:
    found = {"val_loss": loss, "val_ppl": 2.0, "val_bpb": loss / 3, "tokens": 7}
    return {"event": "eval", "time": 1_800_000_000.0, "step": step, **found}


def end(step: int, status: int = 0, code: str = "DONE", reason: str = "done") -> dict[str, Any]:
    told = {"code": code, "status": status, "reason": reason, "step": step}
    return {"event": "exit", "time": 1_800_000_000.0 + step / 10, **told}


def crashed_and_resumed() -> list[dict[str, Any]]:
    """16 steps, a crash; from 10 on two processes to a stop at 20; from there to 40."""
    return [
        run_start(),
        *(step_line(n) for n in range(1, 11)),
        {"event": "checkpoint_saved", "time": 1_800_000_001.0, "step": 10, "path": "p"},
        evaluation(10, 7.5),
        *(step_line(n, loss=1.0) for n in range(11, 17)),
        evaluation(15, 0.5),
        run_start(10, at=1_800_000_100.0, world_size=2),
        {"event": "checkpoint_resharded", "from": {"world_size": 1}, "to": {"world_size": 2}},
        *(step_line(n, at=1_800_000_100.0) for n in range(11, 21)),
        evaluation(20, 6.25),
        end(20, 75, "PREEMPTED", "stopped on SIGTERM, saved"),
        run_start(20, at=1_800_000_200.0, world_size=2),
        *(step_line(n, at=1_800_000_200.0, clipped=n == 33) for n in range(21, 41)),
        evaluation(40, 4.25),
        end(40),
    ]


def write_run(place: Path, lines: Iterable[dict[str, Any] | str]) -> Path:
    """The out_dir; a line that is text already is written as it is, with no newline behind."""
    place.mkdir(parents=True, exist_ok=True)
    text = "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines)
    (place / "metrics.jsonl").write_text(text, encoding="utf-8")
    return place


def made_run(place: Path, lines: Iterable[dict[str, Any] | str]) -> Run:
    return runs_of([read_records(write_run(place, lines))])[0]


def page_of(tmp_path: Path, *places: Path) -> str:
    """The page that the command writes for them."""
    out = tmp_path / "report.html"
    assert main(["report", *map(str, places), "--out", str(out), "--force"]) == 0
    return out.read_text(encoding="utf-8")


class Drawn(HTMLParser):
    """The paths of each chart by name, and the edges they are drawn between."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.edges: dict[str, dict[str, float]] = {}
        self.paths: dict[tuple[str, str, str], str] = {}
        self.tags: list[str] = []
        self._chart = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = {name: value or "" for name, value in attrs}
        if tag == "figure":
            self._chart = found["id"]
            names = ("x0", "x1", "y0", "y1", "log")
            self.edges[self._chart] = {name: float(found[f"data-{name}"]) for name in names}
        elif tag == "path":
            key = (self._chart, found.get("data-name", ""), found["class"])
            self.paths[key] = found["d"]

    def points(self, chart: str, name: str, look: str = "") -> np.ndarray:
        """(points, 2): x and y of a path, in the units of the axes."""
        (path,) = (
            d
            for (c, n, kind), d in self.paths.items()
            if (c, n) == (chart, name) and look in [*kind.split(), ""]
        )
        pairs = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)
        found, edges = np.array(pairs, dtype=float).reshape(-1, 2) / 1000, self.edges[chart]
        x = edges["x0"] + found[:, 0] * (edges["x1"] - edges["x0"])
        low, high = edges["y0"], edges["y1"]
        if edges["log"]:
            return np.column_stack([x, low * (high / low) ** (1 - found[:, 1])])
        return np.column_stack([x, low + (1 - found[:, 1]) * (high - low)])

    def values(self, page: str) -> dict[str, dict[str, list[list[float]]]]:
        """What the pointer reads."""
        found = re.search(r'<script type="application/json" id="drawn">(.*?)</script>', page)
        assert found
        return json.loads(found[1])
