"""Documents of steps with a high loss."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from minimind.errors import UsageError
from minimind.provenance.documents import Documents
from minimind.provenance.step_rows import RunLog, rows_at

WINDOW = 100  # logged steps of the running median


@dataclass(frozen=True)
class Suspect:
    """A document, its steps with a high loss, and its logged steps.

    `score` is the number of standard deviations by which `high` is above its expectation, where
    documents and losses have nothing to do with each other.
    """

    document: int
    high: int
    logged: int
    score: float


def suspects(
    log: RunLog, documents: Documents, steps: range
) -> tuple[list[Suspect], list[int], int]:
    """Documents by how much more often than expected their loss is above the running median.

    Also returns the logged steps with such a loss, and the number of all logged steps in `steps`.
    The median is that of the last `WINDOW` logged steps. Raise UsageError if none is logged.
    """
    logged, high = _high_losses(log, steps)
    if not logged:
        raise UsageError(
            f"--steps {steps.start}:{steps.stop - 1}: {log.run.run_dir} logged no loss of these"
            " steps; give others"
        )
    counts: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    for step in logged:
        rows = rows_at(log.at(step), documents, step, None)
        counts[step in high].update({part.document for row in rows for part in row.parts})
    share = len(high) / len(logged)
    found = []
    for document, times in counts[True].items():
        all_times = times + counts[False][document]
        spread = (all_times * share * (1 - share)) ** 0.5
        score = (times - all_times * share) / spread if spread else 0.0
        found.append(Suspect(document, times, all_times, score))
    return sorted(found, key=lambda s: (-s.score, s.document)), sorted(high), len(logged)


def _high_losses(log: RunLog, steps: range) -> tuple[list[int], set[int]]:
    """Logged steps in `steps`, and those of them with a loss above its running median."""
    losses = log.run.column("loss")
    logged, high = [], set()
    for at, (step, loss) in enumerate(zip(log.run.column("step"), losses, strict=True)):
        if int(step) not in steps:
            continue
        logged.append(int(step))
        before = losses[max(0, at - WINDOW) : at]
        before = before[np.isfinite(before)]
        if len(before) and not loss <= np.median(before):
            high.add(int(step))
    return logged, high
