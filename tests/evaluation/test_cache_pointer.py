"""The pointer over a cache: a distribution, as a naive one gives it, over the text in order."""

from __future__ import annotations

import json
import math

import naive
import numpy as np
import pytest
import runs
import torch
from evaluations import evaluate
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import user_error

from fairseq.evaluation.cache_pointer import SHARPNESS, CachePointer, Pointer, fitted


def random_text(length, words, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(length, 5, generator=generator)
    return hidden, torch.randint(words, (length,), generator=generator)


@given(length=st.integers(1, 30), states=st.integers(1, 12), cuts=st.sets(st.integers(1, 29)), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_probabilities_are_those_of_the_formula_however_the_text_is_cut(length, states, cuts, seed):
    hidden, tokens = random_text(length, 4, seed)
    cache, sharpness = CachePointer(states, (1.0, 7.0)), (1.0, 7.0)
    ends = [0, *sorted(cut for cut in cuts if cut < length), length]
    parts = [cache(hidden[a:b], tokens[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
    expected = [
        [naive.pointed(hidden, tokens, t, states, each, int(tokens[t])) for t in range(length)] for each in sharpness
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), torch.tensor(expected), rtol=1e-4, atol=1e-6)
    assert len(cache.keys) == len(cache.tokens) == min(length, states)


def test_the_mixture_is_a_distribution():
    words, (hidden, tokens) = 6, random_text(20, 6, 1)
    model = torch.randn(words, generator=torch.Generator().manual_seed(2)).log_softmax(0)
    pointer = Pointer(8, 5.0, 0.3)
    for read in (0, 1, 19):
        of_words = []
        for word in range(words):
            cache = CachePointer(pointer.states, [pointer.sharpness])
            if read:
                cache(hidden[:read], tokens[:read])
            pointed = cache(hidden[read : read + 1], torch.tensor([word]))[0]
            of_words.append(pointer.mixed(model[word : word + 1], pointed).exp())
        assert float(torch.cat(of_words).sum()) == pytest.approx(1, abs=1e-5)


def test_the_fit_has_the_largest_likelihood():
    hidden, _ = random_text(400, 4, 3)
    # Words that follow similar states: the sign of a channel tells which two.
    tokens = 2 * (hidden[:, 0] > 0) + (hidden[:, 1] > 0).long()
    lprobs = torch.full((400,), math.log(0.25))
    pointed = CachePointer(100, SHARPNESS)(hidden, tokens)
    best = fitted(100, lprobs, pointed)

    def likelihood(sharpness, weight):
        return float(Pointer(100, sharpness, weight).mixed(lprobs, pointed[SHARPNESS.index(sharpness)]).mean())

    reached = likelihood(best.sharpness, best.weight)
    assert reached > math.log(0.25) + 0.1
    assert all(likelihood(s, w) <= reached + 1e-5 for s in SHARPNESS for w in np.linspace(0, 0.99, 34))


def test_a_fit_on_the_validation_split_can_be_given_for_another(tmp_path):
    path, flags = runs.GOLDEN / "shortformer_stage2.pt", "--sample-break-mode none --cpu --cache-pointer 20"
    first, again, plain = tmp_path / "first", tmp_path / "again", tmp_path / "plain"
    evaluate("--path", path, flags, "--results-path", first)
    sharpness, weight = json.loads((first / "results.json").read_text())["settings"]["pointer"]
    evaluate("--path", path, flags, f"--pointer {sharpness},{weight} --results-path", again)
    evaluate("--path", path, "--sample-break-mode none --cpu --results-path", plain)
    losses = [json.loads((each / "results.json").read_text())["loss_base2"] for each in (first, again, plain)]
    assert sharpness in SHARPNESS and 0 <= weight < 1
    assert losses[0] == pytest.approx(losses[1], abs=1e-9) and losses[0] != losses[2]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--cache-pointer 8 --pointer 20", "--pointer: two numbers"),
        ("--pointer 20,0.2", "--pointer: two numbers"),
        ("--cache-pointer 8 --num-shards 2", "--cache-pointer: reads one text in order"),
        ("--cache-pointer 8 --sample-break-mode eos", "--sample-break-mode eos: --cache-pointer reads one text"),
        ("--cache-pointer 8 --batch-size 2", "--batch-size 2: with a memory its rows are parts of the text"),
        ("--cache-pointer 8 --text README.md", "--cache-pointer: with --text needs --pointer"),
    ],
)
def test_what_excludes_the_pointer_is_one_line(flags, message):
    with user_error(message):
        evaluate("--path", runs.GOLDEN / "shortformer_stage2.pt", "--cpu", flags)
