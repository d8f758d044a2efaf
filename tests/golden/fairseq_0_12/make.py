"""Numbers of fairseq 0.12.2, computed by running it: ``python make.py DATA`` in a Python 3.8 with fairseq 0.12.2, torch 1.12.1.

``DATA`` is ``../fairseq_variants/data-bin``. Writes ``lm.pt``, ``roberta.pt``, ``classifier.pt`` and ``expected.json`` beside itself.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
DATA = str(Path(sys.argv[1]).resolve())
LM = """--task language_modeling --arch transformer_lm --decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32
    --decoder-attention-heads 2 --decoder-input-dim 16 --decoder-output-dim 16 --share-decoder-input-output-embed --dropout 0
    --optimizer adam --lr 2e-3 --tokens-per-sample 32 --max-tokens 256 --seed 8"""
ENCODER = """--task masked_lm --criterion masked_lm --arch roberta_base --encoder-layers 2 --encoder-embed-dim 16
    --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --max-positions 128 --dropout 0 --attention-dropout 0 --optimizer adam
    --lr 2e-3 --tokens-per-sample 32 --max-tokens 256 --seed 8"""
CLASSIFIER = """--task sentence_prediction --criterion sentence_prediction --arch roberta_base --encoder-layers 2
    --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --dropout 0 --attention-dropout 0
    --pooler-dropout 0 --optimizer adam --lr 2e-3 --max-positions 128 --max-tokens 2000 --batch-size 40 --init-token 0
    --separator-token 2 --num-classes 2 --shorten-method truncate --required-batch-size-multiple 1 --no-shuffle
    --cpu --num-workers 0 --log-format json --log-interval 1 --no-epoch-checkpoints --seed 8"""
LINES = [
    "shouth kalgeom plammeotroth seolpath nelba",
    "shouth kalgeom nosuchword ; chen steonlo : shouth @-@ pouthteo 1905",
    "po loumai pel gar li nelba",
]
environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def command(name, *words, stdin=None):
    """Runs a command of fairseq; returns what it wrote."""
    words = [word for part in words for word in part.split()]
    run = subprocess.run(
        [str(Path(sys.executable).parent / f"fairseq-{name}"), *words],
        env=environment,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    if run.returncode:
        raise SystemExit(run.stdout)
    return run.stdout


def train(folder, *words):
    return command(
        "train",
        DATA,
        f"--save-dir {folder} --cpu --num-workers 0 --log-format json --log-interval 1 --no-epoch-checkpoints",
        *words,
    )


def updates(text):
    lines = (line.split(" | ")[-1] for line in text.splitlines() if "| train_inner |" in line)
    return [{name: float(json.loads(line)[name]) for name in ("num_updates", "loss", "lr", "gnorm")} for line in lines]


def parameters(text):
    return int(re.search(r"num. shared model params: ([\d,]+)", text)[1].replace(",", ""))


def masked_lm(folder):
    blocks, used = {}, {}
    for mode in ("none", "complete", "complete_doc", "eos"):
        text = train(
            f"{folder}/{mode}",
            ENCODER,
            f"--sample-break-mode {mode} --max-update 1 --skip-invalid-size-inputs-valid-test",
        )
        blocks[mode] = {split: int(n) for n, split in re.findall(r"loaded (\d+) blocks from: \S*?(\w+)$", text, re.M)}
        left_out = re.search(r"(\d+) samples have invalid sizes", text)
        used[mode] = blocks[mode]["train"] - (int(left_out[1]) if left_out else 0)
    return {"blocks": blocks, "train_blocks_used": used}


def evaluation(folder):
    rows = []
    for mode in ("none", "eos", "complete", "complete_doc"):
        for window in (0, 20):
            text = command(
                "eval-lm",
                DATA,
                f"--path {folder}/checkpoint_last.pt --cpu --batch-size 1 --tokens-per-sample 32 --gen-subset test",
                f"--sample-break-mode {mode} --context-window {window}",
            )
            tokens = int(re.search(r"Evaluated ([\d,]+) tokens", text)[1].replace(",", ""))
            loss, perplexity = re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", text).groups()
            rows.append(
                {
                    "sample_break_mode": mode,
                    "context_window": window,
                    "tokens": tokens,
                    "loss": loss,
                    "perplexity": perplexity,
                }
            )
    return rows


def classification_data(folder):
    """``input0`` and ``label`` as README.custom_classification lays them out: does a line have an even number of words?"""
    for split, start in (("train", 0), ("valid", 40)):
        lines = (HERE.parent / "language_model" / "text" / "train.txt").read_text().splitlines()
        lines = [line.split() for line in lines if len(line.split()) > 12][start : start + 40]
        lines = [" ".join(line[: 5 + 3 * number % 8]) for number, line in enumerate(lines)]
        Path(f"{folder}/{split}.input0").write_text("".join(line + "\n" for line in lines))
        Path(f"{folder}/{split}.label").write_text(
            "".join("even\n" if len(line.split()) % 2 == 0 else "odd\n" for line in lines)
        )
    command(
        "preprocess",
        f"--only-source --trainpref {folder}/train.input0 --validpref {folder}/valid.input0 --destdir {folder}/bin/input0",
        f"--srcdict {DATA}/dict.txt --workers 1",
    )
    command(
        "preprocess",
        f"--only-source --trainpref {folder}/train.label --validpref {folder}/valid.label --destdir {folder}/bin/label",
    )


def rounded(value):
    """Values with seven significant digits."""
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def main():
    work = tempfile.mkdtemp()
    text = train(
        f"{work}/default",
        "--task language_modeling --arch transformer_lm --optimizer adam --max-update 1 --tokens-per-sample 32 --max-tokens 64",
    )
    expected = {"transformer_lm parameters": parameters(text)}
    train(f"{work}/lm", LM, "--max-update 300 --disable-validation")
    shutil.copy(f"{work}/lm/checkpoint_last.pt", HERE / "lm.pt")
    expected["eval-lm"] = evaluation(f"{work}/lm")
    shutil.copytree(f"{work}/lm", f"{work}/again")
    expected["resumed"] = updates(train(f"{work}/again", LM, "--max-update 320 --disable-validation"))

    from fairseq.models.roberta import RobertaModel
    from fairseq.models.transformer_lm import TransformerLanguageModel

    lm = TransformerLanguageModel.from_pretrained(f"{work}/lm", "checkpoint_last.pt", DATA).eval()
    expected["score"] = [
        {"line": line, "positional_scores": rounded(lm.score(line)["positional_scores"].tolist())} for line in LINES
    ]
    expected["sample"] = [{"line": line, "text": lm.sample(line, beam=5, max_len_b=12)} for line in LINES]
    flags = f"--path {work}/lm/checkpoint_last.pt --cpu --beam 4 --nbest 2 --max-len-b 24 --task language_modeling"
    text = command("interactive", DATA, flags, stdin="".join(line + "\n" for line in LINES))
    expected["interactive"] = [line for line in text.splitlines() if re.match(r"[SHDP]-\d", line)]

    train(f"{work}/roberta", ENCODER, "--max-update 20 --disable-validation")
    shutil.copy(f"{work}/roberta/checkpoint_last.pt", HERE / "roberta.pt")
    expected["masked_lm"] = masked_lm(f"{work}/masked")
    roberta = RobertaModel.from_pretrained(f"{work}/roberta", "checkpoint_last.pt", DATA, bpe=None).eval()
    dictionary = roberta.task.source_dictionary
    rows = []
    for line in LINES:
        tokens = torch.cat(
            [torch.tensor([0]), dictionary.encode_line(line, append_eos=True, add_if_not_exist=False).long()]
        )
        with torch.no_grad():
            rows.append(
                {
                    "tokens": tokens.tolist(),
                    "features": [
                        rounded(layer[0].tolist())
                        for layer in roberta.extract_features(tokens, return_all_hiddens=True)
                    ],
                    "logits": [rounded(row[:50].tolist()) for row in roberta.model(tokens[None])[0][0]],
                }
            )
    expected["roberta"] = {"parameters": sum(p.numel() for p in roberta.parameters()), "rows": rows}

    os.makedirs(f"{work}/table")
    classification_data(f"{work}/table")
    new = "--reset-optimizer --reset-dataloader --reset-meters --max-epoch 10"
    table = f"{work}/table/bin --save-dir {work}/classifier"
    command("train", table, CLASSIFIER, new, f"--restore-file {work}/roberta/checkpoint_last.pt")
    shutil.copy(f"{work}/classifier/checkpoint_last.pt", HERE / "classifier.pt")
    shutil.copytree(f"{work}/classifier", f"{work}/classifier-again")
    text = command("train", f"{table}-again", CLASSIFIER, "--max-epoch 20")
    valid = [json.loads(line) for line in re.findall(r"\| valid \| (\{.*\})$", text, re.MULTILINE)]
    expected["sentence_prediction"] = {
        "flags": CLASSIFIER,
        "updates": updates(text),
        "valid": [{name: float(line[f"valid_{name}"]) for name in ("loss", "accuracy")} for line in valid],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        classifier = RobertaModel.from_pretrained(
            f"{work}/classifier", "checkpoint_last.pt", f"{work}/table/bin", bpe=None
        ).eval()
    with torch.no_grad():
        expected["sentence_prediction"]["predictions"] = [
            classifier.predict("sentence_classification_head", torch.tensor(row["tokens"])).tolist() for row in rows
        ]
    (HERE / "expected.json").write_text(json.dumps(expected) + "\n")


main()
