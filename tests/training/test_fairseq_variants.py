"""Checkpoints of fairseq are resumed in the middle of an epoch, and scored, as fairseq does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
import runs
import torch
from mistakes import user_error

from fairseq import checkpoint
from fairseq.config import options
from fairseq.hub import LanguageModel
from fairseq_cli import eval_lm
from fairseq_cli.eval_lm import get_eval_lm_parser

GOLDEN = Path(__file__).parents[1] / "golden" / "fairseq_variants"
VARIANTS: dict[str, Any] = json.loads((GOLDEN / "variants.json").read_text())


def flags(name: str) -> str:
    return VARIANTS[name]["flags"]


def resume(name: str, folder: Path, *more: Any) -> list[dict[str, Any]]:
    first = ["--restore-file", GOLDEN / f"{name}.pt", "--disable-validation"]
    return runs.updates(runs.train(folder, flags(name), first, *more, data=GOLDEN / "data-bin"))


@pytest.mark.parametrize("name", VARIANTS)
def test_losses_of_the_next_updates_are_those_of_fairseq(tmp_path: Path, name: str) -> None:
    log = resume(name, tmp_path, "--no-save", f"--max-update {VARIANTS[name]['max_update']}")
    expected = VARIANTS[name]["resumed"]
    assert [line["num_updates"] for line in log] == [line["num_updates"] for line in expected]
    np.testing.assert_allclose(runs.losses(log), [line["loss"] for line in expected], atol=1e-4)


def test_a_run_that_fairseq_began_is_interrupted_and_goes_on_in_fairseqs_order(tmp_path: Path) -> None:
    resume("add_bos", tmp_path, "--max-update 27")
    assert checkpoint.load(str(tmp_path / "checkpoint_last.pt"))["extra_state"]["train_iterator"]["read"]["count"] == 12
    again = runs.train(
        tmp_path, flags("add_bos"), "--disable-validation --no-save --max-update 40", data=GOLDEN / "data-bin"
    )
    expected = [line["loss"] for line in VARIANTS["add_bos"]["resumed"]]
    np.testing.assert_allclose(runs.losses(runs.updates(again)), expected[7:], atol=1e-4)


def scored(folder: Path, *more: Any) -> tuple[np.ndarray, np.ndarray]:
    words = runs.words(str(GOLDEN / "data-bin"), "--cpu --path", GOLDEN / "add_bos.pt", "--batch-size 4", *more)
    words += ["--save-token-scores", str(folder / "scores.npz")]
    eval_lm.main(options.parse_args_and_arch(get_eval_lm_parser(), words))
    scores = np.load(folder / "scores.npz")
    return scores["tokens"], scores["lprobs"]


def test_a_model_with_begin_symbols_is_scored_with_them_and_they_are_not_reported(tmp_path: Path) -> None:
    expected = np.load(GOLDEN / "add_bos.npz")
    tokens, lprobs = scored(tmp_path, "--sample-break-mode eos --skip-invalid-size-inputs-valid-test")
    assert tokens.tolist() == expected["plain_tokens"].tolist()
    np.testing.assert_allclose(lprobs, expected["plain_lprobs"], atol=1e-5)


def test_begin_symbols_and_context_that_goes_on_contradict_one_another(tmp_path: Path) -> None:
    with user_error("--context-window 20: with --add-bos-token needs --sample-break-mode none"):
        scored(tmp_path, "--context-window 20")
    with user_error("--add-bos-token: rows of models with memory"):
        runs.train(tmp_path, runs.SHORTFORMER, "--tokens-from-prev 16 --add-bos-token --max-update 1 --no-save")


SMALL = """--arch transformer_lm --decoder-layers 1 --decoder-embed-dim 24 --decoder-ffn-embed-dim 24
    --decoder-attention-heads 2 --tokens-per-sample 16 --max-tokens 64 --cpu --criterion cross_entropy"""


def former_or_new(folder: Path, version: str, **settings: Any) -> tuple[Path, naive.NaiveLM]:
    """A random checkpoint of ``transformer_lm`` as *version* of fairseq writes it, with its
    defaults."""
    defaults = {"decoder_normalize_before": version < "0.12"}
    defaults |= dict.fromkeys(("decoder_input_dim", "decoder_output_dim"), 24 if version < "0.12" else 512)
    sizes = {"decoder_layers": 1, "decoder_embed_dim": 24, "decoder_ffn_embed_dim": 24}
    path = folder / f"{version}.pt"
    args, parameters = naive.checkpoint(path, 1200, **defaults | sizes | settings)
    if version >= "0.12":
        state = torch.load(path, weights_only=False)
        state["cfg"] = {"model": {**vars(state.pop("args")), "_name": "transformer_lm"}, "task": "language_modeling"}
        torch.save({**state, "args": None}, path)
    return path, naive.NaiveLM(args, parameters)


@pytest.mark.parametrize("version", ["0.10.2", "0.12"])
def test_transformer_lm_of_either_version_is_scored_and_goes_on_under_the_same_flags(
    version: str, tmp_path: Path
) -> None:
    path, reference = former_or_new(tmp_path, version)
    model = LanguageModel.from_pretrained(path, GOLDEN / "data-bin")
    ids = [10, 11, 12, 13, 14, 15]
    expected = reference.score(np.array([*ids, 2]), 16)
    np.testing.assert_allclose(model.score(" ".join(model.dictionary[i] for i in ids))[1], expected, atol=1e-4)
    for number, start in enumerate(("--reset-optimizer --restore-file", "--finetune-from-model")):
        folder = tmp_path / str(number)
        flags = [
            "--lr 1e-9 --optimizer sgd --max-update 1 --disable-validation --reset-dataloader --reset-meters",
            start,
        ]
        runs.train(folder, SMALL, *flags, path, data=GOLDEN / "data-bin")
        state = checkpoint.load(str(folder / "checkpoint_last.pt"))
        assert state["args"]["decoder_normalize_before"] is (version < "0.12")
        weight = reference.state["decoder.embed_tokens.weight"].float()
        torch.testing.assert_close(state["model"]["decoder.embed_tokens.weight"], weight, rtol=0, atol=1e-6)


def test_flags_that_contradict_a_checkpoint_are_still_refused(tmp_path: Path) -> None:
    path, _ = former_or_new(tmp_path, "0.12")
    with user_error("--decoder-normalize-before True: .* was trained with False"):
        runs.train(tmp_path, SMALL, "--decoder-normalize-before --max-update 1 --restore-file", path)


def test_python_scores_with_begin_symbols_too() -> None:
    model = LanguageModel.from_pretrained(GOLDEN / "add_bos.pt", GOLDEN / "data-bin")
    words = " ".join(model.dictionary[index] for index in range(10, 20))
    begun, plain = model.score(words)[1], None
    model.add_bos_token = False
    plain = model.score(words)[1]
    assert len(begun) == len(plain) == 11 and float((begun - plain).abs().max()) > 0.01
