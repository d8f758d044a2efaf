"""Validations with notes tell the losses of rare words, and of rows with and without them."""

from __future__ import annotations

import math

import noted
import pytest
import runs
import torch
import torch.nn.functional as F
from mistakes import user_error

from fairseq.config import options
from fairseq.training.validation import evaluate
from fairseq_cli import validate

LM = """--arch transformer_xl_tiny --criterion cross_entropy --cpu --tokens-per-sample 8 --max-tokens 48
    --required-batch-size-multiple 1 --lr 0.05 --seed 3 --notes --mem-len 0 --dropout 0 --log-format json"""
SMOOTHED = LM.replace("cross_entropy", "label_smoothed_cross_entropy --label-smoothing 0.2")
EOS = "--sample-break-mode eos"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return noted.corpus(tmp_path_factory.mktemp("noted"))


def naive(losses, real, rare):
    """Mean losses in bits, one token after the other."""
    found = {"rare_loss": [], "near_loss": [], "far_loss": []}
    for row in range(losses.size(0)):
        near = bool(rare[row].any())
        for t in range(losses.size(1)):
            if real[row, t]:
                found["near_loss" if near else "far_loss"].append(float(losses[row, t]) / math.log(2))
                if rare[row, t]:
                    found["rare_loss"].append(float(losses[row, t]) / math.log(2))
    return found


@pytest.mark.parametrize("flags", [noted.TNF_BERT, noted.TNF_ELECTRA, LM, SMOOTHED])
def test_figures_are_means_over_the_tokens_they_name(flags, data):
    trainer = noted.trainer(data, flags, EOS)
    batches = list(trainer.task.iterator("valid", trainer.model, trainer.criterion, training=False))
    totals: dict[str, list[float]] = {}
    trainer.model.eval()
    for sample in batches:
        torch.manual_seed(4)
        with torch.no_grad():
            output, extra = trainer.model(**sample["net_input"])
        output, target = output.detach(), sample["target"]
        if "replaced" in extra:
            losses = F.binary_cross_entropy_with_logits(output, extra["replaced"].float(), reduction="none")
            real = sample["net_input"]["src_tokens"] != trainer.task.dictionary.pad()
        else:
            lprobs = trainer.model.output_layer.log_probs(output)
            losses = -lprobs.gather(2, target.unsqueeze(2)).squeeze(2).detach()
            real = target != trainer.task.dictionary.pad()
        for name, values in naive(losses, real, sample["subsets"]["rare"]).items():
            totals.setdefault(name, []).extend(values)
    torch.manual_seed(4)
    figures = evaluate(trainer, batches).report(trainer.task.figures(trainer.criterion))
    for name, values in totals.items():
        assert values
        assert figures[name] == pytest.approx(sum(values) / len(values), rel=1e-4), name


def test_marks_are_on_the_tokens_of_rare_words(data):
    trainer = noted.trainer(data, noted.TNF_BERT, EOS)
    for sample in trainer.task.iterator("valid", trainer.model, trainer.criterion, training=False):
        expected = torch.zeros_like(sample["subsets"]["rare"])
        for row, first, end, _ in sample["rare_words"].tolist():
            expected[row, first:end] = True
        assert torch.equal(sample["subsets"]["rare"], expected)


def figures_of(file, data, *flags):
    words = runs.words(data, "--path", file, "--valid-subset valid --cpu --max-tokens 96", *flags)
    parser = validate.get_validation_parser()
    return validate.main(options.parse_args_and_arch(parser, words, task_defaults=False))[str(file)]["valid"]


@pytest.mark.parametrize("model", [f"{noted.TNF_BERT} {EOS}", noted.CAUSAL + " --notes"])
def test_validation_with_and_without_notes(model, data, tmp_path):
    runs.train(tmp_path, model, "--max-update 8 --no-epoch-checkpoints", data=data)
    file = tmp_path / "checkpoint_last.pt"
    kept, dropped = figures_of(file, data, "--keep-notes"), figures_of(file, data)
    assert kept["rare_loss"] > 0 and "rare_loss" not in dropped
    assert kept["loss"] != dropped["loss"]
    marked = figures_of(file, data, "--rare-words")
    assert marked["loss"] == pytest.approx(dropped["loss"]) and marked["rare_loss"] > 0


@pytest.mark.parametrize("model", [noted.BERT, noted.CAUSAL])
def test_rare_words_are_measured_in_a_model_that_never_had_notes(model, data, tmp_path):
    runs.train(tmp_path, model, "--max-update 2 --no-epoch-checkpoints", data=data)
    file = tmp_path / "checkpoint_last.pt"
    plain, marked = figures_of(file, data), figures_of(file, data, "--rare-words")
    assert marked["loss"] == pytest.approx(plain["loss"]) and marked["rare_loss"] > 0 and "rare_loss" not in plain
    assert marked["note_1_loss"] > 0 and "permuted_note_1_loss" not in marked
    assert marked["hidden_note_1_loss"] != marked["note_1_loss"]


def test_keeping_the_notes_of_a_model_without_notes_is_an_error(tmp_path):
    runs.train(tmp_path, runs.BASELINE, "--max-update 1 --no-epoch-checkpoints")
    words = runs.words(runs.DATA, "--path", tmp_path / "checkpoint_last.pt", "--valid-subset valid --cpu --keep-notes")
    with user_error("--keep-notes: .* has no notes"):
        validate.main(options.parse_args_and_arch(validate.get_validation_parser(), words, task_defaults=False))
