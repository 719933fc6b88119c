"""Read a text column, or records, of Parquet files and of Hugging Face datasets on disk.

Both are read in Arrow batches. Memory for a Parquet file is bounded by the columns that are read of
one row group; a dataset is memory-mapped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from minimind.data.text.compressed import Damage, needs_extra
from minimind.data.text.documents import (
    DocumentError,
    ReadOptions,
    document_of_cell,
    too_long_document,
)
from minimind.data.text.missing_text import missing_in_table
from minimind.errors import DataError

ROWS_PER_BATCH = 256
DATASET_FILE = "state.json"  # beside a dataset that save_to_disk wrote
SPLITS_FILE = "dataset_dict.json"  # above several, one for each split
TRAIN = "train"


def is_dataset(path: Path) -> bool:
    """Whether a directory was written by save_to_disk of `datasets`."""
    return any(os.path.isfile(path / name) for name in (DATASET_FILE, SPLITS_FILE))


def dataset_bytes(path: Path) -> int:
    """Size of the files of a dataset."""
    return sum(file.stat().st_size for file in _split_directory(path).rglob("*.arrow"))


def dataset_rows(path: Path) -> int:
    """Number of rows of a dataset; raise DataError if it cannot be opened."""
    try:
        return len(_dataset(path))
    except IndexError:  # what the library says of a table without any batch
        return 0


def row_groups(path: Path) -> list[int]:
    """Rows of each row group of a Parquet file; raise DataError if it is damaged."""
    with _parquet(path) as file:
        return [file.metadata.row_group(n).num_rows for n in range(file.metadata.num_row_groups)]


def parquet_texts(
    path: Path, start: int, stop: int, reading: ReadOptions
) -> Iterator[str | DocumentError]:
    """Yield the texts of rows `start` to `stop`, or their problems.

    Reads the row groups that begin in this range. Raise Damage at an unreadable row, DataError if
    there is no column to read.
    """
    with _parquet(path) as file:
        columns = _columns(path, file.schema_arrow, reading)
        first, groups = 0, []
        for number in range(file.metadata.num_row_groups):
            if start <= first < stop:
                groups.append(number)
            first += file.metadata.row_group(number).num_rows
        batches = file.iter_batches(
            ROWS_PER_BATCH, row_groups=groups, columns=columns, use_threads=False
        )
        yield from _texts(batches, reading)


def dataset_texts(
    path: Path, start: int, stop: int, reading: ReadOptions
) -> Iterator[str | DocumentError]:
    """Yield the texts of rows `start` to `stop`, or their problems; as parquet_texts."""
    dataset = _dataset(path)
    columns = _columns(path, dataset.features.arrow_schema, reading)
    rows = dataset.select_columns(columns).with_format("arrow")
    tables = (
        rows[first : min(first + ROWS_PER_BATCH, stop)]
        for first in range(start, stop, ROWS_PER_BATCH)
    )
    yield from _texts((batch for table in tables for batch in table.to_batches()), reading)


def _texts(batches: Iterator[Any], reading: ReadOptions) -> Iterator[str | DocumentError]:
    import pyarrow

    split, text_of = _reader_of_rows(reading)
    while True:
        try:
            batch = next(batches, None)
            rows = None if batch is None else list(split(batch))
        except (pyarrow.ArrowException, ValueError, OSError) as error:  # ValueError: a key twice
            raise Damage(f"cannot be read ({_first_line(error)})") from error
        if rows is None:
            return
        for row in rows:
            try:
                yield text_of(row)
            except DocumentError as error:
                yield error


def _reader_of_rows(
    reading: ReadOptions,
) -> tuple[Callable[[Any], Iterator[Any]], Callable[[Any], str]]:
    """Functions that split a batch into rows, and that give the text of a row."""

    def text_of_cell(row: tuple[Any, int]) -> str:
        cell, size = row
        if size > reading.max_document_bytes:
            raise too_long_document(size, reading)
        return document_of_cell(cell.as_py(), reading)

    if reading.records is not None:
        return _records, reading.records.of_row
    return lambda batch: _cells(batch.column(0)), text_of_cell


def _records(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch; strings are bytes, as they may not be UTF-8."""
    columns = []
    for column in batch.columns:
        column.validate()  # what a cast reads; `view` gives null children a wrong length
        content = column.cast(_in_bytes(column.type))
        content.validate(full=True)  # see `_cells`
        columns.append(content.to_pylist())
    return (dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True))


def _in_bytes(kind: Any) -> Any:
    """The type without strings, and without times, which may fit no `datetime`.

    Values that are named by numbers keep theirs: a cast would repeat them.
    """
    import pyarrow
    from pyarrow import types

    if isinstance(kind, pyarrow.BaseExtensionType):
        return _in_bytes(kind.storage_type)
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_in_bytes(field.type)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        make = pyarrow.list_ if types.is_list(kind) else pyarrow.large_list
        return make(kind.value_field.with_type(_in_bytes(kind.value_type)))
    if types.is_fixed_size_list(kind):
        field = kind.value_field.with_type(_in_bytes(kind.value_type))
        return pyarrow.list_(field, kind.list_size)
    if types.is_temporal(kind) and kind.bit_width in (32, 64):
        return pyarrow.int32() if kind.bit_width == 32 else pyarrow.int64()
    strings = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    return strings.get(kind, kind)


def _cells(column: Any) -> Iterator[tuple[Any, int]]:
    """Yield buffer and size of each cell, so that cells that are too long are never copied.

    Offsets are checked first: a wrong offset in a mapped file is a segmentation fault.
    """
    import pyarrow
    from pyarrow import compute

    if isinstance(column, pyarrow.DictionaryArray):  # not decoded: it may name a long text often
        column.validate(full=True)
        texts = [*_cells(column.dictionary), (pyarrow.scalar(None), 0)]
        return (texts[-1 if number is None else number] for number in column.indices.to_pylist())
    is_large = column.type == pyarrow.large_string()
    content = column.view(pyarrow.large_binary() if is_large else pyarrow.binary())
    content.validate(full=True)
    sizes = compute.call_function("binary_length", [content]).fill_null(0)
    return zip(content, sizes.to_pylist(), strict=True)


def _columns(path: Path, schema: Any, reading: ReadOptions) -> list[str]:
    """The columns to read; raise DataError if they are missing."""
    if reading.records is None:
        _require_text(path, schema, reading.text_field)
        return [reading.text_field]
    try:
        return reading.records.columns(schema.names)
    except DocumentError as error:
        raise DataError(f"{path}: {error.reason}; {error.remedy}") from error


def _require_text(path: Path, schema: Any, field: str) -> None:
    import pyarrow

    strings = (pyarrow.string(), pyarrow.large_string())

    def kind_of(column: Any) -> Any:
        is_dictionary = isinstance(column.type, pyarrow.DictionaryType)
        return column.type.value_type if is_dictionary else column.type

    if field not in schema.names:
        texts = [column.name for column in schema if kind_of(column) in strings]
        what, remedy = missing_in_table(schema.names, texts, field)
        raise DataError(f"{path}: {what}; {remedy}")
    kind = kind_of(schema.field(field))
    if kind not in strings:
        problem = f"column {json.dumps(field)} holds {kind}, not string"
        raise DataError(f"{path}: {problem}; give --text_field and a column of text")


def _parquet(path: Path) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise needs_extra(path, "pyarrow") from error
    try:
        return parquet.ParquetFile(path, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        reason = _first_line(error)
        raise DataError(f"{path}: cannot be read as Parquet ({reason}); write it again") from error


def _dataset(path: Path) -> Any:
    directory = _split_directory(path)
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise needs_extra(path, "datasets") from error
    try:
        return datasets.load_from_disk(str(directory))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # Arrow's errors are ValueErrors; the others come of JSON that has another shape.
        raise DataError(
            f"{path}: is no dataset that save_to_disk wrote ({_first_line(error)}); write it again"
        ) from error


def _split_directory(path: Path) -> Path:
    """The directory of the rows: of one split if there are several."""
    if not (path / SPLITS_FILE).is_file():
        return path
    try:
        splits = json.loads((path / SPLITS_FILE).read_bytes())["splits"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path / SPLITS_FILE}: is damaged; write the dataset again") from error
    if TRAIN not in splits:
        named = ", ".join(map(json.dumps, splits))
        first = path / str(next(iter(splits), TRAIN))
        raise DataError(f'{path}: has no split "{TRAIN}" but {named}; name one, such as {first}')
    return path / TRAIN


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
