"""Wrappers of modules: sharding is applied from outside, to the whole model."""

from __future__ import annotations

from typing import Any

from torch import nn


# Copies of fairseq's models wrap each layer; here sharding is applied from outside.
def fsdp_wrap(module: nn.Module, min_num_params: int | None = None, **unused: object) -> nn.Module:
    """*module*: ``--ddp-backend fully_sharded`` shards the whole model."""
    return module


class ModuleProxyWrapper(nn.Module):
    """A module around one with an attribute ``module``, such as a wrapper of DDP, whose attributes
    and names it has."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            wrapper: Any = super().__getattr__("module")
            return getattr(wrapper, name) if hasattr(wrapper, name) else getattr(wrapper.module, name)

    def forward(self, *args: object, **options: object) -> Any:
        return self.module(*args, **options)

    def state_dict(self, *args: object, **options: object) -> Any:
        return self._inner().state_dict(*args, **options)

    def load_state_dict(self, *args: object, **options: object) -> Any:
        return self._inner().load_state_dict(*args, **options)

    def _inner(self) -> Any:
        wrapper: Any = self.module
        return wrapper.module
