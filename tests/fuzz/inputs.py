"""Valid inputs that bad ones are made of: data, checkpoints, tokenizers, files of figures."""

from __future__ import annotations

import gzip
import importlib.util
import json
import lzma
import os
import random
import shutil
from pathlib import Path

import runs
import torch
import torch.distributed as dist

from fairseq import checkpoint
from fairseq.checkpoint import parts
from fairseq.distributed.tensor_part import TensorPart
from fairseq_cli.common import get_training_parser
from fuzz import standin
from fuzz.commands import Case, run

COMMANDS = (
    *("attention", "average_checkpoints", "classify", "demo", "demo_corpus", "eval_lm", "export_model", "finetune"),
    *("generate", "harness", "import_model", "interactive", "lm_eval", "merge_checkpoint", "notes", "plot"),
    *("preprocess", "recl", "symbols", "tokenize", "train", "validate"),
)
TINY = runs.words(
    """--cpu --tokens-per-sample 12 --max-tokens 48 --required-batch-size-multiple 1 --optimizer adam --lr 0.01
    --log-format none --log-interval 1 --max-update 2 --seed 1"""
)
LM = runs.words(
    """--arch shortformer_tiny --criterion cross_entropy --tokens-from-prev 12 --adaptive-input-cutoff 10,16
    --adaptive-softmax-cutoff 10,16 --decoder-layers 1 --decoder-embed-dim 8 --decoder-ffn-embed-dim 8
    --decoder-attention-heads 2 --decoder-input-dim 8 --decoder-output-dim 8
    --adaptive-softmax-factor 2 --adaptive-input-factor 2"""
)
TNF = runs.words(
    """--arch tnf_bert_tiny --task tnf_masked_lm --criterion masked_lm --encoder-layers 1 --encoder-embed-dim 8
    --encoder-ffn-embed-dim 8 --encoder-attention-heads 2 --max-positions 32"""
)
CLASSIFIER = runs.words(
    """--task sentence_prediction --criterion sentence_prediction --arch bert_tiny --encoder-layers 1
    --encoder-embed-dim 8 --encoder-ffn-embed-dim 8 --encoder-attention-heads 2 --max-positions 32 --data-bin data
    --batch-size 20 --no-epoch-checkpoints"""
)
WORDS = [a + b for a in "abcdefgh" for b in "xyz"] + ["rare", "rarer", "rarest"]
PRELOADED = (
    "matplotlib.pyplot",
    "sentencepiece",
    "tokenizers",
    "sacremoses",
    "subword_nmt.learn_bpe",
    "zstandard",
    "yaml",
    "sklearn.metrics",
    "scipy.stats",
)


def warm_up() -> None:
    """Import what the commands import, so that a fork has it."""

    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["MPLBACKEND"] = "Agg"
    commands = [f"fairseq_cli.{command}" for command in COMMANDS]
    programs = [f"{command}_program" for command in commands]
    for name in [*commands, *(name for name in programs if importlib.util.find_spec(name)), *PRELOADED]:
        importlib.import_module(name)
    standin.install()
    get_training_parser()
    for name in ("torch._dynamo", "fairseq.models.recipes", "torch.distributed.checkpoint", standin.MODEL):
        importlib.import_module(name)


def text(lines: int, seed: int) -> str:
    """Lines of words, some of them rare."""
    chance = random.Random(seed)
    return "".join(" ".join(chance.choices(WORDS, k=chance.randint(3, 9))) + "\n" for _ in range(lines))


def make_inputs(base: Path) -> None:
    """Write the inputs into the new folder *base*."""
    base.mkdir()
    for name, lines in (("train.txt", 40), ("valid.txt", 8), ("prompts.txt", 2)):
        (base / name).write_text(text(lines, lines))
    (base / "text.txt.gz").write_bytes(gzip.compress(b"ax by\n"))
    (base / "text.txt.xz").write_bytes(lzma.compress(b"ax by\n"))
    import zstandard

    (base / "text.txt.zst").write_bytes(zstandard.compress(b"ax by\n"))
    (base / "text.jsonl").write_text('{"text": "ax by"}\n{"text": "cz"}\n')
    (base / "settings.yaml").write_text("lr: 0.01\nmax-update: 2\n")
    (base / "results.json").write_text(json.dumps({"perplexity": 12.5, "loss": 3.6, "split": "test", "tokens": 10}))
    preprocess = ["--only-source", "--trainpref", "train.txt", "--validpref", "valid.txt", "--tokenizer", "space"]
    notes = ["--notes", "--note-min-count", "2", "--note-max-count", "100"]
    _made(base, "preprocess", *preprocess, *notes, "--destdir", "data")
    _made(base, "train", "data", *LM, *TINY, "--save-dir", "lm", "--metrics-file", "metrics.jsonl")
    _made(base, "train", "data", *TNF, *TINY, "--save-dir", "tnf")
    _made(base, "export_model", "lm/checkpoint_last.pt", "--to", "hf", "--out", "hf", "--data", "data")
    make_tables(base / "tables")
    _made(base, "train", "tables", *CLASSIFIER, *TINY, "--save-dir", "classifier")
    for folder in ("lm", "tnf"):
        for path in (base / folder).glob("checkpoint*.pt"):
            if path.name != "checkpoint_last.pt":
                path.unlink()
    (base / "lm" / "checkpoint1.pt").write_bytes((base / "lm" / "checkpoint_last.pt").read_bytes())
    make_sharded(base)
    make_tokenizers(base)
    shutil.rmtree(base / "hf" / "__pycache__", ignore_errors=True)
    for name in (".stdin", ".stdout", ".stderr"):
        (base / name).unlink(missing_ok=True)


def make_tables(folder: Path) -> None:
    """Write a task of two classes."""
    folder.mkdir()
    for name, rows in (("train", 24), ("dev", 6)):
        sentences = text(rows, rows).splitlines()
        labelled = "".join(f"{sentence}\t{number % 2}\n" for number, sentence in enumerate(sentences))
        (folder / f"{name}.tsv").write_text(f"sentence\tlabel\n{labelled}")


def make_sharded(base: Path) -> None:
    """Write the language model as sharded training does, with one process."""
    pid = os.fork()
    if pid == 0:
        store = dist.FileStore(str(base / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        state = checkpoint.read(base / "lm" / "checkpoint_last.pt")
        # Parameters are in parts; what counts, such as the number of a version, is whole.
        model = {
            name: TensorPart(value.clone(), 0, value.shape) if value.is_floating_point() else value
            for name, value in state["model"].items()
        }
        (base / "sharded").mkdir()
        parts.write(base / "sharded", *parts.split({**state, "model": model}), dist.group.WORLD)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    (base / "store").unlink(missing_ok=True)


def make_tokenizers(base: Path) -> None:
    """Write a tokenizer of each kind."""
    import tokenizers
    from sentencepiece import SentencePieceTrainer
    from subword_nmt.learn_bpe import learn_bpe

    with open(base / "train.txt") as source, open(base / "codes", "w") as target:
        learn_bpe(source, target, 8)
    SentencePieceTrainer.train(
        input=str(base / "train.txt"), model_prefix=str(base / "pieces"), vocab_size=30, minloglevel=2, num_threads=1
    )
    kinds = {
        "WordLevel": tokenizers.models.WordLevel({"<unk>": 0, "ax": 1}, unk_token="<unk>"),
        "WordPiece": tokenizers.models.WordPiece({"<unk>": 0, "a": 1, "##x": 2}, unk_token="<unk>"),
        "BPE": tokenizers.models.BPE({"<unk>": 0, "a": 1, "x": 2, "ax": 3}, [("a", "x")], unk_token="<unk>"),
        "Unigram": tokenizers.models.Unigram([("<unk>", 0.0), ("a", -1.0), ("x", -2.0)], 0, False),
    }
    for name, model in kinds.items():
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = tokenizers.normalizers.NFC()
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.decoder = tokenizers.decoders.WordPiece()
        tokenizer.save(str(base / f"{name}.json"))


def _made(base: Path, *words: str) -> None:
    ended = run(Case("input", words, ()), base)
    assert ended.code == 0, ended.stderr
