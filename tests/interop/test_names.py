"""The names that plug-ins and scripts written for fairseq import, and what they do."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest
import runs
import torch

import fairseq
from fairseq.errors import UserError


def table() -> dict[str, list[tuple[str, str]]]:
    """Modules and names of fairseq 0.12.2: those that are here, and the others by the reason."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for line in (runs.GOLDEN.parent / "fairseq_0_12" / "names.txt").read_text().splitlines():
        if line.startswith("# "):
            section = sections.setdefault(line[2:], [])
            continue
        module, _, found = line.partition(": ")
        section += [(f"fairseq.{module}", name) for name in found.split()]
    return sections


def resolves(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def test_names_of_fairseq_resolve_or_are_listed_with_a_reason() -> None:
    here = table()["here"]
    assert [one for one in here if not resolves(*one)] == [] and len(here) > 340
    documented = (runs.ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    for reason, missing in list(table().items())[1:]:
        assert reason in documented and [one for one in missing if resolves(*one)] == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    runs.train(folder, runs.SHORT, "--disable-validation")
    return folder


def test_checkpoint_utils_load_models_settings_and_task(trained: Path) -> None:
    from fairseq import checkpoint_utils
    from fairseq.logging import progress_bar
    from fairseq.options import get_validation_parser, parse_args_and_arch

    path = str(trained / "checkpoint_last.pt")
    words = [str(runs.DATA), "--path", path, "--task", "language_modeling", "--max-tokens", "64", "--cpu"]
    # Scripts override a checkpoint's settings by the flags of their command line.
    options = vars(parse_args_and_arch(get_validation_parser(), words, suppress_defaults=True))
    assert options.keys() == {"data", "path", "task", "max_tokens", "cpu"}
    models, args, task = checkpoint_utils.load_model_ensemble_and_task([path], arg_overrides=options)
    assert args.arch == "transformer_lm_tiny" and args.dataset.max_tokens == 64
    assert args.distributed_training.distributed_world_size >= 1
    assert len(task.source_dictionary) == models[0].decoder.embed_tokens.bounds[-1]
    assert len(list(progress_bar.progress_bar(range(3), log_interval=1, default_log_format="none"))) == 3
    with progress_bar.build_progress_bar(argparse.Namespace(no_progress_bar=True), range(3), prefix="a") as bar:
        assert list(bar) == [0, 1, 2]
    assert checkpoint_utils.load_model_ensemble([path], task=task)[0][0].training is False
    state = checkpoint_utils.load_checkpoint_to_cpu(path, {"dropout": 0.25})
    assert state["args"].dropout == state["cfg"]["model"].dropout == state["cfg"].model["dropout"] == 0.25
    assert state["cfg"].model._name == "transformer_lm_tiny" and state["cfg"].criterion._name == "adaptive_loss"
    task = fairseq.tasks.setup_task(state["cfg"].task)
    assert task.build_model(state["cfg"].model).load_state_dict(state["model"], strict=False).missing_keys == []
    assert checkpoint_utils.checkpoint_paths(str(trained)) == []
    assert checkpoint_utils.checkpoint_paths(str(trained), r"checkpoint_last\.pt") == [path]


def test_from_pretrained_scores_and_samples_as_the_hub_did(trained: Path) -> None:
    from fairseq.hub import LanguageModel
    from fairseq.models.transformer_lm import TransformerLanguageModel

    lm = TransformerLanguageModel.from_pretrained(str(trained), "checkpoint_last.pt", str(runs.DATA))
    own = LanguageModel.from_pretrained(trained / "checkpoint_last.pt", runs.DATA)
    text = "the tower is old ."
    scored = lm.eval().score(text)
    torch.testing.assert_close(scored["positional_scores"], own.score(text)[1][:-1])  # fairseq's has no </s>
    word = lm.task.source_dictionary[9]
    assert lm.decode(lm.encode(word)) == word and len(scored["tokens"]) == len(scored["positional_scores"])
    drawn = [lm.sample(text, sampling=True, sampling_topk=5, max_len_b=9, seed=seed) for seed in (1, 1, 2, 3)]
    assert (
        drawn[0] == drawn[1]
        and len(set(drawn)) > 1
        and all(line.startswith(lm.decode(lm.encode(text))) for line in drawn)
    )
    found = lm.generate(lm.binarize(text), beam=3, max_len_b=8)
    assert (
        len(found) == 3 and [float(one["score"]) for one in found] == sorted(float(one["score"]) for one in found)[::-1]
    )
    torch.testing.assert_close(found[0]["positional_scores"][:5], scored["positional_scores"])
    assert lm.sample(text, beam=3, max_len_b=8) == lm.decode(found[0]["tokens"])
    from fairseq.sequence_scorer import SequenceScorer

    tokens = lm.encode(text)[None]
    sample = {"net_input": {"src_tokens": tokens.roll(1)}, "target": tokens}
    [[hypothesis]] = SequenceScorer(lm.task.target_dictionary).generate(lm.models, sample)
    torch.testing.assert_close(hypothesis["positional_scores"][:-1], scored["positional_scores"])
    [[cut]] = lm.generate([lm.binarize(text)], max_len_b=2, beam=1)
    assert cut["tokens"].tolist() == [*lm.binarize(text)[:2].tolist(), lm.task.dictionary.eos()]
    with pytest.raises(UserError, match="bpe anything: unknown; choose from"):
        TransformerLanguageModel.from_pretrained(str(trained), "checkpoint_last.pt", str(runs.DATA), bpe="anything")
    with pytest.raises(UserError, match="models are not downloaded"):
        TransformerLanguageModel.from_pretrained("transformer_lm.wmt19.en")


def test_hubconf_offers_language_models(trained: Path) -> None:
    lm: Any = torch.hub.load(
        str(runs.ROOT), "language_model", trained / "checkpoint_last.pt", runs.DATA, source="local"
    )
    assert lm.perplexity("the") > 1


def test_a_package_has_the_modules_that_it_once_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    models = importlib.import_module("fairseq.models")
    monkeypatch.delattr(models, "transformer_lm", raising=False)  # of a test that has imported it
    assert models.transformer_lm.__name__ == "fairseq.models.transformer_lm" and not hasattr(models, "nothing")
