"""A training job: its processes, and on each of them restoring, the remaining stages and saving."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

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


@dataclass
class _Origin:
    """What a stage goes on from: a checkpoint, the weights of another run, the stage before, or nothing.

    Attributes:
        state: of a checkpoint, its file or the stage; None once the run has it, so that training does not hold it.
        source: the file or the stage, as messages call it.
    """

    kind: Literal["checkpoint", "weights", "stage", "nothing"] = "nothing"
    state: dict[str, Any] | None = None
    source: str = ""


def _train_stages(
    settings: TrainingSettings, world: World, interruption: Interruption, manager: CheckpointManager | None
) -> int:
    started = time.perf_counter()  # of all stages
    planned = stages.plan(settings)
    origin = _first_origin(settings, world, manager)
    settings = _at_version(settings, (origin.state or {}).get("args") or {})
    recorded = False
    while True:
        stage = stages.stage_at(planned, _updates(origin, settings.checkpoint)) if planned else None
        own = stages.settings_at(settings, planned, stage) if stage else settings
        run = Run(own, world, manager, stage, interruption)
        _begin(run, origin)
        settings = settings.changed(**{**run.inferred, **run.trainer.restored})
        run.batches.open()  # what is wrong with the data is found before anything is written
        if manager is not None and not recorded:
            _record(settings, run, manager)
            recorded = True
        run.train()
        if run.stop.interrupted:
            number = max(world.gather(interruption.signal, everywhere=True))
            logger.info(describe_interruption(number, run.trainer.num_updates, settings.checkpoint))
            return number
        if stage is None or stage is planned[-1] or not run.stage_is_done():
            if end := run.describe_end(time.perf_counter() - started):
                logger.info(end)
            return 0
        logger.info("stage %d is done after %d updates", stage.number, run.trainer.num_updates)
        # From here on the state is on the host alone: a device never holds the models and moments of two stages.
        origin = _Origin("stage", copied(run.state_dict(), again=False), f"stage {stage.number}")
        run.batches.close()  # what opens the next data folder refers to the model
        del run
        gc.collect()  # wrapped modules refer to themselves, and so do frames that PyTorch's first optimizer leaves
        settings = settings.changed(**RESETS_OFF)


def _first_origin(settings: TrainingSettings, world: World, manager: CheckpointManager | None) -> _Origin:
    """Read what the first stage goes on from, the same file on every process."""
    rows = place_of(settings.distributed, world) if is_sharded(settings.distributed, world) else None
    path = world.share(str(manager.restore_path() or "") if manager is not None else None)
    if path:
        return _Origin("checkpoint", checkpoint.load(path, rows=rows), path)
    if settings.checkpoint.finetune_from_model:
        path = str(find_checkpoint(settings.checkpoint.finetune_from_model))
        return _Origin("weights", checkpoint.load(path, rows=rows), path)
    return _Origin()


def _begin(run: Run, origin: _Origin) -> None:
    """Let *run* go on from *origin*, which gives its state away."""
    state, origin.state = origin.state or {}, None
    match origin.kind:
        case "checkpoint":
            with restoring(origin.source):
                run.restore(state, origin.source)
                resumption.log_differences(run.trainer, run.settings, state.get("args") or {}, origin.source)
        case "weights":
            check_dictionary(state, origin.source, dictionary_of(run.task))
            load_fitting(run.trainer.model, state["model"], origin.source)
        case "stage":
            run.restore(state, origin.source, adopt=True)


def _record(settings: TrainingSettings, run: Run, manager: CheckpointManager) -> None:
    """Log the settings and write them and the dictionary to the checkpoint folder, once they have passed every check.

    A run with nothing to do leaves the file, like the checkpoints, with the settings of the last update.
    """
    dictionary = dictionary_of(run.task)
    if dictionary is not None and dictionary.path is not None:
        check_save_dir(manager.folder, dictionary)
        manager.keep_dictionary(dictionary.path)
    logger.info("settings: %s", describe(settings))
    if not settings.checkpoint.no_save and run.limit() is None:
        write_settings(settings, manager.folder / SETTINGS_FILE)


def _at_version(settings: TrainingSettings, stored: Mapping[str, Any]) -> TrainingSettings:
    """*settings* with ``--arch transformer_lm`` as the checkpoint's fairseq meant it."""
    values = resumed(settings.model, stored) if settings.chosen.arch == "transformer_lm" else {}
    if values:
        text = ", ".join(f"{name}={value}" for name, value in values.items())
        logger.info("`arch` transformer_lm as in the checkpoint, by fairseq's up to 0.10.2: %s", text)
    return settings.changed(**values)


@contextlib.contextmanager
def restoring(path: str) -> Iterator[None]:
    """Turn any failure to restore the checkpoint at *path* into a UserError: its content may be of any kind."""
    try:
        yield
    except UserError as error:  # parts of the state do not know the file
        if str(error).startswith("checkpoint: "):
            raise UserError(f"{path}: {error.args[0].removeprefix('checkpoint: ')}") from None
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(
            f"{path}: its training state cannot be restored ({reason}); use another checkpoint, or its weights alone "
            "with `finetune_from_model`"
        ) from error


def _updates(origin: _Origin, options: CheckpointConfig) -> int:
    """The updates behind a run that goes on from *origin*."""
    state = origin.state or {}
    if origin.kind == "weights" or options.reset_optimizer or state.get("last_optimizer_state") is None:
        return 0
    return int((state.get("optimizer_history") or [{}])[-1].get("num_updates", 0))
