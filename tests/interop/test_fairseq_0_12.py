"""Numbers of fairseq 0.12.2, from tests/golden/fairseq_0_12/make.py: here and in
docs/compatibility.md the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch

from fairseq import checkpoint
from fairseq.config import options
from fairseq.hub import load_model
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.tasks import setup_task
from fairseq_cli import eval_lm, interactive, preprocess

GOLDEN = runs.ROOT / "tests" / "golden" / "fairseq_0_12"
DATA = GOLDEN.parent / "fairseq_variants" / "data-bin"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())
PAGE = (runs.ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
LM = """--task language_modeling --arch transformer_lm --decoder-layers 2 --decoder-embed-dim 16
    --decoder-ffn-embed-dim 32 --decoder-attention-heads 2 --decoder-input-dim 16 --decoder-output-dim 16
    --share-decoder-input-output-embed --dropout 0 --optimizer adam --lr 2e-3 --tokens-per-sample 32 --max-tokens 256
    --seed 8 --cpu --log-format json --log-interval 1"""


def row(name: str) -> list[str]:
    """Cells of a row of the page's table of numbers."""
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_transformer_lm_has_as_many_parameters() -> None:
    model = runs.model_of("--arch transformer_lm --tokens-per-sample 32 --cpu", data=DATA)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == EXPECTED["transformer_lm parameters"]
    assert row("parameters of `transformer_lm`, 1,200 words") == [f"{count:,}", f"{count:,}"]


@pytest.mark.parametrize(
    "case", EXPECTED["eval-lm"], ids=lambda case: f"{case['sample_break_mode']}-{case['context_window']}"
)
def test_every_break_mode_and_window_scores_the_same_tokens(
    case: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mode, window = case["sample_break_mode"], case["context_window"]
    flags = f"--cpu --batch-size 1 --tokens-per-sample 32 --sample-break-mode {mode} --context-window {window}"
    words = runs.words(str(DATA), flags, "--path", GOLDEN / "lm.pt", "--save-token-scores", tmp_path / "scores.npz")
    eval_lm.main(options.parse_args_and_arch(eval_lm.get_eval_lm_parser(), words))
    assert f"Loss (base 2): {case['loss']}, Perplexity: {case['perplexity']}" in capsys.readouterr().out
    assert len(np.load(tmp_path / "scores.npz")["tokens"]) == case["tokens"]
    cell = f"{case['perplexity']} ({case['tokens']:,} tokens)"
    assert row(f"perplexity, `{mode}`, `--context-window {window}`") == [cell, cell]


def test_a_run_goes_on_with_fairseqs_losses_rates_and_norms(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = runs.train(
        tmp_path, LM, ["--restore-file", GOLDEN / "lm.pt"], "--max-update 320 --disable-validation --no-save", data=DATA
    )
    got = runs.updates(log)
    for name, places in (("num_updates", 0), ("loss", 3), ("lr", 7), ("gnorm", 3)):
        np.testing.assert_allclose(
            [line[name] for line in got], [line[name] for line in EXPECTED["resumed"]], atol=0.51 * 10**-places
        )
    assert "other than in the checkpoint" not in caplog.text, "0.12 stores a decay of averages that it does not make"


def test_score_gives_the_same_probabilities_of_the_same_tokens() -> None:
    lm = TransformerLanguageModel.from_pretrained(str(GOLDEN), "lm.pt", str(DATA))
    for case in EXPECTED["score"]:
        np.testing.assert_allclose(lm.score(case["line"])["positional_scores"], case["positional_scores"], atol=2e-6)
    total = f"{sum(EXPECTED['score'][0]['positional_scores']):.4f}"
    assert row(f'`score("{EXPECTED["score"][0]["line"]}")`, sum of ln p') == [total, total]


def test_interactive_writes_the_same_hypotheses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("".join(case["line"] + "\n" for case in EXPECTED["score"]))
    words = runs.words(str(DATA), "--cpu --beam 4 --nbest 2 --max-len-b 24", "--path", GOLDEN / "lm.pt")
    interactive.main(
        interactive.get_interactive_generation_parser().parse_args([*words, "--input", str(tmp_path / "lines")])
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:2] in ("S-", "H-", "D-", "P-")]
    assert [cells(line)[0::2] for line in lines] == [cells(line)[0::2] for line in EXPECTED["interactive"]]
    for line, expected in zip(lines, EXPECTED["interactive"], strict=True):
        numbers = [[float(number) for number in cells(each)[1].split()] for each in (line, expected)]
        np.testing.assert_allclose(*numbers, atol=1e-4 if line.startswith("P-") else 2e-6)


def cells(line: str) -> tuple[str, str, str]:
    """The number of a line, its figures and its text."""
    name, *rest = line.split("\t")
    return (name, "", rest[0]) if name[0] == "S" else (name, rest[0], rest[1] if len(rest) > 1 else "")


@pytest.mark.parametrize("mode", EXPECTED["masked_lm"]["blocks"])
def test_masked_lm_makes_as_many_blocks(mode: str) -> None:
    flags = "--task masked_lm --arch roberta_base --max-positions 128 --tokens-per-sample 32 --cpu --sample-break-mode"
    task = setup_task(runs.arguments(flags, mode, data=DATA))
    counts = {split: len(task.dataset(split)) for split in ("train", "valid")}
    expected = EXPECTED["masked_lm"]["blocks"][mode]
    assert (
        row(f"blocks of `masked_lm`, `{mode}`, train and valid") == [f"{expected['train']} and {expected['valid']}"] * 2
    )
    assert counts == expected


@torch.no_grad()
def test_a_masked_language_model_has_the_same_features_and_logits() -> None:
    model, _ = load_model(GOLDEN / "roberta.pt", DATA)
    for case in EXPECTED["roberta"]["rows"]:
        tokens = torch.tensor([case["tokens"]])
        logits, features = model(tokens)[0][0], model(tokens, features_only=True)[0][0]
        torch.testing.assert_close(features, torch.tensor(case["features"][-1]), atol=1e-5, rtol=0)
        torch.testing.assert_close(logits[:, :50], torch.tensor(case["logits"]), atol=1e-5, rtol=0)


def test_a_masked_language_model_goes_on_with_its_optimizer(tmp_path: Path) -> None:
    flags = """--task masked_lm --criterion masked_lm --arch roberta_base --encoder-layers 2 --encoder-embed-dim 16
        --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --max-positions 128 --dropout 0 --attention-dropout 0
        --optimizer adam --lr 2e-3 --tokens-per-sample 32 --max-tokens 256 --seed 8 --cpu --disable-validation"""
    runs.train(tmp_path, flags, ["--restore-file", GOLDEN / "roberta.pt"], "--max-update 21", data=DATA)
    theirs, ours = (checkpoint.load(str(path)) for path in (GOLDEN / "roberta.pt", tmp_path / "checkpoint_last.pt"))
    moments = ours["last_optimizer_state"]["state"]
    before = theirs["last_optimizer_state"]["state"].values()
    assert {entry["step"] for entry in moments.values()} == {21} and len(moments) == len(before) == 41
    for (name, after), entry in zip(moments.items(), before, strict=True):
        if not name.endswith("k_proj.bias"):  # attention does not depend on it: its gradient is rounding
            # One update changes a second moment by a thousandth of itself and of the squared
            # gradient.
            pair = torch.stack([after["exp_avg_sq"].flatten(), entry["exp_avg_sq"].flatten()])
            assert torch.corrcoef(pair)[0, 1] > 0.95, name


@pytest.mark.parametrize("infused", [True, False])
def test_a_model_of_the_shortformers_fork_without_a_cache_has_position_infused_attention(
    infused: bool, tmp_path: Path
) -> None:
    golden = GOLDEN.parent / "language_model"
    state = torch.load(golden / "shortformer_stage2.pt", weights_only=False)  # as the fork wrote it
    state["args"].tokens_from_prev = 0
    if not infused:  # as this package stores it, whose models may lack it
        state["args"].position_infused_attention = False
    torch.save(state, tmp_path / "model.pt")
    flags = "--cpu --batch-size 1 --gen-subset test"
    scores = tmp_path / "scores.npz"
    words = runs.words(str(golden / "data-bin"), flags, "--path", tmp_path / "model.pt", "--save-token-scores", scores)
    eval_lm.main(options.parse_args_and_arch(eval_lm.get_eval_lm_parser(), words))
    # The fork's own model with a cache reads its first segment with an empty one.
    expected = np.load(golden / "expected" / "shortformer.test.nonoverlap.npz")["lprobs"][:64]
    got = np.load(scores)["lprobs"][:64]
    assert (np.abs(got - expected).max() < 1e-5) == infused
    bits = [f"{-mean / np.log(2):.4f}" for mean in (expected.mean(dtype=float), got.mean(dtype=float))]
    name = "bits a token of the Shortformer's fork without a cache, first segment"
    assert (row(name) == bits) == infused


def table(folder: Path) -> Path:
    """The data that ``make.py`` makes, prepared here: do lines have an even number of words?"""
    for split, start in (("train", 0), ("valid", 40)):
        lines = (GOLDEN.parent / "language_model" / "text" / "train.txt").read_text().splitlines()
        words = [line.split() for line in lines if len(line.split()) > 12][start : start + 40]
        texts = [line[: 5 + 3 * number % 8] for number, line in enumerate(words)]
        (folder / f"{split}.input0").write_text("".join(" ".join(text) + "\n" for text in texts))
        (folder / f"{split}.label").write_text("".join("even\n" if len(text) % 2 == 0 else "odd\n" for text in texts))
    for column, flags in (("input0", f"--srcdict {DATA}/dict.txt"), ("label", "")):
        words = runs.words("--only-source", flags, "--destdir", folder / "bin" / column)
        words += ["--trainpref", str(folder / f"train.{column}"), "--validpref", str(folder / f"valid.{column}")]
        preprocess.main(preprocess.get_preprocessing_parser().parse_args(words))
    return folder / "bin"


def test_a_classifier_goes_on_and_is_validated_as_in_fairseq(tmp_path: Path) -> None:
    expected = EXPECTED["sentence_prediction"]
    restored = ["--restore-file", GOLDEN / "classifier.pt"]
    log = runs.train(tmp_path / "run", expected["flags"], restored, "--max-epoch 20", data=table(tmp_path))
    for name, places in (("num_updates", 0), ("loss", 3), ("gnorm", 3)):
        np.testing.assert_allclose(
            [line[name] for line in runs.updates(log)],
            [line[name] for line in expected["updates"]],
            atol=0.51 * 10**-places,
        )
    for line, figures in zip(runs.summaries(log, "valid"), expected["valid"], strict=True):
        assert line["loss"] == pytest.approx(figures["loss"], abs=1e-3)
        assert line["accuracy"] == pytest.approx(figures["accuracy"], abs=1e-3)


@torch.no_grad()
def test_roberta_model_gives_the_same_features_and_predictions() -> None:
    roberta, classifier = (
        RobertaModel.from_pretrained(str(GOLDEN), name, str(DATA), bpe=None).eval()
        for name in ("roberta.pt", "classifier.pt")
    )
    for case, prediction in zip(
        EXPECTED["roberta"]["rows"], EXPECTED["sentence_prediction"]["predictions"], strict=True
    ):
        tokens = torch.tensor(case["tokens"])
        for got, layer in zip(roberta.extract_features(tokens, return_all_hiddens=True), case["features"], strict=True):
            torch.testing.assert_close(got[0], torch.tensor(layer), atol=1e-5, rtol=0)
        got = classifier.predict("sentence_classification_head", tokens)
        torch.testing.assert_close(got, torch.tensor(prediction), atol=1e-5, rtol=0)
