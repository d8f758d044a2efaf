"""Training with notes is exact: alone, resumed, on two processes, after an overflow; and its model
needs no notes."""

from __future__ import annotations

import functools
import operator
from typing import Any

import noted
import pytest
import runs
import torch
import warm
from mistakes import user_error

from fairseq import checkpoint
from fairseq.errors import UserError
from fairseq.hub import load_model
from fairseq.models import loading
from fairseq.notes.extension import without_notes
from fairseq.training.state import TrainingState
from fairseq.training.update import update
from fairseq.training.validation import evaluate

PAIRS = {"bert": (noted.BERT, noted.TNF_BERT), "electra": (noted.ELECTRA, noted.TNF_ELECTRA)}
NARROW = "--encoder-input-dim 8"
CENTRED = "--note-form centred"
NO_DROPOUT = "--dropout 0 --attention-dropout 0 --activation-dropout 0"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return noted.corpus(tmp_path_factory.mktemp("noted"))


def batches(trainer, split="train"):
    return list(trainer.task.iterator(split, trainer.model, trainer.criterion, training=split == "train"))


def step(trainer, count=3):
    torch.manual_seed(2)
    for sample in batches(trainer)[:count]:
        update(trainer, [sample])
    return {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize("more", ["", NARROW, CENTRED])
@pytest.mark.parametrize("pair", PAIRS)
def test_without_weight_notes_leave_training_as_it_is(pair, more, data):
    backbone, tnf = PAIRS[pair]
    plain = noted.trainer(data, backbone, "" if more == CENTRED else more)
    noted_trainer = noted.trainer(data, tnf, more, note_lambda=0)
    expected, parameters = step(plain), step(noted_trainer)
    assert int(noted_trainer.model.notes.taken.sum()) > 0
    for name, value in expected.items():
        assert torch.equal(parameters[name], value), name
    assert parameters.keys() - expected.keys() <= {"note_projection.weight"}


def test_without_rate_the_table_stays_as_it_is(data):
    trainer = noted.trainer(data, noted.TNF_BERT, note_gamma=0)
    before = trainer.model.notes.table.clone()
    step(trainer)
    assert int(trainer.model.notes.taken.sum()) > 0
    assert torch.equal(trainer.model.notes.table, before)


@pytest.mark.parametrize("flags", [noted.TNF_BERT, noted.TNF_ELECTRA, f"{noted.CAUSAL} --notes"])
def test_notes_of_the_context_need_a_window(flags, data):
    with user_error("^--note-half-window 0: must be at least 1 with --note-context$"):
        noted.trainer(data, flags, "--note-context --note-half-window 0")


def stored(trainer: TrainingState) -> dict[str, Any]:
    return loading.stored_settings(trainer.task.settings.flat, trainer.model)


def check_settings(trainer: TrainingState, args: dict[str, Any]) -> None:
    """The check of a run before it restores a checkpoint with the settings *args*."""
    settings = trainer.task.settings
    loading.check_settings(trainer.model, args, settings.model, "x.pt", settings.extensions)


@pytest.mark.parametrize("forms", [("", CENTRED), (CENTRED, "")])
def test_a_checkpoint_with_the_other_form_of_notes_names_the_flag(forms, data):
    saved, resumed = (noted.trainer(data, noted.TNF_BERT, form) for form in forms)
    values = [form.removeprefix("--note-form ") or "literal" for form in forms]
    with user_error(f"^--note-form {values[1]}: x.pt was trained with {values[0]}, "):
        check_settings(resumed, stored(saved))


@pytest.mark.parametrize("pair", PAIRS)
def test_notes_change_training_and_the_table_follows_the_text(pair, data):
    plain, noted_trainer = (noted.trainer(data, flags) for flags in PAIRS[pair])
    notes = noted_trainer.model.notes
    before = notes.table.clone()
    expected, parameters = step(plain), step(noted_trainer)
    assert any(not torch.equal(parameters[name], value) for name, value in expected.items())
    written = notes.taken > 0
    assert 0 < int(written.sum()) < len(written), "the batches have some of the words"
    assert torch.equal((notes.table != before).any(1), written)
    assert int(notes.updates) == 3


def test_from_the_last_update_with_notes_on_training_is_that_without(data):
    """The weights of a model whose notes have ended move as those of its encoder alone, from the
    same weights."""
    ended = noted.trainer(data, noted.TNF_BERT, NO_DROPOUT, CENTRED, "--note-until 2")
    step(ended, 2)
    plain = noted.trainer(data, noted.BERT, NO_DROPOUT)
    plain.model.load_state_dict(without_notes(ended.model.state_dict()))
    plain.optimizer.load_state_dict(ended.optimizer.state_dict())
    taken = ended.model.notes.taken.clone()
    for sample in batches(ended)[2:4]:
        update(ended, [sample])
        rest = {name: value for name, value in sample["net_input"].items() if "span" not in name}
        update(plain, [{**sample, "net_input": rest}])
    assert int(taken.sum()) > 0 and torch.equal(ended.model.notes.taken, taken)
    for name, value in plain.model.named_parameters():
        assert torch.equal(dict(ended.model.named_parameters())[name], value), name


@pytest.mark.parametrize("pair", PAIRS)
def test_a_rank_without_a_batch_has_all_gradients_to_reduce_and_they_are_zero(pair, data):
    trainer = noted.trainer(data, PAIRS[pair][1], NARROW)
    (loss, _, _), _ = trainer.task.step(trainer.graph, None, {}, "cpu")
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    assert not [name for name, gradient in gradients.items() if gradient is None or gradient.any()]


def test_validation_reads_notes_and_takes_none(data):
    trainer = noted.trainer(data, noted.TNF_BERT)
    before = {name: value.clone() for name, value in trainer.model.notes.state_dict().items()}
    evaluate(trainer, batches(trainer, "valid"))
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.notes.state_dict().items())


def test_an_update_that_overflowed_takes_no_notes(data):
    trainer = noted.trainer(data, noted.TNF_BERT, "--fp16")
    samples = batches(trainer)
    before = {name: value.clone() for name, value in trainer.model.notes.state_dict().items()}

    def overflow(module, args, output):
        return output[0] * torch.inf, output[1]

    hook = trainer.model.register_forward_hook(overflow)
    assert not update(trainer, [samples[0]])
    hook.remove()
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.notes.state_dict().items())
    assert update(trainer, [samples[0]])
    assert int(trainer.model.notes.updates) == 1


def test_an_update_whose_gradients_alone_overflowed_takes_no_notes(data):
    trainer = noted.trainer(data, noted.TNF_BERT, "--fp16")
    samples = batches(trainer)[:2]
    notes = trainer.model.notes
    before = notes.table.clone()
    hook = trainer.parameters[0].register_hook(lambda gradient: gradient * torch.inf)
    assert not update(trainer, [samples[0]])
    hook.remove()
    assert torch.equal(notes.table, before) and int(notes.updates) == 0
    assert update(trainer, [samples[1]])
    alone = noted.trainer(data, noted.TNF_BERT, "--fp16")
    assert update(alone, [samples[1]])
    assert torch.equal(notes.taken, alone.model.notes.taken), "those of the second update only"


def test_batches_of_one_update_are_one_update_of_the_table(data):
    together, apart = (noted.trainer(data, noted.TNF_BERT, NO_DROPOUT) for _ in range(2))
    samples = batches(together)[:3]
    update(together, samples)
    assert int(together.model.notes.updates) == 1
    taken = [apart.model(**sample["net_input"])[1]["notes"] for sample in samples]
    apart.model.notes.write(*(functools.reduce(operator.add, values) for values in zip(*taken, strict=True)))
    torch.testing.assert_close(together.model.notes.table, apart.model.notes.table)


@pytest.mark.parametrize(
    ("kind", "more"), [("bert", f"{CENTRED} --note-until 7"), ("electra", "--note-context --note-half-window 1")]
)
def test_an_interrupted_run_goes_on_exactly_with_its_table(kind, more, data, tmp_path):
    flags = [PAIRS[kind][1], more, "--no-epoch-checkpoints --validate-interval 9"]
    whole = runs.train(tmp_path / "whole", *flags, "--max-update 9", data=data)
    runs.train(tmp_path / "parts", *flags, "--max-update 4", data=data)
    rest = runs.train(tmp_path / "parts", *flags, "--max-update 9", data=data)
    assert runs.updates(rest) == runs.updates(whole)[4:]
    one, other = (runs.content(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "parts"))
    assert runs.difference(one, other) is None
    assert int(one["model"]["notes.updates"]) == 9


def test_two_processes_train_as_one(data, tmp_path):
    flags = [
        noted.TNF_BERT,
        NO_DROPOUT,
        CENTRED,
        "--note-context --no-epoch-checkpoints --max-update 6 --validate-interval 9",
    ]
    flags += ["--sample-break-mode none"]
    one = runs.train(tmp_path / "one", *flags, "--batch-size 4", data=data)
    half = "--batch-size 2 --distributed-world-size 2"
    process = warm.command("train.py", data, "--save-dir", tmp_path / "two", *flags, half)
    assert process.returncode == 0, process.stderr
    assert runs.losses(runs.records(process.stdout)) == pytest.approx(runs.losses(one), rel=1e-4)
    states = [runs.content(tmp_path / name / "checkpoint_last.pt")["model"] for name in ("one", "two")]
    for name in ("notes.taken", "notes.written", "notes.updates"):
        assert torch.equal(states[0][name], states[1][name])
    for name in ("notes.table", "notes.moments"):
        torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-3, atol=1e-3)


def test_a_process_without_a_batch_in_the_last_update_takes_part(data, tmp_path):
    flags = [noted.TNF_ELECTRA, NARROW, NO_DROPOUT, "--max-tokens 120 --max-epoch 1 --no-epoch-checkpoints"]
    one = runs.train(tmp_path / "one", *flags, "--update-freq 2 --disable-validation", data=data)
    process = warm.command(
        "train.py", data, "--save-dir", tmp_path / "two", *flags, "--distributed-world-size 2 --disable-validation"
    )
    assert process.returncode == 0, process.stderr
    assert len(runs.losses(one)) == 7  # of 13 batches
    assert runs.losses(runs.records(process.stdout)) == runs.losses(one)
    states = [runs.content(tmp_path / name / "checkpoint_last.pt")["model"] for name in ("one", "two")]
    assert runs.difference(*states) is None


@pytest.fixture(scope="module", params=PAIRS)
def run(request, data, tmp_path_factory):
    """A finished training run with notes, and how to load its model plain."""
    folder = tmp_path_factory.mktemp("run")
    flags = "--max-update 3 --no-epoch-checkpoints"
    runs.train(folder, PAIRS[request.param][1], flags, data=data)
    return folder / "checkpoint_last.pt", request.param


def test_the_finished_model_is_the_encoder_without_notes(run, data, tmp_path):
    file, kind = run
    model, task = load_model(file, data)
    assert type(model).__name__ == {"bert": "BertModel", "electra": "ElectraModel"}[kind]
    assert type(task).__name__ == "MaskedLMTask"
    state = checkpoint.read(file)
    state["model"] = dict(without_notes(state["model"]))
    state["args"]["arch"] = state["args"]["arch"].removeprefix("tnf_")
    state["args"]["task"] = "masked_lm"
    torch.save(state, tmp_path / "plain.pt")
    plain, _ = load_model(tmp_path / "plain.pt", data)
    tokens = torch.randint(4, 20, (2, 9))
    assert torch.equal(model(tokens)[0], plain(tokens)[0])


def test_the_finished_model_needs_no_notes_beside_its_dictionary(run, data):
    assert torch.is_tensor(load_model(run[0], data / "dict.txt")[0](torch.full((1, 5), 6))[0])


def test_notes_are_kept_to_study_them(run, data):
    model, _ = load_model(run[0], data, overrides={"keep_notes": True})
    assert int(model.notes.updates) == 3
    tokens = torch.full((1, 8), 6)
    spans = torch.tensor([[0, 2, 5, 1]])
    with torch.no_grad():
        assert not torch.equal(model(tokens)[0], model(tokens, spans=spans)[0])


def test_notes_of_other_words_are_rejected(data, tmp_path):
    runs.train(tmp_path / "run", noted.TNF_BERT, "--max-update 1 --no-epoch-checkpoints", data=data)
    (tmp_path / "other").mkdir()
    other = noted.corpus(tmp_path / "other", high=24)
    with pytest.raises(UserError, match=r"notes\.txt: differs from the words"):
        load_model(tmp_path / "run" / "checkpoint_last.pt", other, overrides={"keep_notes": True})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--note-lambda=-0.5", "--note-lambda -0.5"),
        ("--note-lambda 2", "--note-lambda 2"),
        ("--note-gamma 1.5", "--note-gamma 1.5"),
        ("--note-gamma -1", "--note-gamma"),
        ("--note-half-window -1", "--note-half-window -1"),
        ("--task masked_lm", "--arch tnf_bert_tiny: needs notes.txt"),
    ],
)
def test_settings_that_make_no_sense_are_rejected(flags, message, data):
    with user_error(message):
        noted.trainer(data, noted.TNF_BERT, flags)


def test_a_folder_without_notes_is_rejected():
    with user_error("run fairseq-preprocess --notes"):
        noted.trainer(runs.DATA, noted.TNF_BERT)
