"""One update, and the state of training between updates.

Model and criterion are one module, so that whatever wraps it sees the whole computation. Metrics stay on the device
until a line of the log is due. The host synchronises once per update, because a loss or gradient that is not finite
decides whether the update is applied.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.checkpoint.optimizer_state import ParameterNames, convert_state
from fairseq.config.fields import parse_dict
from fairseq.config.settings import CheckpointConfig, TrainingSettings
from fairseq.criterions.fairseq_criterion import FairseqCriterion, Sample
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.logging.figures import SIZE, Meter, NamedSums
from fairseq.models import BaseFairseqModel
from fairseq.models.loading import layers_of, load_parameters, stored_parameters
from fairseq.modules import noise
from fairseq.modules.precision import Precision
from fairseq.optim import OPTIMIZERS, FairseqOptimizer, build_optimizer, hidden_matrices, parameter_groups
from fairseq.optim.elementwise import ElementwiseOptimizer
from fairseq.optim.lr_scheduler import build_lr_scheduler
from fairseq.tasks import dictionary_digest
from fairseq.tasks.carried import Carried
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.training import nonfinite
from fairseq.training.averaging import restore_weights, weight_average
from fairseq.training.gradients import LossScaler, norm_and_factor
from fairseq.training.nonfinite import Finding, NonFiniteUpdates
from fairseq.training.oom_retry import BatchSplitter, Rebatch
from fairseq.training.parallel import check_optimizer, data_parallel
from fairseq.training.stop import StopVote
from fairseq.training.validation import validate

logger = logging.getLogger(__name__)


class Trainer:
    """Model, criterion, optimizer and schedule of one run, on one process of *world*.

    The model is placed on the device of *world*.

    Attributes:
        reducer: the execution of *graph*, model and criterion, on the data of all processes.
        scaler: of the loss; None: it is not scaled.

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
    ) -> None:
        self.cfg = cfg = settings.optimization
        self.world = world = world or World()
        self.task = task
        self.graph = task.loss_graph(model, criterion)
        self.model, self.criterion = self.graph.model, self.graph.criterion
        self.precision = Precision(settings.common)
        self.reducer = data_parallel(self.graph, self.precision, settings.distributed, settings.common.compile, world)
        self.optimizer = self._build_optimizer(settings)
        self.lr_scheduler = build_lr_scheduler(settings, self.optimizer)
        repeatable = world.size == 1 or settings.distributed.reduces_after_backward
        self.splitter = BatchSplitter(cfg.oom_retry, model, repeatable)
        self.scaler: LossScaler | None = None
        if self.precision.needs_scaling:
            self.scaler = LossScaler(settings.common, cfg.update_freq, world.size)
        self.names = ParameterNames(self.model, self.criterion, self._source_groups())
        self.parameters = self.optimizer.params
        self.average = weight_average(cfg, self._trained())
        self.num_updates = 0
        self.figures = task.figures(self.criterion)
        self.meters = {name: Meter(world.device) for name in ("train", "train_inner")}
        self.skipped = NonFiniteUpdates(cfg.skip_nonfinite)
        # A plug-in's schedule may set its first rate here only.
        self.lr_scheduler.step_update(0)

    def _build_optimizer(self, settings: TrainingSettings) -> FairseqOptimizer:
        parameters = list(self.reducer.named_parameters())
        # Roles are found by identity in the model; the optimizer has this process's shards of it.
        hidden = {id(p) for p in hidden_matrices(layers_of(self.model))}
        groups = parameter_groups(
            [(name.removeprefix("model."), p) for name, p in parameters],
            self.cfg.no_decay_on_norms_and_biases,
            [p for _, p in parameters if id(self.reducer.full_parameter(p)) in hidden],
            OPTIMIZERS[settings.chosen.optimizer].group_of,
        )
        optimizer = build_optimizer(settings, groups)
        check_optimizer(optimizer, settings.distributed, self.world)
        if self.precision.half_parameters and not optimizer.supports_half_parameters:
            raise UserError(
                f"`memory_efficient_fp16`: the state of {type(optimizer).__name__} would be float16, too; "
                "use `fp16` or another `optimizer`"
            )
        return optimizer

    def begin_epoch(self, epoch: int) -> None:
        """Tell the schedule that *epoch* (from 1) begins."""
        self.lr_scheduler.step_begin_epoch(epoch)

    def end_epoch(self, epoch: int, val_loss: float | None) -> None:
        """Tell the schedule that *epoch* has ended, with the validation figure if there is one."""
        self.lr_scheduler.step(epoch, val_loss)
        self.lr_scheduler.step_update(self.num_updates)

    def train_step(
        self, samples: list[Sample | None], vote: StopVote | None = None, rebatch: Rebatch | None = None
    ) -> bool:
        """One update from *samples*, this process's batches of it (None: an empty one).

        Args:
            samples: the batches, equally many on every rank.
            vote: the ranks' decision to stop, which travels with the reduction of the sums.
            rebatch: batches of other examples of the epoch, for ``--oom-retry``.

        Returns:
            False if nothing was updated: half-precision gradients overflowed, or the update is skipped because its
            loss or gradients are not finite.

        Raises:
            NonFinite: the loss or gradients are not finite, and no more updates may be skipped.
            UserError: memory does not suffice for a batch; the message gives its shape.
        """
        self.graph.train()
        self.graph.update_num = self.num_updates
        batches: Sequence[Sample | None] = samples
        while True:
            try:
                carried, sums, host_size = self._forward_backward(batches)
                break
            except (MemoryError, RuntimeError) as error:
                message = self.splitter.describe(error, batches, self.num_updates + 1)
            # Outside of the handler: the traceback would keep the activations alive.
            self.optimizer.zero_grad()
            batches = self.splitter.halves(batches, rebatch, message)

        # Reduction: the gradients' last pieces, and all sums as one vector.
        self.reducer.reduce()
        sums = vote.reduced(sums) if vote is not None else sums.reduced(self.world)

        # The global number of targets stays on the device: reading it here would wait for the backward pass. One
        # process knows it on the host. The optimizer applies the factor, so that it need not be rounded to float16.
        size = host_size if self.world.size == 1 else sums[SIZE]
        gnorm, factor = norm_and_factor(
            self.parameters, self._gradient_factor(size), self.cfg.clip_norm, self.world.device, self.reducer.total_norm
        )
        # The only synchronisation of an update: whether it is applied decides what every line below does.
        overflow = not bool(torch.isfinite(gnorm) & torch.isfinite(sums["loss"]))
        # An update without overflow counts, too: enough of them raise the scale.
        if self.scaler is not None:
            self.scaler.update(overflow)
        if overflow:
            self._skip(samples, carried, sums)
        else:
            self.optimizer.scaled_step(factor)
            self.num_updates += 1
            self.task.commit(carried, self.model, self.world)
            if self.average is not None:
                self.average.update(self.num_updates)
            self.lr_scheduler.step_update(self.num_updates)
            # A percentage on the device: the log reads its mean, and no update waits for it.
            clipped = (gnorm > self.cfg.clip_norm).double() * (100.0 if self.cfg.clip_norm > 0 else 0.0)
            for meter in self.meters.values():
                meter.add(sums, gnorm=gnorm, clip=clipped)
        self.optimizer.zero_grad()
        return not overflow

    def _skip(self, samples: Sequence[Sample | None], carried: Carried, sums: NamedSums) -> None:
        """Leave out the update of *samples*, which is not finite; raise NonFinite if no more may be left out."""

        def find() -> Finding:
            parameters = dict(self.reducer.named_parameters())
            finding = nonfinite.find(
                self.graph, self.task, samples, parameters, self.precision, self.world, self.num_updates + 1
            )
            self.reducer.reset()
            return finding

        if self.scaler is not None:
            nonfinite.check_scale(self.scaler, find)
        else:
            self.skipped.skip(find())
        # A finite loss was computed from finite states, which what follows in the text continues: gradients alone
        # overflowed, most often by the loss scale. Otherwise the state stays as of the last finite forward pass.
        if bool(torch.isfinite(sums["loss"])):
            self.task.skip(carried)

    def _forward_backward(self, samples: Sequence[Sample | None]) -> tuple[Carried, NamedSums, int]:
        """Add the gradients of *samples*; return the carried state after them, their sums, and their sample size.

        The state that steps carry goes from batch to batch as a value, provisionally.
        """
        carried = self.task.carried
        sums: NamedSums | None = None
        host_size = 0
        for number, sample in enumerate(samples):
            # Only the last backward pass reduces gradients over ranks; those before add to them locally.
            with self.reducer.accumulate(last=number == len(samples) - 1):
                with self.precision.autocast(self.world.device):
                    (loss, sample_size, log), carried = self.task.step(
                        self.reducer.module, sample, carried, self.world.device
                    )
                (loss * self.scaler.scale if self.scaler is not None else loss).backward()
            batch = NamedSums.of(log, sample_size, self.world.device)
            sums = batch if sums is None else sums + batch
            host_size += int(sample_size)
        assert sums is not None, "an update has at least one batch"
        return carried, sums, host_size

    def validate(self, batches: Iterable[Sample | None]) -> Meter:
        """Return the sums over *batches*; see :func:`~fairseq.training.validation.validate`."""
        with self.averaged():
            meter = validate(self.graph, self.task, batches, self.precision, self.world)
            # Without a backward pass sharded layers stay gathered.
            self.reducer.reset()
        return meter

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model has the weights to validate and save: where one is asked for, their mean."""
        return self.average.in_place() if self.average is not None else contextlib.nullcontext()

    def get_lr(self) -> float:
        """Return the learning rate of the next update."""
        return self.optimizer.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the model and its training, in fairseq's layout; on every process.

        Tensors are the live ones: only the process that writes the checkpoint copies them to the host.
        """
        state: dict[str, Any] = {
            "model": self._stored_model(),
            "optimizer_history": [
                {
                    "criterion_name": type(self.criterion).__name__,
                    "optimizer_name": type(self.optimizer).__name__,
                    "lr_scheduler_state": self.lr_scheduler.state_dict(),
                    "num_updates": self.num_updates,
                }
            ],
            "last_optimizer_state": self.names.by_name(
                convert_state(self.optimizer.state_dict(), self.parameters, self.reducer.full)
            ),
            "extra_state": {
                "random": self._gather_random_states(),
                "dropout": noise.generator(),
                "carried": self.task.save_carried(self.world),
                "sums": {name: meter.state_dict() for name, meter in self.meters.items()},
            },
        }
        if (dictionary := dictionary_digest.dictionary_of(self.task)) is not None:
            state[dictionary_digest.KEY] = dictionary.digest()
        if self.average is not None:
            state["extra_state"]["average"] = self._each(self.reducer.full, self.average.state_dict())
        if parameters := self.criterion.state_dict():
            state["extra_state"]["criterion"] = parameters
        if self.skipped.count:
            state["extra_state"]["skipped_nonfinite"] = self.skipped.count
        if self.scaler is not None:
            state["extra_state"]["loss_scaler"] = self.scaler.state_dict()
        return state

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        source: str,
        options: CheckpointConfig = CheckpointConfig(),  # noqa: B008 - frozen
        rows: int = 0,
        *,
        adopt: bool = False,
    ) -> dict[str, Any]:
        """Continue from *state*, ours or fairseq's.

        Args:
            source: what to call it in messages.
            options: what is left aside (``--reset-…``), and what is overridden.
            rows: rows of a batch on one rank that go on where they stopped when *state* was saved, so that their
                memory still fits; 0: none do.
            adopt: nothing else uses the tensors of the optimizer's state, so that they need not be copied.

        Returns:
            The settings that are in force now by the optimizer's state or the schedule's, by name.

        Raises:
            UserError: its parameters are not the model's, or its optimizer not the one asked for.
        """
        load_parameters(self.model, state["model"], source)
        extra = state.get("extra_state") or {}
        history = (state.get("optimizer_history") or [{}])[-1]
        in_force: dict[str, Any] = {}
        if "average" in extra and not options.reset_optimizer:
            average = self._each(self.reducer.local_shard, extra["average"])
            if self.average is not None:
                self.average.load_state_dict(average)
            else:
                # The file has the mean in place of the parameters; training goes on from the weights beside it.
                restore_weights(self._trained(), average)
        if "criterion" in extra and not options.reset_optimizer:
            self.criterion.load_state_dict(extra["criterion"])
        if not options.reset_optimizer and state.get("last_optimizer_state") is not None:
            self._load_optimizer(state, history, source, options, adopt)
            if not options.reset_lr_scheduler:
                self.lr_scheduler.load_state_dict(history.get("lr_scheduler_state") or {})
            names = () if options.reset_lr_scheduler else self.lr_scheduler.restored_settings
            if self.scaler is not None and "loss_scaler" in extra:
                self.scaler.load_state_dict(extra["loss_scaler"])
                names = (*names, "fp16_init_scale")
            of_others = {name: value for name, value in (state.get("args") or {}).items() if name in names}
            in_force = {**self.optimizer.settings_in_force(), **of_others}
            self.num_updates = int(history.get("num_updates", 0))
            self.skipped.count = int(extra.get("skipped_nonfinite", 0))
        # Also with --reset-lr-scheduler: the rate follows from the number of updates.
        self.lr_scheduler.step_update(self.num_updates)
        if not options.reset_meters:
            for name, meter in self.meters.items():
                if name in (extra.get("sums") or {}):
                    meter.load_state_dict(extra["sums"][name])
        if not options.reset_dataloader:
            self._restore_random_states(extra.get("random"), source)
            # Runs saved before 0.9 go on with the masks that they would have had; fairseq's have none to go on with.
            if "dropout" in extra or extra.get("random"):
                noise.use_generator(extra.get("dropout", "sfc64"))
        # Version 0.1 saved the memory of rows beside the other entries.
        saved = extra.get("carried") or {"memory": extra.get("memory") or []}
        self.task.load_carried(saved, rows, self.world)
        return in_force

    def _stored_model(self) -> dict[str, Any]:
        """The model as a checkpoint stores it: where a mean of the weights is asked for, in place of the parameters."""
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

    def _gradient_factor(self, size: int | Tensor) -> Tensor | float:
        """The reciprocal of what summed gradients are divided by: the update's target tokens times the loss scale."""
        scale = self.scaler.scale if self.scaler is not None else 1.0
        # On the device, where reading it would synchronise.
        if isinstance(size, Tensor):
            # Reducers average over processes: the sum over all targets is the average times their number.
            return self.world.size / (size.clamp(min=1).float() * scale)
        return 1.0 / (max(size, 1) * scale)

    def _load_optimizer(
        self, state: Mapping[str, Any], history: Mapping[str, Any], source: str, options: CheckpointConfig, adopt: bool
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
            # A plug-in's optimizer may have another signature.
            **({"adopt": adopt} if isinstance(self.optimizer.optimizer, ElementwiseOptimizer) else {}),
        )

    def _source_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups with the parameters of the model, of which it may have parts."""
        source = self.reducer.full_parameter
        return [{**group, "params": [source(p) for p in group["params"]]} for group in self.optimizer.param_groups]

    def _each(self, convert: Callable[[nn.Parameter, Any], Any], average: Mapping[str, Any]) -> dict[str, Any]:
        """Apply *convert* to what the state of an *average* holds of each parameter."""
        lists = {name: average[name] for name in ("mean", "weights")}
        pairs = {name: zip(self._trained(), values, strict=bool(values)) for name, values in lists.items()}
        return {**average, **{name: [convert(p, value) for p, value in each] for name, each in pairs.items()}}

    def _gather_random_states(self) -> list[dict[str, Tensor]]:
        states = {"cpu": torch.get_rng_state()}
        if self.world.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.world.device)
        return self.world.gather(states, everywhere=True)

    def _restore_random_states(self, states: list[dict[str, Tensor]] | None, source: str) -> None:
        if states and len(states) != self.world.size:
            logger.info(
                "random states of %s are dropped: processes then %d, now %d; dropout starts from `seed`",
                source, len(states), self.world.size,
            )  # fmt: skip
        elif states:
            state = states[self.world.rank]
            torch.set_rng_state(state["cpu"].cpu())
            if "cuda" in state and self.world.device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda"].cpu(), self.world.device)
