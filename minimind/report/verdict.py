"""What held a run back: as it recorded it, or from its profiles or step lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from minimind.report.records import PHASES, Start, number, values_by_rank
from minimind.report.runs import Run, read_configuration
from minimind.telemetry.period import PAUSES, Period
from minimind.telemetry.verdict import Setting, Verdict, verdict


def verdict_of(run: Run) -> str:
    """The sentence on the last start that has a verdict or a profile; empty without any.

    Without --profile it follows from the step lines of the last start, which name no communication
    and no other rank; so there is none where nothing stands out.
    """
    for start in reversed(run.starts):
        recorded = [e["text"] for e in start.events if e["event"] == "verdict" and "text" in e]
        if recorded:
            return str(recorded[-1])
        if profiles := _profiles(start):
            return _judge(profiles, run, start).text
    if not run.starts or (lines := _step_lines(run.starts[-1])) is None:
        return ""
    found = _judge([lines], run, run.starts[-1])
    return "" if found.kind == "compute" else found.text


def _judge(profiles: Sequence[Mapping[str, Any]], run: Run, start: Start) -> Verdict:
    period, configuration = Period(), read_configuration(run.run_dir)
    for profile in profiles:
        period.add(profile)
    flags = {name: value for name, (value, _) in configuration.flags.items()}
    return verdict(period, Setting.read({**flags, **configuration.deepspeed, **start.facts}))


def _profiles(start: Start) -> list[dict[str, Any]]:
    """The `profile` events with the ranks of the last one; malformed ones are left out."""
    found = [_profile(event) for event in start.events if event["event"] == "profile"]
    whole = [one for one in found if one is not None]
    shapes = [{name: len(values) for name, values in one["ranks"].items()} for one in whole]
    return [one for one, shape in zip(whole, shapes, strict=True) if shape == shapes[-1]]


def _profile(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """Its numbers; None if the steps or the time of a phase are missing."""
    step, steps = (number(event.get(name), 0.0) for name in ("step", "steps"))
    means = {f"{name}_ms": number(event.get(f"{name}_ms")) for name in PHASES}
    if steps < 1 or not all(ms >= 0 for ms in means.values()):
        return None
    pauses = {f"{name}_ms": max(0.0, number(event.get(f"{name}_ms"), 0.0)) for name in PAUSES}
    ranks = {
        f"{name}_ms": [
            max(0.0, ms) for ms in values_by_rank(event.get("ranks"), f"{name}_ms").values()
        ]
        for name in (*PHASES, "comm")
    }
    size = max(map(len, ranks.values()))
    if not all(len(ranks[name]) == size for name in means):
        ranks = {}
    ranks = {name: values for name, values in ranks.items() if size and len(values) == size}
    return {"step": int(step), "steps": int(steps), **means, **pauses, "ranks": ranks}


def _step_lines(start: Start) -> dict[str, Any] | None:
    """All step lines as one profile, without communication and ranks; None without lines."""
    steps, spent = start.last_step - start.first_step, start.milliseconds()
    if not (math.isfinite(steps) and steps >= 1 and sum(spent[name] for name in PHASES) > 0):
        return None
    means = {f"{name}_ms": max(0.0, spent[name]) / steps for name in PHASES}
    pauses = {f"{name}_ms": max(0.0, spent[name]) for name in PAUSES}
    return {"step": int(start.last_step), "steps": int(steps), **means, **pauses, "ranks": {}}
