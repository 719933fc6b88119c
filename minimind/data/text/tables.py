"""Read text columns, or records, of tables; and compressed files as bounded streams.

Tables are Parquet files and Hugging Face datasets on disk.

Both are read in Arrow batches. Memory for a Parquet file is bounded by the columns that are read of
one row group; a dataset is memory-mapped.
"""

from __future__ import annotations

import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from minimind.data.text.documents import (
    LINE_BYTES_PER_TEXT_BYTE,
    DocumentError,
    JsonCell,
    ReadOptions,
    document_of_cells,
    missing_in_table,
    too_long_document,
)
from minimind.errors import DataError
from minimind.runtime import disk
from minimind.runtime.file_kinds import (
    ARROW,
    BZIP2,
    GZIP,
    JSON_TEXT,
    PARQUET,
    XZ,
    ZSTD,
    kind_of_content,
    kind_of_file,
)
from minimind.runtime.installed import install_extra
from minimind.runtime.terminal import first_lines

# A kibibyte unpacks to 32 MiB at most (zstd; 1 MiB of deflate), which bounds the memory of a
# decompression bomb. xz and bzip2 take the bound themselves (`BUFFER_BYTES`).
PIECE_BYTES = 2**10
BUFFER_BYTES = 2**20
XZ_MEMORY = 2**28  # bytes; `xz -9` needs a quarter
# What zstd says of a window of more than 2**27 bytes, and xz of one that needs more memory.
TOO_FAR_BACK = {
    "requires too much memory": (
        "the compressed stream looks further back than 128 MiB",
        "compress it again without --long, or with --long=27 at most",
    ),
    "Memory usage limit": (
        f"the compressed stream needs more than {XZ_MEMORY >> 20} MiB of memory",
        "compress it again with xz -9 at most",
    ),
}
GZIP_CONTAINER = 31  # wbits: deflate inside a gzip header and checksum


class Damage(Exception):
    """The rest of a file cannot be read; has the reason and the remedy.

    `lacking` are the bytes of content that a file no longer has, where it says how many it had.
    """

    def __init__(self, what: str, remedy: str = "copy the file again", lacking: int = 0) -> None:
        super().__init__(what)
        self.remedy = remedy
        self.lacking = lacking


class Unpacked(io.RawIOBase):
    """Decompressed content of a file; bytes `consumed` of the file so far, and `given` by them.

    `reached` are those bytes of the file that gave something: blocks give all or nothing.
    Concatenated streams (`cat a.gz b.gz`, parallel compressors) are one content. A truncated stream
    raises Damage: the libraries' readers end silently (zstandard) or lose count of bytes (gzip).
    """

    def __init__(
        self,
        file: BinaryIO,
        kind: str,
        start: Callable[[], Any],
        faults: type[Exception] | tuple[type[Exception], ...],
        padding: bytes,
        *bound: int,
    ) -> None:
        self.consumed = self.given = self.reached = 0
        self._kind = kind
        self._file = file
        self._start = start  # gives a decompressor of one stream
        self._faults = faults
        self._padding = padding  # what may fill the space behind a stream
        self._bound = bound  # bytes that a decompressor gives at most, if it takes such a limit
        self._stream: Any = None  # None between two streams
        self._finished = False  # one stream at least
        self._packed = b""
        self._ready = memoryview(b"")
        self._promised = 0  # bytes given at the end of this stream, as its header says

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`; return the number of bytes, 0 at the end. Raise Damage."""
        while not self._ready:
            if not self._refill():
                return 0
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _refill(self) -> bool:
        """Unpack more bytes; return False at the end of the file."""
        has_more = not getattr(self._stream, "needs_input", True)
        if not self._packed and not has_more:
            self._packed = self._file.read(PIECE_BYTES)
            self.consumed += len(self._packed)
        if not self._packed and not has_more:
            if self._stream is not None:
                lacking = max(0, self._promised - self.given)
                known = (
                    f"it lacks {lacking:,} bytes of text" if lacking else "what it lacks is unknown"
                )
                raise Damage(f"the compressed stream is cut off, and {known}", lacking=lacking)
            return False
        if self._stream is None:
            if self._finished:
                self._packed = self._packed.lstrip(self._padding)
                if not self._packed:
                    return True
            self._stream = self._start()
            if self._kind == ZSTD:
                self._promised = self.given + _content_size(self._packed)
        try:
            self._ready = memoryview(self._stream.decompress(self._packed, *self._bound))
        except self._faults as error:
            for words, told in TOO_FAR_BACK.items():
                if words in str(error):
                    raise Damage(*told) from error
            is_first = not self._finished and self.consumed <= PIECE_BYTES
            if is_first and (kind := kind_of_content(self._packed, self._kind)):
                raise Damage(f"the file is {kind.name}, not {self._kind}", kind.remedy) from error
            raise Damage(f"the compressed stream is damaged ({error})") from error
        if self._ready:
            self.given += len(self._ready)
            self.reached = self.consumed
        self._packed = b""
        if self._stream.eof:
            self._packed = self._stream.unused_data
            self._stream = None
            self._finished = True
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def unpacked(path: Path) -> Unpacked:
    """Open a compressed file; raise DataError if its library is missing."""
    suffix = path.suffix.lower()
    if suffix == ".xz":
        import lzma

        start = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, XZ_MEMORY)
        return Unpacked(open(path, "rb"), XZ, start, lzma.LZMAError, b"\0", BUFFER_BYTES)
    if suffix == ".bz2":
        import bz2

        faults, start = (OSError, ValueError), bz2.BZ2Decompressor
        return Unpacked(open(path, "rb"), BZIP2, start, faults, b"", BUFFER_BYTES)
    if suffix == ".zst":
        zstandard = _zstandard(path)
        start = zstandard.ZstdDecompressor().decompressobj
        return Unpacked(open(path, "rb"), ZSTD, start, zstandard.ZstdError, b"")
    # gzip's own tools ignore zeros behind a stream, which tapes and block devices leave.
    start = partial(zlib.decompressobj, GZIP_CONTAINER)
    return Unpacked(open(path, "rb"), GZIP, start, zlib.error, b"\0")


def _content_size(frame: bytes) -> int:
    """Bytes of content by the header of a zstd frame, which may lack them; else 0."""
    import zstandard

    try:
        return max(0, zstandard.frame_content_size(frame))
    except zstandard.ZstdError:  # the header is cut or damaged, which its decompressor says
        return 0


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise needs_extra(path, "zstandard") from error
    return zstandard


def needs_extra(path: Path, package: str) -> DataError:
    """Message for a missing optional package."""
    return DataError(f"{path}: is read with {package}; {install_extra('data')}")


ROWS_PER_BATCH = 256
DATASET_FILE = "state.json"  # beside a dataset that save_to_disk wrote
SPLITS_FILE = "dataset_dict.json"  # above several, one for each split
TRAIN = "train"
JSON = "arrow.json"  # the extension type of cells that are JSON, such as `Json` of datasets
EXTENSION = b"ARROW:extension:name"  # metadata of a field whose type no library knows


def is_dataset(path: Path) -> bool:
    """Whether a directory was written by save_to_disk of `datasets`."""
    return any(disk.is_file(path / name) for name in (DATASET_FILE, SPLITS_FILE))


def dataset_bytes(path: Path) -> int:
    """Size of the files of a dataset."""
    files = disk.files_below(_split_directory(path))
    return sum(disk.stat(file).st_size for file in files if file.suffix == ".arrow")


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

    Reads the row groups that begin in this range. An unreadable row loses the others of its group,
    which its problem counts. Raise DataError if there is no column to read.
    """
    with _parquet(path) as file:
        schema = file.schema_arrow
        columns = _columns(path, schema, reading)
        first, parts = 0, []
        for number in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(number).num_rows
            if start <= first < stop:
                how = {"row_groups": [number], "columns": columns, "use_threads": False}
                parts.append((rows, partial(file.iter_batches, ROWS_PER_BATCH, **how)))
            first += rows
        yield from _texts(parts, columns, schema, reading)


def dataset_texts(
    path: Path, start: int, stop: int, reading: ReadOptions
) -> Iterator[str | DocumentError]:
    """Yield the texts of rows `start` to `stop`, or their problems; as parquet_texts.

    The groups are of ROWS_PER_BATCH rows.
    """
    dataset = _dataset(path)
    schema = dataset.features.arrow_schema
    columns = _columns(path, schema, reading)
    rows = dataset.select_columns(columns).with_format("arrow")
    ends = ((n, min(n + ROWS_PER_BATCH, stop)) for n in range(start, stop, ROWS_PER_BATCH))
    parts = ((b - a, lambda a=a, b=b: rows[a:b].to_batches()) for a, b in ends)
    yield from _texts(parts, columns, schema, reading)


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

    Values that are named by numbers keep theirs: a cast would repeat them. So do lists of views,
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
            f"{path}: is no dataset that save_to_disk wrote ({first_lines(error)}); write it again"
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
