"""The lines of a start, as tests look at them."""

from __future__ import annotations

from tqdm.utils import disp_len


def start_of(out: str) -> list[str]:
    """The lines of a run's output from the model's to the last before the first step."""
    lines = out.splitlines()
    (first,) = (n for n, line in enumerate(lines) if line.startswith("model  "))
    (last,) = (n for n, line in enumerate(lines) if line.startswith("start  "))
    return lines[first : last + 1]


def unbroken_text(lines: list[str]) -> str:
    """The same without line breaks and runs of spaces."""
    return " ".join(" ".join(lines).split())


def require_fit(lines: list[str]) -> None:
    """An AssertionError where a start is over 20 lines of 100 columns, or begins with another."""
    assert len(lines) <= 20
    assert max(map(disp_len, lines)) <= 100
    labels = [line.split(" ")[0] for line in lines if not line.startswith(" ")]
    expected = ["model", "data", "tokens", "step", "length", "rate", "backend", "output"]
    assert labels[: len(expected)] == expected
