"""fairseq-tokenize: text to symbols and back, of files and pipes, with flags or the tokenizer of a
data folder."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fairseq.config import options
from fairseq.errors import UserError
from fairseq.text import raw_text
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers import Tokenizer
from fairseq.text.tokenizers.moses import Moses
from fairseq.text.tokenizers.subword_nmt import SubwordNMT
from fairseq_cli import tokenize
from fairseq_cli.tokenize import get_tokenize_parser

TEXT = 'Don\'t go, Mr. Smith.\n\n"Well-known (1839)."\n'
TOKENS = 'Don \'t go , Mr. Smith .\n\n" Well @-@ known ( 1839 ) . "\n'


def run(*words: Any) -> None:
    tokenize.main(options.parse_args_and_arch(get_tokenize_parser(), [*map(str, words)]))


class Pipe:
    def __init__(self, content: bytes = b"", terminal: bool = False) -> None:
        self.buffer, self.terminal = io.BytesIO(content), terminal

    def isatty(self) -> bool:
        return self.terminal


def piped(monkeypatch: pytest.MonkeyPatch, content: bytes, *words: Any) -> bytes:
    """What is written to stdout for *content* on stdin."""
    out = Pipe()
    monkeypatch.setattr("sys.stdin", Pipe(content))
    monkeypatch.setattr("sys.stdout", out)
    run(*words)
    return out.buffer.getvalue()


def data_folder(folder: Path) -> Path:
    """A folder with a dictionary and a tokenizer."""
    folder.mkdir()
    dictionary = Dictionary()
    dictionary.add_symbol("a")
    dictionary.save(folder / "dict.txt")
    codes = SubwordNMT.learn({"known": 9, "Smith": 5, "Mr.": 3}, 5)
    Tokenizer(Moses(), SubwordNMT(codes)).save(folder, dictionary.symbols)
    return folder


def test_text_becomes_tokens_and_tokens_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    run(tmp_path / "text.txt.gz", "--tokenizer", "moses", "--output", tmp_path / "tokens")
    assert (tmp_path / "tokens").read_text() == TOKENS
    run(tmp_path / "tokens", "--tokenizer", "moses", "--undo", "--output", tmp_path / "back")
    assert (tmp_path / "back").read_text() == TEXT


def test_pipes_are_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert piped(monkeypatch, TEXT.encode(), "--tokenizer", "moses") == TOKENS.encode()
    assert piped(monkeypatch, TOKENS.encode(), "-", "--tokenizer", "moses", "--undo") == TEXT.encode()


def test_a_data_folder_gives_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_folder(tmp_path / "data")
    symbols = piped(monkeypatch, TEXT.encode(), "--data", data)
    assert b"@@" in symbols and symbols.count(b"\n") == 3
    assert piped(monkeypatch, symbols, "--data", data, "--undo") == TEXT.encode()
    assert piped(monkeypatch, TEXT.encode(), "--data", f"{data}:{data}") == symbols


def test_any_number_of_processes_writes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_text, "BLOCK_BYTES", 100)
    (tmp_path / "text.txt").write_text(TEXT * 20)
    for workers in (1, 2):
        run(tmp_path / "text.txt", "--tokenizer", "moses", "--workers", workers, "--output", tmp_path / str(workers))
    assert (tmp_path / "1").read_text() == (tmp_path / "2").read_text() == TOKENS * 20


def test_commands_of_text_do_not_load_torch(tmp_path: Path) -> None:
    code = "import sys; from fairseq_cli import preprocess, tokenize; tokenize.cli_main();"
    code += "sys.exit('torch' in sys.modules)"
    (tmp_path / "text.txt").write_text(TEXT)
    command = [sys.executable, "-c", code, str(tmp_path / "text.txt"), "--tokenizer", "moses"]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (result.stdout, result.stderr, result.returncode) == (TOKENS, "", 0)


MISTAKES = {
    "": "--data or --tokenizer, --bpe: give",
    "--bpe subword_nmt": "--bpe subword_nmt: needs its codes",
    "--data {data} --tokenizer moses": "has a tokenizer of its own",
    "--data {empty}": "has no tokenizer; give",
    "--data nowhere": "nowhere: folder not found",
    "nowhere.txt --tokenizer moses": "nowhere.txt: file not found",
    "{latin} --tokenizer moses": "latin.txt: line 1: 0xe9 is not UTF-8",
    "{latin} --tokenizer moses --undo": "latin.txt: line 1: 0xe9 is not UTF-8",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes_are_one_line_and_write_nothing(flags: str, tmp_path: Path) -> None:
    data, empty, latin = data_folder(tmp_path / "data"), tmp_path / "empty", tmp_path / "latin.txt"
    empty.mkdir()
    (empty / "dict.txt").write_text("a 1\n")
    latin.write_bytes(b"caf\xe9\n")
    with pytest.raises(UserError) as caught:
        run(*flags.format(data=data, empty=empty, latin=latin).split(), "--output", tmp_path / "out")
    assert MISTAKES[flags] in caught.value.with_flags and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
