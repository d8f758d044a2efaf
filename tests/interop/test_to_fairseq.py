"""``fairseq-export --to fairseq`` writes what fairseq wrote: the same names, numbers and kinds of
settings."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import runs
import torch

from fairseq import checkpoint
from fairseq.config import options
from fairseq.config.settings import training_settings
from fairseq.errors import UserError
from fairseq.interop.fairseq.to_fairseq0x import to_fairseq
from fairseq.models.loading import stored_settings
from fairseq.tasks import setup_task
from fairseq.training.state import TrainingState
from fairseq_cli import export_model
from fairseq_cli.export_model import get_export_parser

GOLDEN = Path(__file__).parents[1] / "golden" / "fairseq_variants"
VARIANTS: dict[str, Any] = json.loads((GOLDEN / "variants.json").read_text())


def export(source: Path, out: Path) -> dict[str, Any]:
    """The exported file, as fairseq's ``torch.load`` would read it."""
    words = [str(source), "--to", "fairseq", "--out", str(out)]
    export_model.main(options.parse_args_and_arch(get_export_parser(), words))
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(out, weights_only=True)


def plain(value: Any) -> Any:
    """A setting as a value that two spellings have in common: "20,40", [20, 40]; 0, 0.0; "(0.9,
    0.98)"."""
    text = str(value).strip("()[]").replace(" ", "")
    return [float(part) if part.replace(".", "", 1).isdecimal() else part for part in text.split(",")]


@pytest.mark.parametrize("name", VARIANTS)
def test_what_fairseq_wrote_comes_back(name: str, tmp_path: Path) -> None:
    former = "--decoder-normalize-before --decoder-input-dim 24 --decoder-output-dim 24"  # defaults up to 0.10.2
    args = runs.arguments(VARIANTS[name]["flags"], former, data=GOLDEN / "data-bin")
    task = setup_task(args)
    settings, model = training_settings(args), task.build_model(args)
    trainer = TrainingState(settings, task, model, task.build_criterion(args))
    trainer.load_state_dict(checkpoint.load(GOLDEN / f"{name}.pt"), name)
    checkpoint.save(tmp_path / "ours.pt", {"args": stored_settings(settings.flat, model), **trainer.state_dict()})
    written, theirs = export(tmp_path / "ours.pt", tmp_path / "out.pt"), checkpoint.read(GOLDEN / f"{name}.pt")

    assert list(written["model"]) == list(theirs["model"])
    assert runs.difference(written["model"], dict(theirs["model"])) is None
    state, expected = written["last_optimizer_state"], theirs["last_optimizer_state"]
    assert state["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
    assert expected["state"].keys() == state["state"].keys()
    for number, entry in expected["state"].items():
        for key, value in entry.items():
            assert float(torch.as_tensor(state["state"][number][key] - value).abs().max()) == 0, (number, key)
    last = theirs["optimizer_history"][-1]
    for key in ("criterion_name", "optimizer_name", "num_updates"):
        assert written["optimizer_history"][-1][key] == last[key]
    settings, theirs_args = vars(written["args"]), theirs["args"]
    assert None not in settings.values()
    both = (settings.keys() & theirs_args.keys()) - {"data", "max_update", "min_lr", "warmup_init_lr"}
    assert len(both) > 35
    different = {key: (settings[key], theirs_args[key]) for key in both if theirs_args[key] is not None
                 and plain(settings[key]) != plain(theirs_args[key])}  # fmt: skip
    assert different == {}


def test_a_roberta_of_fairseq_comes_back(tmp_path: Path) -> None:
    path = GOLDEN.parent / "roberta" / "checkpoint.pt"
    written, theirs = export(path, tmp_path / "out.pt"), checkpoint.read(path)
    assert list(written["model"]) == list(theirs["model"])
    assert runs.difference(written["model"], dict(theirs["model"])) is None
    assert written["last_optimizer_state"] is None
    settings, expected = vars(written["args"]), theirs["args"]
    both = settings.keys() & expected.keys()
    assert len(both) > 35 and settings["task"] == "masked_lm" and "max_positions" in both
    different = {key: (settings[key], expected[key]) for key in both if plain(settings[key]) != plain(expected[key])}
    assert different == {}


def test_settings_are_written_in_fairseqs_spelling_and_read_again(tmp_path: Path) -> None:
    runs.train(tmp_path, runs.BASELINE, "--optimizer adam --max-update 2 --no-epoch-checkpoints")
    written = export(tmp_path / "checkpoint_last.pt", tmp_path / "fairseq.pt")
    args = written["args"]
    assert (args.arch, args.adaptive_softmax_cutoff, args.adam_betas) == ("transformer_lm", "200,600", "(0.9, 0.999)")
    assert args.decoder_input_dim == args.decoder_output_dim == 32 and args.decoder_normalize_before
    assert args.max_target_positions == 16 and not hasattr(args, "batch_size")
    assert written["extra_state"]["train_iterator"].keys() == {"version", "epoch", "iterations_in_epoch", "shuffle"}
    (tmp_path / "again").mkdir()
    (tmp_path / "fairseq.pt").rename(tmp_path / "again" / "checkpoint_last.pt")
    more = [runs.BASELINE, "--optimizer adam --max-update 5 --no-epoch-checkpoints --reset-dataloader"]
    again, whole = runs.train(tmp_path / "again", *more), runs.train(tmp_path, *more)
    assert runs.losses(again) == pytest.approx(runs.losses(whole)) and len(runs.losses(again)) == 3


XL = """--cpu --train-subset valid --valid-subset test --batch-size 4 --arch transformer_xl_tiny
    --criterion cross_entropy --log-format none"""


@pytest.mark.parametrize(
    "flags, message",
    [
        (runs.SHORTFORMER, "has position_infused_attention=True, which fairseq's transformer_lm lacks"),
        (f"{runs.BASELINE} --qk-norm", "has qk_norm=True, which fairseq's transformer_lm lacks"),
        (f"{runs.BASELINE} --rotary-fraction 1", "has rotary_fraction=1.0, which fairseq's transformer_lm lacks"),
        (f"{runs.BASELINE} --attention-window 9", "has attention_window=9, which fairseq's transformer_lm lacks"),
        (f"{runs.BASELINE} --token-shift 2", "has token_shift=2, which fairseq's transformer_lm lacks"),
        (
            f"{runs.BASELINE} --optimizer adam --ngram-notes 9",
            "has ngram_notes=9, which fairseq's transformer_lm lacks",
        ),
        (XL, "is a model that fairseq lacks"),
    ],
)
def test_models_that_fairseq_lacks_are_refused(flags: str, message: str, tmp_path: Path) -> None:
    runs.train(tmp_path, flags, "--max-update 1 --no-epoch-checkpoints --disable-validation")
    with pytest.raises(UserError, match=message):
        export(tmp_path / "checkpoint_last.pt", tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize(
    "name, value",
    [("token_types", 2), ("layer_norm_eps", 1e-12), ("generator_size", 0.5), ("encoder_input_dim", 8),
     ("head_activation_fn", "relu"), ("classification_head_name", "sentiment")],
)  # fmt: skip
def test_encoders_that_are_no_roberta_are_refused(name: str, value: Any) -> None:
    args = {"encoder_attention_heads": 2, "encoder_embed_dim": 16, "encoder_input_dim": 16, "activation_fn": "gelu"}
    assert to_fairseq({"args": args, "model": {}}, "FILE")["args"].arch == "roberta_base"
    with pytest.raises(UserError, match=f"FILE has {name}={value}, which fairseq's roberta_base lacks"):
        to_fairseq({"args": {**args, name: value}, "model": {}}, "FILE")
