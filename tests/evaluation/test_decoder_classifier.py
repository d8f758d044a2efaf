"""Fine-tuning of decoders: which state the head reads, and the commands of encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from mistakes import user_error
from sentences import separable, write_dictionary, write_tsv

from fairseq import checkpoint
from fairseq.config import options
from fairseq.evaluation.classifier import SentenceClassifier
from fairseq.hub import LanguageModel
from fairseq.models.loading import stored_parameters, stored_settings
from fairseq.models.sentence import SentenceModel
from fairseq.tasks import setup_task
from fairseq_cli import export_model, finetune
from fairseq_cli.export_model import get_export_parser
from fairseq_cli.finetune import get_finetune_parser

SIZES = "--cpu --optimizer adam --lr 0.001 --lr-scheduler fixed --tokens-per-sample 16"
BANDS = "--adaptive-input-cutoff 8,16 --adaptive-softmax-cutoff 8,16"
DECODERS = {
    "baseline": f"--arch transformer_lm_tiny {BANDS}",
    "cache": f"--arch shortformer_tiny {BANDS}",
    "learned positions": "--arch gpt2_tiny --add-bos-token",
    "memory": "--arch transformer_xl --n-layer 2 --d-model 32 --n-head 2 --d-inner 64 --mem-len 16",
}


def pretrained(folder: Path, kind: str) -> Any:
    """A language model with random weights, and its checkpoint in *folder*."""
    args = runs.arguments(SIZES, DECODERS[kind], data=write_dictionary(folder))
    torch.manual_seed(2)
    task = setup_task(args)
    model = task.build_model(args)
    state = {"args": stored_settings(task.settings.flat, model), "model": stored_parameters(model)}
    checkpoint.save(folder / "checkpoint_best.pt", {**state, "optimizer_history": [], "extra_state": {}})
    return model.eval()


@pytest.mark.parametrize("kind", DECODERS)
def test_the_head_reads_the_state_of_the_last_token_whatever_follows_it(kind: str, tmp_path: Path) -> None:
    model, rows = pretrained(tmp_path, kind), [[2, 5, 6, 7, 8, 2], [2, 9, 2]]
    parameters = stored_parameters(model)
    with torch.no_grad():
        states = torch.cat([model(torch.tensor([row]))[0][:, -1] for row in rows])
        classifier = SentenceModel(model, "head", 3).eval()
        logits, _ = classifier(torch.tensor([rows[0], [*rows[1], 1, 1, 1]]))
        torch.testing.assert_close(logits, classifier.classification_heads["head"](states), atol=1e-5, rtol=1e-4)
    classifier.check_init(parameters, "")
    left = {name.split(".")[1] for name in classifier.upgrade_state_dict(parameters)}
    assert not left & {"adaptive_softmax", "output_projection"}


def test_a_decoder_is_fine_tuned_and_classifies_with_the_commands_of_encoders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrained(tmp_path / "lm", "learned positions")
    state = checkpoint.load(tmp_path / "lm" / "checkpoint_best.pt")
    # As in imported models, whose `arch` has other widths.
    state["args"] |= {"arch": "transformer_lm", "decoder_input_dim": None, "decoder_output_dim": None}
    checkpoint.save(tmp_path / "lm" / "checkpoint_best.pt", state)
    rows = [[text, "good" if label else "bad"] for text, label in separable(5, 60)]
    rows[0][0] += " w12" * 30  # longer than the table of positions
    for name in ("train", "dev"):
        write_tsv(tmp_path / "table" / f"{name}.tsv", ["sentence", "label"], rows)
    words = ["--cpu --log-format none --seeds 1 --lrs 0.005 --max-epoch 5 --batch-size 8 --path", tmp_path / "lm"]
    words = runs.words(tmp_path / "table", *words, "--save-dir", tmp_path / "out")
    report = finetune.main(options.parse_args_and_arch(get_finetune_parser(), words))
    assert report["score"] > 90
    best = tmp_path / "out" / "lr0.005-seed1"
    want = [line.split("\t")[1] for line in (best / "predictions.valid.tsv").read_text().splitlines()[1:]]
    classifier = SentenceClassifier.from_pretrained(best)
    assert [each.label for each in classifier.classify([row[0] for row in rows])] == want
    batch = classifier.task.rows([("w0",), ("w1 " * 40,)], [None] * 2, "").batch(torch.arange(2).numpy())
    assert batch["net_input"]["src_tokens"][:, 0].tolist() == [0, 0], "as with --add-bos-token in pre-training"
    assert batch["net_input"]["src_tokens"].shape == (2, 16)
    with user_error("SentenceModel .*does not predict the next token"):
        LanguageModel.from_pretrained(best)
    with user_error(f"{best}: no class of transformers has this head"):
        export_model.main(
            options.parse_args_and_arch(get_export_parser(), runs.words(best, "--to hf --out", tmp_path / "hf"))
        )
