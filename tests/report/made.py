"""metrics.jsonl written by hand, and the figures of a page read back from its HTML."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from minimind.cli.main import main
from minimind.report.figures import Summary
from minimind.report.history import Run, read_runs

NOW = 1_800_100_000.0
PHASES = {"data_ms": 1.0, "forward_ms": 29.0, "backward_ms": 60.0, "optimizer_ms": 10.0}
PAUSES = {"evaluate_ms": 0.0, "checkpoint_ms": 0.0, "sample_ms": 0.0}


def run_start(step: int = 0, at: float = 1_800_000_000.0, **facts: Any) -> dict[str, Any]:
    fields = {
        **{"event": "run_start", "time": at, "step": step, "world_size": 1, "backend": "ddp"},
        **{"resume_from": f"checkpoints/step_{step:08}" if step else None, "zero_stage": None},
        **{"dtype": "float32", "device": "cpu", "parameters": 1000, "tokens_per_step": 100},
        **{"total_steps": 40, "versions": {"torch": "2.13.0"}, "commit": "abc"},
    }
    return {**fields, **facts}


def step_line(step: int, at: float = 1_800_000_000.0, **facts: Any) -> dict[str, Any]:
    fields = {
        **{"event": "step", "time": at + step / 10, "step": step, "loss": 9.0 - step / 8},
        **{"lr": 1e-3 / step, "grad_norm": 0.5, "clipped": False, "tokens": 100 * step},
        **{"step_ms": 100.0, **PHASES, **PAUSES, "comm_ms": None, "mfu": None},
        **{"tokens_per_second": 1000.0, "memory_mib": 300.0 + step},
    }
    return {**fields, **facts}


def made_profile(step: int = 10, **facts: Any) -> dict[str, Any]:
    """A profile of ten steps on one rank."""
    times = {**PHASES, **PAUSES, **{n: v for n, v in facts.items() if n in PHASES}}
    ranks = {name: [ms] for name, ms in times.items() if name in PHASES}
    fields = {"event": "profile", "time": 1_800_000_001.0, "step": step, "steps": 10}
    return {**fields, **times, "step_ms": 100.0, "comm_ms": None, "ranks": ranks, **facts}


def verdict_line(text: str, step: int = 10) -> dict[str, Any]:
    figures = {"part_ms": 1.0, "whole_ms": 2.0, "share": 0.5}
    kind = {"kind": "data", "text": text, "figures": figures}
    return {"event": "verdict", "time": 1_800_000_001.0, "step": step, **kind}


def evaluation(step: int, loss: float, **facts: Any) -> dict[str, Any]:
    found = {"val_loss": loss, "val_ppl": 2.0, "val_bpb": loss / 3, "tokens": 7}
    return {"event": "eval", "time": 1_800_000_000.0, "step": step, **found, **facts}


def end(step: int, status: int = 0, code: str = "DONE", reason: str = "done") -> dict[str, Any]:
    fields = {"code": code, "status": status, "reason": reason, "step": step}
    return {"event": "exit", "time": 1_800_000_000.0 + step / 10, **fields}


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
    return read_runs([write_run(place, lines)])[0]


def values_at(run: Run, *names: str, now: float = NOW) -> tuple[float, ...]:
    """Values of figures of a run."""
    figures = Summary(run, now).figures
    return tuple(figures[name].value for name in names)


def recorded_run(place: Path, recorded: dict[str, Any]) -> Path:
    """The out_dir of a run whose figures benchmarks/doctor_runs.py has recorded."""
    lines, at = list[dict[str, Any] | str](), NOW
    for event in recorded["events"]:
        columns = event.get("lines")
        rows = zip(*columns.values(), strict=True) if columns else [()]
        for row in rows:
            at += 1
            fields = {"event": "step", **dict(zip(columns, row, strict=True))} if columns else event
            lines.append({"time": at, **fields})
    flags = (f"{name}: {value}  # recorded\n" for name, value in recorded["flags"].items())
    write_run(place, lines)
    (place / "config.yaml").write_text("".join(flags), encoding="utf-8")
    return place


def page_of(tmp_path: Path, *places: Path) -> str:
    """The page that the command writes for them."""
    out = tmp_path / "report.html"
    assert main(["report", *map(str, places), "--out", str(out), "--force"]) == 0
    return out.read_text(encoding="utf-8")


class Drawn(HTMLParser):
    """The plotly figures of a page by key, and the tags of its HTML."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(page)
        found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)
        assert found
        self.charts: dict[str, Any] = json.loads(found[1])["charts"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def trace(self, chart: str, name: str) -> dict[str, Any]:
        (trace,) = (one for one in self.charts[chart]["data"] if one["name"] == name)
        return trace

    def points(self, chart: str, name: str) -> np.ndarray:
        """(points, 2): x and y of a trace."""
        trace = self.trace(chart, name)
        return np.column_stack([values_of(trace["x"]), values_of(trace["y"])])


def values_of(encoded: Any) -> np.ndarray:
    """float64 of an array as plotly.py writes it: base64 of a NumPy dtype, or a list."""
    if isinstance(encoded, dict):
        return np.frombuffer(base64.b64decode(encoded["bdata"]), encoded["dtype"]).astype(float)
    return np.array(encoded, dtype=float)
