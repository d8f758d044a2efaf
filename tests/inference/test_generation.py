"""Sampling: tokens follow the model's distribution, at a constant cost, past the end of the
window."""

from __future__ import annotations

import naive
import pytest
import runs
import torch

from fairseq.hub import LanguageModel
from fairseq.inference import sample
from fairseq.inference.decoding import Decoding, choose
from fairseq.inference.loading import load_models
from fairseq.models import BaseFairseqModel
from fairseq.text.dictionary import Dictionary

VOCABULARY, LENGTH = 24, 8


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A random model and a naive one."""
    folder = tmp_path_factory.mktemp("models")
    dictionary = Dictionary()
    for word in range(VOCABULARY - 4):
        dictionary.add_symbol(f"w{word}")
    dictionary.save(folder / "dict.txt")

    def make(**kind):
        args, state = naive.checkpoint(folder / "c.pt", VOCABULARY, tokens_per_sample=LENGTH, **kind)
        return load_models([folder / "c.pt"], folder / "dict.txt")[0][0], naive.NaiveLM(args, state)

    return make


def greedy_by_hand(reference, prompt, count):
    """The most probable tokens, by the naive forward pass over all that is in the window."""
    cache, segment, tokens, found = None, [], list(prompt), []
    memory = reference.args.get("tokens_from_prev", 0)
    for _ in range(count):
        for token in tokens:
            if len(segment) == LENGTH:
                if memory:
                    cache, segment = reference.hidden(torch.tensor(segment), cache)[1], []
                else:
                    segment = segment[LENGTH // 2 :]
            segment.append(token)
        hidden, _ = reference.hidden(torch.tensor(segment), cache)
        tokens = [int(reference.log_probs(hidden[-1:]).argmax())]
        found += tokens
    return found


@pytest.mark.parametrize("kind", [{}, {"tokens_from_prev": 8}, {"tokens_from_prev": 5}, {"decoder_learned_pos": True}])
@pytest.mark.parametrize("prompt", [[2], [2, 7, 9], [2, *range(4, 24)]])
def test_greedy_text_is_that_of_a_naive_forward_pass(load, kind, prompt):
    model, reference = load(**kind)
    assert list(sample(model, prompt, 30, temperature=0)) == greedy_by_hand(reference, prompt, 30)


def test_tokens_come_as_they_are_chosen_and_one_token_is_read_for_each(load):
    model, _ = load(tokens_from_prev=8)
    read = []
    hook = model.decoder.register_forward_pre_hook(lambda _, args: read.append(tuple(args[0].shape)))
    stream = sample(model, [2, 5, 6], 100, generator=torch.Generator().manual_seed(1))
    next(stream)
    assert read == [(1, 3)]
    next(stream)
    assert read == [(1, 3), (1, 1)]
    assert len(list(stream)) == 98
    hook.remove()
    assert read[1:] == [(1, 1)] * 99


def test_inference_mode_ends_between_two_tokens(load):
    model, _ = load(tokens_from_prev=8)
    stream = sample(model, [2], 3)
    next(stream)
    assert not torch.is_inference_mode_enabled()


def test_same_generator_seed_gives_the_same_tokens(load):
    model, _ = load()
    first, second, third = (list(sample(model, [2], 40, generator=torch.Generator().manual_seed(s))) for s in (1, 1, 2))
    assert first == second != third


def test_forbidden_tokens_are_never_chosen(load):
    model, _ = load()
    forbidden = list(range(0, VOCABULARY, 2))
    tokens = list(sample(model, [2], 200, forbidden=forbidden, generator=torch.Generator().manual_seed(1)))
    assert len(tokens) == 200 and not set(tokens) & set(forbidden)


LPROBS = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log()


def shares(count=4000, **how):
    chance = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = choose(LPROBS.expand(count, -1), Decoding(**how), chance).tolist()
    return [tokens.count(token) / count for token in range(len(LPROBS))]


@pytest.mark.parametrize(
    "how, expected",
    [
        ({"temperature": 1.0, "top_k": 0, "top_p": 1.0}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"temperature": 1.0, "top_k": 2, "top_p": 1.0}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"temperature": 1.0, "top_k": 0, "top_p": 0.7}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"temperature": 1.0, "top_k": 0, "top_p": 0.75}, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]),
        ({"temperature": 1.0, "top_k": 0, "top_p": 1e-9}, [0, 1, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 99, "top_p": 1.0}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        (
            {"temperature": 0.5, "top_k": 0, "top_p": 1.0},
            [0.01 / 0.285, 0.16 / 0.285, 0.0025 / 0.285, 0.09 / 0.285, 0.0225 / 0.285],
        ),
        ({"temperature": 0, "top_k": 0, "top_p": 1.0}, [0, 1, 0, 0, 0]),
    ],
)
def test_choices_follow_the_distribution(how, expected):
    found = shares(**how)
    assert found == pytest.approx(expected, abs=0.03)
    assert [share == 0 for share in found] == [share == 0 for share in expected]


@pytest.mark.parametrize("top", [{}, {"top_k": 3}, {"top_p": 0.999}])
@pytest.mark.parametrize("temperature", [1e-12, 1e-40, 1e-300, 5e-324])
def test_next_to_no_temperature_is_the_most_probable_token(temperature, top):
    lprobs = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.24, 0.25, 0.25 + 1e-6, 0.26 - 1e-6]]).log()
    lprobs[:, 3] = -torch.inf
    for chance in (0.0, 0.5, 1 - 2.0**-53):
        chances = torch.full((2,), chance, dtype=torch.float64)
        assert choose(lprobs, Decoding(1, temperature, **top), chances).tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [1e20, 1e39, 1e300])
def test_boundless_temperature_makes_all_tokens_alike_but_those_that_have_no_probability(temperature):
    lprobs = LPROBS.clone()
    lprobs[3] = -torch.inf
    chance = torch.linspace(0, 1 - 2.0**-53, 401, dtype=torch.float64)
    for top_k, expected in ((0, [0, 1, 2, 4]), (3, [0, 1, 4])):
        tokens = choose(lprobs.expand(401, -1), Decoding(1, temperature, top_k), chance).tolist()
        assert sorted(set(tokens)) == expected
        assert all(abs(tokens.count(token) - 401 / len(expected)) < 2 for token in expected)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"max_tokens": -1},
        {"prompt_tokens": []},
    ],
)
def test_numbers_out_of_range_are_refused(load, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        list(sample(load()[0], **{"prompt_tokens": [2], "max_tokens": 1, **wrong}))


def test_seed_out_of_range_is_named():
    model = LanguageModel.from_pretrained(runs.GOLDEN / "baseline.pt", runs.DATA)
    with pytest.raises(ValueError, match="seed -1: must be at least 0"):
        model.sample("a", 1, seed=-1)


def test_model_without_cache_is_refused():
    with pytest.raises(ValueError, match="no key-value cache"):
        list(sample(BaseFairseqModel(), [2], 1))
