"""Text that fits the columns of a terminal, in which some characters take two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tqdm.utils import disp_len, disp_trim

COLUMNS = 100
LABEL = 9  # columns before the text


def shortened(text: str, most: int) -> str:
    """`text` in at most `most` columns: where it is longer, its middle is left out."""
    if disp_len(text) <= most:
        return text
    head = disp_trim(text, (most - 3) // 2)
    tail = disp_trim(text[::-1], most - 3 - disp_len(head))[::-1]
    return f"{head}...{tail}"


def labelled(label: str, pieces: Iterable[str]) -> list[str]:
    """Lines of at most `COLUMNS` columns: the label, then `pieces`, broken between two of them.

    A piece that is longer than a line is broken between words.
    """
    lines = [""]
    for piece in _fitting(pieces, COLUMNS - LABEL):
        longer = f"{lines[-1]} {piece}".lstrip()
        if disp_len(longer) > COLUMNS - LABEL:
            lines.append(piece)
        else:
            lines[-1] = longer
    labels = [label, *("" for _ in lines[1:])]
    return [f"{name:<{LABEL}}{line}" for name, line in zip(labels, lines, strict=True)]


def _fitting(pieces: Iterable[str], most: int) -> Iterator[str]:
    for piece in pieces:
        parts = [piece] if disp_len(piece) <= most else piece.split(" ")
        yield from (shortened(part, most) for part in parts)
