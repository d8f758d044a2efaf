"""Texts in a column of Parquet files, of which a few rows are read at once; pyarrow, an optional
dependency, is imported on demand."""

from __future__ import annotations

from collections.abc import Iterator

from fairseq.errors import UserError, read_failure
from fairseq.text.tokenizers.base import import_package

SUFFIX = ".parquet"
EXTRA = "pip install pyarrow"
# So few rows at once because one may be a book.
ROWS = 64
TEXTS = ("string", "large_string", "string_view")  # types of columns
BUFFER = 1 << 20  # bytes of a column that are read at once


def table_rows(path: str, field: str) -> Iterator[tuple[list[str | None], int]]:
    """Yield the texts in the column *field* of a Parquet file, a few rows at once, and the bytes of
    the file that they took.

    Raises:
        UserError: pyarrow is missing, the file cannot be read
            or is damaged, or has no such column of text.
    """
    missing = f"{path}: needs the package pyarrow; {EXTRA}"
    arrow = import_package("pyarrow", missing)
    # Not imported with the package.
    import_package("pyarrow.parquet", missing)
    try:
        # No reading ahead and no threads: they would hold more rows in memory than are used.
        with (
            open(path, "rb") as file,
            arrow.parquet.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False) as table,
        ):
            schema = table.schema_arrow
            kinds = {name: str(kind) for name, kind in zip(schema.names, schema.types, strict=True)}
            # A column of few different texts may be stored as numbers of them.
            if kinds.get(field, "").removeprefix("dictionary<values=").split(",")[0] not in TEXTS:
                known = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())[:200]
                raise UserError(f"{path}: no column of text {field!r}, found {known or 'none'}; see `text_field`")
            size, rows = file.seek(0, 2), max(1, table.metadata.num_rows)
            for batch in table.iter_batches(batch_size=ROWS, columns=[field], use_threads=False):
                yield batch.column(0).to_pylist(), size * len(batch) // rows
    # Of texts that are not UTF-8 Arrow says nothing.
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:200]
        if isinstance(error, OSError) and error.errno:
            reason = read_failure(error)
        raise UserError(f"{path}: cannot be read as a table ({reason}); write or download it again") from None
