"""Texts in tables: a column of Parquet files,
of Arrow files, and of folders of the ``datasets`` library.

``Dataset.save_to_disk`` writes ``state.json``, which lists Arrow files, and
``DatasetDict.save_to_disk`` such a folder for each split. Rows are read a few at a time. pyarrow,
an optional dependency, is imported on demand.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fairseq.errors import UserError, read_failure
from fairseq.system.opening import read_named
from fairseq.text.tokenizers.base import import_package

STATE, SPLITS = "state.json", "dataset_dict.json"
SUFFIXES = (".parquet", ".arrow")
EXTRA = "pip install pyarrow"
# So few rows at once because one may be a book.
ROWS = 64
BUFFER = 1 << 20  # bytes of a column of a Parquet file that are read at once


def is_table(path: str) -> bool:
    """Return whether *path* is a table: by its name, or a folder."""
    return path.endswith(SUFFIXES) or os.path.isdir(path)


def is_dataset(folder: str) -> bool:
    """Return whether the ``datasets`` library saved *folder*."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in (STATE, SPLITS))


def table_files(path: str) -> list[str]:
    """Return the files of the table *path*.

    Raises:
        UserError: it is a folder that ``datasets`` did not write, of several splits, without rows,
            or of chosen rows.
    """
    folder = Path(path)
    if not os.path.isdir(folder):
        return [path]
    if os.path.isfile(folder / SPLITS):
        splits = ", ".join(sorted(file.parent.name for file in folder.glob(f"*/{STATE}")))
        raise UserError(f"{path}: has several splits ({splits}); give the folder of one of them")
    if not os.path.isfile(folder / STATE):
        raise UserError(f"{path}: is a folder; give a text file, or a folder that save_to_disk of datasets wrote")
    content = read_named(folder / STATE, "save the dataset again")
    try:
        state: Any = json.loads(content)
        names = [entry["filename"] for entry in state["_data_files"]]
        # Files of this folder only: a name could lead to any other.
        is_valid = all(isinstance(name, str) and name == Path(name).name for name in names)
        indices = state.get("_indices_files") or state.get("_indices_data_files")
    except (ValueError, KeyError, TypeError, AttributeError):
        is_valid, indices = False, None
    if not is_valid:
        raise UserError(f"{folder / STATE}: damaged: names no files; save the dataset again")
    # The library saves a dataset without rows in this form.
    if not names:
        raise UserError(f"{path}: has no rows; give a dataset with text")
    if indices:
        raise UserError(f"{path}: its rows are chosen by indices; call flatten_indices() before save_to_disk")
    return [str(folder / name) for name in names]


def table_rows(path: str, field: str) -> Iterator[tuple[list[str | None], int]]:
    """Yield the texts in the column *field* of a file, a few rows at once, and the bytes of the
    file that they took.

    Raises:
        UserError: pyarrow is missing, the file cannot be read
            or is damaged, or has no such column of text.
    """
    missing = f"{path}: needs the package pyarrow; {EXTRA}"
    arrow = import_package("pyarrow", missing)
    # Not imported with the package.
    import_package("pyarrow.parquet", missing)
    read = _parquet_batches if path.endswith(".parquet") else _arrow_batches
    try:
        with open(path, "rb") as file:
            for batch, size in read(arrow, file, path, field):
                # Arrow trusts the offsets in a file, and would read beyond its end.
                batch.validate(full=True)
                for start in range(0, len(batch), ROWS):
                    rows = batch.slice(start, ROWS)
                    yield rows.to_pylist(), size * len(rows) // len(batch)
    except (arrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split())[:200] or "takes more memory than there is"
        if isinstance(error, OSError) and error.errno:
            reason = read_failure(error)
        raise UserError(f"{path}: cannot be read as a table ({reason}); write or download it again") from None


def _parquet_batches(arrow: Any, file: BinaryIO, path: str, field: str) -> Iterator[tuple[Any, int]]:
    """The arrays of the column, and the share of each in the size of its rows in the file."""
    # No reading ahead and no threads: they would hold more rows in memory than are used.
    with arrow.parquet.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False) as table:
        _check(arrow, table.schema_arrow, path, field)
        size, rows = file.seek(0, 2), max(1, table.metadata.num_rows)
        for batch in table.iter_batches(batch_size=ROWS, columns=[field], use_threads=False):
            yield batch.column(0), size * len(batch) // rows


def _arrow_batches(arrow: Any, file: BinaryIO, path: str, field: str) -> Iterator[tuple[Any, int]]:
    """As :func:`_parquet_batches`, of an Arrow file or stream."""
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    with arrow.ipc.open_file(file) if is_file else arrow.ipc.open_stream(file) as table:
        batches = map(table.get_batch, range(table.num_record_batches)) if is_file else iter(table)
        _check(arrow, table.schema, path, field)
        before = 0
        for batch in batches:
            yield batch.column(field), file.tell() - before
            before = file.tell()


def _check(arrow: Any, schema: Any, path: str, field: str) -> None:
    """Raise UserError unless *schema* has one column *field*, of text."""
    indices = schema.get_all_field_indices(field)
    kind = schema.types[indices[0]] if len(indices) == 1 else None
    # A column of few different texts may be stored as numbers of them.
    if kind is not None and arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if str(kind) not in ("string", "large_string", "string_view"):
        known = ", ".join(f"{name} ({kind})" for name, kind in zip(schema.names, schema.types, strict=True))[:200]
        raise UserError(f"{path}: no column of text {field!r}, found {known or 'none'}; see `text_field`")
