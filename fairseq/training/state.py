"""The state of a run between two updates,
with its one ``state_dict`` and its one ``load_state_dict``."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from fairseq.checkpoint.optimizer_state import ParameterNames, convert_state
from fairseq.config.fields import differ, parse_dict
from fairseq.config.settings import CheckpointConfig, TrainingSettings
from fairseq.criterions.fairseq_criterion import FairseqCriterion
from fairseq.data.iterator import EpochIterator
from fairseq.data.position import SavedBy
from fairseq.distributed import World
from fairseq.errors import SettingError, UserError
from fairseq.logging.figures import Meter
from fairseq.models.base import BaseFairseqModel
from fairseq.models.loading import load_parameters, stored_parameters, stored_settings
from fairseq.modules.precision import Precision
from fairseq.optim.elementwise import ElementwiseOptimizer
from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import build_lr_scheduler
from fairseq.tasks import dictionary_digest
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.training.averaging import restore_weights, weight_average
from fairseq.training.best import Best, changes, fingerprint
from fairseq.training.clock import Clock
from fairseq.training.due import Due
from fairseq.training.gradients import LossScaler
from fairseq.training.length import Length, frequency, length_of, needs_length
from fairseq.training.limit import Limit
from fairseq.training.nonfinite import NonFiniteUpdates
from fairseq.training.oom_retry import BatchSplitter, Rebatch
from fairseq.training.parallel import data_parallel, optimizer_of
from fairseq.training.random_states import gather_random_states, restore_random_states
from fairseq.training.stages import Stage
from fairseq.training.votes import Votes

logger = logging.getLogger(__name__)


class TrainingState:
    """Everything that a run, or a stage of it,
    holds between two updates, on one process of *world*.

    The model is placed on the device of *world*.

    Attributes:
        settings: in force: the run's, with what is *inferred* and *restored*.
        inferred: settings that the task inferred from the data, such as the classes of a table.
        restored: settings that a restored state put in place of the ones given, by name.
        length_from_data: whether ``max_update`` follows from the data. Then :meth:`plan` makes the
            schedule.
        length: what :meth:`plan` found; None before it, and where the settings give the length.
        graph: model and criterion as one module, so that whatever wraps it sees the whole
            computation.
        reducer: the execution of *graph* on the data of all processes.
        scaler: of the loss; None: it is not scaled.
        average: the mean of the weights, which is validated and saved; None: the weights are.
        batches: the training data, at the position that the run has reached.
        validation: the data of each split that is validated.
        votes: decisions of all ranks, taken with each update.
        applied: whether the last update changed anything.
        due: what is left to do after the last update.
        metric: of the last update's validation; None without one.
        is_best: no validation gave a better metric than the last update's.
        best: the best metric, and for how many validations.
        end: why training ends here; None while it goes on.
        saved: the number of updates at the last save.

    Raises:
        UserError: settings contradict each other, the model or the optimizer.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        task: FairseqTask,
        model: BaseFairseqModel,
        criterion: FairseqCriterion,
        world: World | None = None,
        stage: Stage | None = None,
    ) -> None:
        self.settings, self.stage = settings, stage
        self.cfg = cfg = settings.optimization
        self.world = world = world or World()
        self.task = task
        self.graph = task.loss_graph(model, criterion)
        self.model, self.criterion = self.graph.model, self.graph.criterion
        self.precision = Precision(settings.common)
        self.reducer = data_parallel(self.graph, self.precision, settings.distributed, settings.common.compile, world)
        self.optimizer = optimizer_of(self.reducer, self.model, settings, world)
        self.parameters = self.optimizer.params
        # Names are found by identity in the model; the optimizer has this process's shards of it.
        full = [
            {**group, "params": [self.reducer.full_parameter(p) for p in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        self.names = ParameterNames(self.model, self.criterion, full)
        self.scaler: LossScaler | None = None
        if self.precision.needs_scaling:
            self.scaler = LossScaler(settings.common, world.size)
        self.average = weight_average(cfg, self._trained())
        self.splitter = BatchSplitter(
            cfg.oom_retry, model, world.size == 1 or settings.distributed.reduces_after_backward
        )
        self.skipped = NonFiniteUpdates(cfg.skip_nonfinite)
        self.figures = task.figures(self.criterion)
        self.meters = {name: Meter(world.device) for name in ("train", "train_inner")}
        self.votes = Votes(world)
        self._batches: EpochIterator | None = None
        self.rebatch: Rebatch | None = None
        self.validation: dict[str, EpochIterator] = {}
        self.num_updates, self.saved, self.applied = 0, -1, False
        self.due, self.metric, self.is_best = Due(1), None, False
        self.best = Best(settings.checkpoint.maximize_best_checkpoint_metric)
        self.former_best: Mapping[str, Any] | None = None
        self.end: Limit | None = None
        self.inferred: dict[str, object] = {}
        self.restored: dict[str, object] = {}
        self.length_from_data, self.length = needs_length(settings), None
        if not self.length_from_data:
            self._make_schedule()
        self.restored_position: Mapping[str, object] | None = None
        self.clock, self.started, self.trained_before = Clock(self.meters), time.perf_counter(), 0.0
        self._measured: Mapping[str, object] | None = None

    metric: float | None
    length: Length | None

    def plan(self, done: int = 0, before: Mapping[str, Any] | None = None, former: int = 0) -> None:
        """Make the schedule of a run whose length follows from its data, once their position is
        known; see :func:`~fairseq.training.length.length_of`. In other runs, and the second time,
        do nothing. The log names the *former* last update, a checkpoint's, if there was one.

        Raises:
            SettingError: the schedule does not fit into the updates.
        """
        if not self.length_from_data or self.length is not None:
            return
        self.length = length = length_of(self.cfg, self.batches, done, before)
        if former and former != length.updates:
            logger.info("training ends at update %d (was %d)", length.updates, former)
        try:
            self.settings = self.settings.changed(max_update=length.updates, max_epoch=length.epochs)
            self.cfg = self.settings.optimization
            self._make_schedule()
        except SettingError as error:
            # The schedule names a `max_update` that nobody gave.
            text = f"`max_epoch` {length.epochs}: these data give {length.updates} updates, which do not fit"
            raise SettingError(f"{text}: {error.args[0]}") from None

    def _make_schedule(self) -> None:
        self.lr_scheduler = build_lr_scheduler(self.settings, self.optimizer)
        # A schedule need not set its first rate when it is made.
        self.lr_scheduler.step_update(0)

    @property
    def batches(self) -> EpochIterator:
        assert self._batches is not None, "the state of a run that reads data"
        return self._batches

    @batches.setter
    def batches(self, batches: EpochIterator) -> None:
        self._batches, self.rebatch = batches, batches.rebatch

    @property
    def interrupted(self) -> bool:
        """Whether a signal has asked a rank to stop."""
        return self.votes["interrupted"]

    @property
    def frequency(self) -> int:
        """Batches of an update of this epoch."""
        return frequency(self.cfg, self.batches.epoch)

    @property
    def counts(self) -> dict[str, int]:
        """Counts that are equal on all ranks, with what to call them in messages."""
        return {"updates so far": self.num_updates, "updates of the run": self.cfg.max_update}

    def begin_epoch(self) -> None:
        """Prepare for the first update of an epoch, or for the next one of a resumed epoch."""
        # A resumed epoch goes on with its memory and sums.
        if self.batches.iterations_in_epoch == 0:
            self.task.restart()
            for meter in self.meters.values():
                meter.reset()
        self.lr_scheduler.step_begin_epoch(self.batches.epoch)
        if self.scaler is not None:
            self.scaler.begin_epoch(self.frequency)
        self.clock = Clock(self.meters)

    def end_epoch(self) -> None:
        """End the epoch of the last update, after its validation: a checkpoint then is at the start
        of the next."""
        # The next epoch begins elsewhere in the corpus.
        self.task.restart()
        # A metric that does not improve may lower the rate.
        self.lr_scheduler.step(self.due.epoch, self.metric)
        self.lr_scheduler.step_update(self.num_updates)

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model has the weights to validate
        and save: where one is asked for, their mean."""
        return self.average.in_place() if self.average is not None else contextlib.nullcontext()

    def get_lr(self) -> float:
        """Return the learning rate of the next update."""
        return self.optimizer.get_lr()

    def wall(self) -> float:
        """Return seconds of training so far, restored ones included."""
        return self.trained_before + time.perf_counter() - self.started

    def stored_settings(self) -> dict[str, object]:
        """Return the settings in force, as a checkpoint stores them."""
        return stored_settings(self.settings.flat, self.model)

    # --- saving

    def state_dict(self) -> dict[str, Any]:
        """Return everything a run needs to continue,
        in fairseq's layout; to be called on every process.

        Tensors are the live ones: only the process
        that writes the checkpoint copies them to the host.
        """
        extra: dict[str, object] = {
            "random": gather_random_states(self.world),
            "carried": self.task.save_carried(self.world),
            "sums": {name: meter.state_dict() for name, meter in self.meters.items()},
            "previous_training_time": self.wall(),
            **self.best.state_dict(),
            "val_loss": self.metric,
        }
        if self._batches is not None:
            extra |= {"train_iterator": self.batches.state_dict(), "batches": self.batches_signature()}
        if (measured := self.measured()) is not None:
            extra["validation"] = measured
        if self.length is not None:
            extra["length"] = asdict(self.length)
        if self.due.validate:
            extra["due"] = self.due.state_dict()
        if self.stage is not None:
            names = ("number", "tokens_per_sample", "max_update")
            extra["stage"] = {name: getattr(self.stage, name) for name in names}
        if self.average is not None:
            extra["average"] = self._each(self.reducer.full, self.average.state_dict())
        if parameters := self.criterion.state_dict():
            extra["criterion"] = parameters
        if self.skipped.count:
            extra["skipped_nonfinite"] = self.skipped.count
        if self.scaler is not None:
            extra["loss_scaler"] = self.scaler.state_dict()
        history = {
            "criterion_name": type(self.criterion).__name__,
            "optimizer_name": type(self.optimizer).__name__,
            "lr_scheduler_state": self.lr_scheduler.state_dict(),
            "num_updates": self.num_updates,
        }
        optimizer = convert_state(self.optimizer.state_dict(), self.parameters, self.reducer.full)
        dictionary = dictionary_digest.dictionary_of(self.task)
        return {
            "args": self.stored_settings(),
            "model": self._stored_model(),
            "optimizer_history": [history],
            "last_optimizer_state": self.names.by_name(optimizer),
            "extra_state": extra,
            **({} if dictionary is None else {dictionary_digest.KEY: dictionary.digest()}),
        }

    def batches_signature(self) -> dict[str, Any]:
        """Settings of the batches that memory depends on."""
        return {
            "batches": len(self.batches),
            "data": self.batches.data_checksum(),
            **self.task.batch_settings(),
            "memory_length": self.model.memory_length,
            "processes": self.world.size,
        }

    def measured(self) -> Mapping[str, Any] | None:
        """Return what validations measure, see
        :func:`~fairseq.training.best.fingerprint`; None if not known."""
        # Once, since the data of a split stay: computed where it is first needed, which opens them.
        if self._measured is None and self.validation:
            self._measured = fingerprint(self.settings, *next(iter(self.validation.items())))
        return self._measured

    def _stored_model(self) -> dict[str, object]:
        """The model as a checkpoint stores it: where a mean of the weights is asked for, in place
        of the parameters."""
        stored = self.reducer.consolidated(stored_parameters(self.model))
        if self.average is None:
            return stored
        means = {
            id(self.reducer.full_parameter(p)): self.reducer.full(p, mean.to(p.dtype))
            for p, mean in zip(self._trained(), self.average.mean, strict=bool(self.average.count))
        }
        live = self.model.state_dict(keep_vars=True)
        return {name: means.get(id(live[name]), value) for name, value in stored.items()}

    def _trained(self) -> list[nn.Parameter]:
        """The trained parameters in the order of the model, whatever groups the optimizer has."""
        return [p for _, p in self.reducer.named_parameters()]

    def _each(self, convert: Callable[[nn.Parameter, Any], Any], average: Mapping[str, Any]) -> dict[str, Any]:
        """Apply *convert* to what the state of an *average* holds of each parameter."""
        lists = {name: average[name] for name in ("mean", "weights")}
        pairs = {name: zip(self._trained(), values, strict=bool(values)) for name, values in lists.items()}
        return {**average, **{name: [convert(p, value) for p, value in each] for name, each in pairs.items()}}

    # --- restoring

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        source: str,
        options: CheckpointConfig | None = None,
        rows: int = 0,
        *,
        adopt: bool = False,
    ) -> None:
        """Continue from *state*, ours or fairseq's.

        Args:
            source: what to call it in messages.
            options: what is ignored (``--reset-…``) and overridden; default: the run's settings.
            rows: rows of a batch on one rank whose memory
                is restored where no batches are read; 0: none.
            adopt: nothing else uses the tensors of the optimizer's
                state, so that they need not be copied.

        Raises:
            UserError: its parameters are not the model's, or its optimizer not the one asked for.
        """
        options = options or self.settings.checkpoint
        extra, history = state.get("extra_state") or {}, (state.get("optimizer_history") or [{}])[-1]
        if self._batches is not None and not options.reset_dataloader and "train_iterator" in extra:
            rows = self._load_position(state, extra, source)
        load_parameters(self.model, state["model"], source)
        starts = options.reset_optimizer or state.get("last_optimizer_state") is None
        done = 0 if starts else int(history.get("num_updates", 0))
        former = int((state.get("args") or {}).get("max_update") or 0) if done else 0
        self.plan(done, None if starts or options.reset_dataloader else extra.get("length"), former)
        if not options.reset_optimizer:
            self._load_average(extra)
            if "criterion" in extra:
                self.criterion.load_state_dict(extra["criterion"])
            if state.get("last_optimizer_state") is not None:
                self._load_optimizer(state, extra, history, source, options, adopt)
        if self._batches is not None:
            # The rate of the epoch that the run is in, or has ended: a limit may be reached by it.
            epoch = self.batches.epoch if self.batches.iterations_in_epoch else self.batches.epoch - 1
            self.lr_scheduler.step_begin_epoch(max(1, epoch))
        # Also with --reset-lr-scheduler: the rate follows from the number of updates.
        self.lr_scheduler.step_update(self.num_updates)
        if not options.reset_meters:
            self._load_metrics(extra, state.get("args") or {}, options)
        if not options.reset_dataloader:
            restore_random_states(extra.get("random"), self.world, source)
            if extra.get("due") and not options.reset_optimizer:
                self.due = Due.of(extra["due"])
        self.task.load_carried(extra.get("carried") or {}, rows, self.world)

    def _load_position(self, state: Mapping[str, Any], extra: Mapping[str, Any], source: str) -> int:
        """Go to the position of *state* in the data; return the rows whose memory fits."""
        length = self.task.batch_settings().get("tokens_per_sample")
        saved = SavedBy.of(state, length, self.stage.number if self.stage else None)
        signature = extra.get("batches") or {}
        try:
            same_rows = self.batches.load_state_dict(extra["train_iterator"], saved)
        except UserError:
            if self._is_of_other_data(signature):
                raise UserError(
                    f"{source}: the data have changed: it is in the middle of an epoch of other data than "
                    f"{self.settings.data_path}; use those it was trained with, another `save_dir`, or "
                    "`reset_dataloader` to begin with the new ones"
                ) from None
            raise
        if self._is_of_other_data(signature):
            logger.warning("%s: the data have changed: trained on others than %s", source, self.settings.data_path)
        self.restored_position = extra["train_iterator"]
        here = self.batches_signature()
        names = ("tokens_per_sample", "memory_length", "shuffled_with")
        rows = self.batches.sampler.rows if same_rows else 0
        if any(signature.get(name) != here.get(name) for name in names):
            rows = 0
        if not rows and self.model.memory_length and self.batches.iterations_in_epoch:
            logger.info("%s: memory dropped, because rows, segments or memory have another length", source)
        return rows

    def _is_of_other_data(self, signature: Mapping[str, Any]) -> bool:
        """Whether the data of the epoch are not those of a checkpoint with the *signature*."""
        # At the end of an epoch it is of that epoch, and the next one may read another folder.
        if signature.get("data") is None or (self.batches.changes_data and not self.batches.iterations_in_epoch):
            return False
        return bool(signature["data"] != self.batches.data_checksum())

    def _load_average(self, extra: Mapping[str, Any]) -> None:
        if "average" not in extra:
            return
        average = self._each(self.reducer.local_shard, extra["average"])
        if self.average is not None:
            self.average.load_state_dict(average)
        else:
            # The file has the mean in place of the parameters;
            # training goes on from the weights beside it.
            restore_weights(self._trained(), average)

    def _load_optimizer(
        self,
        state: Mapping[str, Any],
        extra: Mapping[str, Any],
        history: Mapping[str, Any],
        source: str,
        options: CheckpointConfig,
        adopt: bool,
    ) -> None:
        for kind, part in (("criterion", self.criterion), ("optimizer", self.optimizer)):
            name = type(part).__name__
            if (stored := history.get(f"{kind}_name", name)) != name:
                advice = f"give its `{kind}`, or `reset_optimizer`"
                raise UserError(f"{source}: made with {kind} {stored}, not {name}; {advice}")
        numbered = self.names.by_number(state["last_optimizer_state"], self.optimizer.param_groups, state["model"])
        self.optimizer.load_state_dict(
            convert_state(numbered, self.parameters, self.reducer.local_shard),
            parse_dict("`optimizer_overrides`", options.optimizer_overrides),
            # Only an optimizer of this package takes the argument.
            **({"adopt": adopt} if isinstance(self.optimizer.optimizer, ElementwiseOptimizer) else {}),
        )
        names: tuple[str, ...] = ()
        if not options.reset_lr_scheduler:
            self.lr_scheduler.load_state_dict(history.get("lr_scheduler_state") or {})
            names = self.lr_scheduler.restored_settings
        if self.scaler is not None and "loss_scaler" in extra:
            self.scaler.load_state_dict(extra["loss_scaler"])
            names = (*names, "fp16_init_scale")
        self.num_updates = int(history.get("num_updates", 0))
        self.skipped.count = int(extra.get("skipped_nonfinite", 0))
        # What is in force now by the state of the optimizer,
        # the schedule or the scaler, whatever was given.
        stored_values = {name: value for name, value in (state.get("args") or {}).items() if name in names}
        in_force = {**self.optimizer.settings_in_force(), **stored_values}
        flat = self.settings.flat
        self.restored = {n: value for n, value in in_force.items() if n in flat and differ(flat[n], value)}
        self.settings = self.settings.changed(**self.restored)

    def _load_metrics(self, extra: Mapping[str, Any], stored: Mapping[str, Any], options: CheckpointConfig) -> None:
        """Restore sums, times and the best metric, unless that was measured otherwise than this
        run's will be."""
        for name, meter in self.meters.items():
            if name in (extra.get("sums") or {}):
                meter.load_state_dict(extra["sums"][name])
        self.trained_before = float(extra.get("previous_training_time") or 0.0)
        if options.reset_optimizer:
            return
        if (measured := self.measured()) is None:
            self._measured = extra.get("validation")
        elif text := changes(measured, extra.get("validation"), stored):
            logger.info("best validation: starts anew, because it measures something else: %s", text)
            self.former_best = extra.get("stage") or {}
            return
        self.best = self.best.restored(extra)
