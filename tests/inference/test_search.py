"""Texts of all searches are those found by hand without a cache, alone and in batches."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from torch import Tensor

from fairseq.errors import UserError
from fairseq.inference import Search, generate, generator_of, stream
from fairseq.inference.reader import Predictor, Reader
from fairseq.inference.search import choose
from fairseq.models import BaseFairseqModel
from fairseq.models.transformer_xl_settings import BY_DISTANCE
from fairseq.text.dictionary import Dictionary

VOCABULARY, LENGTH, PAD, EOS = 12, 6, 1, 2
SMALL = f"--cpu --tokens-per-sample {LENGTH} --seed 5"
TRANSFORMER = "--arch transformer_lm_tiny --decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16"
CUTOFFS = "--adaptive-input-cutoff 8 --adaptive-softmax-cutoff 8"
XL = "--arch transformer_xl_tiny --d-model 16 --n-head 2 --d-inner 16"
KINDS = {
    "transformer": f"{TRANSFORMER} {CUTOFFS}",
    "shortformer": f"{TRANSFORMER} {CUTOFFS} --tokens-from-prev 4",
    "shifts and notes": f"{TRANSFORMER} {CUTOFFS} --token-shift 2 --ngram-notes 20 --word-notes 30",
    "xl": f"{XL} --mem-len 5",
    "xl same length": f"{XL} --mem-len 5 --same-length --cutoffs 6,9 --div-val 2",
    "shaw": f"{XL} --mem-len 5 --position-encoding shaw",
    "absolute": f"{XL} --position-encoding absolute",
    "learned": f"{XL} --position-encoding learned",
}
PROMPTS = [[2, 5], [2, 4, 5, 6, 7, 8, 9, 10, 11, 4, 5, 6, 7, 8], [2], [2, 9, 8], [2, 7, 6, 5, 4, 9, 8, 4]]
BEAM, GREEDY = Search(7, temperature=0, beam=3), Search(13, temperature=0)
HYPOTHESES = Search(8, temperature=0, beam=3, eos=EOS)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    dictionary = Dictionary()
    for word in range(VOCABULARY - 4):
        dictionary.add_symbol(f"w{word}")
    dictionary.save(folder / "dict.txt")
    return folder


def strong_model(flags: str, data: Path) -> Any:
    """A model whose random weights are large enough for its choices to depend on all that it
    reads."""
    built = runs.model_of(flags, SMALL, data=data).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.45, generator=generator)
    return built


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, data: Path) -> Any:
    return strong_model(KINDS[request.param], data)


@pytest.fixture(scope="module")
def xl(data: Path) -> Any:
    return strong_model(KINDS["xl"], data)


@torch.no_grad()
def lprobs_by_hand(model: Any, tokens: list[int]) -> Tensor:
    """The next token's distribution [V] after *tokens*, without a cache: segments with memory, or
    the last window."""
    memory, rest = None, list(tokens)
    while len(rest) > LENGTH:
        if model.memory_length:
            memory = model(torch.tensor([rest[:LENGTH]]), memory=memory)[1]["memory"]
            rest = rest[LENGTH:]
        else:
            rest = rest[LENGTH - LENGTH // 2 :]
    lprobs: Tensor = model.output_layer.log_probs(model(torch.tensor([rest]), memory=memory)[0][0, -1])
    return lprobs


def text_by_hand(model: Any, prompt: list[int], tokens: int, beam: int) -> list[int]:
    """The best text of a beam search, each text of which is read whole for every token."""
    beams = [(0.0, list[int]())]
    for _ in range(tokens):
        longer = []
        for score, text in beams:
            lprobs = lprobs_by_hand(model, [*prompt, *text])
            longer += [(score + float(lprobs[token]), [*text, token]) for token in range(VOCABULARY)]
        beams = sorted(longer, key=lambda item: -item[0])[:beam]
    return beams[0][1]


def scores_by_hand(model: Any, text: list[int]) -> list[float]:
    """The log-probability of each token of a text after ``</s>``."""
    return [float(lprobs_by_hand(model, [EOS, *text[:i]])[token]) for i, token in enumerate(text)]


def all_texts(model: Any, prompts: list[list[int]], search: Search, batch_size: int, **more: Any) -> list[list[int]]:
    """The tokens of the best text of each prompt."""
    generators = functools.partial(generator_of, 3)
    found = dict(generate([model], prompts, search, generators=generators, batch_size=batch_size, **more))
    return [found[number][0].tokens for number in range(len(prompts))]


def test_next_tokens_distribution_is_that_of_reading_everything_again(model: Any) -> None:
    """Rows read in pieces of any size, exchanged, doubled and dropped on the way."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(VOCABULARY, (3, 40), generator=generator)
    predictor, place = Predictor([Reader(model)], 3, forbidden=[1]), 0
    for size, parents in (
        (1, [2, 0, 1]),
        (9, [0, 0, 1, 2]),
        (3, [0, 2, 3]),
        (1, [1, 0]),
        (14, [1, 0]),
        (2, [1]),
        (1, [0]),
    ):
        with torch.inference_mode():
            hidden = predictor.read(rows[:, place : place + size].tolist())
            found = predictor.log_probs([states[:, -1] for states in hidden])
            predictor.select_rows(parents)
        place += size
        expected = torch.stack([lprobs_by_hand(model, row[:place].tolist()) for row in rows])
        expected[:, 1] = -torch.inf
        assert torch.allclose(found, expected, atol=1e-5)
        rows = rows[parents]


@pytest.mark.parametrize("search", [GREEDY, BEAM])
def test_the_most_probable_text_is_that_of_a_search_by_hand(model: Any, search: Search) -> None:
    for found, prompt in zip(all_texts(model, PROMPTS, search, 8), PROMPTS, strict=True):
        assert found == text_by_hand(model, prompt, search.max_tokens, search.beam)


@pytest.mark.parametrize(
    "search",
    [Search(13), Search(13, 0.8, top_k=5), Search(2, top_p=0.7), BEAM, HYPOTHESES, Search(9, beam=3, eos=EOS)],
    ids=["sampling", "top k", "top p", "beam", "hypotheses", "sampled hypotheses"],
)
def test_texts_do_not_depend_on_their_batch(model: Any, search: Search) -> None:
    def texts(prompts: dict[int, list[int]], batch_size: int) -> dict[int, Any]:
        keys = list(prompts)
        generators = lambda index: generator_of(3, keys[index])  # noqa: E731
        found = generate([model], [*prompts.values()], search, generators=generators, batch_size=batch_size)
        return {keys[index]: [text.tokens for text in texts] for index, texts in found}

    prompts = dict(enumerate(PROMPTS))
    alone = {number: texts({number: prompt}, search.beam)[number] for number, prompt in prompts.items()}
    assert len({str(found) for found in alone.values()}) > 1
    for batch_size in (2 * search.beam, 64):
        assert texts(prompts, batch_size) == alone
    if search.eos < 0:
        for number, prompt in prompts.items():
            assert [*stream([model], prompt, search, generator=generator_of(3, number))] == alone[number][0]


@pytest.mark.parametrize("prefix", [[], [7, 5]])
def test_a_wide_beam_finds_the_best_of_all_hypotheses(xl: Any, prefix: list[int]) -> None:
    others = [token for token in range(VOCABULARY) if token not in (EOS, PAD)]
    texts = [(*prefix, *middle, EOS) for length in (0, 1, 2) for middle in itertools.product(others, repeat=length)]
    texts = [text for text in texts if len(text) > 1]  # min_tokens is 1
    next_lprobs = functools.cache(lambda *tokens: lprobs_by_hand(xl, [EOS, *tokens]))
    lprobs = {text: [float(next_lprobs(*text[:i])[token]) for i, token in enumerate(text)] for text in texts}
    for lenpen in (0.0, 1.0, 2.0):
        scores = {text: math.fsum(lprobs[text]) / len(text) ** lenpen for text in texts}
        best = sorted(texts, key=lambda text: -scores[text])[:5]
        search = Search(len(prefix) + 2, temperature=0, beam=len(texts), eos=EOS, lenpen=lenpen)
        [(_, found)] = generate([xl], [[EOS, *prefix]], search, forbidden=[PAD])
        assert [tuple(hypothesis.tokens) for hypothesis in found[:5]] == best
        assert [hypothesis.score for hypothesis in found[:5]] == pytest.approx(
            [scores[text] for text in best], rel=1e-4
        )
        assert found[0].lprobs == pytest.approx(lprobs[best[0]], rel=1e-4)


def test_no_ngram_is_repeated_and_lengths_are_kept(xl: Any) -> None:
    search = Search(14, temperature=0, beam=3, eos=EOS, min_tokens=12, no_repeat_ngram=2)
    [(_, found)] = generate([xl], [[EOS, 4, 5, 4, 5]], search)
    for hypothesis in found:
        pairs = list(itertools.pairwise(hypothesis.tokens[3:]))
        assert len(pairs) == len(set(pairs))
        assert 12 <= len(hypothesis.tokens) - 1 <= 14 and hypothesis.tokens[-1] == EOS


def test_sampled_hypotheses_are_as_many_as_the_beam_and_have_their_own_scores(model: Any) -> None:
    generators = functools.partial(generator_of, 3)
    prompts, search = [[EOS, 6], [EOS, *range(4, 11)]], Search(14, temperature=3.0, beam=4, eos=EOS)
    for number, found in generate([model], prompts, search, generators=generators, batch_size=8):
        assert len(found) == 4 and len({tuple(hypothesis.tokens) for hypothesis in found}) > 1
        for hypothesis in found:
            assert [EOS, *hypothesis.tokens][: len(prompts[number])] == prompts[number]
            # Read at once, tokens of a prompt have the positions of its end where these are counted
            # from there.
            first = (
                0 if getattr(model.decoder.cfg, "position_encoding", "") in ("", *BY_DISTANCE) else len(prompts[number])
            )
            want = scores_by_hand(model, hypothesis.tokens)
            assert hypothesis.lprobs[first:] == pytest.approx(want[first:], rel=1e-3, abs=1e-4)


def test_a_prefix_without_room_is_the_text_up_to_its_length(xl: Any, caplog: pytest.LogCaptureFixture) -> None:
    for prefix in ([4, 5], [4, 5, 6, 7]):
        [(_, [found])] = generate([xl], [[EOS, *prefix]], Search(2, temperature=0, eos=EOS))
        assert found.tokens == [4, 5, EOS]
        assert found.lprobs == pytest.approx(scores_by_hand(xl, [4, 5, EOS]), rel=1e-3, abs=1e-4)
    assert caplog.messages[0] == "`max_len_b` 2: a prefix of 2 tokens fills the text"


@pytest.mark.parametrize("search", [Search(60), Search(20, temperature=0, beam=4)])
def test_forbidden_tokens_are_never_chosen(xl: Any, search: Search) -> None:
    [text] = all_texts(xl, [[2]], search, 1, forbidden=range(0, VOCABULARY, 2))
    assert len(text) == search.max_tokens and all(token % 2 for token in text)


def test_a_text_that_is_no_hypothesis_ends_before_its_stop(xl: Any) -> None:
    for search in (Search(40), Search(40, temperature=0, beam=2)):
        whole, stopped = (all_texts(xl, PROMPTS, search, 8, stop=stop) for stop in (-1, 0))
        assert [text[: text.index(0)] if 0 in text else text for text in whole] == stopped != whole


def test_no_tokens_can_be_asked_for(xl: Any) -> None:
    assert all_texts(xl, PROMPTS, Search(0), 2) == [[]] * len(PROMPTS)
    assert list(stream([xl], [2], Search(0, temperature=0, beam=2))) == []


def test_ensemble_reads_the_average_of_probabilities(data: Path) -> None:
    pair, prompt = [strong_model(KINDS[kind], data) for kind in ("xl", "transformer")], [2, 5, 6, 7, 8, 9, 10, 5]

    def mean(tokens: list[int]) -> Tensor:
        return sum(lprobs_by_hand(model, tokens).double().exp() for model in pair) / 2  # type: ignore[return-value]

    assert list(stream(pair, prompt, Search(1, temperature=0))) == [int(mean(prompt).argmax())]
    [(_, [found])] = generate(pair, [prompt], Search(8, temperature=0, eos=EOS))
    want = [float(mean(prompt[:1] + found.tokens[:i])[token].log()) for i, token in enumerate(found.tokens)]
    assert found.lprobs == pytest.approx(want, abs=1e-5)


def test_tokens_come_as_they_are_chosen_and_one_token_is_read_for_each(xl: Any) -> None:
    sizes = []
    hook = xl.decoder.register_forward_pre_hook(lambda _, args: sizes.append(tuple(args[0].shape)))
    tokens = stream([xl], [2, 5, 6], Search(300))
    next(tokens)
    assert sizes == [(1, 3)] and not torch.is_inference_mode_enabled()
    next(tokens)
    assert sizes == [(1, 3), (1, 1)]
    assert len(list(tokens)) == 298
    hook.remove()
    assert sizes[1:] == [(1, 1)] * 299


@pytest.mark.parametrize("search", [GREEDY, Search(20, temperature=0, beam=1, eos=EOS, min_tokens=20)])
def test_one_text_is_continued_without_a_copy_of_its_cache(
    xl: Any, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("fairseq.modules.memory.KeyValueCache.select_rows")
    assert len(all_texts(xl, [[2]], search, 1)[0]) >= search.max_tokens


def test_memory_has_room_for_the_text_and_not_for_more(data: Path) -> None:
    def text(memory: int, search: Search) -> list[list[int]]:
        return all_texts(strong_model(f"{XL} --mem-len {memory}", data), PROMPTS, search, 8)

    for search in (Search(30), Search(20, temperature=0, beam=2)):
        assert text(2**31 - 1, search) == text(60, search) != text(3, search)


def test_sources_of_randomness_are_made_batch_by_batch(xl: Any) -> None:
    made: list[int] = []
    generators = lambda number: made.append(number) or generator_of(3, number)  # type: ignore[func-returns-value] # noqa: E731
    next(generate([xl], [[2]] * 6, Search(3), generators=generators, batch_size=2))
    assert made == [0, 1]


def test_seed_prompt_and_sample_each_change_the_draws() -> None:
    keys = list(itertools.product((1, 2), (0, 1), (0, 1)))
    draws = [torch.rand(4, generator=generator_of(*key)).tolist() for key in keys]
    assert len({tuple(draw) for draw in draws}) == len(keys)
    assert draws[0] == torch.rand(4, generator=generator_of(*keys[0])).tolist()


LPROBS = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log()


@pytest.mark.parametrize(
    "how, expected",
    [
        ({}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.7}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.75}, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]),
        ({"top_k": 4, "top_p": 0.75}, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]),
        ({"top_p": 1e-9}, [0, 1, 0, 0, 0]),
        ({"top_k": 99}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"temperature": 0.5}, [0.01 / 0.285, 0.16 / 0.285, 0.0025 / 0.285, 0.09 / 0.285, 0.0225 / 0.285]),
        ({"temperature": 0}, [0, 1, 0, 0, 0]),
    ],
)
def test_choices_follow_the_distribution(how: dict[str, Any], expected: list[float]) -> None:
    draws = torch.rand(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = choose(LPROBS.expand(4000, -1), Search(**how), draws).tolist()
    found = [tokens.count(token) / 4000 for token in range(len(LPROBS))]
    assert found == pytest.approx(expected, abs=0.03)
    assert [share == 0 for share in found] == [share == 0 for share in expected]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"max_tokens": -1},
        {"beam": 0},
    ],
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Search(**wrong)


def test_what_cannot_be_continued_is_refused(xl: Any) -> None:
    with pytest.raises(ValueError, match="prompt_tokens"):
        list(stream([xl], [], Search(1)))
    with pytest.raises(ValueError, match="no key-value cache"):
        list(stream([BaseFairseqModel()], [2], Search(1)))
    with pytest.raises(ValueError, match="seed -1: must be at least 0"):
        generator_of(-1)


def test_probabilities_that_are_no_numbers_are_told_without_flags(data: Path) -> None:
    model = strong_model(KINDS["xl"], data)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    for search in (Search(1), Search(1, top_k=2), BEAM):
        with pytest.raises(UserError, match="probabilities are NaN") as error:
            list(stream([model], [2], search))
        assert "--" not in str(error.value)
