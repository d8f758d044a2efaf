"""Causal models train with notes, resume exactly, and lose nothing but the notes when they are
finished."""

from __future__ import annotations

import noted
import numpy as np
import pytest
import runs
import torch
from mistakes import user_error

from fairseq import checkpoint
from fairseq.hub import load_model
from fairseq.models.loading import load_fitting
from fairseq.training.update import update
from fairseq_cli import preprocess
from fairseq_cli.preprocess import get_preprocessing_parser

COMMON = """--cpu --tokens-per-sample 12 --max-tokens 48 --required-batch-size-multiple 1 --lr 0.05 --clip-norm 0.1
    --seed 3 --log-format json --log-interval 1 --no-epoch-checkpoints --validate-interval 99"""
BANDS = "--adaptive-softmax-cutoff 10,20 --adaptive-input-cutoff 10,20"
ARCHS = {
    "transformer_lm": f"--arch transformer_lm_tiny {BANDS} --criterion cross_entropy {COMMON}",
    "shortformer": f"--arch shortformer_tiny {BANDS} --criterion cross_entropy --tokens-from-prev 12 {COMMON}",
    "llama": f"--arch llama_tiny --criterion cross_entropy --tokens-from-prev 12 {COMMON}",
    "transformer_xl": f"--arch transformer_xl_tiny --criterion cross_entropy --mem-len 12 {COMMON}",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return noted.corpus(tmp_path_factory.mktemp("noted"))


def trained(data, *flags, weight=None):
    """Parameters after three updates, and the model."""
    trainer = noted.trainer(data, *flags)
    if weight is not None:
        trainer.model.notes.note_lambda = weight
    torch.manual_seed(2)
    batches = trainer.task.iterator("train", trainer.model, trainer.criterion, training=True)
    for _, sample in zip(range(3), batches, strict=False):
        update(trainer, [sample])
    return dict(trainer.model.named_parameters()), trainer.model


@pytest.mark.parametrize("arch", ARCHS)
def test_notes_are_taken_and_change_training_and_without_weight_they_do_not(arch, data):
    plain, _ = trained(data, ARCHS[arch])
    idle, _ = trained(data, ARCHS[arch], "--notes", weight=0.0)
    noted_parameters, model = trained(data, ARCHS[arch], "--notes")
    for name, value in plain.items():
        assert torch.equal(idle[name], value), name
    assert any(not torch.equal(noted_parameters[name], value) for name, value in plain.items())
    assert int(model.notes.updates) == 3 and int((model.notes.written > 0).sum()) > 0


@pytest.mark.parametrize("arch, more", [("shortformer", "--note-context"), ("transformer_xl", "")])
def test_an_interrupted_run_goes_on_exactly_with_memory_and_table(arch, more, data, tmp_path):
    flags = [ARCHS[arch], "--notes --disable-validation", more]  # the first part's would be one more
    whole = runs.train(tmp_path / "whole", *flags, "--max-update 7", data=data)
    runs.train(tmp_path / "parts", *flags, "--max-update 3", data=data)
    rest = runs.train(tmp_path / "parts", *flags, "--max-update 7", data=data)
    assert runs.updates(rest) == runs.updates(whole)[3:]
    one, other = (runs.content(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "parts"))
    assert runs.difference(one, other) is None


def test_the_finished_model_has_no_notes_unless_they_are_kept(data, tmp_path):
    runs.train(tmp_path, ARCHS["transformer_xl"], "--notes --note-gamma 0.2 --max-update 2", data=data)
    file = tmp_path / "checkpoint_last.pt"
    model, _ = load_model(file, data)
    kept, _ = load_model(file, data, overrides={"keep_notes": True})
    assert not hasattr(model, "notes") and int(kept.notes.updates) == 2
    tokens = torch.full((1, 5), 7)
    assert torch.equal(model(tokens)[0], kept(tokens)[0])


def test_symbols_that_look_like_marks_do_not_delay_notes(tmp_path):
    """Text that is tokens already has ``@@`` marks or none, whatever else its dictionary holds."""
    (tmp_path / "text").write_text("a ## b ##x ▁ ▁y\n" * 5)
    flags = f"--only-source --notes --note-min-count 5 --trainpref {tmp_path}/text --destdir {tmp_path}/bin"
    preprocess.main(get_preprocessing_parser().parse_args(runs.words(flags)))
    model = noted.trainer(tmp_path / "bin", ARCHS["transformer_lm"].replace("10,20", "6,8"), "--notes").model
    assert model.notes.delay == 0


def test_a_word_that_ends_in_the_unknown_symbol_is_not_read(tmp_path):
    """Its note would tell that the word ends there: ``<unk>`` may stand for a symbol that the next
    token continues."""
    (tmp_path / "text").write_text("a@@ x b a@@ y a@@ x b\n" * 3 + "a@@ x\n")
    flags = f"--only-source --thresholdsrc 6 --notes --note-min-count 3 --note-max-count 7 --destdir {tmp_path}/bin"
    flags += f" --trainpref {tmp_path}/text"
    preprocess.main(get_preprocessing_parser().parse_args(runs.words(flags)))
    task = noted.trainer(tmp_path / "bin", ARCHS["transformer_lm"].replace("10,20", "5,6"), "--notes").task
    spans = noted.examples(task).batch(np.arange(1))["net_input"]["spans"]
    assert task.extensions["notes"].words.words == ("ax", "b", "ay")
    assert set(spans[:, 3].tolist()) == {0, 1}


@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize(
    "flags",
    [
        "--note-form centred",
        "--note-lambda 0.2",
        "--note-gamma 0.2",
        "--note-half-window 2",
        "--note-context",
        "--note-until 3",
    ],
)
def test_settings_of_notes_without_notes_are_rejected(flags, name, data, tmp_path):
    with user_error(f"^{flags.split()[0]}: has no effect without --notes; add it$"):
        runs.train(tmp_path, ARCHS[name], flags, "--max-update 1", data=data)
    assert not list(tmp_path.iterdir())


def test_bad_input_is_one_line(data):
    with user_error("run fairseq-preprocess --notes"):
        noted.trainer(runs.DATA, ARCHS["transformer_lm"], "--notes")
    with user_error("--add-bos-token"):
        noted.trainer(data, ARCHS["transformer_lm"], "--notes --add-bos-token")
    with user_error("--decoder-output-dim 64"):
        narrow = "--arch transformer_lm --decoder-layers 1 --decoder-embed-dim 64 --decoder-output-dim 32"
        noted.trainer(data, ARCHS["transformer_lm"], "--notes", narrow)


def test_a_run_without_notes_stores_and_logs_no_settings_of_notes_and_resumes_one_that_did(data, tmp_path):
    flags = [ARCHS["shortformer"], "--max-update"]
    runs.train(tmp_path, *flags, "1", data=data)
    file = tmp_path / "checkpoint_last.pt"
    state = checkpoint.read(file)
    assert not [name for name in state["args"] if name.startswith("note")]
    assert "\nnote" not in (tmp_path / "settings.yaml").read_text()
    former = {"notes": False, "note_lambda": 0.5, "note_gamma": 0.1, "note_half_window": 16, "note_form": "literal"}
    torch.save({**state, "args": {**state["args"], **former, "note_until": None}}, tmp_path / "former")
    (tmp_path / "former").replace(file)  # its tensors are read from the file
    assert len(runs.updates(runs.train(tmp_path, *flags, "2", data=data))) == 1
    assert not hasattr(load_model(file, data)[0], "notes")


def test_a_model_that_cannot_read_notes_is_named(data):
    with user_error("^--notes: LSTMLanguageModel cannot read notes; use a transformer"):
        noted.trainer(data, "--arch lstm_lm --criterion cross_entropy", COMMON, "--notes")


@pytest.mark.parametrize("flags", [f"{ARCHS['transformer_lm']} --notes", f"--arch tnf_bert_tiny {COMMON}"])
def test_initial_weights_are_without_the_notes_of_other_words(flags, data, caplog):
    model = noted.trainer(data, flags).model
    parameters = {name: torch.full_like(value, 7) for name, value in model.state_dict().items()}
    digest, table = model.notes.digest.clone(), model.notes.table.clone()
    with caplog.at_level("INFO"):
        load_fitting(model, parameters, "other.pt")
    assert torch.equal(model.notes.digest, digest) and torch.equal(model.notes.table, table)
    assert "of other data (notes." in caplog.text and all((p == 7).all() for p in model.parameters())
    load_fitting(model, {**parameters, "notes.digest": digest}, "same.pt")
    assert (model.notes.table == 7).all()
