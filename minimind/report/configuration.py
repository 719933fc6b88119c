"""The configuration of a run and where each value came from, as its folder has it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimind.runtime.durable_files import storing

LINE = re.compile(r"(?P<name>\w+): (?P<value>.*?)(?:  # (?P<source>[^#]*))?", re.DOTALL)
LONG = 300  # letters of a value that are shown


@dataclass(frozen=True)
class Value:
    """One value, as text, and its source."""

    name: str
    text: str
    source: str

    @property
    def is_default(self) -> bool:
        """Whether nobody asked for it."""
        return self.source == "default"


@dataclass(frozen=True)
class Configuration:
    """`config.yaml` with its sources, and DeepSpeed's resolved file by key path."""

    flags: tuple[Value, ...] = ()
    deepspeed: tuple[Value, ...] = ()

    @property
    def grad_clip(self) -> float:
        """The norm from which gradients are clipped; NaN where it is not known."""
        told = [flag.text for flag in self.flags if flag.name == "grad_clip"]
        try:
            return float(told[0]) if told else math.nan
        except ValueError:
            return math.nan


def read_configuration(place: Path) -> Configuration:
    """What lies in a run's folder; what is not there or cannot be read is left out."""
    return Configuration(
        tuple(_flags(_text(place / "config.yaml"))),
        tuple(_flat(_text(place / "ds_config.resolved.json"))),
    )


def _text(path: Path) -> str:
    if not path.is_file():
        return ""
    with storing(str(path), "mend its rights"):
        return path.read_text(encoding="utf-8", errors="replace")


def _flags(text: str) -> list[Value]:
    """As run_folder.py writes them: `name: value  # source`, long values on several lines."""
    joined = re.sub(r"\n +", " ", text)
    found = [LINE.fullmatch(line) for line in joined.splitlines()]
    return [
        Value(one["name"], _unquoted(one["value"].strip())[:LONG], (one["source"] or "").strip())
        for one in found
        if one
    ]


def _unquoted(value: str) -> str:
    """A text of YAML without the quotes that keep it one: `'off'` is off."""
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1].replace("''", "'") if is_quoted else value


def _flat(text: str) -> list[Value]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return _leaves("", found) if isinstance(found, dict) else []


def _leaves(path: str, found: dict[str, Any], depth: int = 0) -> list[Value]:
    values = []
    for name, value in found.items():
        if isinstance(value, dict) and value and depth < 8:
            values += _leaves(f"{path}{name}.", value, depth + 1)
        else:
            values.append(Value(f"{path}{name}", json.dumps(value)[:LONG], ""))
    return values


def differences(each: list[Configuration]) -> list[tuple[str, list[str]]]:
    """Names whose values differ between runs, with the value of each; paths of a run apart."""
    named = [{flag.name: flag.text for flag in one.flags} for one in each]
    names = list(dict.fromkeys(name for one in named for name in one))
    return [
        (name, values)
        for name in names
        if name != "out_dir" and len(set(values := [one.get(name, "") for one in named])) > 1
    ]
