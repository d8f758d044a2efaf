"""Evaluate exported models and their revisions with transformers alone, with the calls of evaluation pipelines.

It imports nothing of this package: copy it to wherever the exports are. For each folder, and each of its subfolders
``chck_…``, it prints the accuracy on minimal pairs; with ``--table`` it fine-tunes a classifier on the last one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    logging,
)

OFFSETS = "Zoë said:\t“Don't — 你好 🙂  now”"


def load(auto: Any, folder: Path, **settings: Any) -> Any:
    """What an automatic class makes of *folder*."""
    return auto.from_pretrained(folder, trust_remote_code=True, **settings)


def revisions(folder: Path) -> list[Path]:
    """Return the revisions of *folder* in the order of the text read, and then the folder itself."""
    units = {"K": 10**3, "M": 10**6}

    def amount(path: Path) -> int:
        number = path.name.split("_")[1]
        return int(number.rstrip("KM")) * units.get(number[-1], 1)

    return [*sorted(folder.glob("chck_*"), key=amount), folder]


def check_offsets(tokenizer: Any) -> None:
    """See that each token's offsets are of the characters that it stands for."""
    encoded = tokenizer(OFFSETS, return_offsets_mapping=True, add_special_tokens=False)
    covered = {place for begin, end in encoded["offset_mapping"] for place in range(begin, end)}
    assert covered == set(range(len(OFFSETS))), "no character is left out"
    assert tokenizer.decode(encoded["input_ids"]) == OFFSETS


@torch.no_grad()
def log_probability(model: Any, tokenizer: Any, text: str, causal: bool) -> float:
    """The log-probability of *text*, or for an encoder its pseudo-log-likelihood (Salazar et al. 2020)."""
    encoded = tokenizer(text, return_tensors="pt", return_special_tokens_mask=True, truncation=not causal)
    ids = encoded["input_ids"]  # [1, T]
    if causal:
        ids = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], 1)  # the end of the line, as in training
        lprobs = model(ids).logits[0, :-1].log_softmax(-1)  # [T - 1, V]
        return float(lprobs.gather(1, ids[0, 1:, None]).sum())
    places = (encoded["special_tokens_mask"][0] == 0).nonzero()[:, 0]
    rows = ids.repeat(len(places), 1)  # one row for each masked token
    rows[range(len(places)), places] = tokenizer.mask_token_id
    lprobs = model(rows).logits[range(len(places)), places].log_softmax(-1)
    return float(lprobs.gather(1, ids[0, places, None]).sum())


def accuracy(folder: Path, pairs: Sequence[dict[str, str]]) -> float | None:
    """Return the share of *pairs* whose good sentence is more probable; None if the model predicts no words."""
    tokenizer, config = load(AutoTokenizer, folder), load(AutoConfig, folder)
    check_offsets(tokenizer)
    base = load(AutoModel, folder).eval()
    assert base(**tokenizer("A text.", return_tensors="pt")).last_hidden_state.shape[0] == 1
    causal = config.architectures[0].endswith("ForCausalLM")
    if not causal and not config.architectures[0].endswith("ForMaskedLM"):
        return None
    model = load(AutoModelForCausalLM if causal else AutoModelForMaskedLM, folder).eval()
    good, bad = (
        [log_probability(model, tokenizer, pair[f"sentence_{kind}"], causal) for pair in pairs]
        for kind in ("good", "bad")
    )
    return sum(first > second for first, second in zip(good, bad, strict=True)) / len(pairs)


def read_table(path: Path) -> list[tuple[str, str]]:
    """Return sentences and labels."""
    head, *rows = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    return [(row[head.index("sentence")], row[head.index("label")]) for row in rows]


def classify(folder: Path, table: Path, epochs: int, rate: float) -> float:
    """Fine-tune a classifier on ``train.tsv``; return its accuracy on ``dev.tsv``."""
    torch.manual_seed(1)
    training, test = read_table(table / "train.tsv"), read_table(table / "dev.tsv")
    labels = sorted({label for _, label in training})
    tokenizer = load(AutoTokenizer, folder)
    model = load(AutoModelForSequenceClassification, folder, num_labels=len(labels))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def batch(rows: Sequence[tuple[str, str]]) -> tuple[Any, Tensor]:
        texts = [text for text, _ in rows]
        inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        return inputs, torch.tensor([labels.index(label) for _, label in rows])

    for _ in range(epochs):
        order = torch.randperm(len(training)).split(16)
        for rows in order:
            inputs, wanted = batch([training[row] for row in rows.tolist()])
            model(**inputs, labels=wanted).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    right = 0
    with torch.no_grad():
        for begin in range(0, len(test), 16):
            inputs, wanted = batch(test[begin : begin + 16])
            right += int((model(**inputs).logits.argmax(-1) == wanted).sum())
    return right / len(test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="exported models")
    parser.add_argument("--pairs", type=Path, required=True, help="JSON lines with sentence_good and sentence_bad")
    parser.add_argument("--table", type=Path, help="folder with train.tsv and dev.tsv, columns sentence and label")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1e-4)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    pairs = [json.loads(line) for line in args.pairs.read_text(encoding="utf-8").splitlines()]
    for folder in args.folders:
        for revision in revisions(folder):
            if (share := accuracy(revision, pairs)) is not None:
                print(f"{revision}\tpairs\t{share:.4f}", flush=True)
        if args.table is not None and load(AutoConfig, folder).architectures[0] != "ElectraForMaskedLM":
            print(f"{folder}\tclassifier\t{classify(folder, args.table, args.epochs, args.rate):.4f}", flush=True)


if __name__ == "__main__":
    main()
