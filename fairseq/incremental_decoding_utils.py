"""The state of incremental decoding: what modules keep of earlier tokens, by module and name."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

State = dict[str, dict[str, Tensor | None]]


def get_incremental_state(module: nn.Module, incremental_state: Any, key: str) -> Any:
    """The entry *key* of *module* in the state of incremental decoding; None without one."""
    return None if incremental_state is None else incremental_state.get(f"{id(module)}.{key}")


def set_incremental_state(module: nn.Module, incremental_state: Any, key: str, value: object) -> Any:
    """The state of incremental decoding with the entry *key* of *module* set."""
    if incremental_state is not None:
        incremental_state[f"{id(module)}.{key}"] = value
    return incremental_state


def with_incremental_state(cls: Any) -> Any:
    """Class decorator that adds ``get_incremental_state`` and ``set_incremental_state``."""
    cls.get_incremental_state, cls.set_incremental_state = get_incremental_state, set_incremental_state
    return cls
