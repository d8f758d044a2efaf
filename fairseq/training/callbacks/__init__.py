"""What accompanies training beside the update:
one file each, given the state and settings of its own."""

from __future__ import annotations

from collections.abc import Sequence

from fairseq.checkpoint import CheckpointManager
from fairseq.config.settings import TrainingSettings
from fairseq.distributed import Interruption, World
from fairseq.training.callbacks.callback import Callback, register_callback, registered_callbacks
from fairseq.training.callbacks.checkpoints import Checkpoints
from fairseq.training.callbacks.intervals import Intervals
from fairseq.training.callbacks.limits import Limits
from fairseq.training.callbacks.log import Log
from fairseq.training.callbacks.profiler import Profiler, parse_window
from fairseq.training.callbacks.settings import RunSettings
from fairseq.training.callbacks.signals import Signals
from fairseq.training.callbacks.validation import Validation
from fairseq.training.log import Reporter
from fairseq.training.milestones import Milestones
from fairseq.training.saving import Saver
from fairseq.training.stages import Stage

__all__ = ["Callback", "callbacks_of", "register_callback"]


def callbacks_of(
    settings: TrainingSettings,
    world: World,
    stage: Stage | None = None,
    manager: CheckpointManager | None = None,
    interruption: Interruption | None = None,
    more: Sequence[Callback] = (),
    recorded: TrainingSettings | None = None,
) -> list[Callback]:
    """Return the callbacks of a run, or of its *stage*, in the order in which they are called.

    Args:
        manager: the checkpoints; None except on the first process.
        interruption: the signal that asks this process to stop.
        more: callbacks beside the run's own and the registered ones.
        recorded: the settings of all stages, where they are to be recorded.

    Raises:
        UserError: a setting of one of them is invalid.
    """
    cfg, saving, data = settings.optimization, settings.checkpoint, settings.data
    reporter = Reporter(settings.common, saving, world, settings.flat)
    return [
        Limits(saving.patience),
        Profiler(parse_window(settings.profiling.profile, cfg.max_update), saving.save_dir),
        # Once it is known whether there is something to do.
        *([RunSettings(recorded, manager)] if recorded is not None and manager is not None else []),
        Log(reporter, settings.chosen.arch),
        *registered_callbacks(settings),
        *more,
        Intervals(saving, Milestones(saving, settings.data_path, data.train_subset)),
        # Before the validation it saves a state that is still
        # to be validated, and after it the complete one.
        Checkpoints(saving, Saver(saving, settings.distributed, world, manager), manager),
        Validation(saving.best_checkpoint_metric, data.max_valid_steps, reporter),
        Signals(interruption or Interruption()),
    ]
