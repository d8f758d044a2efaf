"""Exported folders with what is expected of them, for ``tests/interop/outside.py`` and
``outside_tools.py``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import exports
import numpy as np
import runs
import torch
from subword_encodings import complete, encodings
from torch import Tensor

from fairseq import checkpoint
from fairseq.inference import Search, stream
from fairseq.interop.hugging_face.export import write_texts
from fairseq.interop.hugging_face.tokenizer_files import FAST, tokenizer_files
from fairseq.models.loading import stored_parameters
from fairseq.text.dictionary import Dictionary
from fairseq.text.text_corpus import TextReader
from fairseq.text.tokenizers import Tokenizer

CUSTOM = ("baseline", "gpt", "shortformer", "transformer-xl bands")
NATIVE = {"gpt2": "--arch gpt2_tiny", "llama": "--arch llama_tiny", "pythia": "--arch pythia_tiny"}
ENCODERS = {"roberta": "roberta_base", "electra": "electra_base"}
NAMES = (*CUSTOM, *NATIVE, *ENCODERS)
RUN = """--cpu --train-subset valid --valid-subset test --tokens-per-sample 32 --max-tokens 64 --lr 0.1
    --criterion cross_entropy"""
ENCODER = "--task masked_lm --encoder-embed-dim 32 --encoder-ffn-embed-dim 64 --encoder-attention-heads 2"
ENCODER += " --encoder-layers 2 --max-positions 40"
AUTO = {"roberta": "AutoModelForMaskedLM", "electra": "AutoModelForPreTraining"}


def folder_of(name: str, root: Path) -> Path:
    """The exported model *name* in *root*, with ``expected.npz``."""
    folder, values = (_encoder if name in ENCODERS else _decoder)(name, root)
    np.savez(folder / "expected.npz", **values)
    return folder


@torch.no_grad()
def _decoder(name: str, root: Path) -> tuple[Path, dict[str, Any]]:
    flags = (NATIVE[name], RUN) if name in NATIVE else (exports.MODELS[name],)
    model = runs.model_of(*flags).eval() if name in NATIVE else exports.made(name)
    folder = exports.exported(exports.saved(model, root / f"{name} checkpoint", *flags), root / name.replace(" ", "_"))
    text = exports.tokens(2, 8)
    dictionary, ids = Dictionary.load(runs.DATA / "dict.txt"), [10, 20, 2, 30, 3]
    words = f"{dictionary[10]} {dictionary[20]}\n{dictionary[30]} nowhere"
    prompt = text[0, :5].tolist()

    def scores(row: list[int]) -> Tensor:
        """Log-probabilities of all tokens but the first."""
        log_probs = model.output_layer.log_probs(model(torch.tensor([row]))[0])[0]
        return log_probs[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0]

    return folder, {
        "auto": "AutoModelForCausalLM",
        "text": text,
        "log_probs": model.output_layer.log_probs(model(text)[0]),
        "words": words,
        "ids": ids,
        "scores": scores([dictionary.eos(), *ids]),
        "choice": scores([10, 20, 30])[-1],
        "greedy": [*prompt, *stream([model], prompt, Search(15, temperature=0))],
    }


@torch.no_grad()
def _encoder(name: str, root: Path) -> tuple[Path, dict[str, Any]]:
    argv = f"{ENCODER} --arch {ENCODERS[name]}"
    model = runs.model_of(argv).eval()
    for number, parameter in enumerate(model.parameters()):
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    args, source = vars(runs.arguments(argv)), root / f"{name}.pt"
    state = {"args": {**args, "optimizer_overrides": "{}"}, "model": model.state_dict(), "extra_state": {}}
    checkpoint.save(source, {**state, "optimizer_history": []})
    folder = exports.exported(source, root / name, "--data", args["data"])
    dictionary, text = Dictionary.load(runs.DATA / "dict.txt"), exports.tokens(2, 8)
    found = model(text)[0]
    return folder, {
        "auto": AUTO[name],
        "text": text,
        "log_probs": found.log_softmax(-1) if found.dim() == 3 else torch.nn.functional.logsigmoid(found),
        "words": f"{dictionary[10]} {dictionary[20]} nowhere",
        "ids": [dictionary.bos(), 10, 20, dictionary.unk(), dictionary.eos()],
    }


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
        assert library == (FAST in files)
        # Tokenizers of the library leave out every special symbol.
        decoded = text.replace("\n", "") if library else text
        expected = {"text": text, "ids": TextReader(dictionary, tokenizer).ids(text), "decoded": decoded}
        write_texts(out, {**files, "config.json": "{}", "expected.json": json.dumps(expected)})


@torch.no_grad()
def add_subword_model(folder: Path) -> None:
    """A model like a native *folder* in its folder ``gguf``, with byte-level subwords: converters
    read no other tokenizers."""
    data, source = folder / "data", folder / "checkpoint"
    shutil.copytree(runs.DATA, data)
    tokenizer = Tokenizer(None, encodings()["byte"])
    dictionary = complete(tokenizer)
    (data / "dict.txt").unlink()
    dictionary.save(data / "dict.txt")
    tokenizer.save(data, dictionary.symbols)
    flags = (NATIVE[folder.name], RUN)
    model = runs.model_of(*flags, data=data).eval()
    shutil.copytree(data, source, ignore=shutil.ignore_patterns("*.bin", "*.idx"))
    state = {"args": vars(runs.arguments(*flags, data=data)), "model": stored_parameters(model), "extra_state": {}}
    checkpoint.save(source / "checkpoint.pt", {**state, "optimizer_history": []})
    out = exports.exported(source / "checkpoint.pt", folder / "gguf")
    text = torch.randint(4, len(dictionary), (2, 8), generator=torch.Generator().manual_seed(1))
    values = {"auto": "AutoModelForCausalLM", "text": text, "words": "the", "ids": [], "greedy": []}
    np.savez(out / "expected.npz", **values, log_probs=model.output_layer.log_probs(model(text)[0]))


def make(root: Path, names: tuple[str, ...] = NAMES) -> list[Path]:
    """The folders *names* in *root*; the first one has tokenizers of subwords, too."""
    folders = [folder_of(name, root) for name in names]
    add_tokenizers(folders[0])
    for folder in folders:
        if folder.name in NATIVE:
            add_subword_model(folder)
    return folders
