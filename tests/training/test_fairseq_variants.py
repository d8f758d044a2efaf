"""Checkpoints of fairseq are resumed in the middle of an epoch, and scored, as fairseq does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs

from fairseq import checkpoint, options
from fairseq.errors import UserError
from fairseq.hub import LanguageModel
from fairseq_cli import eval_lm

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
    eval_lm.main(options.parse_args_and_arch(options.get_eval_lm_parser(), words))
    scores = np.load(folder / "scores.npz")
    return scores["tokens"], scores["lprobs"]


def test_a_model_with_begin_symbols_is_scored_with_them_and_they_are_not_reported(tmp_path: Path) -> None:
    expected = np.load(GOLDEN / "add_bos.npz")
    tokens, lprobs = scored(tmp_path, "--sample-break-mode eos --skip-invalid-size-inputs-valid-test")
    assert tokens.tolist() == expected["plain_tokens"].tolist()
    np.testing.assert_allclose(lprobs, expected["plain_lprobs"], atol=1e-5)


def test_begin_symbols_and_context_that_goes_on_contradict_one_another(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--add-bos-token: needs independent blocks and excludes --context-window"):
        scored(tmp_path, "--context-window 20")
    with pytest.raises(UserError, match="--add-bos-token: rows of models with memory"):
        runs.train(tmp_path, runs.SHORTFORMER, "--tokens-from-prev 16 --add-bos-token --max-update 1 --no-save")


def test_python_scores_with_begin_symbols_too() -> None:
    model = LanguageModel.from_pretrained(GOLDEN / "add_bos.pt", GOLDEN / "data-bin")
    words = " ".join(model.dictionary[index] for index in range(10, 20))
    begun, plain = model.score(words)[1], None
    model.add_bos_token = False
    plain = model.score(words)[1]
    assert len(begun) == len(plain) == 11 and float((begun - plain).abs().max()) > 0.01
