"""The biases u and v of Transformer-XL's attention where all layers share one pair (Dai et al. 2019, §3.3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class AttentionBiases(nn.Module):
    """u and v, as ``r_w_bias`` and ``r_r_bias`` [H, D]. The decoder owns them and hands them to every layer."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.r_w_bias = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.r_r_bias = nn.Parameter(torch.zeros(num_heads, head_dim))


def name_as_layers_own(decoder: nn.Module, shared: str, layers: list[str]) -> None:
    """Let the state dict of *decoder* name the parameters of its submodule *shared* as if each of *layers* had them.

    Checkpoints have u and v with each layer's attention, shared or not, as the authors' do.
    """

    def spread(_: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        items = list(state.items())
        state.clear()
        # In the order of the parameters, by which optimizer states are numbered.
        for name, value in items:
            bias = name.removeprefix(f"{prefix}{shared}.")
            state.update({name: value} if bias == name else {f"{prefix}{layer}.{bias}": value for layer in layers})

    def gather(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        for bias in dict(module.get_submodule(shared).named_parameters()):
            names = [f"{prefix}{layer}.{bias}" for layer in layers]
            if all(name in state for name in names):
                # Every layer's entry is a copy of the one pair.
                state[f"{prefix}{shared}.{bias}"] = [state.pop(name) for name in names][0]

    decoder.register_state_dict_post_hook(spread)
    decoder.register_load_state_dict_pre_hook(gather)
