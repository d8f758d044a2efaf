"""A missing, empty, truncated or wrong file as the input of any command is one line that names it,
with exit code 2, and nothing is written."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import runs

import fairseq_cli

CHECKPOINT = runs.GOLDEN / "baseline.pt"
MODEL = f"--path {CHECKPOINT} --cpu"
PAIRS = runs.ROOT / "examples" / "babylm" / "pairs.jsonl"
BINARY = bytes(range(256)) * 40
COMMANDS = {module.name for module in pkgutil.iter_modules(fairseq_cli.__path__)}

# Command lines with one wrong input, and the kind of file that it should have been.
LINES = {
    "train": ("checkpoint", f"{runs.DATA} {runs.SHORT} --no-save --restore-file BAD"),
    "finetuned": ("checkpoint", f"train {runs.DATA} {runs.SHORT} --no-save --finetune-from-model BAD"),
    "eval_lm": ("checkpoint", f"{runs.DATA} --path BAD --cpu"),
    "validate": ("checkpoint", f"{runs.DATA} --path BAD --cpu"),
    "generate": ("checkpoint", f"{runs.DATA} --path BAD --cpu --context-tokens 4"),
    "recl": ("checkpoint", f"analyze recl {runs.DATA} --path BAD --cpu"),
    "attention": ("checkpoint", f"analyze attention {runs.DATA} --path BAD --cpu --results-path out"),
    "export_model": ("checkpoint", "BAD --to hf --out out"),
    "average": ("checkpoint", "checkpoint average --inputs BAD --output out.pt"),
    "merge": ("missing", "checkpoint merge BAD out.pt"),
    "import_model": ("missing", "BAD --from hf --out out"),
    "predict": ("checkpoint", f"finetune predict BAD {runs.DATA}/dict.txt --cpu"),
    "text": ("text", f"eval_lm {runs.DATA} {MODEL} --text BAD"),
    "interactive": ("text", f"{runs.DATA} {MODEL} --input BAD"),
    "preprocess": ("text", "--only-source --trainpref BAD --tokenizer space --destdir out"),
    "dictionary": ("text", f"preprocess --only-source --trainpref {__file__} --srcdict BAD --destdir out"),
    "tokenize": ("text", "BAD --tokenizer space"),
    "symbols": ("missing", "corpus symbols BAD out --kind bytes"),
    "compare": ("text", f"BAD {runs.DATA} --updates 1 --out out"),
    "curves": ("text", "analyze curves BAD --results-path out.png"),
    "pairs": ("text", f"harness {CHECKPOINT} --data {runs.DATA} --cpu --pairs BAD"),
    "known_words": ("text", f"harness {CHECKPOINT} --data {runs.DATA} --cpu --pairs {PAIRS} --known-words BAD"),
    "config": ("text", f"train {runs.DATA} {runs.SHORT} --no-save --config BAD"),
}
KINDS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "folder": lambda path: path.mkdir(),
    "binary": lambda path: path.write_bytes(BINARY),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(CHECKPOINT.read_bytes()[:20_000]),
}
TRIED = {"missing": ["missing"], "text": ["missing", "folder", "binary"], "checkpoint": list(KINDS)}


@pytest.mark.parametrize("name, kind", [(name, kind) for name in LINES for kind in TRIED[LINES[name][0]]])
def test_a_wrong_input_is_one_line(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    KINDS[kind](tmp_path / "BAD")
    before = os.listdir(tmp_path)
    words = runs.words(LINES[name][1])
    command = words.pop(0) if words[0] in COMMANDS else name
    monkeypatch.setattr(sys, "argv", [command, *words])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"fairseq_cli.{command}").cli_main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and last.startswith(command) and ": error: " in last, last
    assert "BAD" in last, last
    assert os.listdir(tmp_path) == before
