"""Rows that --skip_rows leaves out: the file, and what is left of each source."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minimind.config.flags import MOST_LEFT_OUT
from minimind.config.rules import SourceRows
from minimind.config.run_config import RunConfig
from minimind.data.rows.order import Ranges, count_rows, joined, left_out_by_source
from minimind.errors import UsageError
from minimind.runtime.durable_files import read_small

HEADER = re.compile(r"# rows of (\d+) tokens of text ([0-9a-f]{8})\s*")
MOST_BYTES = 2**28  # lines of nonfinite_rows.jsonl have the tokens of their rows
LINE = re.compile(r"(\d{1,16})(?::(\d{1,16}))?")


def skip_rows_text(rows: Iterable[int], row_tokens: int, fingerprint: str) -> str:
    """Return a file that leaves out `rows`; its first line names the text and the row length."""
    lines = [f"# rows of {row_tokens} tokens of text {fingerprint[:8]}"]
    for first, stop in joined((row, row + 1) for row in rows):
        lines.append(f"{first}:{stop - 1}" if stop - first > 1 else str(first))
    return "\n".join(lines) + "\n"


def read_skip_rows(path: Path, n_rows: int, row_tokens: int, fingerprint: str) -> Ranges:
    """Return the rows in a file, as ranges; raise UsageError for a line that names none.

    A line is a row (17), a range (17:19), a comment (#), or a JSON object with a `row`, such as
    those of nonfinite_rows.jsonl. Rows count from 0 and depend on --max_seq_len, so a file with the
    first line of `skip_rows_text` is refused for other text or rows of another length.
    """
    try:
        lines = read_small(path, MOST_BYTES).decode(errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"--skip_rows {path}: {error.strerror}; correct the path") from error
    ranges: set[tuple[int, int]] = set()
    for number, line in enumerate(lines, 1):
        where = f"--skip_rows {path}:{number}"
        if header := HEADER.fullmatch(line):
            if header.groups() != (str(row_tokens), fingerprint[:8]):
                raise UsageError(
                    f"{where}: has rows of {header[1]} tokens of text {header[2]}, and this run"
                    f" reads rows of {row_tokens} of text {fingerprint[:8]}; give a file made for"
                    " it"
                )
        elif line.strip() and not line.lstrip().startswith("#"):
            found = _rows_of(line.strip(), row_tokens, where)
            if found is None:
                continue
            if not 0 <= found.start < found.stop <= n_rows:
                raise UsageError(
                    f"{where}: {line.strip()[:80]!r} is not in rows 0 to {n_rows - 1}; correct it"
                )
            ranges.add((found.start, found.stop))
    if not ranges:
        raise UsageError(f"--skip_rows {path}: has no rows; add some, or remove --skip_rows")
    rows = joined(ranges)
    if (count := count_rows(rows)) > MOST_LEFT_OUT:
        raise UsageError(
            f"--skip_rows {path}: has {count:,} rows, more than {MOST_LEFT_OUT:,}; take their"
            " documents out of the text instead"
        )
    return rows


def rows_left_out(run: RunConfig, sizes: Sequence[int], manifest: Mapping[str, Any]) -> Ranges:
    """The rows of --skip_rows; `sizes` has the number of rows of each source."""
    if run.skip_rows is None:
        return ()
    path, row_tokens = Path(run.skip_rows), run.max_seq_len + 1
    return read_skip_rows(path, sum(sizes), row_tokens, manifest["fingerprint"])


def rows_of_sources(run: RunConfig, manifest: Mapping[str, Any]) -> list[SourceRows]:
    """Rows of the sources of a manifest, without those of --skip_rows if it is of text."""
    row_tokens, ranges = run.max_seq_len + 1, ()
    sizes = [source["tokens"]["train"] // row_tokens for source in manifest["sources"]]
    if run.task == "pretrain":  # rows of conversations are numbered once they are packed
        ranges = rows_left_out(run, sizes, manifest)
    left_out = left_out_by_source(sizes, ranges)
    return [
        SourceRows(one["name"], size - len(out), one["weight"])
        for one, size, out in zip(manifest["sources"], sizes, left_out, strict=True)
    ]


def _rows_of(line: str, row_tokens: int, where: str) -> range | None:
    """Rows of a line, None for one of a gradient; raise UsageError for another line."""
    if line.startswith("{"):
        value = _row_object(line)
        tokens = value.get("tokens")
        if isinstance(tokens, list) and len(tokens) != row_tokens:
            raise UsageError(
                f"{where}: is a row of {len(tokens)} tokens, and this run reads rows of"
                f" {row_tokens} (--max_seq_len); give rows of this length"
            )
        row = value.get("row")
        if "row" not in value and "step" in value:  # in nonfinite_rows.jsonl: names no row
            return None
        if isinstance(row, int) and not isinstance(row, bool):
            return range(row, row + 1)
    elif match := LINE.fullmatch(line):
        return range(int(match[1]), int(match[2] or match[1]) + 1)
    raise UsageError(
        f"{where}: {line[:80]!r} is not a row (17), a range (17:19) or a JSON object with a row;"
        " correct it"
    )


def _row_object(line: str) -> dict[str, Any]:
    """The JSON object of a line; empty for other lines."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
