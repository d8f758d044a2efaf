"""Exported folders in the versions of transformers that people have, without this package.

The installed transformers is always tried, with two models. Where ``OTHER_PYTHONS`` names
interpreters with other versions, separated by ``:``, all of them are tried with seven.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import exports
import numpy as np
import pytest
import runs
import torch
from subword_encodings import complete, encodings

from fairseq.inference import sample
from fairseq.inference.engine import Reader
from fairseq.interop.hugging_face.export import write_texts
from fairseq.interop.hugging_face.sources import sources
from fairseq.interop.hugging_face.tokenizer_files import FAST, tokenizer_files
from fairseq.text.dictionary import Dictionary
from fairseq.text.text_corpus import TextReader
from fairseq.text.tokenizers import Tokenizer

CUSTOM = ("shortformer", "baseline", "gpt", "transformer-xl bands")
NATIVE = {"llama": "--arch llama_tiny", "gpt2": "--arch gpt2_tiny", "pythia": "--arch pythia_tiny"}
RUN = """--cpu --train-subset valid --valid-subset test --tokens-per-sample 32 --max-tokens 64 --lr 0.1
    --criterion cross_entropy"""
OTHERS = [name for name in os.environ.get("OTHER_PYTHONS", "").split(":") if name]


def folder_of(name: str, root: Path) -> Path:
    """An exported model with what is expected of it."""
    if name in NATIVE:
        flags = (NATIVE[name], RUN)
        model = runs.model_of(*flags).eval()
    else:
        flags = (exports.MODELS[name],)
        model = exports.made(name)
    folder = exports.exported(exports.saved(model, root / f"{name} checkpoint", *flags), root / name.replace(" ", "_"))
    text = exports.tokens(2, 8)
    dictionary = Dictionary.load(runs.DATA / "dict.txt")
    words = f"{dictionary[10]} {dictionary[20]}\n{dictionary[30]} nowhere"
    with torch.no_grad():
        log_probs = model.output_layer.log_probs(model(text)[0])
    prompt = text[0, :5].tolist()
    values: dict[str, Any] = {"text": text, "log_probs": log_probs, "words": words, "ids": [10, 20, 2, 30, 3]}
    np.savez(folder / "expected.npz", **values, greedy=[*prompt, *sample(Reader(model), prompt, 15, top_k=1)])
    return folder


def add_tokenizers(folder: Path) -> None:
    """Tokenizers of subwords: files of the library, or code."""
    for name, subwords in encodings().items():
        tokenizer, library = Tokenizer(None, subwords), name in ("gpt2", "byte")
        text = "The café lower river\nthe lower 世界, newest" if library else "the lower river\nthe newest low"
        dictionary = complete(tokenizer) if library else Dictionary()
        for symbol in " ".join(map(tokenizer.encode, text.splitlines())).split():
            dictionary.add_symbol(symbol)
        out = folder / "tokenizers" / name
        out.mkdir(parents=True)
        dictionary.save(out / "dict.txt")
        tokenizer.save(out, dictionary.symbols)
        files = tokenizer_files(tokenizer, dictionary, 100)
        assert library == (FAST in files.texts)
        # Tokenizers of the library leave out every special symbol.
        decoded = text.replace("\n", "") if library else text
        expected = {"text": text, "ids": TextReader(dictionary, tokenizer).ids(text), "decoded": decoded}
        texts = {**files.texts, **sources(files.adapters, files.parts), "config.json": "{}"}
        write_texts(out, {**texts, "expected.json": json.dumps(expected)})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("exports")
    names = (*CUSTOM, *NATIVE) if OTHERS else (CUSTOM[0], "llama")
    folders = [folder_of(name, root) for name in names]
    add_tokenizers(folders[0])
    return folders


@pytest.mark.parametrize("python", [sys.executable, *(OTHERS or ["others"])])
def test_exports_work_as_people_use_them(python: str, folders: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if python == "others":
        pytest.skip("set OTHER_PYTHONS to interpreters with other versions of transformers")
    script = Path(__file__).with_name("outside.py")
    env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [python, "-I", str(script), *map(str, folders)]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    problems = [
        f"{Path(folder).name}, {title}: {outcome}"
        for folder, checks in result["table"].items()
        for title, outcome in checks.items()
        if outcome != "yes"
    ]
    assert not problems and not result["ours"], "\n".join([result["version"], *problems])
    lines = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    column = next(row for row in rows if row[0] == "use").index(result["version"])
    assert {row[0]: row[column] for row in rows if row[1:] == ["yes"] * 3} == dict.fromkeys(checks_of(result), "yes")


def checks_of(result: dict[str, Any]) -> list[str]:
    """The names of what is tried."""
    return list(next(iter(result["table"].values())))
