"""Evaluation by several processes gives the result of one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import noted
import numpy as np
import pytest
import runs
import warm
from mistakes import user_error

from fairseq.config import options
from fairseq.evaluation import pseudo_likelihood
from fairseq_cli import eval_lm, generate, validate
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.generate import get_generation_parser
from fairseq_cli.validate import get_validation_parser

TWO = "--distributed-world-size 2"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of a model without and one with memory."""
    found = {}
    for name, flags in (("lm", runs.BASELINE), ("shortformer", runs.SHORTFORMER)):
        folder = tmp_path_factory.mktemp(name)
        runs.train(folder, flags, "--max-update 2 --disable-validation --no-epoch-checkpoints")
        found[name] = folder / "checkpoint_last.pt"
    return found


def score(model: Path, *flags: Any) -> dict[str, Any]:
    words = runs.words(runs.DATA, "--cpu --path", model, "--max-tokens 64", *flags)
    return eval_lm.main(options.parse_args_and_arch(get_eval_lm_parser(), words))


def results(folder: Path) -> tuple[dict[str, Any], np.ndarray]:
    return json.loads((folder / "results.json").read_text()), np.load(folder / "scores.npz")["lprobs"]


def test_two_processes_give_the_result_of_one(models: dict[str, Path], tmp_path: Path) -> None:
    found = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        flags = ["--results-path", folder, "--save-token-scores", folder / "scores.npz"]
        if folder.name == "one":
            score(models["shortformer"], *flags)
        else:
            words = runs.words(runs.DATA, "--cpu --path", models["shortformer"], "--max-tokens 64", flags, TWO)
            result = warm.command("eval_lm.py", *words)
            assert result.returncode == 0, result.stderr
            assert result.stdout.count("Loss (base 2)") == 1, "one process prints"
        found.append(results(folder))
    (one, scores), (two, others) = found
    np.testing.assert_allclose(others, scores, atol=1e-5)
    assert two["tokens"] == one["tokens"] and two["perplexity"] == pytest.approx(one["perplexity"], rel=1e-6)


def test_two_processes_give_the_pseudo_likelihoods_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, found = noted.corpus(tmp_path), []
    path = runs.saved(tmp_path / "model.pt", noted.ELECTRA, data=data)
    monkeypatch.setattr(pseudo_likelihood, "SORTED_TOKENS", 20)  # several parts; commands are forks of this process
    for out in (tmp_path / "one", tmp_path / "two"):
        words = runs.words(data, "--cpu --gen-subset valid --by-frequency --path", path)
        words += runs.words("--save-token-scores", out / "scores.npz", "--results-path", out)
        if out.name == "one":  # imports what forks of this process then need not
            eval_lm.main(options.parse_args_and_arch(get_eval_lm_parser(), words))
        else:
            result = warm.command("eval_lm.py", *words, TWO)
            assert result.returncode == 0, result.stderr
            assert result.stdout.count("Evaluated") == 1, "one process prints"
        found.append(results(out))
    (one, scores), (two, others) = found
    np.testing.assert_allclose(others, scores, atol=1e-5)
    assert len(scores) > 100 and scores.max() < 0
    assert two["perplexity"] == pytest.approx(one["perplexity"], rel=1e-6)
    assert two["tokens"] == one["tokens"] and len(two["by_frequency"]["bands"]) == len(one["by_frequency"]["bands"])


def test_validation_by_two_processes_is_that_of_one(models: dict[str, Path]) -> None:
    words = runs.words(runs.DATA, "--cpu --valid-subset valid --log-format json --path", models["lm"])
    args = options.parse_args_and_arch(get_validation_parser(), [*words, "--max-tokens", "64"], task_defaults=False)
    alone = validate.main(args)[str(models["lm"])]["valid"]
    result = warm.command("validate.py", *words, "--max-tokens 32", TWO)
    assert result.returncode == 0, result.stderr
    (line,) = runs.records(result.stdout)
    assert line["valid_ntokens"] == alone["ntokens"]
    assert line["valid_loss"] == pytest.approx(alone["loss"], abs=1e-5)


def test_shards_are_parts_of_the_whole(models: dict[str, Path], tmp_path: Path) -> None:
    def scores(*flags: Any) -> np.ndarray:
        score(models["lm"], "--save-token-scores", tmp_path / "scores.npz", *flags)
        return np.load(tmp_path / "scores.npz")["lprobs"]

    parts = [scores(f"--num-shards 3 --shard-id {shard}") for shard in range(3)]
    assert all(len(part) for part in parts)
    np.testing.assert_allclose(np.concatenate(parts), scores(), atol=1e-5)
    words = runs.words(runs.DATA, "--cpu --valid-subset valid --path", models["lm"], "--num-shards 2 --shard-id")
    found = []
    for shard in range(2):
        args = options.parse_args_and_arch(get_validation_parser(), [*words, str(shard)], task_defaults=False)
        found.append(next(iter(validate.main(args).values()))["valid"])
    whole = validate.main(options.parse_args_and_arch(get_validation_parser(), words[:-3], task_defaults=False))
    expected = next(iter(whole.values()))["valid"]
    assert sum(part["ntokens"] for part in found) == expected["ntokens"]
    mean = sum(part["ntokens"] * part["loss"] for part in found) / expected["ntokens"]
    assert mean == pytest.approx(expected["loss"], abs=1e-5)


@pytest.mark.parametrize("how", ["--sampling --num-samples 5", "--results-format fairseq --beam 2"])
def test_generation_by_two_processes_and_by_shards_is_that_of_one(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    (tmp_path / "text").write_text("".join(f"the {word} of the\n" for word in ("and", "in", ".", "a", "to")))
    text = ["--text", tmp_path / "text"] if "fairseq" in how else "--gen-subset valid"
    flags = [text, "--cpu --context-tokens 8 --max-new-tokens 6 --path"]
    words = runs.words(runs.DATA, flags, models["lm"], how)

    def alone(*more: str) -> str:
        generate.main(options.parse_args_and_arch(get_generation_parser(), [*words, *more]))
        return capsys.readouterr().out

    whole = alone()
    result = warm.command("generate.py", *words, TWO)
    assert result.returncode == 0, result.stderr
    assert _without_scores(result.stdout) == _without_scores(whole)
    parts = [_without_scores(alone("--num-shards", "2", "--shard-id", shard)) for shard in "01"]
    assert sorted(line for part in parts for line in part) == sorted(_without_scores(whole))


def _without_scores(text: str) -> list[str]:
    """The lines of *text* without numbers, which depend on the other texts of a batch in their last
    digit."""
    return [re.sub(r"-?\d+\.\d+", "", line) for line in text.splitlines()]


def test_a_shard_that_does_not_exist_is_refused(models: dict[str, Path]) -> None:
    with user_error("--shard-id 2: --num-shards 2 are numbered from 0"):
        score(models["lm"], "--num-shards 2 --shard-id 2")
