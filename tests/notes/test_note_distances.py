"""``fairseq-validate --keep-notes --rare-words``: losses by distance to a word that reads its note,
and of controls."""

from __future__ import annotations

import logging
import math

import noted
import pytest
import runs
import torch

from fairseq.config import options
from fairseq.hub import load_model
from fairseq.notes.control import controlled, mark_distances
from fairseq_cli import validate

LM = """--arch transformer_xl_tiny --criterion cross_entropy --cpu --tokens-per-sample 24 --max-tokens 96
    --required-batch-size-multiple 1 --lr 0.05 --seed 3 --notes --mem-len 0 --dropout 0 --max-update 1"""
MODELS = {
    "bert": f"{noted.TNF_BERT} --max-update 3 --init-std 0.3 --note-form centred",
    "cut words": f"{noted.TNF_BERT} --max-update 3 --init-std 0.3 --sample-break-mode none",
    "causal": LM,
}
NAMES = {1: "note_1", 2: "note_2_3", 3: "note_2_3", **dict.fromkeys(range(4, 9), "note_4_8")}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return noted.corpus(tmp_path_factory.mktemp("noted"))


def words_of(symbols):
    """(first, end) of the words of *symbols*."""
    first, words = 0, []
    for end, symbol in enumerate(symbols, 1):
        if not symbol.endswith("@@"):
            words.append((first, end))
            first = end
    return words


def distance(words, reading, target, causal):
    """Words from the token *target* of a row of *words* to the nearest of the spans *reading* that
    it sees."""
    here = next((n for n, (first, end) in enumerate(words) if first <= target < end), len(words))
    places = [words.index((first, end)) for first, end in reading if not causal or end <= target]
    return min((abs(here - place) for place in places), default=math.inf)


@torch.no_grad()
def naive_losses(model, task, batches, dropped=False, hidden=None):
    """Losses in bits of the predicted tokens of each distance, one token after the other; *hidden*
    replaces words."""
    found = {name: [] for name in ("all", *NAMES.values(), "note_far")}
    pad, causal = task.dictionary.pad(), model.predicts_next_token
    for sample in batches:
        inputs, targets = dict(sample["net_input"]), sample["target"]
        spans = [s for s in inputs["spans"].tolist() if model.notes.taken[s[3]] > 0]
        if dropped:
            inputs["spans"] = inputs["spans"][:0]
        shown = inputs["src_tokens"].clone()
        for row, first, end, _ in spans if hidden is not None else ():
            shown[row, first:end] = hidden
        lprobs = model.output_layer.log_probs(model(**{**inputs, "src_tokens": shown})[0]).tolist()
        for row, target in enumerate(targets.tolist()):
            source = inputs["src_tokens"][row].tolist()
            masked = [source[t] if target[t] == pad else target[t] for t in range(len(target))]
            words = words_of([task.dictionary[t] for t in ([source[0], *target] if causal else masked)])
            reading = [(first, end) for r, first, end, _ in spans if r == row]
            for t, symbol in enumerate(target):
                if symbol != pad:
                    loss = -lprobs[row][t][symbol] / math.log(2)
                    d = distance(words, reading, t + causal, causal)
                    found["all"].append(loss)
                    found[NAMES.get(d, "note_far")].append(loss)
    return {name: sum(losses) / len(losses) for name, losses in found.items()}


@pytest.mark.parametrize("kind", MODELS)
def test_losses_by_distance_with_permuted_and_without_notes_are_those_of_a_naive_reference(
    kind, data, tmp_path, caplog
):
    runs.train(tmp_path, MODELS[kind], "--no-epoch-checkpoints --disable-validation", data=data)
    file = tmp_path / "checkpoint_last.pt"
    words = runs.words(data, "--path", file, "--valid-subset train --cpu --max-tokens 96 --keep-notes --rare-words")
    with caplog.at_level(logging.INFO):
        parsed = options.parse_args_and_arch(validate.get_validation_parser(), words, task_defaults=False)
        figures = validate.main(parsed)[str(file)]["train"]
    model, task = load_model(file, data, overrides={"keep_notes": True})
    assert 0 < int((model.notes.taken > 0).sum()) < len(model.notes.taken), "some words have a written note"
    mark_distances(task)
    criterion = task.build_criterion(task.settings)
    batches = list(task.iterator("train", model, criterion, training=False))
    with controlled(model.notes, "permuted"):
        permuted = naive_losses(model, task, batches)
    expected = {"": naive_losses(model, task, batches), "permuted_": permuted}
    expected["dropped_"] = naive_losses(model, task, batches, dropped=True)
    mask = task.dictionary.unk() if model.predicts_next_token else task.dictionary.mask()
    expected["hidden_"] = naive_losses(model, task, batches, dropped=True, hidden=mask)
    for prefix, losses in expected.items():
        for name, value in losses.items():
            figure = f"{name}_loss" if name != "all" else "nll_loss" if model.predicts_next_token else "loss"
            assert figures[prefix + figure] == pytest.approx(value, rel=1e-4), (prefix, name)
    table = [record.message.split() for record in caplog.records][-4:]
    assert [line[-5:] for line in table] == [[f"{v:.3f}" for v in losses.values()] for losses in expected.values()]
    assert expected[""]["note_1"] != expected["permuted_"]["note_1"] != expected["dropped_"]["note_1"]
    assert expected["dropped_"]["note_1"] != expected["hidden_"]["note_1"]


def test_permuted_notes_are_the_written_ones_each_of_another_word(data):
    notes = noted.trainer(data, noted.TNF_BERT).model.notes
    notes.taken[2:9] = 1
    before = notes.table.clone()
    with controlled(notes, "permuted"):
        moved = (notes.table != before).any(1)
        assert moved.tolist() == (notes.taken > 0).tolist()
        assert sorted(notes.table.tolist()) == sorted(before.tolist())
    assert torch.equal(notes.table, before)
