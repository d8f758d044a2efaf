"""The Python interface: load, score, generate."""

from __future__ import annotations

import math
import shutil

import naive
import numpy as np
import pytest
import runs
import torch

from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.errors import UserError
from fairseq.hub import LanguageModel

SHORTFORMER = runs.GOLDEN / "shortformer_stage2.pt"


@pytest.fixture(scope="module", params=["shortformer_stage2", "baseline"])
def model(request):
    return LanguageModel.from_pretrained(str(runs.GOLDEN / f"{request.param}.pt"), str(runs.DATA))


def golden(name):
    with np.load(runs.GOLDEN / "expected" / name) as expected:
        return expected["tokens"], expected["lprobs"]


def test_scores_of_a_text_are_those_of_the_original(model):
    name = "shortformer" if model.model.memory_length else "baseline"
    tokens, lprobs = golden(f"{name}.test.nonoverlap.npz")
    text = (runs.GOLDEN / "text" / "test.txt").read_text(encoding="utf-8")
    words, found = model.score(text)
    assert words == [model.dictionary[token] for token in tokens]
    assert found.dtype == torch.float32 and np.abs(found.numpy() - lprobs).max() < 1e-5
    assert model.perplexity(text) == pytest.approx(math.exp(-lprobs.astype(np.float64).mean()), rel=1e-6)


def test_list_of_texts_gives_a_list_of_scores_that_have_nothing_to_do_with_one_another(model):
    texts = ["a b", "= x =\nnothing"]
    both = model.score(texts)
    assert isinstance(both, list)
    for text, (words, lprobs) in zip(texts, both, strict=True):
        alone = model.score(text)
        assert words == alone[0]
        torch.testing.assert_close(lprobs, alone[1], atol=1e-6, rtol=1e-6)  # rows of a matrix product: rounding
    total = torch.cat([lprobs for _, lprobs in both]).double()
    assert model.perplexity(texts) == pytest.approx(math.exp(-total.mean()))


@pytest.mark.parametrize(
    "text, words",
    [
        ("= =", ["=", "=", "</s>"]),
        ("=  \t=\u00a0=", ["=", "=", "=", "</s>"]),
        ("=\n", ["=", "</s>"]),
        ("=\r\n=\r", ["=", "</s>", "=", "</s>"]),
        ("=\n\n=", ["=", "</s>", "</s>", "=", "</s>"]),
        ("", ["</s>"]),
        ("never-seen-word", ["<unk>", "</s>"]),
    ],
)
def test_text_is_split_at_white_space_and_lines_end_in_eos(model, text, words):
    found, lprobs = model.score(text)
    assert found == words and lprobs.shape == (len(words),) and bool((lprobs < 0).all())


def test_unknown_words_of_several_texts_are_announced_once(model, caplog):
    model.score(["unheard-of", "= never-seen", "="])
    (line,) = [record.getMessage() for record in caplog.records if "not in the dictionary" in record.getMessage()]
    assert "unheard-of" in line and "never-seen" in line


def test_perplexity_of_nothing_is_refused(model):
    with pytest.raises(ValueError, match="no text"):
        model.perplexity([])


def test_same_seed_gives_the_same_text(model):
    first, second, third = (model.sample("= dun", max_tokens=80, seed=seed) for seed in (7, 7, 8))
    assert first == second != third
    assert model.sample(max_tokens=80) != model.sample(max_tokens=80)


def test_sample_goes_on_from_the_prompt(model):
    prompt = "= dun =\nunheard-of"
    text = model.sample(prompt, max_tokens=300, seed=1)
    assert text.startswith(("= dun =\n<unk> ", "= dun =\n<unk>\n"))
    rest = text[len("= dun =\n<unk>") :]
    assert rest.count("\n") + len(rest.split()) == 300
    assert model.sample(prompt, max_tokens=0) == "= dun =\n<unk>"
    assert model.sample("= dun =\n", max_tokens=0) == "= dun =\n", "the end of a line is a token"


def test_special_symbols_and_fillers_are_never_sampled(tmp_path):
    words = ["a", "b", "madeupword0000", "madeupword0001"]
    (tmp_path / "dict.txt").write_text("".join(f"{w} {0 if w.startswith('made') else 1}\n" for w in words))
    naive.checkpoint(tmp_path / "checkpoint.pt", 8)
    model = LanguageModel.from_pretrained(tmp_path, tmp_path / "dict.txt")
    text = model.sample(max_tokens=500, seed=1)
    assert set(text.split()) == {"a", "b"} and "\n" in text


def test_segment_can_be_chosen():
    model = LanguageModel.from_pretrained(SHORTFORMER, runs.DATA, overrides={"tokens_per_sample": 256})
    words, lprobs = model.score((runs.GOLDEN / "text" / "test.txt").read_text(encoding="utf-8"))
    tokens, expected = golden("shortformer.test.nonoverlap.npz")
    assert np.abs(lprobs.numpy() - expected)[:64].max() < 1e-5
    assert np.abs(lprobs.numpy() - expected)[64:].max() > 1e-3


@pytest.mark.parametrize("name", ["checkpoint_best.pt", "checkpoint.pt", "checkpoint_last.pt"])
def test_folder_with_a_checkpoint_will_do(tmp_path, name):
    shutil.copy(SHORTFORMER, tmp_path / name)
    model = LanguageModel.from_pretrained(tmp_path, runs.DATA / "dict.txt")
    assert model.tokens_per_sample == 64 and model.model.memory_length == 64


def test_best_checkpoint_of_a_folder_is_taken(tmp_path):
    shutil.copy(SHORTFORMER, tmp_path / "checkpoint_best.pt")
    (tmp_path / "checkpoint_last.pt").write_bytes(b"no checkpoint")
    LanguageModel.from_pretrained(tmp_path, runs.DATA)


def test_mistakes_say_what_is_wrong(tmp_path):
    for checkpoint, data, message in (
        (tmp_path, runs.DATA, "no checkpoint in this folder"),
        (tmp_path / "none.pt", runs.DATA, "file not found"),
        (SHORTFORMER, tmp_path / "nowhere", "folder or file not found"),
        (SHORTFORMER, tmp_path, "dict.txt: file not found"),
    ):
        with pytest.raises(UserError, match=message):
            LanguageModel.from_pretrained(checkpoint, data)
    with pytest.raises(ValueError, match="top_p 2"):
        LanguageModel.from_pretrained(SHORTFORMER, runs.DATA).sample(top_p=2)


def test_training_goes_on_after_scoring_in_the_same_process():
    lengths = {"tokens_per_sample": 37, "tokens_from_prev": 37}
    model = LanguageModel.from_pretrained(SHORTFORMER, runs.DATA, overrides=lengths)
    model.score("= " * 100)
    tokens = torch.from_numpy(IndexedCorpus(str(runs.DATA / "test")).tokens[:74].astype(np.int64)).view(1, 74)
    _, extra = model.model.train()(tokens[:, :37])
    hidden, _ = model.model(tokens[:, 37:], memory=extra["memory"])
    hidden.sum().backward()
    assert all(p.grad is not None for p in model.model.decoder.layers.parameters())
