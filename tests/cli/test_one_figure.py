"""A table of the figures that several commands print of one checkpoint and one text: equal to the
printed digit.

A second one has the accuracy of a classifier.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import preprocessing
import pytest
import runs
from sentences import write_dictionary, write_pretrained, write_task
from subword_encodings import TEXT

from fairseq import checkpoint
from fairseq.config import options
from fairseq.hub import LanguageModel
from fairseq.interop.harness.requests import Requests
from fairseq_cli import analyze, eval_lm, finetune, validate

LINES = "the lower river\nthe newest riverbed isn't wide\n" * 3
RUN = """--cpu --arch transformer_lm --decoder-layers 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 48
    --decoder-attention-heads 2 --criterion cross_entropy --tokens-per-sample 16 --max-tokens 64 --optimizer adam
    --lr 0.01 --max-update 3 --log-format json --log-interval 1 --seed 3 --dropout 0"""
DIGITS = {"bits per token": 4, "perplexity": 2, "tokens": 0, "bits per byte": 4, "bits of words": 3, "words": 0}


def of_words(report: dict[str, Any]) -> tuple[float, float]:
    """The bits of all words of a report by frequency, and their number."""
    band = next(band for band in report["bands"] if band["band"] == "all")
    return band["words"] * band["bits_per_word"][0], band["words"]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """For each figure what each source says."""
    pytest.importorskip("subword_nmt")
    folder = tmp_path_factory.mktemp("run")
    training, text = (
        preprocessing.text_file(folder, content, name) for content, name in ((TEXT, "train"), (LINES, "valid"))
    )
    preprocessing.run(folder / "data", trainpref=training, validpref=text, bpe="subword_nmt", learn_bpe=20)
    log = runs.train(folder / "run", RUN, "--metrics-file", folder / "metrics.jsonl", data=folder / "data")
    path, data = folder / "run" / "checkpoint_last.pt", str(folder / "data")
    recorded = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    recorded = [line for line in recorded if line["tag"] == "valid"]
    logged = runs.summaries(log, "valid")

    def printed(main: Any, parser: Any, *words: Any) -> Any:
        words = (data, "--path", str(path), "--cpu", *map(str, words))
        return main(options.parse_args_and_arch(parser, words, task_defaults=False))

    of_validate = printed(validate.main, validate.get_validation_parser(), "--valid-subset", "valid")
    validated = of_validate[str(path)]["valid"]
    of_corpus = printed(eval_lm.main, eval_lm.get_eval_lm_parser(), "--gen-subset", "valid")
    of_text = printed(eval_lm.main, eval_lm.get_eval_lm_parser(), "--text", text)
    bands = printed(eval_lm.main, eval_lm.get_eval_lm_parser(), "--gen-subset", "valid", "--by-frequency")
    flags = ("--valid-subset", "valid", "--by-frequency", "--results-path", folder / "frequency")
    printed(validate.main, validate.get_validation_parser(), *flags)
    of_bands = json.loads((folder / "frequency" / "results.json").read_text())["by_frequency"]["valid"]
    (curve,) = analyze.curves(analyze.get_curves_parser().parse_args([str(folder / "metrics.jsonl")]))
    model = LanguageModel.from_pretrained(path)
    symbols, lprobs = model.score(LINES)
    bits = (-lprobs.double() / math.log(2)).tolist()
    words = [value for symbol, value in zip(symbols, bits, strict=True) if symbol != "</s>"]
    rolling = -Requests(model).rolling([LINES])[0] / math.log(2)
    saved = checkpoint.load(path)["extra_state"]["val_loss"]
    (bits_e, words_e), (bits_v, words_v) = of_words(bands["by_frequency"]), of_words(of_bands)
    return {
        "bits per token": {
            "log of training": logged[-1]["loss"],
            "metrics file": recorded[-1]["loss"],
            "checkpoint": saved,
            "plot": curve["last loss"][0],
            "validate": validated["loss"],
            "eval-lm of the corpus": of_corpus["loss_base2"],
            "eval-lm of the text": of_text["loss_base2"],
            "hub": math.log2(model.perplexity(LINES)),
            "harness": rolling / len(symbols),
        },
        "perplexity": {
            "log of training": logged[-1]["ppl"],
            "metrics file": recorded[-1]["ppl"],
            "validate": validated["ppl"],
            "eval-lm of the corpus": of_corpus["perplexity"],
            "eval-lm of the text": of_text["perplexity"],
            "hub": model.perplexity(LINES),
        },
        "tokens": {  # with the ends of lines
            "log of training": logged[-1]["wpb"],  # there is one batch
            "metrics file": recorded[-1]["wpb"],
            "validate": validated["ntokens"],
            "eval-lm of the corpus": of_corpus["tokens"],
            "eval-lm of the text": of_text["tokens"],
            "hub": len(symbols),
        },
        "bits per byte": {  # of all tokens, by the bytes of the raw text, line feeds among them
            "eval-lm of the corpus": of_corpus["bits_per_byte"],
            "eval-lm of the text": of_text["bits_per_byte"],
            "harness": rolling / len(LINES.encode()),  # as its tasks divide
        },
        "bits of words": {  # a report by frequency counts no ends of lines
            "eval-lm": bits_e,
            "validate": bits_v,
            "hub": sum(words),
        },
        "words": {"eval-lm": words_e, "validate": words_v, "text": len(LINES.split())},
    }


@pytest.mark.parametrize("figure", DIGITS)
def test_commands_agree_to_the_printed_digit(figure: str, figures: Any) -> None:
    values = figures[figure]
    shown = {source: f"{value:.{DIGITS[figure]}f}" for source, value in values.items()}
    assert len(set(shown.values())) == 1, shown


def test_commands_agree_on_the_accuracy_of_a_classifier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dictionary(tmp_path / "bin")
    write_task(tmp_path / "MR")
    write_pretrained(tmp_path / "bert.pt", tmp_path / "bin")
    of_task = ["--glue-task MR --cpu --data-bin", tmp_path / "bin"]
    words = [tmp_path / "MR", of_task, "--log-format none --seeds 1 --lrs 0.01 --max-epoch 2 --batch-size 8"]
    words = runs.words(*words, "--path", tmp_path / "bert.pt", "--save-dir", tmp_path / "out")
    report = finetune.main(options.parse_args_and_arch(finetune.get_finetune_parser(), words))
    path = tmp_path / "out" / "lr0.01-seed1" / "checkpoint_best.pt"
    words = runs.words(tmp_path / "MR", "--path", path, "--valid-subset valid --cpu")
    validated = validate.main(
        options.parse_args_and_arch(validate.get_validation_parser(), words, task_defaults=False)
    )[str(path)]["valid"]
    rows = [line.split("\t") for line in (tmp_path / "MR" / "dev.tsv").read_text().splitlines()[1:]]
    (tmp_path / "texts").write_text("".join(f"{row[0]}\n" for row in rows))
    words = runs.words(path, tmp_path / "texts", "--cpu")
    capsys.readouterr()
    finetune.predict(options.parse_args_and_arch(finetune.get_predict_parser(), words))
    labels = [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()]
    right = sum(label == row[1] for label, row in zip(labels, rows, strict=True))
    found = {
        "finetune": report["score"],
        "checkpoint": checkpoint.load(path)["extra_state"]["val_loss"],
        "validate": validated["accuracy"],
        "classify": 100 * right / len(rows),
    }
    assert len({f"{value:.1f}" for value in found.values()}) == 1 and 50 < found["classify"] < 100, found
