"""Numbers as people read them, and where the ticks of an axis go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

DASH = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
LONG = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def exact(value: float) -> str:
    """`12,535`, `3.6006`, `2.00e-3`: as many digits as a reader can use."""
    if not math.isfinite(value):
        return DASH
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.1f}"
    if size >= 0.01:
        return f"{value:.4f}" if size < 10 else f"{value:.2f}"
    mantissa, power = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(power)}" if value else "0"


def short(value: float) -> str:
    """`12.5k`, `2.36M`, `3.6`."""
    if not math.isfinite(value):
        return DASH
    for unit, letter in LONG:
        if abs(value) >= unit * 0.99995:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """`41 s`, `12 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    if not math.isfinite(seconds):
        return DASH
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    steps = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    for unit, name, smaller, smaller_name in steps:
        if whole >= unit:
            rest = whole % unit // smaller
            return f"{whole // unit} {name}" + (f" {rest} {smaller_name}" if rest else "")
    return f"{whole} s"


def milliseconds(value: float) -> str:
    """`620 ms`, `1.24 s`."""
    if not math.isfinite(value):
        return DASH
    return f"{value / 1e3:.3g} s" if value >= 999.5 else f"{value:.3g} ms"


def mebibytes(value: float) -> str:
    """`512 MiB`, `23.4 GiB`."""
    if not math.isfinite(value):
        return DASH
    return f"{value / 1024:.1f} GiB" if value >= 1024 else f"{value:.0f} MiB"


def percent(share: float) -> str:
    """`32 %`, `0.4 %`."""
    return f"{share:.0%}" if share >= 0.0995 or not share else f"{share:.1%}"


def moment(seconds: float) -> str:
    """`2026-11-21 22:58 UTC`."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return DASH


def count(number: int, noun: str, plural: str | None = None) -> str:
    """`1 resume`, `2 resumes`, `3 crashes`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` multiples of 1, 2 or 5 times a power of ten, from `low` to `high`."""
    span = high - low
    if not span > 0:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / most))
    while span / step > most:
        step *= 2.5 if math.isclose(step / 10 ** math.floor(math.log10(step) + 1e-9), 2) else 2
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten between `low` and `high`, with 2 and 5 times them where they are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = -(-len(decades) // most)
    tens = [10.0**n for n in decades if n % every == 0]
    fine = [k * 10.0**n for n in decades for k in (1, 2, 5)]
    inside = [t for t in fine if low <= t <= high]
    return inside if len(inside) <= most else [t for t in tens if low <= t <= high]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Labels that tell the ticks apart, all of one form."""
    digits = 2
    is_small = any(0 < abs(t) < 1e-3 for t in ticks)
    while digits < 8:
        digits += 1
        texts = [_tick(t, digits, is_small) for t in ticks]
        pairs = zip(ticks, texts, strict=True)
        if len(set(texts)) == len(texts) and all(_tells(t, text) for t, text in pairs):
            return texts
    return [f"{t:g}" for t in ticks]


def _tick(value: float, digits: int, is_small: bool) -> str:
    if value and is_small and abs(value) < 1:
        mantissa, power = f"{value:.{digits - 1}e}".split("e")
        return f"{float(mantissa):g}e{int(power)}"
    for unit, letter in LONG:
        if abs(value) >= unit * 0.99995:
            return f"{value / unit:.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def _tells(value: float, text: str) -> bool:
    unit = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1.0)
    return math.isclose(float(text.rstrip("kMGT")) * unit, value, rel_tol=1e-6, abs_tol=1e-12)
