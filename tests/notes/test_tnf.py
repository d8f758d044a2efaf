"""Encoders with notes: what a note can tell, and what it cannot."""

from __future__ import annotations

import argparse
import copy

import noted
import pytest
import runs
import torch

from fairseq.models import ARCHITECTURES, MODELS
from fairseq.notes.settings import SIZES
from fairseq.tasks import setup_task

KINDS = {"bert": noted.TNF_BERT, "electra": noted.TNF_ELECTRA}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return noted.corpus(tmp_path_factory.mktemp("noted"))


@pytest.fixture(params=KINDS)
def made(request, data):
    """A model with notes like no others, in evaluation mode, and a batch of masked text for it."""
    args = runs.arguments(KINDS[request.param], data=data)
    torch.manual_seed(1)
    task = setup_task(args)
    model, criterion = task.build_model(args).eval(), task.build_criterion(args)
    model.notes.table.normal_(0, 5, generator=torch.Generator().manual_seed(3))
    sample = next(iter(task.iterator("train", model, criterion, training=True)))
    return model, criterion, sample


def run(model, criterion, sample):
    with torch.no_grad():
        output = model(**sample["net_input"])
        return output, criterion.compute_loss(model, output, sample)[0]


def test_the_note_of_a_word_that_is_predicted_tells_nothing(made):
    """Words of which every occurrence in the batch has a chosen token: with other notes, the same
    output and loss."""
    model, criterion, sample = made
    read = set(sample["net_input"]["spans"][:, 3].tolist())
    hidden = sorted(set(sample["rare_words"][:, 3].tolist()) - read)
    assert hidden and read
    (before, _), loss = run(model, criterion, sample)
    model.notes.table[hidden] += 100
    (after, extra), other_loss = run(model, criterion, sample)
    assert torch.equal(before, after) and torch.equal(loss, other_loss)
    taken = set(extra["notes"][0]._indices()[0].tolist())
    assert not taken & set(hidden), "and no note is taken where the word is hidden"
    model.notes.table[sorted(read)] += 100
    assert not torch.equal(before, run(model, criterion, sample)[0][0])


def test_notes_are_taken_from_the_finished_models_hidden_states(made):
    model, criterion, sample = made
    (_, extra), _ = run(model, criterion, sample)
    row, first, end, word = sample["net_input"]["spans"][0].tolist()
    k, length = model.notes.note_half_window, int((sample["net_input"]["src_tokens"][row] != model.padding_idx).sum())
    window = extra["hidden"][row, max(0, first - k) : min(length, end + k)]
    sums, _ = extra["notes"]
    assert int(sums._indices()[0, 0]) == word
    torch.testing.assert_close(sums._values()[0], window.mean(0))


def test_a_padding_symbol_in_the_text_does_not_end_the_windows_of_its_row(made):
    model, _, _ = made
    tokens = torch.tensor(
        [[7, model.padding_idx, model.padding_idx, 8, 9, 10], [7, 8, 9, 10, *[model.padding_idx] * 2]]
    )
    with torch.no_grad():
        _, extra = model(tokens, spans=torch.tensor([[0, 4, 5, 0], [1, 3, 4, 1]]))
    expected = torch.stack([extra["hidden"][0].mean(0), extra["hidden"][1, :4].mean(0)])
    torch.testing.assert_close(extra["notes"][0]._values(), expected)


def test_parameters_have_the_names_they_have_without_notes(made, data):
    model, _, _ = made
    plain = runs.model_of(noted.ELECTRA if hasattr(model, "generator") else noted.BERT, data=data)
    assert {name for name in model.state_dict() if not name.startswith("notes.")} == set(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]


def test_a_copy_is_a_model_of_its_own(made):
    model, criterion, sample = made
    other = copy.deepcopy(model)
    (before, _), _ = run(model, criterion, sample)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(run(model, criterion, sample)[0][0], before)
    assert not torch.equal(run(other, criterion, sample)[0][0], before)


def test_notes_of_a_batch_without_rare_words_are_none(made):
    model, _, _ = made
    tokens = torch.full((2, 6), 7)
    plain = model(tokens)[0]
    noted_output, extra = model(tokens, spans=torch.empty(0, 4, dtype=torch.int64))
    assert torch.equal(plain, noted_output)
    assert extra["notes"][0]._nnz() == 0 and extra["notes"][1]._nnz() == 0


@pytest.mark.parametrize("size", SIZES)
def test_every_size_has_one_with_notes(size):
    own, other = argparse.Namespace(), argparse.Namespace()
    ARCHITECTURES[f"tnf_{size}"].fill(own)
    ARCHITECTURES[size].fill(other)
    assert own == other
    assert issubclass(MODELS[ARCHITECTURES[f"tnf_{size}"].model].encoder_class, MODELS[ARCHITECTURES[size].model])


def test_with_one_reader_notes_change_what_the_generator_writes_and_nothing_in_the_discriminator(data):
    args = runs.arguments(noted.TNF_ELECTRA, "--note-readers generator", data=data)
    task = setup_task(args)
    model = task.build_model(args).eval()
    sample = next(iter(task.iterator("train", model, task.build_criterion(args), training=True)))["net_input"]
    clean = {name: sample[name] for name in ("src_tokens", "spans", "longest_span")}
    results = []
    with torch.no_grad():
        for scale in (0, 5):
            model.notes.table.normal_(0, scale) if scale else model.notes.table.zero_()
            results.append((model(**sample)[1]["generator_hidden"], model(**clean)[0]))
    (before, judged), (after, judged_again) = results
    assert not torch.equal(before, after) and torch.equal(judged, judged_again)
    assert torch.equal(judged, model(clean["src_tokens"])[0])
