"""A training job: its processes, and on each of them restoring, the remaining stages and saving."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fairseq import checkpoint, distributed
from fairseq.checkpoint import CheckpointManager
from fairseq.checkpoint.manager import find_checkpoint
from fairseq.checkpoint.store import copied
from fairseq.config.settings import CheckpointConfig, TrainingSettings
from fairseq.distributed import Interruption, Job, World
from fairseq.distributed.sharding import is_sharded, place_of
from fairseq.errors import UserError
from fairseq.logging.recorders import log_file
from fairseq.models.architectures.transformer_lm import resumed
from fairseq.models.loading import load_fitting
from fairseq.system.terminal import log_to_stderr
from fairseq.tasks.dictionary_digest import check_dictionary, check_save_dir, dictionary_of
from fairseq.training import resumption, stages
from fairseq.training.effective import SETTINGS_FILE, check_outputs, describe, write_settings
from fairseq.training.run import Run
from fairseq.training.stop import describe_interruption

logger = logging.getLogger(__name__)

RESETS_OFF = {field.name: False for field in fields(CheckpointConfig) if field.name.startswith("reset_")}


def launch(settings: TrainingSettings) -> None:
    """Train on as many processes as *settings* ask for.

    Raises:
        SystemExit: a signal stopped the run, with 128 plus its number.
    """
    distributed.run(Job(run_process, settings, settings.common, settings.distributed))


def run_process(settings: TrainingSettings, world: World) -> None:
    """Train as one process of *world*, with a log on stderr."""
    log_to_stderr(logging.INFO if world.is_first else logging.ERROR)
    with Interruption() as interruption, log_file(settings.common.log_file if world.is_first else None):
        number = train(settings, world, interruption)
    if number:
        sys.exit(128 + number)


def train(settings: TrainingSettings, world: World, interruption: Interruption | None = None) -> int:
    """Train what *settings* describe, on one process of *world*: restore, run every stage that is left, save.

    Args:
        settings: those of the run.
        world: the processes.
        interruption: the signal that asks this process to stop; polled after each update.

    Returns:
        The number of the signal that stopped the run, the same on every rank; 0 if it ended by its settings.

    Raises:
        UserError: the settings, the data or the checkpoint are invalid.
    """
    manager = CheckpointManager(settings.checkpoint) if world.is_first else None
    with manager.locked() if manager is not None else contextlib.nullcontext():
        if manager is not None:
            check_outputs(settings)
        return _train_stages(settings, world, interruption or Interruption(), manager)


def _record(settings: TrainingSettings, nothing_to_do: bool) -> None:
    """Log the settings and write them to the checkpoint folder, once they have passed every check.

    A run with *nothing_to_do* leaves the file, like the checkpoints, with the settings of the last update.
    """
    logger.info("settings: %s", describe(settings))
    if not (settings.checkpoint.no_save or nothing_to_do):
        write_settings(settings, Path(settings.checkpoint.save_dir) / SETTINGS_FILE)


def _train_stages(
    settings: TrainingSettings, world: World, interruption: Interruption, manager: CheckpointManager | None
) -> int:
    started = time.perf_counter()  # of all stages
    planned = stages.plan(settings)
    options = settings.checkpoint
    path = world.share(str(manager.restore_path() or "") if manager is not None else None)
    rows = place_of(settings.distributed, world) if is_sharded(settings.distributed, world) else None
    state = checkpoint.load(path, rows=rows) if path else None
    source = path
    initial, initial_path = None, options.finetune_from_model or ""
    if state is None and initial_path:
        initial_path = str(find_checkpoint(initial_path))
        initial = checkpoint.load(initial_path, rows=rows)
    settings = _at_version(settings, (state or initial or {}).get("args") or {})
    stage = None
    recorded = manager is None
    while True:
        if planned:
            stage = stages.stage_at(planned, _updates(state, options))
        own = stages.settings_at(settings, planned, stage) if stage else settings
        run = Run(own, world, manager, stage, interruption)
        if run.inferred:
            settings = settings.changed(**run.inferred)
        dictionary = dictionary_of(run.task)
        if state is not None:
            with restoring(path) if source == path else contextlib.nullcontext():
                run.restore(state, source, adopt=source != path)
                if source == path:
                    resumption.log_differences(run.trainer, run.settings, state.get("args") or {}, source)
            settings = settings.changed(**run.trainer.restored)
            state = None
        elif initial is not None:
            check_dictionary(initial, initial_path, dictionary)
            load_fitting(run.trainer.model, initial["model"], initial_path)
            initial = None
        run.batches.open()  # what is wrong with the data is found before anything is written
        if manager is not None and dictionary is not None and dictionary.path is not None:
            check_save_dir(manager.folder, dictionary)
            manager.keep_dictionary(dictionary.path)
        if not recorded:
            _record(settings, nothing_to_do=run.limit() is not None)
            recorded = True
        run.train()
        if run.stop.interrupted:
            number = max(world.gather(interruption.signal, everywhere=True))
            logger.info(describe_interruption(number, run.trainer.num_updates, options))
            return number
        if stage is None or stage is planned[-1] or not run.stage_is_done():
            if end := run.describe_end(time.perf_counter() - started):
                logger.info(end)
            return 0
        logger.info("stage %d is done after %d updates", stage.number, run.trainer.num_updates)
        # From here on the state is on the host alone: a device never holds the models and moments of two stages.
        state, source = copied(run.state_dict(), again=False), f"stage {stage.number}"
        run.batches.close()  # what opens the next data folder refers to the model
        del run
        gc.collect()  # wrapped modules refer to themselves, and so do frames that PyTorch's first optimizer leaves
        settings = settings.changed(**RESETS_OFF)
        options = settings.checkpoint


def _at_version(settings: TrainingSettings, stored: Mapping[str, Any]) -> TrainingSettings:
    """*settings* with ``--arch transformer_lm`` as the checkpoint's fairseq meant it."""
    values = resumed(settings.model, stored) if settings.chosen.arch == "transformer_lm" else {}
    if values:
        text = ", ".join(f"{name}={value}" for name, value in values.items())
        logger.info("--arch transformer_lm as in the checkpoint, by fairseq's up to 0.10.2: %s", text)
    return settings.changed(**values)


@contextlib.contextmanager
def restoring(path: str) -> Iterator[None]:
    """Turn any failure to restore the checkpoint at *path* into a UserError: its content may be of any kind."""
    try:
        yield
    except UserError as error:  # parts of the state do not know the file
        if str(error).startswith("checkpoint: "):
            raise UserError(f"{path}: {str(error).removeprefix('checkpoint: ')}") from None
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(
            f"{path}: its training state cannot be restored ({reason}); use another checkpoint, or its weights alone "
            "with --finetune-from-model"
        ) from error


def _updates(state: dict[str, Any] | None, options: CheckpointConfig) -> int:
    if state is None or options.reset_optimizer or state.get("last_optimizer_state") is None:
        return 0
    return int((state.get("optimizer_history") or [{}])[-1].get("num_updates", 0))
