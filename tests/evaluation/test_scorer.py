"""The scorer's three modes: every token once, and the numbers of a naive forward pass."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import naive
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import user_error

from fairseq.config.settings import CommonConfig
from fairseq.errors import UserError
from fairseq.evaluation import Scorer, Scoring
from fairseq.evaluation import scorer as scorer_module
from fairseq.evaluation.cache_pointer import CachePointer, Pointer
from fairseq.inference.loading import load_models
from fairseq.models import BaseFairseqModel
from fairseq.models.loading import check_settings
from fairseq.modules.precision import Precision
from fairseq.text.dictionary import Dictionary

VOCABULARY = 40
DICTIONARY = Dictionary()
for _word in range(VOCABULARY - 4):
    DICTIONARY.add_symbol(f"w{_word}")


@dataclass
class Text:
    """A corpus in memory."""

    tokens: np.ndarray
    sizes: np.ndarray

    @property
    def offsets(self):
        return np.concatenate([[0], np.cumsum(self.sizes)])


def text(*sizes, seed=0):
    """Lines of random words, of the given sizes with </s>."""
    rng = np.random.RandomState(seed)
    lines = [np.append(rng.randint(3, VOCABULARY, size - 1), 2) for size in sizes]
    return Text(np.concatenate(lines), np.array(sizes))


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Make a random checkpoint; returns its model and a naive one."""
    folder = tmp_path_factory.mktemp("models")
    DICTIONARY.save(folder / "dict.txt")
    made = {}

    def make(**kind):
        name = str(sorted(kind.items()))
        if name not in made:
            path = folder / f"{len(made)}.pt"
            args, state = naive.checkpoint(path, VOCABULARY, seed=len(made), tokens_per_sample=8, **kind)
            made[name] = load_models([path], folder / "dict.txt")[0][0], naive.NaiveLM(args, state)
        return made[name]

    return make


SHORTFORMER = {"tokens_from_prev": 8}


@pytest.mark.parametrize("mode", ["non-overlapping", "context window", "streams", "token by token"])
@given(length=st.integers(1, 70), rows=st.integers(1, 5), more=st.integers(0, 7))
@settings(max_examples=15, deadline=None)
def test_every_token_is_scored_once_in_the_corpus_order(load, mode, length, rows, more):
    model, reference = load(**({} if mode in ("non-overlapping", "context window") else SHORTFORMER))
    window = more if mode == "context window" else 0
    scoring = Scoring(8, context_window=window, token_by_token=mode == "token by token", batch_size=rows)
    corpus = text(length, seed=length)
    scores = Scorer([model], DICTIONARY, scoring).score(corpus)
    assert np.array_equal(scores.tokens, corpus.tokens) and scores.tokens.dtype == np.int64
    blocks_in_rows = rows if model.memory_length else 1
    expected = reference.score(corpus.tokens, 8, window, blocks_in_rows)
    np.testing.assert_allclose(scores.lprobs, expected, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("cache", [0, -1])
def test_models_of_the_shortformers_fork_without_cache_keep_position_infused_attention(load, cache):
    model, reference = load(tokens_from_prev=cache)
    plain, _ = load()
    corpus = text(30)
    scores = Scorer([model], DICTIONARY, Scoring(8, context_window=2)).score(corpus)
    np.testing.assert_allclose(scores.lprobs, reference.score(corpus.tokens, 8, 2), rtol=2e-6, atol=1e-5)
    with user_error("--position-infused-attention False: fork.pt was trained with True"):
        check_settings(plain, vars(model.cfg), plain.cfg, "fork.pt")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("cache", [1, 5, 8, 20])
def test_token_by_token_equals_non_overlapping(load, cache, rows):
    model, _ = load(tokens_from_prev=cache)
    corpus = text(*[11] * 10)
    both = [Scorer([model], DICTIONARY, Scoring(8, batch_size=rows, token_by_token=t)) for t in (False, True)]
    together, stepwise = (scorer.score(corpus).lprobs for scorer in both)
    assert np.abs(together - stepwise).max() < 1e-5


def test_token_by_token_reads_each_token_once(load):
    model, _ = load(**SHORTFORMER)
    corpus, read = text(50), []
    hook = model.decoder.register_forward_pre_hook(lambda _, args: read.append(args[0].shape))
    Scorer([model], DICTIONARY, Scoring(8, batch_size=2, token_by_token=True)).score(corpus)
    hook.remove()
    assert {shape[1] for shape in read} == {1}
    # Seven blocks, four in the first row and three in the second, of which the last has two tokens
    # and six of padding.
    assert sum(shape[0] for shape in read) == 50 + 6


def test_the_cache_of_a_document_is_as_long_as_the_longest_that_is_read_beside_it(load, monkeypatch):
    model, reference = load(**SHORTFORMER)
    sizes = [61, 30, 9, 8, 3, 2]
    corpus, asked = text(*sizes), []
    scorer = Scorer([model], DICTIONARY, Scoring(8, batch_size=2, texts=True))
    make = scorer.readers[0].new_cache
    monkeypatch.setattr(
        scorer.readers[0], "new_cache", lambda rows, longest: asked.append((rows, longest)) or make(rows, longest)
    )
    found = scorer.score(corpus).lprobs
    assert asked == [(2, 64), (2, 16), (2, 8)]
    texts = np.split(corpus.tokens, np.cumsum(sizes)[:-1])
    expected = np.concatenate([reference.score(each, 8) for each in texts])
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-5)


def test_the_length_of_each_group_of_documents_is_read_a_fixed_number_of_times_a_step(load, monkeypatch):
    model, _ = load(**SHORTFORMER)
    calls = []

    class Group(list):
        def __len__(self):
            calls.append(self)
            return super().__len__()

    def steps(blocks, rows):
        return [Group(group) for group in text_steps(blocks, rows)]

    text_steps = scorer_module._text_steps
    monkeypatch.setattr(scorer_module, "_text_steps", steps)
    counts = []
    for documents in (5, 20):
        calls.clear()
        Scorer([model], DICTIONARY, Scoring(8, texts=True)).score(text(*[4] * documents))
        counts.append(len(calls))
    assert counts[1] == 4 * counts[0]


def test_memory_path_equals_cache_path(load):
    """A model that has memory but no key-value cache is read through its memory."""
    model, reference = load(**SHORTFORMER)

    class WithoutCache(BaseFairseqModel):
        memory_length = model.memory_length
        output_layer = model.output_layer

        def forward(self, src_tokens, memory=None):
            return model(src_tokens, memory=memory)

    corpus = text(75)
    scores = Scorer([WithoutCache()], DICTIONARY, Scoring(8, batch_size=3)).score(corpus)
    np.testing.assert_allclose(scores.lprobs, reference.score(corpus.tokens, 8, rows=3), rtol=2e-6, atol=1e-5)


def test_model_of_a_plugin_without_output_layer_is_scored(load):
    model, reference = load()

    class Plugin(BaseFairseqModel):
        def forward(self, src_tokens):
            return model.output_layer.log_probs(model(src_tokens)[0]), {}

    corpus = text(75)
    scores = Scorer([Plugin()], DICTIONARY, Scoring(8, context_window=3)).score(corpus)
    np.testing.assert_allclose(scores.lprobs, reference.score(corpus.tokens, 8, 3), rtol=2e-6, atol=1e-5)


def test_lines_are_those_of_the_corpus(load):
    model, _ = load()
    corpus = text(5, 1, 7, 3)
    assert Scorer([model], DICTIONARY, Scoring(8)).score(corpus).lines.tolist() == [0, 5, 6, 13, 16]


def test_blank_lines_are_not_scored_with_complete_doc(load):
    model, reference = load()
    corpus = text(5, 1, 7, 3, 1)
    scores = Scorer([model], DICTIONARY, Scoring(8, break_mode="complete_doc", batch_size=2)).score(corpus)
    kept = np.r_[0:5, 6:16]
    assert np.array_equal(scores.tokens, corpus.tokens[kept])
    assert scores.lines.tolist() == [0, 5, 5, 12, 15, 15]
    first = reference.score(corpus.tokens[:5], 8)  # the first block begins the corpus
    np.testing.assert_allclose(scores.lprobs[:5], first, rtol=2e-6, atol=1e-5)


def test_every_line_by_itself_with_eos(load):
    model, reference = load()
    corpus = text(5, 2, 7)
    scores = Scorer([model], DICTIONARY, Scoring(8, break_mode="eos", batch_size=2)).score(corpus)
    expected = [reference.score(corpus.tokens[a:b], 8) for a, b in ((0, 5), (5, 7), (7, 14))]
    np.testing.assert_allclose(scores.lprobs, np.concatenate(expected), rtol=2e-6, atol=1e-5)


def naive_lines(corpus, size, mode):
    """Blocks as lists of tokens: lines packed into *size* tokens, a longer one by itself; blank
    ones end documents."""
    blocks, fresh = [], True
    for start, end in itertools.pairwise(corpus.offsets):
        line = corpus.tokens[start:end].tolist()
        if mode == "complete_doc" and line == [2]:
            fresh = True
        elif mode != "eos" and not fresh and len(blocks[-1]) + len(line) <= size:
            blocks[-1] += line
        else:
            blocks.append(line)
            fresh = False
    return blocks


def naive_window(reference, blocks, length, window):
    """Log-probabilities as fairseq computes them: each block after what the blocks before leave in
    its window."""
    context, found = [], []
    for block in blocks:
        read = context[max(0, len(context) - min(window, max(0, length - len(block)))) :]
        row = [*read, 2, *block[:-1]]  # every block begins a line
        lprobs = reference.log_probs(reference.hidden(torch.tensor(row))[0][len(read) :])
        found.append(lprobs.gather(1, torch.tensor(block)[:, None])[:, 0].numpy())
        context = row[-window:]
    return np.concatenate(found)


@pytest.mark.parametrize("mode", ["eos", "complete", "complete_doc"])
@pytest.mark.parametrize("positions", [8, 12])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_context_window_keeps_lines_up_to_the_models_positions(load, mode, positions, shards):
    model, reference = load(max_target_positions=positions)
    corpus = text(13, 3, 2, 7, 1, 1, 12, 8, 4, 1, 6, 2, 2, 9, 3)
    blocks = [block for block in naive_lines(corpus, 5, mode) if len(block) <= positions]
    parts = [
        Scorer([model], DICTIONARY, Scoring(8, mode, context_window=3, batch_size=2, shard=shard, shards=shards))
        for shard in range(shards)
    ]
    scores = [part.score(corpus) for part in parts]
    assert np.concatenate([part.tokens for part in scores]).tolist() == [token for block in blocks for token in block]
    expected = naive_window(reference, blocks, 8, 3)
    np.testing.assert_allclose(np.concatenate([part.lprobs for part in scores]), expected, rtol=2e-6, atol=1e-5)


def test_blocks_longer_than_positions_are_left_out_and_counted(load, caplog):
    model, _ = load()
    corpus = text(5, 9, 3)
    scores = Scorer([model], DICTIONARY, Scoring(8, break_mode="eos")).score(corpus)
    assert caplog.messages == ["left out 1 of 3 blocks, longer than 8 positions"]
    assert np.array_equal(scores.tokens, np.delete(corpus.tokens, np.r_[5:14]))
    with pytest.raises(UserError, match="no block to score"):
        Scorer([model], DICTIONARY, Scoring(8, break_mode="eos")).score(text(9))


def test_ensemble_is_the_mean_of_probabilities(load):
    pairs = [load(), load(share_decoder_input_output_embed=True)]
    corpus = text(30)
    scores = Scorer([model for model, _ in pairs], DICTIONARY, Scoring(8)).score(corpus)
    mean = np.mean([np.exp(reference.score(corpus.tokens, 8)) for _, reference in pairs], axis=0)
    np.testing.assert_allclose(scores.lprobs, np.log(mean), rtol=2e-6, atol=1e-5)


def test_ensemble_of_shortformer_and_baseline_reads_the_same_blocks(load):
    pairs = [load(**SHORTFORMER), load()]
    corpus = text(30)
    scores = Scorer([model for model, _ in pairs], DICTIONARY, Scoring(8, batch_size=2)).score(corpus)
    lprobs = [reference.score(corpus.tokens, 8, rows=rows) for (_, reference), rows in zip(pairs, (2, 1), strict=True)]
    np.testing.assert_allclose(scores.lprobs, np.log(np.mean(np.exp(lprobs), axis=0)), rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize(
    "kind, scoring, message",
    [
        ({}, Scoring(8, context_window=8), "--context-window 8: must be less than --tokens-per-sample 8"),
        ({}, Scoring(8, token_by_token=True), "--sliding-inf 1: the model has no memory"),
        (SHORTFORMER, Scoring(8, context_window=4), "--context-window 4: the model uses its memory"),
        (
            SHORTFORMER,
            Scoring(8, context_window=4, token_by_token=True),
            "--context-window 4: with --sliding-inf 1 must be 7",
        ),
        (SHORTFORMER, Scoring(8, break_mode="complete"), "--sample-break-mode complete: a model with memory"),
    ],
)
def test_contradictions_are_refused(load, kind, scoring, message):
    with user_error(message):
        Scorer([load(**kind)[0]], DICTIONARY, scoring)


def test_progress_sees_every_batch(load):
    seen = []

    def progress(items, length):
        for number, item in enumerate(items, start=1):
            seen.append((number, length))
            yield item

    Scorer([load()[0]], DICTIONARY, Scoring(8, batch_size=2)).score(text(50), progress)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_lower_precision_has_a_cache_of_that_precision(load):
    model, _ = load(**SHORTFORMER)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = model.new_cache(2)
    assert {tensor.dtype for layer in cache.layers for tensor in (layer.keys, layer.values)} == {torch.bfloat16}
    exact = Scorer([model], DICTIONARY, Scoring(8)).score(text(50)).lprobs
    bf16 = Scorer([model], DICTIONARY, Scoring(8), Precision(CommonConfig(bf16=True))).score(text(50)).lprobs
    assert 0 < np.abs(exact - bf16).mean() < 0.1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("token_by_token", [False, True])
def test_gpu_agrees_with_cpu(load, token_by_token):
    model, reference = load(**SHORTFORMER)
    corpus = text(75)
    scoring = Scoring(8, batch_size=3, token_by_token=token_by_token)
    found = Scorer([model], DICTIONARY, scoring, device="cuda").score(corpus).lprobs
    model.cpu()
    np.testing.assert_allclose(found, reference.score(corpus.tokens, 8, rows=3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["non-overlapping", "context window", "streams", "token by token"])
def test_states_are_read_once_in_the_order_of_the_text(load, mode, monkeypatch):
    model, _ = load(**({} if mode in ("non-overlapping", "context window") else SHORTFORMER))
    window, step = 3 * (mode == "context window"), mode == "token by token"
    corpus, read = text(13, 40, 8), []

    class Watched(CachePointer):
        def __call__(self, hidden, tokens):
            read.append((hidden, tokens))
            return super().__call__(hidden, tokens)

    plain = Scorer([model], DICTIONARY, Scoring(8, context_window=window, token_by_token=step)).score(corpus)
    monkeypatch.setattr(scorer_module, "CachePointer", Watched)
    scoring = Scoring(8, context_window=window, token_by_token=step, cache_pointer=10)
    scorer = Scorer([model], DICTIONARY, scoring)
    scorer.pointer = Pointer(10, 5.0, 0.25)
    mixed = scorer.score(corpus)
    hidden, tokens = (torch.cat(parts) for parts in zip(*read, strict=True))
    assert np.array_equal(tokens.numpy(), corpus.tokens) and np.array_equal(mixed.tokens, corpus.tokens)
    pointed = [naive.pointed(hidden, tokens, t, 10, 5.0, int(tokens[t])) for t in range(len(tokens))]
    expected = 0.75 * np.exp(plain.lprobs) + 0.25 * np.array(pointed)
    expected[0] = np.exp(plain.lprobs[0])
    np.testing.assert_allclose(np.exp(mixed.lprobs), expected, rtol=1e-4)
