"""Rows of Parquet, of Arrow files and of datasets, as records.

64 rows are in memory at a time. To continue, Parquet row groups and rows of a dataset are skipped without being read;
an Arrow stream is read again up to the place, which costs little.
"""

from collections.abc import Callable, Iterator
from typing import Any

from ithaca.base.errors import first_line
from ithaca.data.preparation.inputs import Input
from ithaca.data.preparation.records import columns
from ithaca.data.preparation.streams import BadFile, import_pyarrow

ROWS = 64

Found = Iterator[tuple[int, int, dict[str, Any]]]  # the number of a row, from 0; bytes read so far; its record
Rows = Callable[[Input, int, str | None], Found]  # (file, rows to skip, field) -> the rows behind them


def parquet_rows(file: Input, skip: int, field: str | None) -> Found:
    """Return the rows of a Parquet file behind the first `skip`."""
    pyarrow = import_pyarrow(file.path)
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file.path)
        wanted = columns(file.path, table.schema_arrow.names, field)
    except pyarrow.ArrowException as problem:
        raise BadFile(f"'{file.path}' is not Parquet ({first_line(problem)})") from None
    return _checked(file, "Parquet", _parquet_rows(file, table, wanted, skip))


def _parquet_rows(file: Input, table: Any, columns: list[str], skip: int) -> Found:
    """Yield the rows behind the first `skip`. Row groups before them are not read."""
    with table:
        row = 0
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if row + rows <= skip:
                row += rows
                continue
            for batch in table.iter_batches(ROWS, row_groups=[group], columns=columns):
                for record in batch.to_pylist():
                    if row >= skip:
                        yield row, file.size * (row + 1) // table.metadata.num_rows, record
                    row += 1


def arrow_rows(file: Input, skip: int, field: str | None) -> Found:
    """Return the rows of an Arrow file or stream behind the first `skip`."""
    pyarrow = import_pyarrow(file.path)
    try:
        source = pyarrow.OSFile(str(file.path))
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        wanted = columns(file.path, reader.schema.names, field)
    except pyarrow.ArrowException as problem:
        raise BadFile(f"'{file.path}' is not Arrow ({first_line(problem)})") from None
    batches = (reader.get_batch(number) for number in range(reader.num_record_batches)) if is_file else reader
    return _checked(file, "Arrow", _arrow_rows(source, batches, wanted, skip))


def _arrow_rows(source: Any, batches: Any, columns: list[str], skip: int) -> Found:
    with source:
        size, row = source.size(), 0
        for batch in batches:
            for start in range(max(skip - row, 0), batch.num_rows, ROWS):
                for number, record in enumerate(batch.select(columns).slice(start, ROWS).to_pylist()):
                    yield row + start + number, min(source.tell(), size), record
            row += batch.num_rows


def hub_rows(file: Input, skip: int, field: str | None) -> Found:
    """Return the rows of a dataset behind the first `skip`."""
    wanted = columns(file.path, file.dataset.column_names, field)
    return _checked(file, "a dataset", _hub_rows(file.dataset, wanted, skip))


def _hub_rows(dataset: Any, columns: list[str], skip: int) -> Found:
    rest = dataset.select(range(skip, len(dataset))).select_columns(columns).with_format("arrow")
    row = skip
    for table in rest.iter(ROWS):
        for record in table.to_pylist():
            yield row, row + 1, record
            row += 1


def _checked(file: Input, kind: str, rows: Found) -> Found:
    """Yield rows, and raise an error that names the file where its content is damaged."""
    try:
        yield from rows
    except (OSError, ValueError, import_pyarrow(file.path).ArrowException) as problem:  # ValueError: text not in UTF-8
        raise BadFile(f"'{file.path}' is not {kind} ({first_line(problem)})") from None
