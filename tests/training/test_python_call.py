"""``fairseq.train.train``: the command, its settings and its errors, from Python."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import runs
import torch

from fairseq.errors import UserError
from fairseq.hub import LanguageModel, MaskedLanguageModel
from fairseq.train import train
from fairseq.training.hooks import Hook, register_hook
from fairseq.training.state import TrainingState

SETTINGS = {
    "arch": "transformer_lm_tiny",
    "lr": [0.01, 0.02],
    "optimizer": "adam",
    "tokens_per_sample": 16,
    "max_tokens": 64,
    "max_update": 3,
    "train_subset": "valid",
    "valid_subset": "test",
    "cpu": True,
    "bf16": False,
    "max_epoch": None,
}
FLAGS = (
    "--arch transformer_lm_tiny --lr 0.01,0.02 --optimizer adam --tokens-per-sample 16 --max-tokens 64 --max-update 3"
)
FLAGS += " --train-subset valid --valid-subset test --cpu"


def test_the_call_trains_as_the_command_and_returns_the_model(tmp_path: Path) -> None:
    model = train(runs.DATA, **SETTINGS, save_dir=tmp_path / "python")
    runs.train(tmp_path / "command", FLAGS)
    files = [tmp_path / name / "checkpoint_last.pt" for name in ("python", "command")]
    assert runs.difference(*map(runs.content, files)) is None
    assert isinstance(model, LanguageModel) and model.score("= =")[0] == ["=", "=", "</s>"]
    again = train(runs.DATA, **SETTINGS, save_dir=tmp_path / "python")  # complete: nothing is trained
    assert torch.equal(again.score("= =")[1], model.score("= =")[1])


def test_an_encoder_is_returned_as_a_masked_language_model(tmp_path: Path) -> None:
    sizes = {"encoder_layers": 1, "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 16, "encoder_attention_heads": 2}
    splits = {"train_subset": "valid", "valid_subset": "test"}
    model = train(
        runs.DATA, arch="bert_tiny", cpu=True, max_update=1, tokens_per_sample=16, save_dir=tmp_path, **sizes, **splits
    )
    assert isinstance(model, MaskedLanguageModel)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_updates": 3}, "--max-updates"),
        ({"lr": "fast"}, "--lr"),
        ({"bf16": 3}, "--bf16"),
        ({"no_save": True}, "--no-save"),
        ({"valid_subset": "none"}, "none"),
    ],
)
def test_what_is_wrong_is_a_user_error(settings: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        train(runs.DATA, **{**SETTINGS, "save_dir": tmp_path, **settings})
    assert message in error.value.with_flags


def test_ctrl_c_is_a_keyboard_interrupt_after_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupt(Hook):
        def on_update(self, state: TrainingState) -> None:
            if state.num_updates == 1:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("fairseq.training.hooks._FACTORIES", [])
    register_hook(lambda settings: Interrupt())
    with pytest.raises(KeyboardInterrupt):
        train(runs.DATA, **SETTINGS, save_dir=tmp_path)
    assert (tmp_path / "checkpoint_last.pt").exists()
