"""Documents that are whole records, such as conversations: how a line or a row becomes text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Records:
    """Readers of records; each raises DocumentError.

    `of_line` and `of_row` give the text of a document. The row of a table is a dictionary of its
    columns, in which strings are bytes and a value that is not given is None. `columns` selects
    those to read from all names of columns.
    """

    of_line: Callable[[bytes | bytearray], str]
    of_row: Callable[[dict[str, Any]], str]
    columns: Callable[[Sequence[str]], list[str]]
