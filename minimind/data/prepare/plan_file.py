"""plan.json: what identifies a preparation, and in what two of them differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minimind.data.prepare.work_units import Plan

PLAN_NAME = "plan.json"
TEXT = "text"


def described(
    plan: Plan, skips_bad: bool, max_bad_fraction: float, vocab_size: int | None
) -> dict[str, Any]:
    """What plan.json says, but for the tokenizer; of one that is learnt, how many pieces."""
    policy = {"skips_bad": skips_bad, "max_bad_fraction": max_bad_fraction}
    return {**plan.to_json(), **policy, "vocab_size": vocab_size}


def read_described(directory: Path) -> Any:
    """What the folder's plan.json says, None where there is none or it is damaged."""
    try:
        return json.loads((directory / PLAN_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def differences(here: dict[str, Any], there: Any) -> list[str]:
    """In what the preparation `there` is another than the one `here`, in words of the flags.

    How its paths are spelled is nothing. A tokenizer that is learnt is the same where all else is.
    """
    ours, theirs = _compared_values(here), _compared_values(there)
    if not theirs:
        return ["version"]
    if ours[TEXT] != theirs[TEXT]:  # and so its units are others
        ours.pop("shard_bytes")
    names = []
    for name, value in ours.items():
        if value != theirs[name]:
            is_short = not isinstance(value, list)
            names.append(f"{name} ({theirs[name]}, here {value})" if is_short else name)
    return names


def _compared_values(plan_json: Any) -> dict[str, Any]:
    try:
        learnt = plan_json["vocab_size"]
        return {
            TEXT: [plan_json["inputs"], [source["name"] for source in plan_json["sources"]]],
            "weights": [source["weight"] for source in plan_json["sources"]],
            "tokenizer": [plan_json.get("tokenizer") if learnt is None else learnt],
            "shard_bytes": [unit["segments"] for unit in plan_json["units"]],
            **{name: plan_json["options"][name] for name in sorted(plan_json["options"])},
            "on_bad_data": "skip" if plan_json["skips_bad"] else "error",
            "max_bad_fraction": plan_json["max_bad_fraction"],
        }
    except (KeyError, TypeError, AttributeError):
        return {}
