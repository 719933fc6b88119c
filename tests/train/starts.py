"""The start of a run, as tests look at it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from tqdm.utils import disp_len

from minimind.checkpoint.resume import read_manifests
from minimind.config.launcher_env import planned_launch, read_launch
from minimind.config.run_config import RunConfig
from minimind.train.initial_weights import InitialModel
from minimind.train.initial_weights import read_initial as read_initial_of_text
from minimind.train.start import Plan, decide
from minimind.train.text import find_text

LABELS = ("model", "data", "tokens", "step", "length", "rate", "backend", "output", "settings")


def planned(run: RunConfig, environ: Mapping[str, str] | None = None) -> Plan:
    """What --dry_run decides."""
    launch = planned_launch(read_launch(environ or {}), environ or {})
    with ExitStack() as cleanup:
        return decide(run, launch, cleanup, tokenize=False)


def read_initial(run: RunConfig) -> InitialModel:
    """The model that a run starts from, with the checkpoints in its out_dir."""
    with ExitStack() as cleanup:
        saved = read_manifests(Path(run.out_dir) / "checkpoints", run.resume)
        return read_initial_of_text(run, find_text(run, cleanup), saved)


def start_of(out: str) -> list[str]:
    """The lines of a run's output from the model's to the last before the first step."""
    lines = out.splitlines()
    (first,) = (n for n, line in enumerate(lines) if line.startswith("model  "))
    (last,) = (n for n, line in enumerate(lines) if line.startswith("start  "))
    return lines[first : last + 1]


def unbroken_text(lines: list[str]) -> str:
    """The same without line breaks and runs of spaces."""
    return " ".join(" ".join(lines).split())


def require_labels(lines: list[str]) -> None:
    """Raise AssertionError for a first screen without its labels, or with a long line of text."""
    assert all(disp_len(line) <= 100 for line in lines if not line.startswith("  "))
    labels = [line.split(" ")[0] for line in lines if not line.startswith(" ")]
    assert tuple(labels[: len(LABELS)]) == LABELS
