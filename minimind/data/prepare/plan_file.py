"""plan.json, which identifies a preparation, and the differences between two of them."""

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
    """Return the content of plan.json without the tokenizer's fingerprint.

    `vocab_size` is that of a tokenizer to train, None if one is given.
    """
    policy = {"skips_bad": skips_bad, "max_bad_fraction": max_bad_fraction}
    return {**plan.to_json(), **policy, "vocab_size": vocab_size}


def read_described(directory: Path) -> Any:
    """Read plan.json; None if it is missing or damaged."""
    try:
        return json.loads((directory / PLAN_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def differences(here: dict[str, Any], there: Any) -> list[str]:
    """Return the flags in which two preparations differ, with both values where they are short.

    The spelling of paths does not count. Trained tokenizers are equal if everything else is.
    """
    ours, theirs = _compared_values(here), _compared_values(there)
    if not theirs:
        return ["version"]
    if ours[TEXT] != theirs[TEXT]:  # which also changes the units
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
