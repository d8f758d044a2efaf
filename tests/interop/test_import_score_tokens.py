"""Tokens are scored by their ids, with the segments and the memory asked for; what cannot be is
refused."""

from __future__ import annotations

import naive_xl
import numpy as np
import pytest
import runs
import torch
from imports import SMALL, authors, saved, some_tokens

from fairseq.hub import LanguageModel


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("model")
    path, _ = saved(folder, {**SMALL, "same_length": True})
    return LanguageModel.from_pretrained(authors(path, folder / "out", "--config", folder / "config.json"))


NO_LENGTHS = [0, -1, 5.5, 4.0, "5", None, True, torch.tensor(5), 10**30]


def test_rows_have_nothing_to_do_with_one_another(model):
    tokens = some_tokens(rows=3)
    together = model.score_tokens(tokens, 4, 9)
    for row in range(3):
        assert torch.allclose(model.score_tokens(tokens[row : row + 1], 4, 9)[0], together[row], atol=1e-5)


def test_scoring_leaves_the_model_as_it_was(model):
    tokens = some_tokens()
    before = model.score_tokens(tokens, 5, 6)
    assert model.score_tokens(tokens, 5, 2).sub(before).abs().max() > 1e-3
    assert model.model.memory_length == 6 and torch.equal(model.score_tokens(tokens, 5, 6), before)


@pytest.mark.parametrize(
    "tokens, segment, memory, reason",
    [
        (some_tokens()[0], 4, 4, "expected int64"),
        (some_tokens()[:, :1], 4, 4, "expected int64"),
        (some_tokens()[:0], 4, 4, "expected int64"),
        (some_tokens().float(), 4, 4, "expected int64"),
        (some_tokens(words=41) + 1, 4, 4, "ids go from 0 to 39"),
        (some_tokens() - 5, 4, 4, "ids go from 0 to 39"),
        (some_tokens().int(), 4, 4, "tokens .* torch.int32: expected int64"),
        (some_tokens().tolist(), 4, 4, "tokens: expected a tensor, int64 .*, found list"),
        *((some_tokens(), length, 4, "segment_length .*: expected a whole number from 1 to") for length in NO_LENGTHS),
        *(
            (some_tokens(), 4, length, "memory_length .*: expected a whole number from 0 to")
            for length in NO_LENGTHS[1:]
        ),
        (some_tokens(), 4, 0, "same_length needs memory"),
    ],
)
def test_tokens_and_lengths_that_cannot_be_are_refused(model, tokens, segment, memory, reason):
    with pytest.raises(ValueError, match=reason):
        model.score_tokens(tokens, segment, memory)


def test_lengths_may_be_numpys_whole_numbers(model):
    tokens = some_tokens()
    assert torch.equal(model.score_tokens(tokens, np.int64(5), np.int32(6)), model.score_tokens(tokens, 5, 6))


def test_memory_is_not_asked_of_a_model_without(tmp_path):
    path, _ = saved(tmp_path, {**SMALL, "attn_type": 2, "mem_len": 0})
    model = LanguageModel.from_pretrained(authors(path, tmp_path / "out", "--config", tmp_path / "config.json"))
    with pytest.raises(ValueError, match="the model has no memory"):
        model.score_tokens(some_tokens(), 5, 5)


@pytest.mark.parametrize("attn_type", [0, 1])
def test_memory_may_be_given_to_a_model_that_was_trained_without(attn_type, tmp_path):
    config = {**SMALL, "attn_type": attn_type, "mem_len": 0}
    path, state = saved(tmp_path, config)
    model = LanguageModel.from_pretrained(authors(path, tmp_path / "out", "--config", tmp_path / "config.json"))
    tokens = some_tokens()
    for segment, memory in [(5, 6), (5, 0), (3, 11)]:
        expected = naive_xl.nll(state, config, tokens.numpy(), segment, memory)
        assert np.abs(model.score_tokens(tokens, segment, memory).numpy() - expected).max() < 2e-5


def test_shortformers_memory_is_read_by_ids_as_its_original_reads_it():
    with np.load(runs.GOLDEN / "expected" / "shortformer.test.nonoverlap.npz") as expected:
        tokens, lprobs = expected["tokens"], expected["lprobs"]
    model = LanguageModel.from_pretrained(runs.GOLDEN / "shortformer_stage2.pt", runs.DATA)
    row = torch.from_numpy(np.concatenate([[2], tokens]).astype(np.int64))[None]
    assert np.abs(model.score_tokens(row, 64, 64)[0].numpy() + lprobs).max() < 1e-5
    assert np.abs(model.score_tokens(row, 64, 32)[0].numpy() + lprobs).max() > 1e-2
