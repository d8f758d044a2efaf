"""The state of a run between two updates,
with its one ``state_dict`` and its one ``load_state_dict``."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairseq.checkpoint.optimizer_state import ParameterNames, convert_state
from fairseq.config import fields
from fairseq.config.fields import format_value, parse_dict, values_differ
from fairseq.config.settings import CheckpointConfig, MemoryConfig, TrainingSettings
from fairseq.criterions.fairseq_criterion import FairseqCriterion
from fairseq.data.iterator import EpochIterator
from fairseq.data.position import CheckpointOrigin
from fairseq.distributed import World
from fairseq.errors import SettingError, UserError
from fairseq.logging.figures import RunningSums
from fairseq.models.base import BaseFairseqModel
from fairseq.models.loading import load_parameters, stored_parameters, stored_settings
from fairseq.models.recipes import fit_schedule
from fairseq.modules import devices
from fairseq.modules.precision import Precision
from fairseq.optim.elementwise import MultiTensorOptimizer
from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import build_lr_scheduler
from fairseq.tasks import dictionary_digest
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.training.averaging import restore_weights, weight_average
from fairseq.training.gradients import LossScaler
from fairseq.training.length import RunLength, frequency, length_of, needs_length
from fairseq.training.nonfinite import NonFiniteUpdates
from fairseq.training.parallel import data_parallel, optimizer_of
from fairseq.training.stages import Stage

logger = logging.getLogger(__name__)

MEASURED = (
    *("best_checkpoint_metric", "maximize_best_checkpoint_metric", "max_valid_steps", "label_smoothing"),
    *("tokens_per_sample", "sample_break_mode", "add_bos_token", "mask_prob", "leave_unmasked_prob"),
    *("random_token_prob", "mask_whole_words", "freq_weighted_replacement", "discriminator_weight"),
    *("init_token", "separator_token", "shorten_method", "max_option_length"),
    *fields.defaults(MemoryConfig),
)
"""Settings that change what a validation measures."""


class Requests(NamedTuple):
    """What a rank asks of all of them, in the reduction of an update's sums."""

    stop: bool = False  # a signal came
    save: bool = False  # the last save is --save-interval-minutes ago
    late: bool = False  # --stop-time-hours are over


@dataclass(frozen=True)
class PendingWork:
    """Validation and saves still to do after the last update; a checkpoint stores them if a signal
    left no time for them."""

    epoch: int  # of the update, from 1
    end_of_epoch: bool = False
    validate: bool = False  # on all splits
    save: bool = False  # whatever the validation gives
    milestone: str = ""  # name of the checkpoint that is due by words or tokens; empty: none is


class TrainingState:
    """Everything that a run, or a stage of it,
    holds between two updates, on one process of *world*.

    The model is placed on the device of *world*.

    Attributes:
        settings: in force: the run's, with what was *found*.
        found: settings by name that the task inferred from the data, such as the classes of a
            table, or that a restored state put in place of the ones given.
        length: the number of updates where it follows from the data (``length_from_data``), once
            :meth:`plan` has made the schedule.
        graph: model and criterion as one module, so that whatever wraps it sees the whole
            computation.
        reducer: the execution of *graph* on the data of all processes.
        scaler: of the loss; None: it is not scaled.
        average: the mean of the weights, which is validated and saved; None: the weights are.
        batches: the training data, at the position that the run has reached.
        validation: the data of each split that is validated.
        metric: of the present weights, from the first split; None before their validation.
        best: the best metric so far, which ``checkpoint_best.pt`` has.
        without_improvement: validations since then.
        incomparable: how *best* of the checkpoint was measured otherwise; empty: it was not.
        restored_position: in the data, of a checkpoint; that of *batches* may be earlier.
        requests: what any rank asked for with the last update.
        due: what an interrupted run has to do before its next update, else None.
        end: why training ends here, a setting and its value; None while it goes on.

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
        self.cfg = settings.optimization
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
        self.average = weight_average(self.cfg, self._trained())
        self.skipped = NonFiniteUpdates(self.cfg.skip_nonfinite)
        self.figures = task.figures(self.criterion)
        self.meters = {name: RunningSums(world.device) for name in ("train", "train_inner")}
        self._batches: EpochIterator | None = None
        self.validation: dict[str, EpochIterator] = {}
        self.num_updates = 0
        self.metric: float | None = None
        self.best: float | None = None
        self.without_improvement, self.incomparable = 0, ""
        self.requests, self.due, self.end = Requests(), None, None
        self.found: dict[str, object] = {}
        self.length_from_data, self.length = needs_length(settings), None
        if not self.length_from_data:
            self._make_schedule()
        self.started, self.trained_before = time.perf_counter(), 0.0
        self.restored_position: Mapping[str, Any] = {"epoch": 1}
        self._measured: Mapping[str, Any] | None = None

    due: PendingWork | None
    end: str | None
    length: RunLength | None

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
        changed, name = {}, "warmup_updates"
        if self.settings.origins.get(name) == f"recipe of {self.settings.chosen.arch}":
            changed = fit_schedule({name: self.settings.flat[name]}, length.updates)
        try:
            self.settings = self.settings.changed(max_update=length.updates, max_epoch=length.epochs, **changed)
            self.cfg = self.settings.optimization
            self._make_schedule()
            self.found |= changed
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
        self._batches = batches

    @property
    def frequency(self) -> int:
        """Batches of an update of this epoch."""
        return frequency(self.cfg, self.batches.epoch)

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

    def end_epoch(self, epoch: int) -> None:
        """End *epoch* after its validation: a checkpoint then is at the start of the next."""
        # The next epoch begins elsewhere in the corpus.
        self.task.restart()
        # A metric that does not improve may lower the rate.
        self.lr_scheduler.step(epoch, self.metric)
        self.lr_scheduler.step_update(self.num_updates)

    def validated(self, metric: float) -> bool:
        """Record the *metric* of a validation; return whether it is the best, ties included."""
        is_tie, best, self.metric = metric == self.best, self.best, metric
        maximize = self.settings.checkpoint.maximize_best_checkpoint_metric
        if not math.isnan(metric) and (best is None or (metric > best if maximize else metric < best)):
            self.best, self.without_improvement = metric, 0
            return True
        # As in fairseq, an equal metric is saved as the best, and uses up patience.
        self.without_improvement += 1
        return is_tie

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

    def measured(self) -> Mapping[str, Any] | None:
        """Return what validations measure, by setting: metrics that differ in it are not compared.
        None if not known."""
        # Once, since the data of a split stay: computed where it is first needed, which opens them.
        if self._measured is None and self.validation:
            split, batches = next(iter(self.validation.items()))
            flat, sizes = self.settings.flat, getattr(batches.dataset, "sizes", None)
            names = [*MEASURED, *(["seed"] if flat.get("mask_prob") is not None else [])]
            self._measured = {
                "valid_subset": split,
                # Not the folder, which may have been moved.
                "valid_tokens": len(batches.dataset) if sizes is None else int(sizes.sum()),
                "precision": self.precision.name(self.world.device),
                **{name: flat[name] for name in names if flat.get(name) is not None},
            }
        return self._measured

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
            "best": self.best,
            "without_improvement": self.without_improvement,
            "val_loss": self.metric,
        }
        if self._batches is not None:
            extra |= {"train_iterator": self.batches.state_dict(), "batches": self.batches_signature()}
        if (measured := self.measured()) is not None:
            extra["validation"] = measured
        if self.length is not None:
            extra["length"] = asdict(self.length)
        if self.due is not None:
            extra["due"] = asdict(self.due)
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

    def _stored_model(self) -> dict[str, object]:
        """The model as a checkpoint stores it: where a mean of the weights is asked for, in place
        of the parameters."""
        stored = self.reducer.consolidated(stored_parameters(self.model))
        if self.average is None:
            return stored
        means = {
            id(self.reducer.full_parameter(p)): self.reducer.full(p, mean.to(p.dtype))
            for p, mean in zip(self._trained(), self.average.means(), strict=bool(self.average.count))
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
    ) -> dict[str, object]:
        """Continue from *state*, ours or fairseq's.

        Args:
            source: what to call it in messages.
            options: what is ignored (``--reset-…``) and overridden; default: the run's settings.
            rows: rows of a batch on one rank whose memory
                is restored where no batches are read; 0: none.
            adopt: nothing else uses the tensors of the optimizer's
                state, so that they need not be copied.

        Returns:
            The settings that the state put in place of the ones given, by name.

        Raises:
            UserError: its parameters are not the model's, or its optimizer not the one asked for.
                Another criterion or optimizer is found before anything changes; after other errors
                begin with a new state.
        """
        options = options or self.settings.checkpoint
        extra, history = state.get("extra_state") or {}, (state.get("optimizer_history") or [{}])[-1]
        goes_on = not options.reset_optimizer and state.get("last_optimizer_state") is not None
        # What cannot be restored is refused before anything is.
        if goes_on:
            for kind, part in (("criterion", self.criterion), ("optimizer", self.optimizer)):
                name = type(part).__name__
                if (stored := history.get(f"{kind}_name", name)) != name:
                    before, now = (state.get("args") or {}).get(kind), getattr(self.settings.chosen, kind)
                    before, now = (stored, name) if before in (None, now) else (before, now)  # or classes, as plug-ins'
                    advice = f"give its `{kind}`, or `reset_optimizer`"
                    raise UserError(f"{source}: made with {kind} {before}, not {now}; {advice}")
        if self._batches is not None and not options.reset_dataloader and "train_iterator" in extra:
            rows = self._load_position(state, extra, source)
        load_parameters(self.model, state["model"], source)
        done = int(history.get("num_updates", 0)) if goes_on else 0
        former = int((state.get("args") or {}).get("max_update") or 0) if done else 0
        self.plan(done, extra.get("length") if goes_on and not options.reset_dataloader else None, former)
        if not options.reset_optimizer and "criterion" in extra:
            self.criterion.load_state_dict(extra["criterion"])
        self.num_updates = done
        if "average" in extra and not options.reset_optimizer:
            self._load_average(extra["average"], goes_on)
        restored = self._load_optimizer(state, extra, history, options, adopt) if goes_on else {}
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
            if extra.get("due") and goes_on:
                self.due = PendingWork(**{name: extra["due"][name] for name in PendingWork.__dataclass_fields__})
        self.task.load_carried(extra.get("carried") or {}, rows, self.world)
        return restored

    def _load_position(self, state: Mapping[str, Any], extra: Mapping[str, Any], source: str) -> int:
        """Go to the position of *state* in the data; return the rows whose memory fits."""
        length = self.task.batch_settings().get("tokens_per_sample")
        saved = CheckpointOrigin.of(state, length, self.stage.number if self.stage else None)
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

    def _load_average(self, stored: Mapping[str, Any], goes_on: bool) -> None:
        """Restore the weights, and their mean if a run that *goes_on* has begun one."""
        average = self._each(self.reducer.local_shard, stored)
        if self.average is not None and goes_on and self.num_updates >= self.average.start:
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
        options: CheckpointConfig,
        adopt: bool,
    ) -> dict[str, object]:
        numbered = self.names.by_number(state["last_optimizer_state"], self.optimizer.param_groups, state["model"])
        self.optimizer.load_state_dict(
            convert_state(numbered, self.parameters, self.reducer.local_shard),
            parse_dict("`optimizer_overrides`", options.optimizer_overrides),
            # Only an optimizer of this package takes the argument.
            **({"adopt": adopt} if isinstance(self.optimizer.optimizer, MultiTensorOptimizer) else {}),
        )
        names: tuple[str, ...] = ()
        if not options.reset_lr_scheduler:
            self.lr_scheduler.load_state_dict(history.get("lr_scheduler_state") or {})
            names = self.lr_scheduler.restored_settings
        if self.scaler is not None and "loss_scaler" in extra:
            self.scaler.load_state_dict(extra["loss_scaler"])
            names = (*names, "fp16_init_scale")
        self.skipped.count = int(extra.get("skipped_nonfinite", 0))
        # What is in force now by the state of the optimizer,
        # the schedule or the scaler, whatever was given.
        stored_values = {name: value for name, value in (state.get("args") or {}).items() if name in names}
        in_force = {**self.optimizer.settings_in_force(), **stored_values}
        flat = self.settings.flat
        restored = {
            name: value for name, value in in_force.items() if name in flat and values_differ(flat[name], value)
        }
        self.settings = self.settings.changed(**restored)
        self.found |= restored
        return restored

    def _load_metrics(self, extra: Mapping[str, Any], stored: Mapping[str, Any], options: CheckpointConfig) -> None:
        """Restore sums, times and the best metric, unless that was measured otherwise than this
        run's will be."""
        for name, meter in self.meters.items():
            if name in (extra.get("sums") or {}):
                meter.load_state_dict(extra["sums"][name])
        self.trained_before = float(extra.get("previous_training_time") or 0.0)
        if options.reset_optimizer:
            return
        before = extra.get("validation")
        if (now := self.measured()) is None:
            self._measured = before
        else:
            # fairseq's checkpoints have the settings of the run alone.
            given = {name: value for name, value in stored.items() if value is not None}
            split = str(given.get("valid_subset", "valid")).split(",")[0]
            former = {**given, "valid_subset": split, **(before or {})}
            names = now.keys() & former.keys()
            if before is not None and "valid_tokens" in before:  # neither fairseq's nor of 1.0
                former, names = before, now.keys() | before.keys()
            changed = [name for name in sorted(names) if values_differ(_if_on(now, name), _if_on(former, name))]
            self.incomparable = ", ".join(
                f"`{n}` {format_value(now.get(n))} (was {format_value(former.get(n))})" for n in changed
            )
        if self.incomparable:
            logger.info("best validation: starts anew, because it measures something else: %s", self.incomparable)
            return
        self.best, self.without_improvement = extra.get("best"), int(extra.get("without_improvement") or 0)
        self.metric = extra.get("val_loss")


def _if_on(settings: Mapping[str, Any], name: str) -> object:
    """A setting's value; None where it is off, or unknown as to a plug-in's task."""
    value = settings.get(name)
    return None if value == "none" else value


def gather_random_states(world: World) -> list[dict[str, Tensor]]:
    """Return the random states of every process, in rank order; to be called on all of them."""
    states = {"cpu": torch.get_rng_state()}
    if devices.is_accelerator(world.device):
        states[world.device.type] = devices.random_state(world.device)
    return world.gather(states, everywhere=True)


def restore_random_states(states: Sequence[Mapping[str, Tensor]] | None, world: World, source: str) -> None:
    """Restore this process's part of *states*; states of another number of processes are dropped
    with a line."""
    if states and len(states) != world.size:
        logger.info(
            "random states of %s are dropped: processes then %d, now %d; dropout starts from `seed`",
            source, len(states), world.size,
        )  # fmt: skip
    elif states:
        state = states[world.rank]
        torch.set_rng_state(state["cpu"].cpu())
        # A run that continues on another kind of device starts its random numbers from `seed`.
        if devices.is_accelerator(world.device) and world.device.type in state:
            devices.set_random_state(state[world.device.type], world.device)
