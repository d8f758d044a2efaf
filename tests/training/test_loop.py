"""A job: what it restores or starts from, its stages in turn, what it writes before training, and
its exit code."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import yaml
from mistakes import logged

from fairseq import checkpoint
from fairseq.config.settings import training_settings
from fairseq.distributed import Interruption, Job, World
from fairseq.errors import UserError
from fairseq.training import loop, resume, training_job
from fairseq.training.state import TrainingState

QUICK = f"{runs.BASELINE} --decoder-layers 1 --no-epoch-checkpoints --disable-validation"
SHORTFORMER = f"{runs.SHORTFORMER} --decoder-layers 1 --no-epoch-checkpoints --disable-validation"


def settings_of(save_dir: Path, *flags: Any) -> Any:
    return training_settings(runs.arguments(QUICK, "--save-dir", save_dir, *flags))


def last(folder: Path) -> dict[str, Any]:
    return checkpoint.read(folder / "checkpoint_last.pt")


# --- processes


def test_a_job_hands_settings_to_each_process(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    assert training_job(settings) == Job(loop.run_process, settings, settings.common, settings.distributed)


@pytest.mark.parametrize("first", [True, False])
def test_a_process_ends_with_the_code_of_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    answers = iter([0, 15])
    calls: list[Any] = []

    def train(settings: Any, world: World, interruption: Any) -> int:
        calls.append((settings, world, isinstance(interruption, Interruption)))
        # the signal is recorded while it trains, and the log has a copy
        assert signal.getsignal(signal.SIGTERM) == interruption._record
        logging.getLogger("fairseq").error("a message")
        return next(answers)

    monkeypatch.setattr(loop, "train", train)
    levels: list[int] = []
    monkeypatch.setattr(loop, "log_to_stderr", levels.append)
    settings, world = settings_of(tmp_path, "--log-file", tmp_path / "log.txt"), World(0 if first else 1, 1)
    loop.run_process(settings, world)
    with pytest.raises(SystemExit) as end:
        loop.run_process(settings, world)
    assert end.value.code == 143 and calls == [(settings, world, True)] * 2
    assert levels == [logging.INFO if first else logging.ERROR] * 2
    assert (tmp_path / "log.txt").exists() is first, "one process writes the file"


def interrupted_at(updates: int, monkeypatch: pytest.MonkeyPatch) -> Interruption:
    """A signal during the update after *updates*."""
    interruption = Interruption()
    step = loop.update

    def stepped(state: TrainingState, *args: Any) -> bool:
        if state.num_updates == updates:
            interruption.signal = signal.SIGUSR1
        return step(state, *args)

    monkeypatch.setattr(loop, "update", stepped)
    return interruption


def test_a_signal_ends_the_job_in_any_stage_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = settings_of(tmp_path, "--stages 8:2,16:5")
    assert loop.train(settings, World(), interrupted_at(2, monkeypatch)) == signal.SIGUSR1
    assert last(tmp_path)["optimizer_history"][-1]["num_updates"] == 3
    assert caplog.messages[-1].startswith(f"stopped by SIGUSR1 after update 3; saved {tmp_path}/checkpoint_last.pt; ")
    assert loop.train(settings, World()) == 0
    assert last(tmp_path)["optimizer_history"][-1]["num_updates"] == 5


# --- stages


THREE = "--max-tokens 64 --stages 8:1,16:2,32:3 --no-save"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings of each stage's run, in the order in which they are made."""
    found: list[Any] = []
    build = loop.build_state

    def watched(settings: Any, *args: Any) -> Any:
        found.append(settings)
        return build(settings, *args)

    monkeypatch.setattr(loop, "build_state", watched)
    return found


def lengths(made: list[Any]) -> list[int]:
    return [settings.flat["tokens_per_sample"] for settings in made]


def test_stages_follow_one_another_and_are_told(
    tmp_path: Path, made: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log = runs.train(tmp_path, SHORTFORMER, THREE)
    assert [(line["num_updates"], line["stage"], line["tokens_per_sample"]) for line in runs.updates(log)] == [
        (1, 1, 8), (2, 2, 16), (3, 3, 32)
    ]  # fmt: skip
    assert [message for message in caplog.messages if "is done" in message] == [
        "stage 1 is done after 1 update",
        "stage 2 is done after 2 updates",
    ]
    assert "done training in" in caplog.messages[-1] and lengths(made) == [8, 16, 32]
    assert not any("settings in force" in message for message in caplog.messages), "nothing was resumed"
    restored = [message for message in caplog.messages if message.startswith("restored")]
    assert restored == ["restored stage 1: epoch 1, update 1", "restored stage 2: epoch 1, update 2"]


@pytest.fixture
def done(tmp_path: Path) -> Path:
    """The folder of a run of three updates."""
    runs.train(tmp_path, SHORTFORMER, "--tokens-per-sample 32 --tokens-from-prev 32 --max-tokens 64 --max-update 3")
    return tmp_path


RESETS = "--reset-optimizer --reset-meters --reset-dataloader --reset-lr-scheduler"


@pytest.mark.parametrize(("flags", "expected"), [(RESETS, [8, 16, 32]), ("", [32])])
def test_what_is_reset_begins_with_the_first_stage_and_is_kept_by_the_next_ones(
    done: Path, made: list[Any], flags: str, expected: list[int]
) -> None:
    runs.train(done, SHORTFORMER, THREE, flags)
    assert lengths(made) == expected
    resets = [{getattr(settings.checkpoint, name) for name in loop.RESETS_OFF} for settings in made]
    assert resets == [{bool(flags)}, {False}, {False}][: len(made)]


def test_a_run_with_stages_resumes_in_the_stage_of_its_updates(tmp_path: Path) -> None:
    flags = "--max-tokens 64 --stages 8:2,16:4"
    runs.train(tmp_path, SHORTFORMER, runs.ADAM, "--tokens-per-sample 16 --tokens-from-prev 16 --max-update 3")
    (line,) = runs.updates(runs.train(tmp_path, SHORTFORMER, runs.ADAM, flags))
    assert (line["num_updates"], line["stage"]) == (4, 2)
    without = {**last(tmp_path), "last_optimizer_state": None}
    checkpoint.save(tmp_path / "checkpoint_last.pt", without)
    lines = runs.updates(runs.train(tmp_path, SHORTFORMER, runs.ADAM, flags))
    assert [line["num_updates"] for line in lines] == [1, 2, 3, 4], "weights alone have no updates behind them"


# --- what a run starts from


def test_a_run_starts_from_the_weights_of_another_and_from_nothing_else_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs.train(tmp_path / "a", QUICK, runs.ADAM, "--max-update 3")
    caplog.set_level(logging.INFO)
    initial = ["--finetune-from-model", tmp_path / "a", "--lr 1e-12 --max-update 1"]
    (line,) = runs.updates(runs.train(tmp_path / "b", QUICK, runs.ADAM, *initial))
    assert line["num_updates"] == 1 and line["epoch"] == 1
    weights, started = (last(tmp_path / name)["model"] for name in ("a", "b"))
    assert all(torch.allclose(weights[name], started[name], atol=1e-6) for name in weights)
    assert any(message.startswith(f"{tmp_path}/a/checkpoint_last.pt: ") for message in caplog.messages)
    runs.train(tmp_path / "b", QUICK, runs.ADAM, "--lr 0.1 --max-update 3")
    caplog.clear()
    (line,) = runs.updates(runs.train(tmp_path / "b", QUICK, runs.ADAM, initial, "--lr 1e-12 --max-update 4"))
    assert line["num_updates"] == 4, "a run that has begun goes on"
    moved = last(tmp_path / "b")["model"]
    assert not any(torch.allclose(weights[name], moved[name]) for name in weights if weights[name].dim() == 2)
    assert not any("parameters loaded" in message for message in caplog.messages)


def test_the_first_stage_alone_starts_from_other_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs.train(tmp_path / "a", SHORTFORMER, "--max-update 1")
    caplog.set_level(logging.INFO)
    flags = ["--finetune-from-model", tmp_path / "a" / "checkpoint_last.pt", "--max-tokens 64 --stages 8:1,16:2"]
    runs.train(tmp_path / "b", SHORTFORMER, flags)
    assert sum("parameters loaded" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("flag", ["--finetune-from-model", "--restore-file"])
def test_checkpoints_of_another_dictionary_are_refused_by_name(tmp_path: Path, flag: str) -> None:
    runs.train(tmp_path / "a", QUICK, "--max-update 1")
    path = tmp_path / "a" / "checkpoint_last.pt"
    checkpoint.save(path, {**last(tmp_path / "a"), "dictionary": "0" * 64})
    with pytest.raises(UserError) as error:
        runs.train(tmp_path / "b", QUICK, flag, path, "--max-update 2")
    assert error.value.with_flags.startswith(f"{path}: was trained with another dictionary")
    assert not (tmp_path / "b" / "settings.yaml").exists()


def test_a_folder_of_another_dictionary_is_not_written_to(tmp_path: Path) -> None:
    tmp_path.joinpath("dict.txt").write_text("other 1\n")
    runs.train(tmp_path / "a", QUICK, "--max-update 1")
    (tmp_path / "checkpoint_last.pt").write_bytes((tmp_path / "a" / "checkpoint_last.pt").read_bytes())
    state = last(tmp_path)
    del state["dictionary"]
    checkpoint.save(tmp_path / "checkpoint_last.pt", state)
    with pytest.raises(UserError, match="dictionary"):
        runs.train(tmp_path, QUICK, "--max-update 2")
    assert (tmp_path / "dict.txt").read_text() == "other 1\n"


def test_the_architecture_is_that_of_the_checkpoints_fairseq(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Up to 0.10.2 ``transformer_lm`` normalised before each sublayer."""
    caplog.set_level(logging.INFO)
    former, plain = {"decoder_normalize_before": True}, {"decoder_normalize_before": False}
    for arch, stored, expected in (
        ("transformer_lm", former, True),
        ("transformer_lm", plain, False),
        ("transformer_lm", {}, False),
        ("transformer_lm_tiny", plain, True),  # which it has by itself
    ):
        settings = training_settings(runs.arguments(QUICK, "--arch", arch))
        found = resume.at_version(settings, stored)
        assert found.model.decoder_normalize_before is expected
        assert found.flat["decoder_normalize_before"] is expected
    widths = {"decoder_input_dim": None, "decoder_output_dim": None}
    named = training_settings(runs.arguments(QUICK, "--decoder-input-dim 512 --decoder-output-dim 512"))
    assert resume.at_version(named, widths).model.decoder_input_dim == 512, "of another architecture"
    (message,) = logged(caplog)
    assert message == ("--arch transformer_lm as in the checkpoint, of a former version: decoder_normalize_before=True")
    bands = {"adaptive_input_factor": 4.0, "adaptive_softmax_factor": 4.0}
    for flags, factor in (("", 4.0), ("--adaptive-input-factor 2 --adaptive-softmax-factor 2", 2.0)):
        small = training_settings(runs.arguments(QUICK, "--arch shortformer_tiny", flags))
        assert resume.at_version(small, {}).model == small.model
        assert resume.at_version(small, bands).model.adaptive_input_factor == factor
    fast = training_settings(runs.arguments(QUICK.replace("_tiny", "_fast_demo")))
    assert fast.model.ngram_notes and not resume.at_version(fast, {**bands, "ngram_notes": 0}).model.ngram_notes
    assert resume.at_version(fast, {"ngram_notes": 64000}).model == resume.at_version(fast, {}).model == fast.model
    both = training_settings(runs.arguments(QUICK, "--arch transformer_lm"))
    resume.at_version(both, {**former, **widths})
    assert logged(caplog)[-1] == f"{message}, decoder_input_dim=32, decoder_output_dim=32"
    state = {"args": former, "model": {}, "optimizer_history": []}
    checkpoint.save(tmp_path / "former.pt", state)
    for flag in ("--restore-file", "--finetune-from-model"):
        caplog.clear()
        with pytest.raises(UserError):  # it has no parameters
            runs.train(tmp_path / "run", QUICK.replace("_tiny", ""), flag, tmp_path / "former.pt")
        assert message in logged(caplog)


# --- what it writes before training


def test_dictionary_and_settings_are_beside_the_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    runs.train(tmp_path / "a", QUICK, "--max-update 1")
    assert (tmp_path / "a" / "dict.txt").read_bytes() == (runs.DATA / "dict.txt").read_bytes()
    assert yaml.safe_load((tmp_path / "a" / "settings.yaml").read_text())["max_update"] == 1
    (line,) = [message for message in caplog.messages if message.startswith("settings: ")]
    assert line.startswith(f"settings: data={runs.DATA}, ")
    runs.train(tmp_path / "b", QUICK, "--max-update 1 --no-save")
    assert not (tmp_path / "b").exists()


def test_a_resumed_run_names_the_checkpoint_and_what_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs.train(tmp_path, QUICK, "--max-update 1")
    runs.train(tmp_path, QUICK, "--max-update 2 --seed 4")
    (message,) = [message for message in logged(caplog) if "in force" in message]
    path = tmp_path / "checkpoint_last.pt"
    assert message == f"{path}: settings in force, other than in the checkpoint: --seed 4 (was 3)"


def test_two_jobs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "--max-update 1")
    with loop.CheckpointManager(settings.checkpoint).locked(), pytest.raises(UserError, match=f"{tmp_path}"):
        loop.train(settings, World())
    assert loop.train(settings, World()) == 0


# --- a state that cannot be restored


@pytest.mark.parametrize("error", [TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError, RuntimeError])
def test_any_failure_to_restore_names_the_file_and_a_way_out(error: type[Exception]) -> None:
    with pytest.raises(UserError) as found, resume.restoring("x.pt"):
        raise error("no  such\nthing " + "x" * 300)
    line = found.value.with_flags
    assert line.startswith(f"x.pt: its training state cannot be restored ({error.__name__}: ")
    assert line.endswith("); use another checkpoint, or its weights alone with --finetune-from-model")
    assert "\n" not in line and "xxx" in line and len(line) < 370


def test_an_error_of_a_part_is_that_of_its_file(tmp_path: Path) -> None:
    for text, expected in (("checkpoint: bad", "x.pt: bad"), ("--lr 1: bad", "--lr 1: bad"), ("a checkpoint: b",) * 2):
        with pytest.raises(UserError) as found, resume.restoring("x.pt"):
            raise UserError(text)
        assert found.value.with_flags == expected
    with pytest.raises(KeyboardInterrupt), resume.restoring("x.pt"):
        raise KeyboardInterrupt


def test_a_state_that_cannot_be_restored_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.train(tmp_path, QUICK, runs.ADAM, "--max-update 1")
    monkeypatch.setattr(TrainingState, "load_state_dict", lambda self, state, *args, **settings: state["nothing"])
    with pytest.raises(UserError, match=f"^{tmp_path}/checkpoint_last.pt: its training state cannot be restored"):
        runs.train(tmp_path, QUICK, runs.ADAM, "--max-update 2")
