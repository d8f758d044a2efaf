"""Parameters of decoders: the names here and in Hugging Face files, and how matrices are packed
there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq.interop.pickles.named_tensors import Tensors

EMBEDDINGS, OUTPUT = "decoder.embed_tokens.weight", "decoder.output_projection.weight"
POSITIONS = "decoder.embed_positions.weight"
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# Causal masks and frequencies, which old versions of transformers saved.
COMPUTED = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")

Parameter = tuple[str, tuple[str, ...], bool]
"""A name there, the parameters here that it packs, and whether it is a layer's."""


@dataclass(frozen=True)
class Names:
    """The modules of a family there.

    Attributes:
        base: first part of all names but the output's, which files of a model without an output
            leave out.
        output: the output layer.
        outer: modules around the layers, theirs to ours.
        layers: name of the list of layers.
        inner: modules of a layer, theirs to ours; several of ours are packed in one.
        transposed: matrices of layers are [inputs, outputs], as of one-dimensional convolutions.
        interleaved: packed queries, keys and values alternate head by head.
    """

    base: str
    output: str
    outer: Mapping[str, str]
    layers: str
    inner: Mapping[str, Sequence[str]]
    transposed: bool = False
    interleaved: bool = False

    def parameters(self, ours: Mapping[str, Sequence[int]], layers: int) -> Iterator[Parameter]:
        """All parameters of a model but an output that is tied, whose names and shapes here are
        *ours*."""
        outer = self.outer.items()
        modules: list[Parameter] = [(f"{self.base}.{theirs}", (f"decoder.{name}",), False) for theirs, name in outer]
        for i in range(layers):
            modules += [
                (f"{self.base}.{self.layers}.{i}.{theirs}", tuple(f"decoder.layers.{i}.{name}" for name in names), True)
                for theirs, names in self.inner.items()
            ]
        modules.append((self.output, (OUTPUT.removesuffix(".weight"),), False))
        for theirs, names, is_layers in modules:
            for part in ("weight", "bias"):
                if f"{names[0]}.{part}" in ours:
                    yield f"{theirs}.{part}", tuple(f"{name}.{part}" for name in names), is_layers

    def read(self, tensors: Tensors, ours: Mapping[str, Sequence[int]], layers: int, heads: int) -> dict[str, Tensor]:
        """Our parameters, which are taken from *tensors*; UserError if one is missing or has
        another shape."""
        tensors.left = {self._full(name): value for name, value in tensors.left.items() if not name.endswith(COMPUTED)}
        result: dict[str, Tensor] = {}
        for theirs, names, is_layers in self.parameters(ours, layers):
            shape = [sum(ours[name][0] for name in names), *ours[names[0]][1:]]
            turned = self.transposed and is_layers
            value = tensors.take(theirs, *(reversed(shape) if turned else shape))
            value = value.t() if turned and value.dim() == 2 else value
            result.update(zip(names, self._unpacked(value, len(names), heads), strict=True))
        return result

    def write(self, state: Mapping[str, Tensor], layers: int, heads: int) -> dict[str, Tensor]:
        """The tensors of a file for our parameters *state*."""
        result: dict[str, Tensor] = {}
        for theirs, names, is_layers in self.parameters({name: list(x.shape) for name, x in state.items()}, layers):
            value = self._packed([state[name] for name in names], heads)
            turned = self.transposed and is_layers and value.dim() == 2
            result[theirs] = (value.t() if turned else value).contiguous()
        return result

    def _full(self, name: str) -> str:
        """The name of a tensor in a file, also of a model without an output layer."""
        is_full = name.startswith((f"{self.base}.", f"{self.output}."))
        return name if is_full else f"{self.base}.{name}"

    def _unpacked(self, value: Tensor, count: int, heads: int) -> list[Tensor]:
        if not self.interleaved or count == 1:
            return [part.contiguous() for part in value.chunk(count)]
        return [part.flatten(0, 1).contiguous() for part in value.unflatten(0, (heads, count, -1)).unbind(1)]

    def _packed(self, parts: Sequence[Tensor], heads: int) -> Tensor:
        if not self.interleaved or len(parts) == 1:
            return torch.cat(list(parts))
        return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 2)


_PLAIN = {name: (name,) for name in (*QKV, "self_attn.out_proj", "fc1", "fc2")}
_NORMS = ("self_attn_layer_norm",), ("final_layer_norm",)

GPT2 = Names(
    base="transformer",
    output="lm_head",
    outer={"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "layer_norm"},
    layers="h",
    inner={
        **dict(zip(("ln_1", "ln_2"), _NORMS, strict=True)),
        "attn.c_attn": QKV,
        "attn.c_proj": ("self_attn.out_proj",),
        "mlp.c_fc": ("fc1",),
        "mlp.c_proj": ("fc2",),
    },
    transposed=True,
)
LLAMA = Names(
    base="model",
    output="lm_head",
    outer={"embed_tokens": "embed_tokens", "norm": "layer_norm"},
    layers="layers",
    inner={
        **{name: (name,) for name in QKV},
        "self_attn.o_proj": ("self_attn.out_proj",),
        "mlp.gate_proj": ("fc1",),
        "mlp.up_proj": ("fc3",),
        "mlp.down_proj": ("fc2",),
        **dict(zip(("input_layernorm", "post_attention_layernorm"), _NORMS, strict=True)),
    },
)
NEOX = Names(
    base="gpt_neox",
    output="embed_out",
    outer={"embed_in": "embed_tokens", "final_layer_norm": "layer_norm"},
    layers="layers",
    inner={
        **dict(zip(("input_layernorm", "post_attention_layernorm"), _NORMS, strict=True)),
        "attention.query_key_value": QKV,
        "attention.dense": ("self_attn.out_proj",),
        "mlp.dense_h_to_4h": ("fc1",),
        "mlp.dense_4h_to_h": ("fc2",),
    },
    interleaved=True,
)
OPT = Names(
    base="model",
    output="lm_head",
    outer={
        "decoder.embed_tokens": "embed_tokens",
        "decoder.embed_positions": "embed_positions",
        "decoder.project_in": "project_in_dim",
        "decoder.project_out": "project_out_dim",
        "decoder.final_layer_norm": "layer_norm",
    },
    layers="decoder.layers",
    inner={**_PLAIN, **{name: (name,) for (name,) in _NORMS}},
)
