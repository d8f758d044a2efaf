"""Evaluate exported models and their revisions with transformers alone, with the calls of
evaluation pipelines.

It imports nothing of this package: copy it to wherever the exports are. For each folder, and each
of its subfolders ``chck_…``, it prints the accuracy on minimal pairs; with ``--table`` it
fine-tunes a classifier on the last one. Without a folder it only reads the files, to find their
mistakes before hours of training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
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


def configuration(folder: Path) -> Any:
    """The configuration of *folder*, read once: each reading of an export's code takes half a
    second."""
    return AutoConfig.from_pretrained(folder, trust_remote_code=True)


def load(auto: Any, folder: Path, config: Any) -> Any:
    """What an automatic class makes of *folder*."""
    return auto.from_pretrained(folder, config=config, trust_remote_code=True)


def revisions(folder: Path) -> list[Path]:
    """Return the revisions of *folder* in the order of the text read, and then the folder
    itself."""
    units = {"K": 10**3, "M": 10**6}

    def amount(path: Path) -> int:
        number = path.name.split("_")[1]
        return int(number.rstrip("KM")) * units.get(number[-1], 1)

    return [*sorted(folder.glob("chck_*"), key=amount), folder]


def check_offsets(tokenizer: Any) -> None:
    """See that each token's offsets are of the characters that it stands for."""
    encoded = tokenizer(OFFSETS, return_offsets_mapping=True, add_special_tokens=False)
    covered = {index for begin, end in encoded["offset_mapping"] for index in range(begin, end)}
    assert covered == set(range(len(OFFSETS))), "no character is left out"
    assert tokenizer.decode(encoded["input_ids"]) == OFFSETS


@torch.no_grad()
def log_probability(model: Any, tokenizer: Any, text: str, causal: bool) -> float:
    """The log-probability of *text*, or for an encoder its pseudo-log-likelihood (Salazar et al.
    2020)."""
    encoded = tokenizer(text, return_tensors="pt", return_special_tokens_mask=True, truncation=not causal)
    ids = encoded["input_ids"]  # [1, T]
    if causal:
        lprobs = model(ids).logits[0, :-1].log_softmax(-1)  # [T - 1, V]
        return float(lprobs.gather(1, ids[0, 1:, None]).sum())
    masked = (encoded["special_tokens_mask"][0] == 0).nonzero()[:, 0]
    rows = ids.repeat(len(masked), 1)  # one row for each masked token
    rows[range(len(masked)), masked] = tokenizer.mask_token_id
    lprobs = model(rows).logits[range(len(masked)), masked].log_softmax(-1)
    return float(lprobs.gather(1, ids[0, masked, None]).sum())


def accuracies(folder: Path, pairs: Sequence[tuple[str, str, str]]) -> tuple[float, float] | None:
    """Return the share of *pairs* whose good sentence is more probable, and its mean over
    paradigms, which BabyLM reports; None if the model predicts no words."""
    config = configuration(folder)
    tokenizer = load(AutoTokenizer, folder, config)
    check_offsets(tokenizer)
    base = load(AutoModel, folder, config).eval()
    assert base(**tokenizer("A text.", return_tensors="pt")).last_hidden_state.shape[0] == 1
    causal = config.architectures[0].endswith("ForCausalLM")
    if not causal and not config.architectures[0].endswith("ForMaskedLM"):
        return None
    model = load(AutoModelForCausalLM if causal else AutoModelForMaskedLM, folder, config).eval()
    right: dict[str, list[bool]] = {}
    for *sentences, paradigm in pairs:
        good, bad = (log_probability(model, tokenizer, sentence, causal) for sentence in sentences)
        right.setdefault(paradigm, []).append(good > bad)
    return sum(map(sum, right.values())) / len(pairs), statistics.mean(sum(row) / len(row) for row in right.values())


class InputError(Exception):
    """A file that cannot be used; the message names it, its line, and what is expected."""


def numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a text with something in them, and where each is."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}; give a file in UTF-8") from None
    # Unlike splitlines(), which also splits at U+2028 and U+0085 inside of sentences.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{path}: line {number}", line.rstrip("\r")


def read_pairs(path: Path) -> list[tuple[str, str, str]]:
    """The good and the bad sentence and the paradigm of each pair of a file in BLiMP's format, or
    of a folder of such files."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    pairs: list[tuple[str, str, str]] = []
    for file in files:
        for where, line in numbered_lines(file):
            try:
                pair = json.loads(line)
            except (ValueError, RecursionError):
                raise InputError(f"{where}: not JSON; give one object in each line") from None
            both: list[Any] = (
                [pair.get(f"sentence_{kind}") for kind in ("good", "bad")] if isinstance(pair, dict) else [None]
            )
            if not all(isinstance(sentence, str) and sentence.strip() for sentence in both):
                raise InputError(f"{where}: has no texts sentence_good and sentence_bad")
            pairs.append((both[0], both[1], str(pair.get("UID") or file.stem)))
    if not pairs:
        raise InputError(f"{path}: no pairs; give JSON lines with sentence_good and sentence_bad")
    return pairs


def read_table(path: Path) -> list[tuple[str, str]]:
    """Sentences and labels of a table with tabs between its columns."""
    lines = numbered_lines(path)
    head = next(lines, ("", ""))[1].split("\t")
    if missing := {"sentence", "label"} - set(head):
        raise InputError(f"{path}: no column {' and no column '.join(sorted(missing))}; tabs divide columns")
    columns = head.index("sentence"), head.index("label")
    rows = []
    for where, line in lines:
        fields = [field.strip() for field in line.split("\t")]
        if len(fields) <= max(columns) or not all(fields[column] for column in columns):
            raise InputError(f"{where}: no sentence or no label; correct or remove the line")
        if "," in fields[columns[1]]:  # fairseq-finetune separates labels by commas
            raise InputError(f"{where}: label {fields[columns[1]]!r} has a comma; correct or remove the line")
        rows.append((fields[columns[0]], fields[columns[1]]))
    if not rows:
        raise InputError(f"{path}: no examples; the file needs lines after its header")
    return rows


def read_tables(folder: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Sentences and labels to train on, from ``train.tsv``, and to test on, from ``dev.tsv``."""
    training, test = read_table(folder / "train.tsv"), read_table(folder / "dev.tsv")
    known = {label for _, label in training}
    if len(known) < 2:
        raise InputError(f"{folder / 'train.tsv'}: all examples have the label {training[0][1]}; give two or more")
    if unknown := sorted({label for _, label in test} - known):
        raise InputError(f"{folder / 'dev.tsv'}: label {unknown[0]} is not in train.tsv")
    return training, test


def classify(
    folder: Path, training: Sequence[tuple[str, str]], test: Sequence[tuple[str, str]], epochs: int, rate: float
) -> float:
    """Fine-tune a classifier on *training*; return its accuracy on *test*."""
    torch.manual_seed(1)
    labels = sorted({label for _, label in training})
    config = configuration(folder)
    config.num_labels = len(labels)
    tokenizer = load(AutoTokenizer, folder, config)
    model = load(AutoModelForSequenceClassification, folder, config)
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
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR", help="exported models")
    parser.add_argument("--pairs", type=Path, required=True, help="JSON lines with sentence_good and sentence_bad")
    parser.add_argument("--table", type=Path, help="folder with train.tsv and dev.tsv, columns sentence and label")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1e-4)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        pairs = read_pairs(args.pairs)
        tables = read_tables(args.table) if args.table is not None else None
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    for folder in args.folders:
        for revision in revisions(folder):
            if (shares := accuracies(revision, pairs)) is not None:
                print(f"{revision}\tpairs\t{shares[0]:.4f}\tparadigms\t{shares[1]:.4f}", flush=True)
        if tables is not None and configuration(folder).architectures[0] != "ElectraForMaskedLM":
            score = classify(folder, *tables, args.epochs, args.rate)
            print(f"{folder}\tclassifier\t{score:.4f}", flush=True)


if __name__ == "__main__":
    main()
