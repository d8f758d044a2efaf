"""Base class of optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.config.fields import typed
from fairseq.config.registry import OPTIMIZERS
from fairseq.config.settings import RateConfig, TrainingSettings, training_settings
from fairseq.config.shared import Part
from fairseq.errors import SettingError, UserError, nearest
from fairseq.optim.elementwise import MultiTensorOptimizer, scale_
from fairseq.optim.groups import NO_DECAY


@OPTIMIZERS.extend
class FairseqOptimizer(Part):
    """An optimizer of *params*, or of groups of them as dicts, with its settings.

    A subclass without :attr:`optimizer_class` sets ``self._optimizer`` itself.
    """

    settings_name = "optimizer"
    config: RateConfig | None = None
    optimizer_class: type[torch.optim.Optimizer] | None = None
    """The torch optimizer inside, made with :attr:`optimizer_config`."""
    supports_half_parameters = True
    """True if parameters may be float16 (``--memory-efficient-fp16``): the state must be
    float32."""

    group_settings: Mapping[str, str] = {"weight_decay": "weight_decay"}
    """What the groups of parameters hold of the settings, and a restored state replaces: their name
    by the group's."""

    updates_parts = False
    """True if a part of a parameter is updated as it would be within the whole
    (``--ddp-backend fully_sharded``)."""

    def __init__(self, args: Any, params: Iterable[Any] | None = None) -> None:
        self.args = self.cfg = args
        self._optimizer: torch.optim.Optimizer
        if self.optimizer_class is not None and self.config_class is not None and params is not None:
            self.config = typed(self.config_class, args)
            self._optimizer = self.optimizer_class(params, **self.optimizer_config)

    @classmethod
    def group_of(cls, name: str, role: str) -> Mapping[str, object]:
        """Return the settings of a parameter's group; parameters with the same settings form one.

        ``lr_factor`` is the ratio of the group's rate to the schedule's.

        Args:
            name: of the parameter, as in checkpoints.
            role: one of :mod:`fairseq.optim.groups`: ``HIDDEN``,
                ``NO_DECAY`` (norms and biases) or ``OUTER``.
        """
        return {}

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer inside."""
        return self._optimizer

    @property
    def updates_rows(self) -> bool:
        """True if sparse gradients update single rows of a table."""
        none = MultiTensorOptimizer.update_rows
        return getattr(type(self.optimizer), "update_rows", none) is not none

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """The keyword arguments of the torch optimizer:
        the rate, and what its groups hold of the settings."""
        if self.config is None:
            return {}  # a subclass with other settings gives its own
        values = {key: getattr(self.config, name) for key, name in self.group_settings.items()}
        return {"lr": self.config.lr[0]} | {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def params(self) -> list[nn.Parameter]:
        """The trained parameters, in the order of the optimizer's state."""
        return [p for group in self.param_groups for p in group["params"]]

    def settings_in_force(self) -> dict[str, object]:
        """Return the settings that the groups hold, by name;
        after a state is restored they may be its own."""
        # Norms and biases without weight decay do not have the setting in force.
        decayed = [group for group in self.param_groups if group.get("group") != NO_DECAY]
        group = decayed[0] if decayed else {}
        values = {name: group[key] for key, name in self.group_settings.items() if key in group}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def get_lr(self) -> float:
        """The rate that :meth:`set_lr` set."""
        group = self.param_groups[0]
        # The schedule's rate: any group gives it, once its own factor is taken out.
        return group["lr"] / group.get("lr_factor", 1.0)

    def set_lr(self, lr: float) -> None:
        """Set the rate of every group to *lr* times the group's ``lr_factor``, if it has one."""
        for group in self.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)

    def step(self) -> None:
        """Update the parameters from their gradients."""
        self.optimizer.step()

    def scaled_step(self, factor: Tensor | float) -> None:
        """Update the parameters from their gradients times *factor*, which may be done in place.

        Our optimizers multiply gradients of half precision
        in float32, where small ones do not underflow.
        """
        if isinstance(self.optimizer, MultiTensorOptimizer) and type(self).step is FairseqOptimizer.step:
            self.optimizer.step(factor=factor)
        else:
            # A subclass that overrides step takes no factor.
            scale_([p.grad for p in self.params if p.grad is not None], factor)
            self.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """torch's layout: ``state`` by the parameters' index, and ``param_groups``."""
        return self.optimizer.state_dict()

    def load_state_dict(
        self, state: Mapping[str, Any], overrides: Mapping[str, object] | None = None, *, adopt: bool = False
    ) -> None:
        """Restore a state, ours or fairseq's.

        Args:
            state: what :meth:`state_dict` returned. Its tensors are copied, unless *adopt*: nothing
                else uses them.
            overrides: settings that replace the state's, e.g. ``{"weight_decay": 0.1}``; a group of
                norms and biases without weight decay stays one.

        Raises:
            UserError: the state belongs to other parameters, or an override names no setting.
        """
        # Before anything is loaded: torch would report another count, or fail within an update.
        _check_shapes(state, self.params)
        before = [dict(group) for group in self.param_groups]
        # A state of another version or of fairseq lacks settings that are newer.
        groups = [{**mine, **stored} for mine, stored in zip(before, state["param_groups"], strict=True)]
        state = {**state, "param_groups": groups}
        if isinstance(self.optimizer, MultiTensorOptimizer):
            self.optimizer.load_state_dict(state, adopt)
        else:
            self.optimizer.load_state_dict(state)
        rate = self.get_lr()
        # The ratios of this run's rates: the state has the saved run's.
        for group, former in zip(self.param_groups, before, strict=True):
            # A group without the factor must not inherit the saved run's.
            group.pop("lr_factor", None)
            group.update({name: value for name, value in former.items() if name == "lr_factor"})
        self.set_lr(rate)
        settings = [name for name in self.param_groups[0] if name not in ("params", "group", "lr_factor")]
        for name, value in (overrides or {}).items():
            if name not in settings:
                raise SettingError(f"`optimizer_overrides`: no setting {name!r}; {nearest(name, settings)}")
            for group in self.param_groups:
                if name != "weight_decay" or group.get("group") != NO_DECAY:
                    group[name] = value


def build_optimizer(settings: TrainingSettings, params: Iterable[Any]) -> FairseqOptimizer:
    """Return the optimizer that *settings* choose, of the *params* that require a gradient, or of
    groups as dicts."""
    settings = training_settings(settings)
    cls = OPTIMIZERS[settings.chosen.optimizer]
    trained = [p for p in params if isinstance(p, dict) or p.requires_grad]
    return cls(cls.settings_of(settings), trained)


def move_step(state: Mapping[str, Any], to_group: bool) -> dict[str, object]:
    """Return *state* with the number of updates in its groups, as apex has it, or by parameter, as
    fairseq has it."""
    groups = [dict(group) for group in state["param_groups"]]
    entries = {index: dict(entry) for index, entry in state["state"].items()}
    for group in groups:
        members = [entries[index] for index in group["params"] if index in entries]
        if to_group and "step" not in group and (steps := [int(entry["step"]) for entry in members if "step" in entry]):
            # apex counts for all parameters of a group together; one that joined later has fewer.
            group["step"] = max(steps)
        if not to_group and "step" in group:
            for entry in members:
                entry.setdefault("step", group["step"])
    return {**state, "state": entries, "param_groups": groups}


def _check_shapes(state: Mapping[str, Any], params: list[nn.Parameter]) -> None:
    stored = [index for group in state["param_groups"] for index in group["params"]]
    advice = "it belongs to another model; use `reset_optimizer` to start without it"
    if len(stored) != len(params):
        raise UserError(
            f"checkpoint: its optimizer state is for {len(stored)} parameters, the model has {len(params)}: {advice}"
        )
    for index, parameter in zip(stored, params, strict=True):
        shape = parameter.shape
        # Adafactor keeps the means of rows and columns.
        allowed = (shape, shape[:-1], shape[:-2] + shape[-1:])
        for name, value in state["state"].get(index, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape not in allowed:
                raise UserError(
                    f"checkpoint: its optimizer state {name} {index} has shape {list(value.shape)}, "
                    f"the parameter {list(parameter.shape)}: {advice}"
                )


LegacyFairseqOptimizer = FairseqOptimizer  # its name for optimizers of the namespace
