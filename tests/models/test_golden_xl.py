"""Ten updates of each of the authors' models, made by the trainer, against the losses and gradients
they recorded."""

from __future__ import annotations

from pathlib import Path

import imports
import numpy as np
import pytest
import torch

from fairseq import checkpoint
from fairseq.config import options
from fairseq.config.settings import training_settings
from fairseq.tasks import setup_task
from fairseq.training.state import TrainingState
from fairseq.training.update import update
from fairseq_cli.common import get_training_parser

FLAGS = """--cpu --arch transformer_xl --criterion cross_entropy --optimizer adam --adam-torch-eps --lr 0.001
    --clip-norm 0.25 --batch-size 3 --dropout 0 --dropatt 0"""


def trainer_of(folder: Path) -> TrainingState:
    """A trainer of the imported model in *folder*."""
    args = options.parse_args_and_arch(get_training_parser(), [str(folder), *FLAGS.split()])
    state = checkpoint.load(folder / "checkpoint.pt")
    vars(args).update({name: value for name, value in state["args"].items() if not name.startswith("drop")})
    task = setup_task(args)
    model = task.build_model(args)
    model.load_state_dict(state["model"])
    criterion = task.build_criterion(args)
    criterion.padding_idx = -1  # every id is a word here
    return TrainingState(training_settings(args), task, model, criterion)


@pytest.mark.parametrize("name", imports.NAMES)
def test_ten_updates_are_the_authors(tmp_path: Path, name: str) -> None:
    settings, arrays = imports.golden(name)
    config = ["--config", imports.AUTHORS / f"{name}.json"]
    trainer = trainer_of(imports.authors(imports.AUTHORS / f"{name}.state_dict.pt", tmp_path / "model", *config))
    tokens, length = torch.from_numpy(arrays["tokens"]).long().t(), settings["tgt_len"]  # (3, 61)
    losses, norms = [], []
    for step in range(settings["train_steps"]):
        start = step * length % (tokens.size(1) - 1)
        target = tokens[:, start + 1 : start + length + 1]
        source = tokens[:, start : start + length]
        sample = {"net_input": {"src_tokens": source}, "target": target, "ntokens": target.numel(), "nsentences": 3}
        trainer.meters["train_inner"].reset()
        assert update(trainer, [sample])
        report = trainer.meters["train_inner"].report(trainer.figures)
        losses.append(report["loss"] * np.log(2))
        norms.append(report["gnorm"])
    assert np.abs(np.array(losses) - settings["train_loss"]).max() < 1e-4
    assert np.abs(np.array(norms) - settings["train_gnorm"]).max() < 1e-3
    assert (trainer.task.carried["memory"] is not None) == (settings["mem_len"] > 0)
