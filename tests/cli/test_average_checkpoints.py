"""``fairseq-checkpoint average`` writes the mean of the parameters of several checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import runs
import torch
from mistakes import user_error
from states import a_state

from fairseq import checkpoint
from fairseq.config import options
from fairseq.errors import UserError
from fairseq_cli.checkpoint import average, get_average_parser


def run(*flags: object) -> None:
    average(options.parse_args_and_arch(get_average_parser(), runs.words(*flags)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of epochs 8 to 10 and of two updates, whose parameters are all their number."""
    for name, value in {"checkpoint8": 8, "checkpoint9": 9, "checkpoint10": 10, "checkpoint_1_5": 5}.items():
        checkpoint.save(tmp_path / f"{name}.pt", a_state(float(value)))
    return tmp_path


@pytest.mark.parametrize(
    "flags, mean",
    [
        ("--num-epoch-checkpoints 2", 9.5),
        ("--num-epoch-checkpoints 2 --checkpoint-upper-bound 9", 8.5),
        ("--num-update-checkpoints 1", 5.0),
    ],
)
def test_the_newest_of_a_folder_are_averaged(folder: Path, flags: str, mean: float) -> None:
    run("--inputs", folder, flags, "--output", folder / "average.pt")
    assert set(checkpoint.load(folder / "average.pt")["model"]["w"].tolist()) == {mean}


@pytest.mark.parametrize("maximize, mean", [(False, 1.5), (True, 11.0)])
def test_the_best_are_those_of_the_metric_of_the_run(tmp_path: Path, maximize: bool, mean: float) -> None:
    for value in (1, 2, 10, 12):
        state = a_state(float(value))
        state["args"]["maximize_best_checkpoint_metric"] = maximize
        checkpoint.save(tmp_path / f"checkpoint.best_accuracy_{value}.5000.pt", state)
    (tmp_path / "checkpoint.best_accuracy_1.2.3.pt").touch()
    run("--inputs", tmp_path, "--num-best-checkpoints 2 --output", tmp_path / "average.pt")
    assert set(checkpoint.load(tmp_path / "average.pt")["model"]["w"].tolist()) == {mean}
    checkpoint.save(tmp_path / "checkpoint.best_loss_3.0000.pt", a_state(3.0))
    with user_error("best checkpoints of several metrics, accuracy, loss; give files"):
        run("--inputs", tmp_path, "--num-best-checkpoints 2 --output", tmp_path / "mixed.pt")


def test_an_average_of_a_run_is_evaluated_like_any_checkpoint(tmp_path: Path) -> None:
    from fairseq.hub import LanguageModel

    runs.train(tmp_path, runs.SHORT, "--save-interval-updates 1 --disable-validation")
    paths = [tmp_path / f"checkpoint_1_{n}.pt" for n in (1, 2)]
    run("--inputs", *paths, "--output", tmp_path / "average.pt")
    states = [checkpoint.load(path)["model"] for path in (*paths, tmp_path / "average.pt")]
    for name, value in states[2].items():
        mean = ((states[0][name] + states[1][name]) / 2).to(value.dtype)
        torch.testing.assert_close(value, mean)
    assert LanguageModel.from_pretrained(tmp_path / "average.pt", runs.DATA).perplexity("the") > 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_whole_numbers_are_those_of_the_checkpoint_with_most_updates(tmp_path: Path, order: tuple[int, ...]) -> None:
    paths = []
    for number, updates in enumerate((9, 10, 200)):
        state = a_state(float(number))
        state["model"]["notes.updates"] = torch.tensor(updates)
        state["optimizer_history"][-1]["num_updates"] = updates
        checkpoint.save(tmp_path / f"{updates}.pt", state)
        paths.append(tmp_path / f"{updates}.pt")
    run("--inputs", *(paths[number] for number in order), "--output", tmp_path / "average.pt")
    model = checkpoint.load(tmp_path / "average.pt")["model"]
    assert model["notes.updates"].item() == 200 and set(model["w"].tolist()) == {1.0}


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--num-epoch-checkpoints 4", "3 epoch checkpoints found, 4 are to be averaged"),
        ("--num-epoch-checkpoints 1 --num-update-checkpoints 1", "give one of them"),
        ("--num-epoch-checkpoints 0", "--num-epoch-checkpoints: expected a whole number above 0"),
        ("--checkpoint-upper-bound 3", "--checkpoint-upper-bound: needs"),
    ],
)
def test_mistakes_are_user_errors(folder: Path, flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run("--inputs", folder, flags, "--output", folder / "average.pt")
    assert not (folder / "average.pt").exists()


def test_checkpoints_of_other_models_are_refused(folder: Path) -> None:
    other = a_state(1.0)
    other["model"]["v"] = torch.zeros(2)
    checkpoint.save(folder / "other.pt", other)
    with pytest.raises(UserError, match="other.pt: has other parameters than"):
        run("--inputs", folder / "checkpoint8.pt", folder / "other.pt", "--output", folder / "average.pt")


@pytest.mark.parametrize(
    "arch, name, values",
    [
        ("transformer_lm_tiny", "decoder_attention_heads", (2, 4)),
        ("shortformer_tiny", "decoder_normalize_before", (True, False)),
        ("transformer_xl_tiny", "tie_projs", ("tails", "none")),
        ("bert_tiny", "activation_fn", ("gelu", "relu")),
        ("tnf_electra_tiny", "note_readers", ("both", "generator")),
        ("tnf_bert_tiny", "encoder_attention_heads", (2, 1)),
    ],
)
def test_checkpoints_of_models_that_differ_in_a_setting_only_are_refused(
    tmp_path: Path, arch: str, name: str, values: tuple[object, object]
) -> None:
    paths = [tmp_path / "1.pt", tmp_path / "2.pt", tmp_path / "3.pt"]
    for path, value in zip(paths, (*values, None), strict=True):
        state = a_state()
        state["args"] = {"arch": arch, name: value, "dropout": 0.1 if value == values[0] else 0.2}
        checkpoint.save(path, state)
    run("--inputs", paths[0], paths[2], "--output", tmp_path / "average.pt")  # fairseq's checkpoints may lack it
    (tmp_path / "average.pt").unlink()
    message = f"{paths[1]}: was trained with --{name.replace('_', '-')} {values[1]}, and {paths[0]} with {values[0]}; "
    with user_error(f"^{re.escape(message)}give checkpoints of one run$"):
        run("--inputs", *paths[:2], "--output", tmp_path / "average.pt")
    assert not (tmp_path / "average.pt").exists()


def test_whole_numbers_are_not_averaged_with_parameters(folder: Path) -> None:
    other = a_state(1.0)
    other["model"]["w"] = other["model"]["w"].long()
    checkpoint.save(folder / "other.pt", other)
    with pytest.raises(UserError, match="other.pt: has other parameters than"):
        run("--inputs", folder / "checkpoint8.pt", folder / "other.pt", "--output", folder / "average.pt")
