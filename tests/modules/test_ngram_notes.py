"""Notes of pairs and of words: their rows, and the updates of rows, beside plain Python."""

from __future__ import annotations

import math

import pytest
import runs
import torch
from mistakes import user_error

from fairseq.config import fields
from fairseq.models.transformer_lm import TransformerDecoder, TransformerLMConfig
from fairseq.modules.ngram_notes import CONTINUES, HISTORY, IS_CONTINUED, STANDS_ALONE, NGramNotes, WordNotes
from fairseq.optim.adam import Adam, FairseqAdam
from fairseq.text.dictionary import Dictionary

WORDS, PADDING = 30, 1
MULTIPLIER = round(2**64 / ((1 + math.sqrt(5)) / 2) / 2**12) * 2**12  # the golden ratio's, to float64's digits


def row_of(first: int, second: int, rows: int) -> int:
    """The row of a pair, in Python's numbers of any size."""
    if first < 0 or PADDING in (first, second):
        return 0
    spread = (first * WORDS + second) * 0x9E3779B97F4A7C15 % 2**64
    return 1 + (spread >> 32) % rows


def notes(rows: int = 50, dim: int = 4) -> NGramNotes:
    module = NGramNotes(rows, dim, WORDS, PADDING)
    with torch.no_grad():
        module.table.weight[1:] = torch.randn(rows, dim, generator=torch.Generator().manual_seed(1))
    return module


def after_nothing(tokens: torch.Tensor) -> torch.Tensor:
    """*tokens* at the beginning of a segment, as notes read them."""
    return torch.nn.functional.pad(tokens, (HISTORY, 0), value=-1)


def test_the_multiplier_is_the_golden_ratios():
    assert abs(0x9E3779B97F4A7C15 - MULTIPLIER) < 2**12


def test_a_note_is_the_row_of_the_token_and_the_one_before_it():
    module = notes()
    tokens = torch.randint(WORDS, (3, 9), generator=torch.Generator().manual_seed(2))
    tokens[1, 4], tokens[2, 8] = PADDING, PADDING
    result = module(after_nothing(tokens))
    for row, text in enumerate(tokens.tolist()):
        for t, token in enumerate(text):
            expected = module.table.weight[row_of(text[t - 1] if t else -1, token, 50)]
            torch.testing.assert_close(result[row, t], expected, atol=0, rtol=0)


def test_a_word_has_the_note_of_its_tokens_so_far():
    module = WordNotes(1 << 20, 1, WORDS)
    parts = {2: STANDS_ALONE, **dict.fromkeys(range(10, 20), CONTINUES), **dict.fromkeys(range(20, 25), IS_CONTINUED)}
    for symbol, part in parts.items():
        module.parts[symbol] = part
    tokens = torch.randint(2, WORDS, (20, 60), generator=torch.Generator().manual_seed(5))
    tokens[0, 3:17] = torch.arange(3, 17).clamp(min=10)  # a word of fourteen tokens
    rows, words = module.rows_of(after_nothing(tokens)), {}
    for of_row, text in zip(rows.tolist(), tokens.tolist(), strict=True):
        begin = 0
        for t, token in enumerate(text):
            before = text[t - 1] if t else 2
            joined = (parts.get(token) == CONTINUES and before != 2) or (
                parts.get(before) == IS_CONTINUED and token != 2
            )
            begin = begin if joined else t
            assert (of_row[t] > 0) == joined
            if joined:
                # The same row for the same tokens, of which the last eight count.
                assert words.setdefault(tuple(text[max(begin, t - HISTORY) : t + 1]), of_row[t]) == of_row[t]
    assert max(map(len, words)) == HISTORY + 1
    assert len(set(words.values())) == len(words) > 400  # of a million rows: chance lets some 0.1 words share one
    pieces = [rows[:, :7], module.rows_of(tokens[:, :22])[:, :], module.rows_of(tokens[:, 15:])]
    torch.testing.assert_close(torch.cat([pieces[0], pieces[1], pieces[2]], dim=1), rows, atol=0, rtol=0)


def test_dropped_notes_are_left_out_in_training_only():
    module = NGramNotes(50, 4, WORDS, PADDING, dropout=0.3)
    torch.nn.init.ones_(module.table.weight[1:])
    text = after_nothing(torch.randint(2, WORDS, (50, 41), generator=torch.Generator().manual_seed(6)))
    torch.manual_seed(7)
    dropped = module(text)[:, 1:, 0] == 0
    # 2,000 pairs: five standard deviations around the share.
    assert abs(float(dropped.double().mean()) - 0.3) < 5 * math.sqrt(0.3 * 0.7 / 2000)
    assert (module(text)[:, 1:][~dropped] != 0).any() and (module.eval()(text)[:, 1:] == 1).all()


def test_pairs_spread_evenly_over_the_rows():
    module = NGramNotes(64, 1, 1000, -1)
    first, second = (x.flatten() for x in torch.meshgrid(torch.arange(1000), torch.arange(300), indexing="ij"))
    text = torch.nn.functional.pad(torch.stack([first, second], dim=1), (HISTORY - 1, 0))
    counts = torch.bincount(module.rows_of(text)[:, 0], minlength=65)
    # 300,000 pairs, 4,688 a row: six standard deviations of a row drawn at random.
    assert counts[0] == 0 and (counts[1:] - 300_000 / 64).abs().max() < 6 * math.sqrt(300_000 / 64)


def test_rows_are_updated_by_what_an_update_touches():
    betas, eps, rate = (0.9, 0.75), 1e-3, 0.1
    module = notes(rows=20, dim=3)
    table = module.table.weight
    optimizer = Adam([table], lr=rate, betas=betas, eps=eps, weight_decay=0.5)
    expected = table.detach().double().tolist()
    steps, means = [0] * 21, [0.0] * 21
    generator = torch.Generator().manual_seed(4)
    for _ in range(12):
        tokens = torch.randint(WORDS, (2, 3), generator=generator)
        slopes = torch.randn(2, 3, 3, generator=generator)
        # Gradients of two batches add up, and count times a factor.
        for half in range(2):
            (module(after_nothing(tokens[half : half + 1])) * slopes[half : half + 1]).sum().backward()
        optimizer.step(factor=0.5)
        optimizer.zero_grad()
        sums: dict[int, list[float]] = {}
        for text, of_text in zip(tokens.tolist(), slopes.tolist(), strict=True):
            for t in range(1, 3):
                if row := row_of(text[t - 1], text[t], 20):
                    before = sums.get(row, [0.0] * 3)
                    sums[row] = [x + 0.5 * g for x, g in zip(before, of_text[t], strict=True)]
        for row, gradient in sums.items():
            square = sum(g * g for g in gradient) / 3
            steps[row] += 1
            share = max(1 / steps[row], 1 - betas[1])
            means[row] += share * (square - means[row])
            for c, g in enumerate(gradient):
                expected[row][c] -= rate * g / (math.sqrt(means[row]) + eps)
    assert max(steps) > 4  # beyond the plain mean
    torch.testing.assert_close(table.detach(), torch.tensor(expected), atol=1e-5, rtol=1e-5)
    assert not table[0].any()


@pytest.mark.parametrize(("flags", "name"), [(runs.NAG, "NAG"), ("--optimizer adam", "AdamW")])
def test_an_optimizer_without_rows_is_refused_before_anything_is_written(tmp_path, monkeypatch, flags, name):
    # As a plug-in may have it, or apex.
    monkeypatch.setattr(FairseqAdam, "optimizer_class", torch.optim.AdamW)
    monkeypatch.setattr(FairseqAdam, "group_settings", {"weight_decay": "weight_decay"})
    with user_error(
        f"--ngram-notes, --word-notes: {name} updates no single rows; use --optimizer adam, with --no-apex, or muon; "
        "or give 0"
    ):
        runs.train(tmp_path / "run", runs.BASELINE, flags, "--ngram-notes 20")
    assert not (tmp_path / "run").exists()


def test_the_words_of_notes_are_those_of_the_dictionary_without_punctuation():
    dictionary = Dictionary()
    for symbol in ("Ġcat", "Ġdog", "s", "ly", ".", "Ġ", "'s", "Ġ("):
        dictionary.add_symbol(symbol)
    cfg = fields.typed(TransformerLMConfig, {"decoder_embed_dim": 8, "decoder_attention_heads": 1, "word_notes": 99})
    decoder = TransformerDecoder(cfg, len(dictionary), dictionary.pad())
    decoder.mark_words(dictionary)
    text = torch.tensor(
        [[dictionary.index(symbol) for symbol in ["Ġcat", "s", ".", "ly", "'s", "Ġ(", "s", "</s>", "ly", "Ġ", "s"]]]
    )
    noted = decoder.word_notes.rows_of(after_nothing(text))[0] > 0
    assert noted.tolist() == [False, True, False, False, True, False, False, False, False, False, False]
