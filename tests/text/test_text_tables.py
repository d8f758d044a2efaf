"""Texts in tables: the lines of JSON lines with the same rows, in bounded memory; damaged files are
one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mistakes import user_error

from fairseq.config import options
from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.text import raw_text, text_tables
from fairseq.text.raw_text import check_raw, documents_of, format_of, is_plain, lines_of, read_blocks
from fairseq_cli import preprocess
from fairseq_cli.preprocess import get_preprocessing_parser

pa: Any = pytest.importorskip("pyarrow", reason="tables need pyarrow, the extra [data]")
pq: Any = pytest.importorskip("pyarrow.parquet")

ROWS = ["one\ntwo\n", "", "Möbius\t世界  🙂", "a \u2028 line\r\nlast"] * 50


def column(kind: str = "string") -> Any:
    values = pa.array(ROWS, pa.large_string() if kind == "large_string" else pa.string())
    values = values.dictionary_encode() if kind == "dictionary" else values
    return pa.table({"id": list(range(len(ROWS))), "text": values})


def parquet(folder: Path, kind: str = "string") -> Path:
    pq.write_table(column(kind), folder / "a.parquet", row_group_size=70, compression="zstd")
    return folder / "a.parquet"


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
@pytest.mark.parametrize("block", [50, 1 << 20])
def test_tables_have_the_lines_and_documents_of_json_lines(
    kind: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_text, "BLOCK_BYTES", block)
    monkeypatch.setattr(text_tables, "ROWS", 7)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    path, same = str(parquet(tmp_path, kind)), str(tmp_path / "a.jsonl")
    form, sizes = format_of(path, "text", False), []
    assert form == format_of(same, "text", False) and not is_plain(path)
    blocks = list(read_blocks(path, form, sizes.append))
    for read in (lines_of, documents_of):
        want = [item for part in read_blocks(same, form) for item in read(part, form)]
        assert [item for part in blocks for item in read(part, form)] == want
    assert (len(blocks) > 20) == (block == 50)
    counts = [part.data.count(b"\n") for part in blocks]
    assert [part.first for part in blocks] == (1 + np.cumsum([0, *counts[:-1]])).tolist()
    assert 0.5 * check_raw(path) < sum(sizes) <= check_raw(path)


def test_memory_does_not_grow_with_the_rows_of_a_group(tmp_path: Path) -> None:
    path, most = str(tmp_path / "a.parquet"), []
    for rows in (1000, 3000):  # of 10 KB
        table = pa.table({"text": [f"{i} {'word ' * 2000}" for i in range(rows)]})
        pq.write_table(table, path, row_group_size=rows, use_dictionary=False, compression="none")
        before = pa.total_allocated_bytes()
        blocks = read_blocks(path, format_of(path, "text", False))
        most.append(max(pa.total_allocated_bytes() - before for _ in blocks))
    assert most[1] < most[0] + (1 << 20)


def test_preprocessing_of_a_table_equals_that_of_its_text(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("".join(row.removesuffix("\n").replace("\r\n", "\n") + "\n" for row in ROWS))
    for name, path in (("text", tmp_path / "t.txt"), ("table", parquet(tmp_path))):
        flags = ["--trainpref", str(path), "--bpe", "hf", "--learn-bpe", "300", "--destdir", str(tmp_path / name)]
        preprocess.main(options.parse_args_and_arch(get_preprocessing_parser(), flags))
    text, rows = (IndexedCorpus(str(tmp_path / name / "train")) for name in ("text", "table"))
    np.testing.assert_array_equal(text.tokens[:], rows.tokens[:])
    assert (tmp_path / "text/dict.txt").read_bytes() == (tmp_path / "table/dict.txt").read_bytes()


def read(path: Path, field: str = "text") -> list[str]:
    form = format_of(str(path), field, False)
    check_raw(str(path))
    return [line for block in read_blocks(str(path), form) for line in lines_of(block, form)]


@pytest.mark.parametrize("damage", ["cut", "other", "flipped"])
def test_damaged_tables_are_one_line(damage: str, tmp_path: Path) -> None:
    path = parquet(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        for place in range(64):
            data[place] ^= 0xFF
            data[-1 - place] ^= 0xFF
    path.write_bytes({"cut": data[: len(data) // 3], "other": b"no table at all", "flipped": data}[damage])
    with user_error(f"{path.name}: cannot be read as a table") as error:
        read(path)
    assert "\n" not in str(error.value)


def test_a_column_that_is_not_utf8_is_one_line(tmp_path: Path) -> None:
    words = pa.array([b"d\xe9j\xe0"], pa.binary())
    column = pa.StringArray.from_buffers(1, *words.buffers()[1:])
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with user_error("a.parquet: cannot be read as a table .*utf-8"):
        read(tmp_path / "a.parquet")


def test_rows_without_text_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None], "n": [1, 2]}), tmp_path / "a.parquet")
    with user_error("a.parquet: line 2: no text in field 'text'"):
        read(tmp_path / "a.parquet")
    for field in ("n", "body"):
        with user_error(
            rf"a.parquet: no column of text '{field}', found text \(string\), n \(int64\); see --text-field"
        ):
            read(tmp_path / "a.parquet", field)


def test_arrow_files_of_datasets_are_called_so(tmp_path: Path) -> None:
    with pa.ipc.new_stream(str(tmp_path / "data.arrow"), column().schema) as writer:
        writer.write_table(column())
    with user_error("data.arrow: is an Arrow file; write Parquet, as to_parquet of datasets does"):
        check_raw(str(tmp_path / "data.arrow"))


def test_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with user_error("a.parquet: needs the package pyarrow; pip install pyarrow"):
        read(path)


def test_table_without_rows_has_no_words(tmp_path: Path) -> None:
    pq.write_table(column().slice(0, 0), tmp_path / "a.parquet")
    flags = ["--trainpref", str(tmp_path / "a.parquet"), "--destdir", str(tmp_path / "out"), "--tokenizer", "space"]
    with user_error("a.parquet: the text is empty"):
        preprocess.main(options.parse_args_and_arch(get_preprocessing_parser(), flags))
