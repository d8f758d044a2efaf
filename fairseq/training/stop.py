"""The end of a run: the limit that ended it, in the words
of its last message, and the commands that follow."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from fairseq.checkpoint.manager import BEST, LAST
from fairseq.config.settings import CheckpointConfig, TrainingSettings
from fairseq.data.folders import data_folders
from fairseq.system.terminal import duration
from fairseq.training.state import TrainingState

logger = logging.getLogger(__name__)

# A run that goes on starts from its own checkpoint.
_ELSEWHERE = ("--restore-file", "--finetune-from-model")


def log_end(state: TrainingState, seconds: float) -> None:
    """Log the last messages of a run of *seconds* that ended by its settings."""
    assert state.end is not None, "the run has ended"
    logger.info("%s is reached after %d updates", state.end.setting, state.num_updates)
    for step in next_steps(state.settings, state.task.evaluated_by, state.model.can_generate, sys.argv):
        logger.info(step)
    metric = state.settings.checkpoint.best_checkpoint_metric
    logger.info(describe_end(seconds, metric, state.best.value))


def describe_end(seconds: float, metric: str, best: float | None) -> str:
    """Return the last message of a run of *seconds*, with its *best* validation *metric*; None
    without a validation."""
    result = "no validation" if best is None else f"best validation {metric} {best:.4g}"
    return f"done training in {seconds:.1f} seconds ({duration(seconds)}); {result}"


def next_steps(settings: TrainingSettings, command: str, can_generate: bool, argv: Sequence[str]) -> list[str]:
    """Return what can be done with a run that has ended,
    with the commands; nothing where nothing was saved.

    *command* is the module of :mod:`fairseq_cli` that evaluates checkpoints of the task.
    """
    folder = settings.checkpoint.save_dir
    if settings.checkpoint.no_save:
        return []
    plugin = ["--user-dir", settings.common.user_dir] if settings.common.user_dir is not None else []
    evaluated, writes = evaluation(settings, command, argv), command == "eval_lm" and can_generate
    return [
        *([f"evaluate: {evaluated}"] if evaluated else []),
        *([f"write text: {shlex.join([*_program(argv[0], 'interactive'), folder, *plugin])}"] if writes else []),
        f"draw curves: {shlex.join([*_program(argv[0], 'plot'), folder])}",
    ]


def evaluation(settings: TrainingSettings, command: str, argv: Sequence[str]) -> str | None:
    """Return the command that evaluates the best checkpoint of a run, or else the last; None if
    there is none.

    *command* is the module of :mod:`fairseq_cli` that evaluates checkpoints of the task.
    """
    folder, data = Path(settings.checkpoint.save_dir), settings.data
    if settings.checkpoint.no_save or not any(os.path.exists(folder / name) for name in (BEST, LAST)):
        return None
    words = [*_program(argv[0], command), settings.data_path, "--path", str(folder)]
    split = data.valid_subset.split(",")[0].strip()
    if command == "eval_lm":
        # A folder without a test split: what there is to evaluate is the validation split.
        first = data_folders(settings.data_path)[0]
        words += [] if os.path.exists(first / f"{data.gen_subset}.idx") else ["--gen-subset", split]
    elif split != "valid":
        words += ["--valid-subset", split]
    if settings.common.user_dir is not None:
        words += ["--user-dir", settings.common.user_dir]
    return shlex.join(words)


def describe_interruption(number: int, updates: int, saving: CheckpointConfig) -> str:
    """Return what the log says of a run that the signal
    *number* stopped after *updates*: how to go on."""
    if saving.no_save or saving.no_last_checkpoints:
        then = f"nothing to go on from was saved (`{'no_save' if saving.no_save else 'no_last_checkpoints'}`)"
    else:
        then = f"saved {Path(saving.save_dir) / LAST}; to go on: {continuation(sys.argv)}"
    return f"stopped by {signal.Signals(number).name} after update {updates}; {then}"


def continuation(argv: Sequence[str]) -> str:
    """Return the command that goes on with a run which ``sys.argv`` *argv* started, without flags
    that restart it."""
    program, *words = argv
    path = Path(program)
    if path.parent.name == "fairseq_cli":
        command = ["python", "-m", f"fairseq_cli.{path.stem}"]
    else:
        command = ["python", program] if path.suffix == ".py" else [path.name]
    remaining = iter(words)
    for word in remaining:
        if word in _ELSEWHERE:
            next(remaining, None)  # its value
        elif not word.startswith(("--reset-", *(f"{flag}=" for flag in _ELSEWHERE))):
            command.append(word)
    return shlex.join(command)


def _program(program: str, command: str) -> list[str]:
    """The words that start *command*, a module
    of :mod:`fairseq_cli`, in the way *program* was started."""
    path = Path(program)
    if path.parent.name == "fairseq_cli":
        return ["python", "-m", f"fairseq_cli.{command}"]
    if path.suffix == ".py" and os.path.isfile(path.parent / f"{command}.py"):
        return ["python", str(path.parent / f"{command}.py")]
    return [f"fairseq-{command.replace('_', '-')}"]
