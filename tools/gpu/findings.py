"""What a part finds: checks, figures, and what it left out and why."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

RIGHT, WRONG = "ok", "WRONG"


class PartError(Exception):
    """Why a part cannot go on, in one sentence; `log` is the end of what its process printed."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True)
class Finding:
    """One row of a part's table; `is_right` is None for a figure and for what was not run."""

    what: str
    found: str
    limit: str = ""
    is_right: bool | None = None
    value: Any = None  # the figure itself, for results.json
    skipped: str = ""  # why it was not run

    def cells(self) -> tuple[str, str, str, str]:
        """As in the tables."""
        if self.skipped:
            return self.what, f"not run: {self.skipped}", "", ""
        verdict = "" if self.is_right is None else RIGHT if self.is_right else WRONG
        return self.what, self.found, self.limit, verdict


def figure(what: str, value: Any, text: str = "") -> Finding:
    """A figure without a limit."""
    return Finding(what, text or str(value), value=value)


def check(what: str, is_right: bool, found: str, limit: str = "", value: Any = None) -> Finding:
    """Something that has to hold."""
    return Finding(what, found, limit, bool(is_right), value)


def at_most(what: str, value: float, limit: float, text: str = "") -> Finding:
    """A number that must not exceed `limit`; NaN does."""
    is_right = math.isfinite(value) and value <= limit
    return Finding(what, text or f"{value:.1e}", f"{limit:g}", is_right, value)


def skipped(what: str, why: str) -> Finding:
    """What was not run here, which is no failure."""
    return Finding(what, "", skipped=why)


@dataclass
class Result:
    """How a part ended."""

    name: str
    about: str
    status: str = "running"  # then passed, failed or not run
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    error: str = ""
    log: str = ""

    @property
    def has_passed(self) -> bool:
        """Whether it counts as held."""
        return self.status == "passed"
