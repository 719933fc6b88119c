"""Terminal output: escaped control characters, error lines, phases of a start.

Generated text, file names, foreign metrics.jsonl files and echoed flags may contain escape
sequences, which a terminal would execute. Pipes get text unchanged.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import starmap, zip_longest
from shutil import get_terminal_size
from threading import Timer
from typing import Any, TextIO

from minimind.errors import RunError
from minimind.runtime.environment import rank_of
from minimind.runtime.urls import masked_text

# C0 but for the newline and the tab, DEL, C1, and halves of surrogate pairs.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    r"""`text` with its control characters as `\x1b` and the like; newlines and tabs stay."""
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


SHOWN = 72  # characters of a text that is shortened to one line


def shorten_line(text: str, most: int = SHOWN) -> str:
    """Escape `text` to one line of at most `most` characters."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return line if len(line) <= most else f"{line[: most - 3]}..."


def first_lines(error: BaseException, count: int | None = 1) -> str:
    """The first `count` lines of an error's message as one (None: all), or its type if empty."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:count]).rstrip(".") or type(error).__name__


def screen_columns(most: int = sys.maxsize) -> int:
    """Columns of the terminal, at most `most`; in a pipe `most`, whatever COLUMNS says."""
    return min(most, get_terminal_size((most, 24)).columns) if _is_terminal(sys.stdout) else most


def columns_of(text: str) -> int:
    """Columns that a text takes: two for a wide character, none for one that combines."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "WF")
        for one in text
    )


# A word, or a wide character, which may end a line, with the punctuation that may not begin one.
# Blanks before it are kept within a line.
WIDE = "\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uffef\U00020000-\U0003fffd"
PIECE = re.compile(
    rf"\s*(?:[{WIDE}][\u3001\u3002\u300d\u300f\u3011\uff01\uff09\uff0c\uff1a\uff1b\uff1f]*|[^\s{WIDE}]+)"
)


def folded(line: str, indent: int, columns: int) -> list[str]:
    """Wrap a line; a word that is longer than a line is not broken. Later lines are indented."""
    lines, width, indent = [""], 0, min(indent, columns // 2)  # room for words
    for piece in PIECE.findall(line):
        width += columns_of(piece)
        if width > columns and lines[-1].strip():
            lines.append(" " * indent + piece.lstrip())
            width = columns_of(lines[-1])
        else:
            lines[-1] += piece
    return lines


def fitted(text: str, labels: int = 0) -> str:
    """Wrap the lines of a text to the screen, each below its text.

    A line that ends in a backslash, and the line after it, stay as they are: a shell reads them.
    labels: columns of the label that a line may have, with two blanks.
    """
    columns, found, is_command = screen_columns(), [], False
    for line in text.split("\n"):
        goes_on = line.endswith("\\")
        own = len(line) - len(line.lstrip()) + 2
        indent = labels if line[:labels].endswith("  ") else own
        found += [line] if is_command or goes_on else folded(line, indent, columns)
        is_command = goes_on
    return "\n".join(found)


def aligned(
    rows: Iterable[Sequence[str]], sides: str = "<", indent: str = "", columns: int | None = None
) -> str:
    """Lay out rows as lines, with two blanks between columns.

    sides: the side of each column to align to, `<` or `>`; the last also holds for the rest.
    columns: those of a line, by default the screen's. Cells are wrapped to fit, at the least with
    one blank between columns; a row with a word that is too long has a line for each cell.
    """
    lines = [*rows]
    room = (screen_columns() if columns is None else columns) - len(indent)
    widths, gap = _widths(lines, room)
    found: list[str] = []
    for line in lines:
        cells = [folded(cell, 0, width) for cell, width in zip(line, widths, strict=True)]
        pairs = zip(cells, widths, strict=True)
        if any(columns_of(part) > width for cell, width in pairs for part in cell):
            first, *others = filter(None, line)
            parts = [part for cell in others for part in folded(f"  {cell}", 4, room)]
            found += [*folded(first, 2, room), *parts]
            continue
        for parts in zip_longest(*cells, fillvalue=""):
            columns_of_line = zip(parts, sides.ljust(len(widths), sides[-1]), widths, strict=False)
            found.append(gap.join(starmap(_padded, columns_of_line)))
    return "\n".join(f"{indent}{line}".rstrip() for line in found)


def _widths(lines: Sequence[Sequence[str]], room: int) -> tuple[list[int], str]:
    """Widths of the columns of a table, less than those of cells that do not fit; and the gap."""
    table = [*zip(*lines, strict=True)]
    widths = [max(map(columns_of, column)) for column in table]
    words = [
        max(columns_of(part.lstrip()) for cell in column for part in PIECE.findall(cell) or [""])
        for column in table
    ]
    gap = "  " if sum(words) + 2 * (len(words) - 1) <= room else " "
    room -= len(gap) * (len(words) - 1)
    for least in (words, [1] * len(words)):  # longer words only where nothing else is left
        while sum(widths) > room and (wider := [n for n, w in enumerate(widths) if w > least[n]]):
            widths[max(wider, key=widths.__getitem__)] -= 1
    return widths, gap


def _padded(text: str, side: str, width: int) -> str:
    blanks = " " * (width - columns_of(text))
    return text + blanks if side == "<" else blanks + text


def for_stdout(text: str) -> str:
    """`text` as standard output gets it: printable at a terminal, as it is in a pipe."""
    return printable(text) if _is_terminal(sys.stdout) else text


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()  # None: closed by whoever started us


class Guarded:
    """Wraps a text stream to a terminal and escapes control characters.

    A leading or trailing carriage return is kept for progress bars. After the terminal is closed,
    output is dropped: SIGHUP stops the process, unless it ignores it (nohup).
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        inner = text.strip("\r")
        with self._dropping():
            self._stream.write(text.replace(inner, printable(inner)) if inner else text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            null = os.open(os.devnull, os.O_WRONLY)  # the interpreter flushes again at its end
            os.dup2(null, self._stream.fileno())
            os.close(null)


@contextmanager
def guarded() -> Iterator[None]:
    """Guard standard output and standard error inside the block if they are terminals."""
    before: Any = (sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = (Guarded(out) if _is_terminal(out) else out for out in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def traceback_text(error: BaseException) -> str:
    """The traceback of an error, without what URLs hide."""
    return masked_text("".join(traceback.format_exception(error)))


def trace_lines(error: BaseException) -> list[str]:
    """Its traceback from a user's code on: not the frame that caught it, nor those of an import."""
    trace = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in trace.stack[1:] if "importlib" not in frame.filename]
    trace.stack = traceback.StackSummary.from_list(frames)
    return "".join(trace.format()).splitlines() if frames else []


def print_traceback(error: BaseException) -> None:
    """Print it to stderr."""
    print(traceback_text(error), end="", file=sys.stderr)


LONG = 2.0  # seconds


@contextmanager
def phase(what: str, after: float = LONG, on_any_rank: bool = False) -> Iterator[None]:
    """Print `what` to stderr if the block takes longer than `after` seconds.

    On rank 0, or with `on_any_rank` for work that one process does for all. Also a decorator.
    """
    if not on_any_rank and rank_of(os.environ) != 0:
        yield
        return
    timer = Timer(after, _print_phase, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _print_phase(what: str) -> None:
    from tqdm import tqdm  # imported late: most commands end sooner

    text = f"{what} ..."
    with suppress(OSError, ValueError):  # stderr is full or closed
        if _is_terminal(sys.stderr):  # over a progress bar that another process has drawn there
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            text = f"\r{text:<{max(0, columns - 1)}}"
        tqdm.write(text, file=sys.stderr)  # above the bar of this one
        sys.stderr.flush()


def one_line(program: str, error: BaseException, place: str = "") -> str:
    """`PROGRAM: error[E_NAME] PLACE: what; what to do`, always one line.

    place: `rank=R step=S` for a process of a run.
    """
    code = getattr(error, "code", RunError.code)
    what = printable(masked_text(" ".join(str(error).split()))) or type(error).__name__
    return f"{program}: {f'error[{code}] {place}'.rstrip()}: {what}"
