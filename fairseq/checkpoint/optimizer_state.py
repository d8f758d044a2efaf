"""Optimizer states by parameter name, as checkpoints hold them,
and by number, as torch's optimizers do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.errors import UserError, first_of

ADVICE = "it belongs to another model; use `reset_optimizer` to start without it"
State = Mapping[str, Any]
"""``state`` by parameter, and ``param_groups``, each with its ``params`` and settings."""


class ParameterNames:
    """Names of an optimizer's parameters: each the first one that a checkpoint has it under.

    The state dict of *model* names them; a *criterion* may have some, too, named ``criterion.…``.
    """

    def __init__(self, model: nn.Module, criterion: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
        keys = dict(model.state_dict(keep_vars=True))
        keys |= {f"criterion.{key}": value for key, value in criterion.state_dict(keep_vars=True).items()}
        first: dict[int, str] = {}
        self.aliases = {key: first.setdefault(id(value), key) for key, value in keys.items()}
        params = [p for group in groups for p in group["params"]]
        self.names = [first.get(id(p), f"parameters.{number}") for number, p in enumerate(params)]
        self.shapes = dict(zip(self.names, [p.shape for p in params], strict=True))
        names = iter(self.names)
        self.groups = [list(islice(names, len(group["params"]))) for group in groups]

    def by_name(self, state: State) -> dict[str, object]:
        """Return *state*, in torch's layout,
        with its parameters named; one of another layout as it is."""
        groups = state.get("param_groups")
        if not isinstance(groups, list) or sum(len(group["params"]) for group in groups) != len(self.names):
            return dict(state)
        return _renamed(state, dict(enumerate(self.names)))

    def by_number(
        self, state: State, groups: Sequence[Mapping[str, Any]], stored: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Return a checkpoint's optimizer state in the optimizer's own numbering.

        A group takes its settings from the stored group of its first parameter. If parameters are
        grouped otherwise than they were, it keeps its own weight decay.

        Args:
            state: by name; or by number in the order of *stored*, as fairseq saves it; or fairseq's
                ``--fp16`` state over a single flat parameter.
            stored: the names of the checkpoint's model parameters, in its order.

        Raises:
            UserError: the state belongs to other parameters.
        """
        if not isinstance(state.get("param_groups"), list):
            return dict(state)
        if not all(isinstance(name, str) for group in state["param_groups"] for name in group["params"]):
            state = self._by_name(state, stored)
        saved = {name: group for group in state["param_groups"] for name in group["params"]}
        if saved.keys() != set(self.names):
            others = first_of(sorted(map(str, saved.keys() ^ set(self.names))))
            raise UserError(
                f"checkpoint: its optimizer state is for {len(saved)} parameters, the model has {len(self.names)} "
                f"({others} differ): {ADVICE}"
            )
        regrouped = {frozenset(group["params"]) for group in state["param_groups"]} != set(map(frozenset, self.groups))
        restored = []
        for group, members in zip(groups, self.groups, strict=True):
            # This run's flags group by weight decay, so that the stored one would undo them.
            decay = {"weight_decay": group["weight_decay"]} if regrouped and "weight_decay" in group else {}
            restored.append({**saved[members[0]], **decay, "params": members})
        number = {name: index for index, name in enumerate(self.names)}
        return _renamed({**state, "param_groups": restored}, number)

    def _by_name(self, state: State, stored: Iterable[str]) -> State:
        """Name a numbered state's parameters by their order in the checkpoint."""
        # Tied parameters are numbered once, at their first name.
        order = list(dict.fromkeys(name for key in stored if (name := self.aliases.get(key)) in self.shapes))
        # fairseq's optimizer numbers a criterion's parameters after the model's.
        order += [name for name in self.names if name.startswith("criterion.")]
        if len(order) != len(self.names):
            order = self.names
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        if len(numbers) == 1 != len(order):
            state, numbers = _unflatten(state, [self.shapes[name] for name in order])
        if len(numbers) != len(order):
            counts = f"{len(numbers)} parameters, the model has {len(order)}"
            raise UserError(f"checkpoint: its optimizer state is for {counts}: {ADVICE}")
        return _renamed(state, dict(zip(numbers, order, strict=True)))


def convert_state(
    state: State, params: Sequence[nn.Parameter], convert: Callable[[nn.Parameter, Any], object]
) -> dict[str, object]:
    """Return *state* with ``convert(parameter, value)`` in place of each value of each of *params*.

    One that is not in torch's layout is returned as it is.
    """
    groups = state.get("param_groups")
    if not isinstance(groups, list):
        return dict(state)
    owners = dict(zip([key for group in groups for key in group["params"]], params, strict=False))
    entries = {
        key: {name: convert(owners[key], value) for name, value in entry.items()} if key in owners else entry
        for key, entry in state["state"].items()
    }
    return {**state, "state": entries}


def _renamed(state: State, names: Mapping[Any, Any]) -> dict[str, object]:
    # What an optimizer keeps of no parameter, such as a count of steps, has a name of its own.
    of_all = {key: value for key, value in state["state"].items() if isinstance(key, str) and key not in names}
    entries = of_all | {names[key]: state["state"][key] for key in names if key in state["state"]}
    groups = [{**group, "params": [names[key] for key in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": entries, "param_groups": groups}


def _unflatten(state: State, shapes: Sequence[torch.Size]) -> tuple[State, list[int]]:
    """Cut a state over one flat parameter into *shapes*: fairseq's ``--fp16`` trains all of them
    end to end."""
    (group,) = state["param_groups"]
    sizes = [shape.numel() for shape in shapes]
    cut: dict[int, dict[str, object]] = {index: {} for index in range(len(shapes))}
    for name, value in state["state"].get(group["params"][0], {}).items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            pieces = [value] * len(shapes)
        elif value.numel() == sum(sizes):
            pieces = [piece.view(shape) for piece, shape in zip(value.split(sizes), shapes, strict=True)]
        else:
            return state, group["params"]
        for index, piece in enumerate(pieces):
            cut[index][name] = piece
    return {**state, "state": cut, "param_groups": [{**group, "params": list(cut)}]}, list(cut)
