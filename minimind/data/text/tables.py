"""Read text columns, or records, of tables: Parquet files and Hugging Face datasets on disk.

Both are read in Arrow batches. Memory for a Parquet file is bounded by the columns that are read of
one row group; a dataset is memory-mapped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from minimind.data.text.documents import (
    LINE_BYTES_PER_TEXT_BYTE,
    DocumentError,
    Found,
    JsonCell,
    ReadOptions,
    Rejection,
    Segment,
    document_of_cells,
    missing_in_table,
    too_long_document,
)
from minimind.data.text.packed import needs_extra
from minimind.errors import DataError
from minimind.runtime import disk
from minimind.runtime.file_kinds import ARROW, JSON_TEXT, PARQUET, kind_of_file
from minimind.runtime.terminal import first_lines

ROWS_PER_BATCH = 256
DATASET_FILE = "state.json"  # beside a dataset that save_to_disk wrote
SPLITS_FILE = "dataset_dict.json"  # above several, one for each split
TRAIN = "train"
JSON = "arrow.json"  # the extension type of cells that are JSON, such as `Json` of datasets
EXTENSION = b"ARROW:extension:name"  # metadata of a field whose type no library knows


def is_dataset(path: Path) -> bool:
    """Whether a directory was written by save_to_disk of `datasets`."""
    return any(disk.is_file(path / name) for name in (DATASET_FILE, SPLITS_FILE))


def parquet_segments(path: Path, unit_bytes: int) -> Iterator[Segment]:
    """Join neighbouring row groups up to about `unit_bytes`; raise DataError for a damaged file."""
    size = disk.stat(path).st_size
    counts = row_groups(path) if size else []
    total = sum(counts)
    start = stop = 0
    for count in counts:
        stop += count
        weight = (stop - start) * size // max(total, 1)
        if (weight >= unit_bytes or stop == total) and stop > start:
            yield Segment(path, start, stop, weight)
            start = stop
    if not total:
        yield Segment(path, 0, 0, 0)


def row_groups(path: Path) -> list[int]:
    """Rows of each row group of a Parquet file; raise DataError if it is damaged."""
    with _parquet(path) as file:
        return [file.metadata.row_group(n).num_rows for n in range(file.metadata.num_row_groups)]


def parquet_rows(segment: Segment, reading: ReadOptions) -> Found:
    """Documents of the row groups that begin in a segment.

    An unreadable row loses the others of its group, which its rejection counts. Raise DataError if
    there is no column to read.
    """
    with _parquet(segment.path) as file:
        schema = file.schema_arrow
        columns = _columns(segment.path, schema, reading)
        first, parts = 0, []
        for number in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(number).num_rows
            if segment.start <= first < segment.stop:
                how = {"row_groups": [number], "columns": columns, "use_threads": False}
                parts.append((rows, partial(file.iter_batches, ROWS_PER_BATCH, **how)))
            first += rows
        yield from _documents(segment, _texts(parts, columns, schema, reading))


def dataset_segments(path: Path, unit_bytes: int) -> Iterator[Segment]:
    """Rows of about `unit_bytes`; raise DataError for a dataset that cannot be opened."""
    files = disk.files_below(_split_directory(path))
    size = sum(disk.stat(file).st_size for file in files if file.suffix == ".arrow")
    try:
        rows = len(_dataset(path))
    except IndexError:  # what the library says of a table without any batch
        rows = 0
    step = max(1, rows * unit_bytes // max(size, 1))
    for start in range(0, max(rows, 1), step):
        stop = min(start + step, rows)
        yield Segment(path, start, stop, (stop - start) * size // max(rows, 1))


def dataset_rows(segment: Segment, reading: ReadOptions) -> Found:
    """Documents of the rows of a dataset, in groups of ROWS_PER_BATCH; see `parquet_rows`."""
    dataset = _dataset(segment.path)
    schema = dataset.features.arrow_schema
    columns = _columns(segment.path, schema, reading)
    rows = dataset.select_columns(columns).with_format("arrow")
    starts = range(segment.start, segment.stop, ROWS_PER_BATCH)
    ends = ((n, min(n + ROWS_PER_BATCH, segment.stop)) for n in starts)
    parts = ((b - a, lambda a=a, b=b: rows[a:b].to_batches()) for a, b in ends)
    yield from _documents(segment, _texts(parts, columns, schema, reading))


def _documents(segment: Segment, texts: Iterator[str | DocumentError]) -> Found:
    row = segment.start
    for text in texts:
        if isinstance(text, DocumentError):
            bad, lost = text, text.documents
            yield Rejection(segment.path, row + 1, None, bad.reason, bad.remedy, lost)
            row += lost
        else:
            row += 1
            share = (row - segment.start) / (segment.stop - segment.start)
            yield text, int(segment.weight * share), row, None
    if row < segment.stop:
        reason = f"the rows from here to {segment.stop} are missing"
        lost = segment.stop - row
        yield Rejection(segment.path, row + 1, None, reason, "copy the file again", lost)


def _texts(
    parts: Iterable[tuple[int, Callable[[], Iterable[Any]]]],
    columns: list[str],
    schema: Any,
    reading: ReadOptions,
) -> Iterator[str | DocumentError]:
    """Yield the texts of parts, given their numbers of rows and what reads them in batches."""
    import pyarrow

    split, text_of = _reader_of_rows(schema, reading)
    for left, batches_of in parts:
        batches = None
        while left:
            try:
                batches = iter(batches_of()) if batches is None else batches
                batch = next(batches, None)
                rows = [] if batch is None else list(split(batch.select(columns)))
            except (pyarrow.ArrowException, ValueError, OSError) as error:  # ValueError: key twice
                yield _unread(left, f"cannot be read ({first_lines(error)})")
                break
            if batch is None:
                yield _unread(left, "is missing")
                break
            left -= len(rows)
            for row in rows:
                try:
                    yield text_of(row)
                except DocumentError as error:
                    yield error


def _unread(rows: int, problem: str) -> DocumentError:
    """The error of a row, and of those behind it that are lost with it."""
    others = f", nor are the {rows - 1} rows behind it read" if rows > 1 else ""
    return DocumentError(f"{problem}{others}", "copy the file again", documents=rows)


def _reader_of_rows(
    schema: Any, reading: ReadOptions
) -> tuple[Callable[[Any], Iterator[Any]], Callable[[Any], str]]:
    """Functions that split a batch into rows, and that give the text of a row."""
    if reading.records is not None:
        return partial(_records, reading.records.around_text), reading.records.of_row
    paths = [_path(schema, name) for name in reading.names]

    def content_of(cell: Any, size: int, is_json: bool) -> bytes | JsonCell | None:
        limit = reading.max_document_bytes
        if size > (limit * LINE_BYTES_PER_TEXT_BYTE + len('""') if is_json else limit):
            raise too_long_document(size, reading)
        content = cell.as_py()
        return content if content is None or not is_json else JsonCell(content)

    def text_of_row(row: tuple[tuple[Any, int, bool], ...]) -> str:
        cells = zip(reading.names, row, strict=True)
        return document_of_cells({name: content_of(*cell) for name, cell in cells}, reading)

    def rows_of(batch: Any) -> Iterator[Any]:
        return zip(*(_cells(_leaf(batch, path)) for path in paths), strict=True)

    return rows_of, text_of_row


def _path(fields: Any, name: str) -> list[str]:
    """The column of a name and the fields in it, by the names around its dots; [] if none is so."""
    from pyarrow import types

    by_name = {field.name: field for field in fields}
    head, _, rest = name.partition(".")
    if name in by_name:
        return [name]
    if not rest or head not in by_name or not types.is_struct(by_name[head].type):
        return []
    inner = _path(by_name[head].type, rest)
    return [head, *inner] if inner else []


def _leaf(batch: Any, path: Sequence[str]) -> Any:
    """The column at a path."""
    from pyarrow import compute

    column = batch.column(path[0])
    for name in path[1:]:
        column.validate()
        column = compute.call_function("struct_field", [column], compute.StructFieldOptions([name]))
    return column


def _records(named_times: bool, batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch; strings are bytes, as they may not be UTF-8."""
    columns = []
    for column in batch.columns:
        column.validate()  # what a cast reads; `view` gives null children a wrong length
        content = column.cast(_in_bytes(column.type, named_times))
        content.validate(full=True)  # see `_cells`
        mark = _marked(column.type)
        values = content.to_pylist()
        columns.append([_unless_null(mark, value) for value in values] if mark else values)
    return (dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True))


def _in_bytes(arrow_type: Any, named_times: bool = False) -> Any:
    """The type without strings, and without times, which may fit no `datetime`: text, or numbers.

    Dictionary-encoded columns stay so: a cast would expand them. So do lists of views,
    which Arrow casts to lists that lack their last offset.
    """
    import pyarrow
    from pyarrow import types

    if isinstance(arrow_type, pyarrow.BaseExtensionType):
        return _in_bytes(arrow_type.storage_type)
    if types.is_struct(arrow_type):
        return pyarrow.struct(
            [field.with_type(_in_bytes(field.type, named_times)) for field in arrow_type]
        )
    if types.is_list(arrow_type) or types.is_large_list(arrow_type):
        make = pyarrow.list_ if types.is_list(arrow_type) else pyarrow.large_list
        return make(arrow_type.value_field.with_type(_in_bytes(arrow_type.value_type, named_times)))
    if types.is_fixed_size_list(arrow_type):
        field = arrow_type.value_field.with_type(_in_bytes(arrow_type.value_type, named_times))
        return pyarrow.list_(field, arrow_type.list_size)
    if types.is_temporal(arrow_type) and arrow_type.bit_width in (32, 64):
        if named_times and not types.is_duration(arrow_type):
            return pyarrow.string()
        return pyarrow.int32() if arrow_type.bit_width == 32 else pyarrow.int64()
    strings = {
        pyarrow.string(): pyarrow.binary(),
        pyarrow.large_string(): pyarrow.large_binary(),
        pyarrow.string_view(): pyarrow.binary_view(),
    }
    return strings.get(arrow_type, arrow_type)


def _marked(arrow_type: Any) -> Callable[[Any], Any] | None:
    """A function that makes JSON in a value of this type a JsonCell; None if the type has none."""
    import pyarrow
    from pyarrow import types

    if isinstance(arrow_type, pyarrow.BaseExtensionType):
        return JsonCell
    if isinstance(arrow_type, pyarrow.DictionaryType):
        return _marked(arrow_type.value_type)
    if types.is_struct(arrow_type):
        marks = {field.name: mark for field in arrow_type if (mark := _marked(field.type))}

        def of_struct(struct: Any) -> Any:
            return struct | {name: _unless_null(mark, struct[name]) for name, mark in marks.items()}

        return of_struct if marks else None
    if types.is_map(arrow_type):
        of_value = _marked(arrow_type.item_type)
        return of_value and (lambda pairs: [(k, _unless_null(of_value, v)) for k, v in pairs])
    if arrow_type.num_fields == 1:  # a list of any kind
        inner = _marked(arrow_type.field(0).type)
        return inner and (lambda values: [_unless_null(inner, value) for value in values])
    return None


def _unless_null(mark: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else mark(value)


def _cells(column: Any) -> Iterator[tuple[Any, int, bool]]:
    """Yield buffer and size of each cell, so that cells that are too long are never copied.

    The last value is whether it is JSON. Offsets are checked first: a wrong offset in a mapped file
    is a segmentation fault.
    """
    import pyarrow
    from pyarrow import compute

    if isinstance(column, pyarrow.DictionaryArray):  # not decoded: it may name a long text often
        column.validate(full=True)
        texts = [*_cells(column.dictionary), (pyarrow.scalar(None), 0, False)]
        return (texts[-1 if number is None else number] for number in column.indices.to_pylist())
    is_json = isinstance(column, pyarrow.ExtensionArray)
    storage = column.storage if is_json else column
    content = storage.view(_in_bytes(storage.type))
    content.validate(full=True)
    if content.type not in (pyarrow.binary(), pyarrow.large_binary()):  # views, or null
        content = content.cast(pyarrow.large_binary())
    sizes = compute.call_function("binary_length", [content]).fill_null(0)
    return ((cell, size, is_json) for cell, size in zip(content, sizes.to_pylist(), strict=True))


def _columns(path: Path, schema: Any, reading: ReadOptions) -> list[str]:
    """The columns to read; raise DataError if they are missing or of a type that is not read."""
    for name in reading.required:
        _require_text(path, schema, name)
    if reading.records is None:
        columns = list(dict.fromkeys(_path(schema, name)[0] for name in reading.names))
    else:
        try:
            columns = reading.records.columns(schema.names)
        except DocumentError as error:
            raise DataError(f"{path}: {error.reason}; {error.remedy}") from error
    for name in columns:
        if problem := _misread(schema.field(name)):
            raise DataError(f"{path}: column {json.dumps(name)} {problem}")
    return columns


def _misread(field: Any) -> str:
    """Why a column would be read as something else, with the remedy; empty if it would not."""
    import pyarrow

    arrow_type = field.type
    is_extension = isinstance(arrow_type, pyarrow.BaseExtensionType)
    unknown = (field.metadata or {}).get(EXTENSION, b"").decode(errors="replace")
    name = arrow_type.extension_name if is_extension else unknown
    if name and not (is_extension and name == JSON):
        return f"holds the extension type {json.dumps(name)}, which is not read; write plain text"
    if isinstance(arrow_type, pyarrow.DictionaryType):
        return _misread(field.with_type(arrow_type.value_type))
    inner = [arrow_type.field(n) for n in range(arrow_type.num_fields)]
    for key, times in Counter(one.name for one in inner).items():
        if times > 1:
            return f"has the key {json.dumps(key)} {times} times; keep the one that is meant"
    return next(filter(None, map(_misread, inner)), "")


def _require_text(path: Path, schema: Any, field: str) -> None:
    import pyarrow
    from pyarrow import types

    strings = (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())
    others = (pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view(), pyarrow.null())

    def kind_of(column: Any) -> Any:
        is_dictionary = isinstance(column.type, pyarrow.DictionaryType)
        return column.type.value_type if is_dictionary else column.type

    name = json.dumps(field)
    names = _path(schema, field)
    if not names:
        inner = (
            [f"{one.name}.{i.name}", i]
            for one in schema
            if types.is_struct(one.type)
            for i in one.type
        )
        columns = [*((one.name, one) for one in schema), *inner]
        texts = [name for name, column in columns if kind_of(column) in strings]
        reason, remedy = missing_in_table(schema.names, texts, field)
        raise DataError(f"{path}: {reason}; {remedy}")
    column, among = None, list(schema)
    for depth, key in enumerate(names, 1):
        same = [one for one in among if one.name == key]
        if len(same) > 1:
            name = f"{'' if depth > 1 else 'the column '}{json.dumps('.'.join(names[:depth]))}"
            problem = f"has {name} {len(same)} times"
            raise DataError(f"{path}: {problem}; keep the one that is meant")
        column = same[0]
        among = list(column.type) if types.is_struct(column.type) else []
    kind = kind_of(column)
    if kind not in (*strings, *others) and not isinstance(kind, pyarrow.BaseExtensionType):
        problem = f"column {name} holds {kind}, not string"
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
        if kind := kind_of_file(path, PARQUET):
            raise DataError(f"{path}: is {kind.name}, not Parquet; {kind.remedy}") from error
        reason = first_lines(error)
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
        for file in sorted(disk.entries(directory)):
            if kind := kind_of_file(file, ARROW, JSON_TEXT):
                raise DataError(f"{file}: is {kind.name}; {kind.remedy}") from error
        # Arrow's errors are ValueErrors; the others come of JSON that has another shape.
        raise DataError(
            f"{path}: is not a dataset that save_to_disk wrote ({first_lines(error)}); write it"
            " again"
        ) from error


def _split_directory(path: Path) -> Path:
    """The directory of the rows; the split `train` if there are several."""
    if not disk.is_file(path / SPLITS_FILE):
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
