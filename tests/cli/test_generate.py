"""Texts in batches and by beam search are those found one by one and by hand; fairseq-generate
shows what it made."""

from __future__ import annotations

import functools
import itertools

import pytest
import runs
import torch

from fairseq.errors import UserError
from fairseq.inference import Decoding, continuations, generator_of, stream
from fairseq.inference.decoding import choose
from fairseq.inference.predictor import Predictor
from fairseq.text.dictionary import Dictionary

SHORTFORMER = runs.GOLDEN / "shortformer_stage2.pt"
BASELINE = runs.GOLDEN / "baseline.pt"
VOCABULARY = 12
LENGTH = 6
SMALL = f"--cpu --tokens-per-sample {LENGTH} --seed 5"
TRANSFORMER = "--arch transformer_lm_tiny --decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16"
CUTOFFS = "--adaptive-input-cutoff 8 --adaptive-softmax-cutoff 8"
XL = "--arch transformer_xl_tiny --d-model 16 --n-head 2 --d-inner 16"
KINDS = {
    "transformer": f"{TRANSFORMER} {CUTOFFS}",
    "shortformer": f"{TRANSFORMER} {CUTOFFS} --tokens-from-prev 4",
    "xl": f"{XL} --mem-len 5",
    "xl same length": f"{XL} --mem-len 5 --same-length --cutoffs 6,9 --div-val 2",
    "shaw": f"{XL} --mem-len 5 --position-encoding shaw",
    "absolute": f"{XL} --position-encoding absolute",
    "learned": f"{XL} --position-encoding learned",
}
PROMPTS = [[2, 5], [2, 4, 5, 6, 7, 8, 9, 10, 11, 4, 5, 6, 7, 8], [2], [2, 9, 8], [2, 7, 6, 5, 4, 9, 8, 4]]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    dictionary = Dictionary()
    for word in range(VOCABULARY - 4):
        dictionary.add_symbol(f"w{word}")
    dictionary.save(folder / "dict.txt")
    return folder


@pytest.fixture(scope="module", params=KINDS)
def model(request, data):
    return strong_model(KINDS[request.param], data)


def strong_model(flags, data):
    """A model whose random weights are large enough for its choices to depend on all that it
    reads."""
    built = runs.model_of(flags, SMALL, data=data).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.45, generator=generator)
    return built


@torch.no_grad()
def lprobs_by_hand(model, tokens):
    """The next token's distribution [V] after *tokens*, without a cache: segments with memory, or
    the last window."""
    memory, rest = None, list(tokens)
    while len(rest) > LENGTH:
        if model.memory_length:
            memory = model(torch.tensor([rest[:LENGTH]]), memory=memory)[1]["memory"]
            rest = rest[LENGTH:]
        else:
            rest = rest[LENGTH - LENGTH // 2 :]
    return model.output_layer.log_probs(model(torch.tensor([rest]), memory=memory)[0][0, -1])


def all_texts(model, prompts, how, batch_size, seed=3, **more):
    generators = functools.partial(generator_of, seed)
    found = dict(continuations([model], prompts, how, generators=generators, batch_size=batch_size, **more))
    return [found[number] for number in range(len(prompts))]


def test_next_tokens_distribution_is_that_of_reading_everything_again(model):
    """Rows read in pieces of any size, exchanged, doubled and dropped on the way."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(VOCABULARY, (3, 40), generator=generator)
    predictor, place = Predictor([model], 3, forbidden=[1]), 0
    for size, order in (
        (1, [2, 0, 1]),
        (9, [0, 0, 1, 2]),
        (3, [0, 2, 3]),
        (1, [1, 0]),
        (14, [1, 0]),
        (2, [1]),
        (1, [0]),
    ):
        with torch.inference_mode():
            found = predictor.read(rows[:, place : place + size].tolist(), first=1 if len(rows) > 1 else 0)
            predictor.select_rows(order)
        place += size
        expected = torch.stack([lprobs_by_hand(model, row[:place].tolist()) for row in rows])
        expected[:, 1] = -torch.inf
        assert torch.allclose(found, expected[1:] if len(rows) > 1 else expected, atol=1e-5)
        rows = rows[order]


def test_greedy_text_is_that_of_reading_everything_again_for_each_token(model):
    for prompt, found in zip(PROMPTS, all_texts(model, PROMPTS, Decoding(20, temperature=0), 8), strict=True):
        tokens = list(prompt)
        for _ in range(20):
            tokens.append(int(lprobs_by_hand(model, tokens).argmax()))
        assert found == tokens[len(prompt) :]


@pytest.mark.parametrize(
    "how",
    [Decoding(25, 1.0), Decoding(25, 0.8, top_k=5), Decoding(2, top_p=0.7), Decoding(7, beam=3)],
    ids=["sampling", "top k", "top p", "beam"],
)
def test_text_does_not_depend_on_its_batch(model, how):
    alone = [list(stream([model], p, how, generator=generator_of(3, n))) for n, p in enumerate(PROMPTS)]
    assert len({tuple(text) for text in alone}) > 1
    for batch_size in (1, 2, 9, 64):
        assert all_texts(model, PROMPTS, how, batch_size) == alone


def search_by_hand(model, prompt, tokens, beam):
    """Beam search a text at a time, each read whole for every token."""
    beams = [(0.0, [])]
    for _ in range(tokens):
        longer = []
        for score, text in beams:
            lprobs = lprobs_by_hand(model, [*prompt, *text])
            longer += [(score + float(lprobs[token]), [*text, token]) for token in range(VOCABULARY)]
        beams = sorted(longer, key=lambda item: -item[0])[:beam]
    return beams[0][1]


def test_beam_search_finds_what_a_search_by_hand_finds(model):
    prompts = PROMPTS[:4]
    for found, prompt in zip(all_texts(model, prompts, Decoding(9, beam=3), 8), prompts, strict=True):
        assert found == search_by_hand(model, prompt, 9, 3)


def test_beam_as_wide_as_there_are_texts_finds_the_most_probable_of_all(data):
    model = runs.model_of(KINDS["xl"], SMALL, data=data).eval()
    model.requires_grad_(False)
    texts = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=3)))  # [V³, 3]
    tokens = torch.cat([torch.tensor([[2, 5]]).expand(len(texts), 2), texts], 1)
    lprobs = model.output_layer.log_probs(model(tokens)[0].flatten(0, 1)).unflatten(0, tokens.shape)  # [V³, 5, V]
    scores = lprobs[:, 1:4].gather(2, texts[..., None]).sum((1, 2))
    [found] = all_texts(model, [[2, 5]], Decoding(3, beam=VOCABULARY**2), 1)
    assert found == texts[scores.argmax()].tolist()


def test_beam_of_one_is_greedy_and_a_wider_one_never_worse(model):
    def score(text):
        return sum(float(lprobs_by_hand(model, [2, 5, *text[:i]])[token]) for i, token in enumerate(text))

    greedy, one, wide = (
        list(stream([model], [2, 5], how)) for how in (Decoding(5, 0.0), Decoding(5, 0.0, beam=1), Decoding(5, beam=40))
    )
    assert greedy == one and score(wide) >= score(greedy) - 1e-5


def test_forbidden_tokens_are_in_no_beam(model):
    [text] = all_texts(model, [[2]], Decoding(30, beam=4), 1, forbidden=range(0, VOCABULARY, 2))
    assert len(text) == 30 and all(token % 2 for token in text)


@pytest.mark.parametrize("how", [Decoding(0), Decoding(0, beam=2)])
def test_no_tokens_can_be_asked_for(model, how):
    assert all_texts(model, PROMPTS, how, 2) == [[]] * len(PROMPTS)


def test_choices_never_leave_the_top_k_or_the_nucleus():
    generator = torch.Generator().manual_seed(0)
    lprobs = (torch.randn(500, 50, generator=generator) * 2).log_softmax(-1)
    lprobs[:, 7] = -torch.inf
    chance = torch.rand(500, generator=generator, dtype=torch.float64)
    chance[0], chance[1] = 0.0, 1 - 2.0**-53
    for top_k, top_p in ((3, 1.0), (0, 0.6), (10, 0.5), (0, 1.0)):
        chosen = choose(lprobs, Decoding(1, 1.0, top_k, top_p), chance).tolist()
        for row, token in zip(lprobs.exp().tolist(), chosen, strict=True):
            order = sorted(range(50), key=lambda i: -row[i])[: top_k or 49]
            total, allowed = 0.0, []
            for place in order:
                if total < top_p * sum(row[i] for i in order) - 1e-6:
                    allowed.append(place)
                total += row[place]
            assert token in allowed


def test_seed_prompt_and_sample_each_change_the_draws():
    keys = list(itertools.product((1, 2), (0, 1), (0, 1)))
    draws = [torch.rand(4, generator=generator_of(*key)).tolist() for key in keys]
    assert len({tuple(draw) for draw in draws}) == len(keys)
    assert draws[0] == torch.rand(4, generator=generator_of(*keys[0])).tolist()


def test_ensemble_reads_the_average_of_probabilities(data):
    pair = [runs.model_of(KINDS[kind], SMALL, data=data).eval() for kind in ("xl", "transformer")]
    with torch.inference_mode():
        found = Predictor(pair, 1).read([[2, 5, 6, 7, 8, 9, 10, 5]])[0]
    mean = sum(lprobs_by_hand(model, [2, 5, 6, 7, 8, 9, 10, 5]).double().exp() for model in pair) / 2
    assert torch.allclose(found.double().exp(), mean, atol=1e-6)
    assert list(stream(pair, [2, 5, 6, 7, 8, 9, 10, 5], Decoding(1, temperature=0))) == [int(mean.argmax())]


def test_thousands_of_tokens_cost_one_pass_of_constant_size_each(data):
    model = runs.model_of(KINDS["xl"], SMALL, data=data).eval()
    sizes = []
    attention = model.decoder.layers[0].self_attn
    attention.register_forward_hook(lambda module, args, kwargs, out: sizes.append(args[0].shape[1]), with_kwargs=True)
    assert len(list(stream([model], [2, 5, 6], Decoding(2000)))) == 2000
    assert sizes == [3] + [1] * 1999


def test_memory_has_room_for_the_text_and_not_for_more(data):
    def text(memory, how):
        return all_texts(strong_model(f"{XL} --mem-len {memory}", data), PROMPTS, how, 8)

    for how in (Decoding(30), Decoding(20, beam=2)):
        assert text(2**31 - 1, how) == text(60, how) != text(3, how)


def test_sources_of_randomness_are_made_batch_by_batch(data):
    model, made = runs.model_of(KINDS["xl"], SMALL, data=data).eval(), []
    texts = continuations(
        [model], [[2]] * 6, Decoding(3), generators=lambda n: made.append(n) or generator_of(3, n), batch_size=2
    )
    next(texts)
    assert made == [0, 1]


def test_probabilities_that_are_no_numbers_are_told_without_flags(data):
    model = runs.model_of(KINDS["xl"], SMALL, data=data).eval()
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(UserError, match="probabilities are NaN") as error:
        list(stream([model], [2], Decoding(1)))
    assert "--" not in str(error.value)
