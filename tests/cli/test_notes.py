"""fairseq-analyze notes shows neighbours, norms and ages of a checkpoint's notes, and writes
them."""

from __future__ import annotations

import json

import noted
import pytest
import runs
import torch
from mistakes import user_error

from fairseq.config import options
from fairseq.errors import UserError
from fairseq.hub import load_model
from fairseq.notes.study import nearest
from fairseq_cli import analyze, export_model
from fairseq_cli.analyze import get_notes_parser
from fairseq_cli.export_model import get_export_parser


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return noted.corpus(tmp_path_factory.mktemp("noted"))


@pytest.fixture(scope="module", params=["", "--encoder-input-dim 8"])
def run(request, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    runs.train(folder, noted.TNF_BERT, request.param, "--max-update 4 --no-epoch-checkpoints", data=data)
    return folder / "checkpoint_last.pt"


def notes(*flags):
    return analyze.notes(get_notes_parser().parse_args(runs.words(*flags)))


def test_every_note_is_reported_with_its_age_and_count(run, data, capsys):
    report = notes(run, "--top 3 --nearest 2")
    state = torch.load(run, weights_only=True)["model"]
    lines = (data / "notes.txt").read_text().splitlines()
    assert [f"{note['word']} {note['count']}" for note in report["notes"]] == lines
    for number, note in enumerate(report["notes"]):
        written = int(state["notes.written"][number])
        assert note["age"] == (4 - written if written else None)
        assert note["taken"] == int(state["notes.taken"][number])
        assert note["norm"] == pytest.approx(float(state["notes.table"][number].norm()))
    assert len(report["neighbours"]) == 3
    out = capsys.readouterr().out
    assert all(f"| {word} |" in out for word in report["neighbours"])


def test_neighbours_are_the_nearest_written_notes(run, data):
    report = notes(run, data, "--words", report_word(run), "--nearest 3")
    state = torch.load(run, weights_only=True)["model"]
    words = [line.split()[0] for line in (data / "notes.txt").read_text().splitlines()]
    written = state["notes.written"] > 0
    centred = state["notes.table"] - state["notes.table"][written].mean(0)
    own = words.index(report_word(run))
    cosines = torch.nn.functional.cosine_similarity(centred, centred[own][None])
    expected = sorted((w for w in range(len(words)) if written[w] and w != own), key=lambda w: -cosines[w])[:3]
    found = report["neighbours"][words[own]]
    assert [one["word"] for one in found["notes"]] == [words[w] for w in expected]
    assert len(found["tokens"]) == 3


def report_word(run):
    return max(notes(run)["notes"], key=lambda note: note["taken"])["word"]


def test_the_results_are_files_that_need_nothing_else(run, tmp_path):
    notes(run, "--results-path", tmp_path / "study")
    assert json.loads((tmp_path / "study" / "notes.json").read_text())["updates"] == 4


def test_nearest_finds_what_a_sort_finds():
    table, queries = torch.randn(300, 5), torch.randn(4, 5)
    cosines = torch.nn.functional.cosine_similarity(queries[:, None], table[None], dim=2)
    for row, found in zip(cosines, nearest(queries, lambda rows: table[rows], 300, 7), strict=True):
        assert [place for place, _ in found] == row.argsort(descending=True)[:7].tolist()
        assert [cosine for _, cosine in found] == pytest.approx(row.sort(descending=True)[0][:7].tolist(), abs=1e-5)


ENCODER = """
from fairseq.models import register_model
from fairseq.models.bert import BertConfig, BertModel
from fairseq.notes.settings import TNFBertConfig
from fairseq.notes.tnf import TNFBert

@register_model("encoder_of_notes", dataclass=BertConfig)
class Encoder(BertModel):
    pass

@register_model("tnf_encoder_of_notes", dataclass=TNFBertConfig)
class Noted(TNFBert):
    encoder_class = Encoder

@register_model("noted_encoder", dataclass=TNFBertConfig)
class NamedOtherwise(Noted):
    pass
"""


def test_notes_of_a_plug_ins_encoder_are_shown_and_it_serves_without_them(data, tmp_path):
    (tmp_path / "noted_plugin").mkdir()
    (tmp_path / "noted_plugin" / "__init__.py").write_text(ENCODER)
    plugin = ["--user-dir", tmp_path / "noted_plugin"]
    for arch in ("tnf_encoder_of_notes", "noted_encoder"):
        flags = [noted.TNF_BERT.replace("tnf_bert_tiny", arch), *plugin, "--max-update 1 --no-epoch-checkpoints"]
        runs.train(tmp_path / arch, *flags, "--disable-validation", data=data)
        words = runs.words(tmp_path / arch / "checkpoint_last.pt", *plugin)
        found = analyze.notes(options.parse_args_and_arch(get_notes_parser(), words))
        assert found["updates"] == 1
    model, _ = load_model(tmp_path / "tnf_encoder_of_notes" / "checkpoint_last.pt", data)
    assert not hasattr(model, "notes")
    words = runs.words(tmp_path / "tnf_encoder_of_notes", "--to hf --out", tmp_path / "hf", *plugin)
    export_model.main(options.parse_args_and_arch(get_export_parser(), words))
    assert "RobertaForMaskedLM" in (tmp_path / "hf" / "config.json").read_text()
    with user_error("--arch noted_encoder: .* register the model as tnf_NAME"):
        load_model(tmp_path / "noted_encoder" / "checkpoint_last.pt", data)


def test_bad_input_is_one_line(run, data, tmp_path):
    with user_error("--words nowhere: has no note"):
        notes(run, "--words nowhere")
    with pytest.raises(UserError, match="folder not found"):
        notes(run, tmp_path / "nowhere")
    with pytest.raises(UserError, match="notes.txt: file not found"):
        notes(run, runs.DATA)
    runs.train(tmp_path / "plain", noted.BERT, "--max-update 1 --no-epoch-checkpoints", data=data)
    with pytest.raises(UserError, match="has no notes"):
        notes(tmp_path / "plain" / "checkpoint_last.pt")
