"""Numbers as text, an en dash for NaN and infinity; phases and pauses; the colors of the pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

DASH = "\N{EN DASH}"


def figure(value: float) -> str:
    """`12,535`, `350.5`, `12.50`, `3.6006`, `2.00e-3`."""
    if not math.isfinite(value) or not value:
        return DASH if value else "0"
    size = abs(value)
    if size < 0.01:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.{4 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0}f}"


def size(value: float) -> str:
    """`350`, `2.36M`, `80.6M`, `1.61B`, `3.2e13`."""
    if not math.isfinite(value):
        return DASH
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= 0.9995 * unit:
            return f"{value / unit:.3g}{name}" if value < 999.5 * unit else f"{value:.3g}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """`7.1 s`, `41 s`, `12 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    if not math.isfinite(seconds):
        return DASH
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    for unit, name, smaller, smaller_name in units:
        if whole >= unit:
            rest = whole % unit // smaller
            return f"{whole // unit} {name}" + (f" {rest} {smaller_name}" if rest else "")
    return f"{whole} s"


def clock_time(seconds: float) -> str:
    """`4:05`, `1:04:05`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def milliseconds(value: float) -> str:
    """`620 ms`, `1.24 s`."""
    if not math.isfinite(value):
        return DASH
    return f"{value / 1e3:.3g} s" if value >= 999.5 else f"{value:.3g} ms"


def memory(value: float) -> str:
    """`512 MiB`, `23.4 GiB` for a value in MiB."""
    if not math.isfinite(value):
        return DASH
    return f"{value / 1024:.1f} GiB" if value >= 1024 else f"{value:.0f} MiB"


def percent(share: float) -> str:
    """`32%`, `0.4%`."""
    return f"{share:.0%}" if share >= 0.0995 or not share else f"{share:.1%}"


def timestamp(seconds: float) -> str:
    """`2026-11-21 22:58 UTC`."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return DASH


SCORES_HEAD = ("task", "value", "chance", "stderr", "questions")


def score_values(
    fields: Mapping[str, Any],
) -> list[tuple[str, float, float | None, float | None, int | None]]:
    """Name, value, chance, standard error and questions of tasks and averages.

    `fields` are those of a `scores` event; what is not finite in it is not known.
    """
    found: list[tuple[str, float, float | None, float | None, int | None]] = []

    def known(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    for prefix in ("", "ema_"):
        for name, one in fields.get(f"{prefix}tasks", {}).items():
            if (value := known(one.get("value"))) is not None:
                chance, stderr, questions = (known(one.get(key)) for key in SCORES_HEAD[2:])
                count = None if questions is None else round(questions)
                found.append((f"{prefix}{name}", value, chance, stderr, count))
        if (average := known(fields.get(f"{prefix}average"))) is not None:
            found.append((f"{prefix}average", average, 0.0, None, None))
    return found


def scores_table(fields: Mapping[str, Any]) -> list[list[str]]:
    """A row for each of `score_values`, after SCORES_HEAD."""
    rows = [[*SCORES_HEAD]]
    for name, value, chance, stderr, questions in score_values(fields):
        numbers = ("" if one is None else f"{one:.4f}" for one in (chance, stderr))
        rows.append([name, f"{value:.4f}", *numbers, "" if questions is None else f"{questions:,}"])
    return rows


def scores_line(fields: Mapping[str, Any]) -> str:
    """`cloze 0.4100 (chance 0.25), bits_per_byte 1.4370, average 0.2130`."""
    return ", ".join(
        f"{name} {value:.4f}" + (f" (chance {chance:.3g})" if chance else "")
        for name, value, chance, *_ in score_values(fields)
    )


def listed(parts: Sequence[str]) -> str:
    """`a`, `a and b`, or `a, b and c`."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 resume`, `2 resumes`, `3 crashes`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def log_ticks(low: float, high: float) -> list[float]:
    """Ticks of a log axis around the range: 1, 2, 5 of each decade, or only 1 if there are many."""
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(decades) <= 4 else (1,)
    return [float(f"{digit}e{decade}") for decade in decades for digit in digits]


PHASES = ("data", "forward", "backward", "optimizer")


class Pause(NamedTuple):
    """What a run does between steps. Only one that recurs by a flag has a verb."""

    noun: str
    light: str
    dark: str
    verb: str = ""
    flag: str = ""


PAUSES = {
    "evaluate": Pause("evaluation", "#c0679a", "#cc79a7", "evaluation takes", "eval_interval"),
    "checkpoint": Pause("checkpoint", "#7b4fa0", "#b08fd4", "checkpoints take", "save_interval"),
    "sample": Pause("samples", "#808080", "#999999", "samples take", "sample_interval"),
    "score": Pause("scores", "#9a8220", "#c2a83e", "scores take", "eval_tasks_interval"),
    "verify": Pause(
        *("checks for corruption", "#5b8c5a", "#5b8c5a"),
        *("checks for corruption take", "verify_interval"),
    ),
    "fingerprint": Pause(
        *("fingerprints", "#4f7d8c", "#7fa9b8"), *("fingerprints take", "fingerprints")
    ),
    "own_code": Pause("own functions", "#9c5b3f", "#c98a6b"),
    "trace": Pause("trace", "#6f6f6f", "#cccccc"),
    "gc": Pause("garbage collection", "#8c6d46", "#8c6d46"),
}
NOUNS = {name: name for name in PHASES} | {name: one.noun for name, one in PAUSES.items()}
RECURRING = {name: one for name, one in PAUSES.items() if one.flag}

# Light and dark, after Okabe and Ito (2008), whose colors differ for every kind of color vision.
# Text has a contrast of 4.5 to `paper`; borders of controls (`edge`), bars and lines have 3.
# `rule` only divides.
PALETTE = {
    **{"paper": ("#ffffff", "#14181d"), "ink": ("#1d2733", "#e4e8ec")},
    **{"soft": ("#5c6773", "#97a3af"), "rule": ("#dfe3e8", "#2c343d")},
    **{"edge": ("#7d8894", "#6f7b87")},
    **{"bad": ("#c0392b", "#ff7b6b"), "good": ("#00795a", "#2fc99b")},
    **{"run0": ("#0072b2", "#56b4e9"), "run1": ("#d55e00", "#f08b43")},
    **{"run2": ("#009e73", "#2fc99b"), "run3": ("#b0578d", "#d98cba")},
    **{"run4": ("#b8860b", "#e6b422"), "run5": ("#3a9bd9", "#9ad0f5")},
    **{"run6": ("#6b5b95", "#b3a1e0"), "run7": ("#555555", "#b5b5b5")},
    **{"data": ("#b87a00", "#e6b422"), "forward": ("#3f97cc", "#2f79ad")},
    **{"backward": ("#1f5f94", "#7cc4f0"), "optimizer": ("#17936e", "#1fa27c")},
    **{"xz": ("#8a5a1c", "#d9a866"), "zstd": ("#5f6f00", "#b9cc4a")},
    **{name: (one.light, one.dark) for name, one in PAUSES.items()},
}
# Color and dash of the floors, whose names are written in the color.
FLOORS = {
    **{"unigram": ("run7", "longdash"), "trigram": ("run6", "dashdot"), "zlib": ("run3", "dot")},
    **{"xz": ("xz", "dash"), "zstd": ("zstd", "longdashdot")},
}
LIGHT = {name: light for name, (light, _) in PALETTE.items()}  # page.html changes light to dark


def skipped(place: object, file: object, reason: object) -> str:
    """A checkpoint that was rejected, with the file at fault."""
    return f"skipped checkpoint {place}: {file} {reason}"
