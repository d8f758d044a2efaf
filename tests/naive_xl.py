"""Transformer-XL from its formulas, a token and a key at a time, in double precision, over the
authors' tensors.

Nothing here is shared with the package: it is what the package is compared with. Configurations
have the keys of ``golden/transformer_xl/*.json``; ``d_embed`` may be added where it is not
``d_model``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

Vector = np.ndarray
EPSILON = 1e-5  # of layer norm
ENCODINGS = {"relative": 0, "shaw": 1, "absolute": 2, "learned": 3}


def nll(
    state: dict[str, torch.Tensor],
    config: dict[str, Any],
    tokens: np.ndarray,
    segment: int,
    memory: int,
    start: str = "empty",
) -> np.ndarray:
    """Negative natural-log likelihood of ``tokens[:, 1:]``, float64 [B, T].

    Args:
        state: the authors' state dict.
        config: the authors' configuration; its own segment and memory length are not looked at.
        tokens: [B, T + 1].
        segment, memory: tokens read at once, and remembered.
        start: ``empty``, or ``zeros``: a memory of zero vectors before the first segment.
    """
    model = _Model({name: value.detach().double().numpy() for name, value in state.items()}, config, memory)
    rows = []
    for row in np.asarray(tokens):
        remembered = [[np.zeros(config["d_model"])] * (memory if start == "zeros" else 0)] * config["n_layer"]
        losses: list[float] = []
        for first in range(0, len(row) - 1, segment):
            read = row[first : first + segment + 1]
            hidden, remembered = model.read(list(map(int, read[:-1])), remembered)
            losses += [-model.log_prob(h, int(target)) for h, target in zip(hidden, read[1:], strict=True)]
        rows.append(losses)
    return np.array(rows)


def random_state(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """The authors' state dict for *config* with random values, every tensor large enough to matter;
    float32."""
    generator = torch.Generator().manual_seed(seed)
    d, inner = config["d_model"], config["n_head"] * config["d_head"]
    heads, layers = (config["n_head"], config["d_head"]), config["n_layer"]
    d_embed, kind = config.get("d_embed", d), config["attn_type"]
    ends = [0, *config["cutoffs"], config["vocab_size"]]
    bands = len(ends) - 1
    shapes: dict[str, tuple[int, ...]] = {}
    projected = config["div_val"] > 1 or d_embed != d
    for band in range(bands if config["div_val"] > 1 else 1):
        words = ends[band + 1] - ends[band] if config["div_val"] > 1 else ends[-1]
        width = d_embed // config["div_val"] ** band
        shapes[f"word_emb.emb_layers.{band}.weight"] = (words, width)
        shapes[f"crit.out_layers.{band}.weight"] = (words, width)
        shapes[f"crit.out_layers.{band}.bias"] = (words,)
        if projected:
            shapes[f"word_emb.emb_projs.{band}"] = (d, width)
    if projected:
        for band in range(bands):
            shapes[f"crit.out_projs.{band}"] = (d, d_embed // config["div_val"] ** band)
    if bands > 1:
        shapes |= {"crit.cluster_weight": (bands - 1, d_embed), "crit.cluster_bias": (bands - 1,)}
    rows = config["tgt_len"] + (config["mem_len"] if kind == 1 else 0)
    shapes |= [
        {"r_w_bias": heads, "r_r_bias": heads},
        {"r_emb": (layers, rows, *heads), "r_w_bias": (layers, *heads), "r_bias": (layers, rows, heads[0])},
        {},
        {"r_emb": (layers, rows, *heads)},
    ][kind]
    for name in (f"layers.{layer}." for layer in range(layers)):
        maps = {"qkv_net": 3 * inner} if kind < 2 else {"q_net": inner, "kv_net": 2 * inner}
        shapes |= {f"{name}dec_attn.{part}.weight": (size, d) for part, size in maps.items()}
        shapes |= {f"{name}dec_attn.o_net.weight": (d, inner)}
        shapes |= {f"{name}dec_attn.r_net.weight": (inner, d)} if kind == 0 else {}
        shapes |= {
            f"{name}{part}.layer_norm.{one}": (d,) for part in ("dec_attn", "pos_ff") for one in ("weight", "bias")
        }
        shapes |= {f"{name}pos_ff.CoreNet.0.weight": (config["d_inner"], d)}
        shapes |= {f"{name}pos_ff.CoreNet.0.bias": (config["d_inner"],)}
        shapes |= {f"{name}pos_ff.CoreNet.3.weight": (d, config["d_inner"]), f"{name}pos_ff.CoreNet.3.bias": (d,)}
    state = {name: 0.25 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in state:
        if name.endswith("layer_norm.weight"):
            state[name] += 1
    if config["tie_weight"]:
        state |= {name.replace("word_emb.emb", "crit.out"): state[name] for name in state if "emb_layers" in name}
    for band, tied in enumerate(config["tie_projs"]):
        if tied and projected:
            state[f"crit.out_projs.{band}"] = state[f"word_emb.emb_projs.{band if config['div_val'] > 1 else 0}"]
    return state


class _Model:
    def __init__(self, state: dict[str, Vector], config: dict[str, Any], memory: int) -> None:
        self.state, self.config, self.memory = state, config, memory
        self.kind = config["attn_type"]
        self.ends = [0, *config["cutoffs"], config["vocab_size"]]

    def read(self, tokens: list[int], memory: list[list[Vector]]) -> tuple[list[Vector], list[list[Vector]]]:
        """Hidden states of a segment, and each layer's inputs for the last tokens."""
        hidden = [self.embedding(token) for token in tokens]
        if self.kind == ENCODINGS["absolute"]:
            hidden = [h + self.sinusoid(len(tokens) - 1 - t) for t, h in enumerate(hidden)]
        remembered = []
        for layer in range(self.config["n_layer"]):
            if self.kind == ENCODINGS["learned"]:
                table = self.state["r_emb"][layer]
                hidden = [h + table[len(table) - len(tokens) + t].ravel() for t, h in enumerate(hidden)]
            context = memory[layer] + hidden
            remembered.append(context[len(context) - self.memory :] if len(context) > self.memory else context)
            hidden = [self.layer(layer, context, t, len(tokens)) for t in range(len(tokens))]
        return hidden, remembered

    def embedding(self, token: int) -> Vector:
        band, inside = self.place(token)
        if self.config["div_val"] == 1:
            band, inside = 0, token
        vector = self.state[f"word_emb.emb_layers.{band}.weight"][inside]
        projection = self.state.get(f"word_emb.emb_projs.{band}")
        vector = vector if projection is None else projection @ vector
        return vector * math.sqrt(self.config["d_model"])

    def place(self, token: int) -> tuple[int, int]:
        """A word's band, and its number in the band."""
        band = max(i for i, first in enumerate(self.ends[:-1]) if first <= token)
        return band, token - self.ends[band]

    def sinusoid(self, distance: int) -> Vector:
        d = self.config["d_model"]
        angles = [distance * 10000 ** (-2 * k / d) for k in range(d // 2)]
        return np.array([*map(math.sin, angles), *map(math.cos, angles)])

    def layer(self, layer: int, context: list[Vector], t: int, segment: int) -> Vector:
        """The layer's output for token *t* of the segment that ends *context*."""
        x = context[len(context) - segment + t]
        pre = self.config["pre_lnorm"]
        attended = self.attention(
            layer, [self.norm(f"layers.{layer}.dec_attn", c) for c in context] if pre else context, t, segment
        )
        x = x + attended if pre else self.norm(f"layers.{layer}.dec_attn", x + attended)
        name = f"layers.{layer}.pos_ff"
        inside = self.state[f"{name}.CoreNet.0.weight"] @ (self.norm(name, x) if pre else x)
        inside = np.maximum(inside + self.state[f"{name}.CoreNet.0.bias"], 0)
        out = x + self.state[f"{name}.CoreNet.3.weight"] @ inside + self.state[f"{name}.CoreNet.3.bias"]
        return out if pre else self.norm(name, out)

    def norm(self, name: str, x: Vector) -> Vector:
        scaled = (x - x.mean()) / math.sqrt(x.var() + EPSILON)
        return scaled * self.state[f"{name}.layer_norm.weight"] + self.state[f"{name}.layer_norm.bias"]

    def attention(self, layer: int, context: list[Vector], t: int, segment: int) -> Vector:
        name, size = f"layers.{layer}.dec_attn", self.config["n_head"] * self.config["d_head"]
        if self.kind < 2:
            maps = [self.state[f"{name}.qkv_net.weight"][i * size : (i + 1) * size] for i in range(3)]
        else:
            both = self.state[f"{name}.kv_net.weight"]
            maps = [self.state[f"{name}.q_net.weight"], both[:size], both[size:]]
        query_at = len(context) - segment + t
        first = 0
        if self.config["same_length"]:
            first = max(0, t - (segment - max(0, len(context) - self.memory)) + 1)
        seen = range(first, query_at + 1)
        query = self.heads(maps[0] @ context[query_at])
        keys = {j: self.heads(maps[1] @ context[j]) for j in seen}
        values = {j: self.heads(maps[2] @ context[j]) for j in seen}
        result = []
        for head in range(self.config["n_head"]):
            scores = [self.score(layer, head, query[head], keys[j][head], query_at - j) for j in seen]
            weights = np.exp(np.array(scores) / math.sqrt(self.config["d_head"]))
            weights = weights / weights.sum()
            result.append(sum(weight * values[j][head] for weight, j in zip(weights, seen, strict=True)))
        return self.state[f"{name}.o_net.weight"] @ np.concatenate(result)

    def heads(self, vector: Vector) -> Vector:
        return vector.reshape(self.config["n_head"], self.config["d_head"])

    def score(self, layer: int, head: int, query: Vector, key: Vector, distance: int) -> float:
        state = self.state
        if self.kind == ENCODINGS["relative"]:
            if self.config["clamp_len"] > 0:
                distance = min(distance, self.config["clamp_len"])
            by_distance = self.heads(state[f"layers.{layer}.dec_attn.r_net.weight"] @ self.sinusoid(distance))[head]
            own = f"layers.{layer}.dec_attn." if self.config.get("untie_r") else ""
            u, v = state[f"{own}r_w_bias"][head], state[f"{own}r_r_bias"][head]
            return float((query + u) @ key + (query + v) @ by_distance)
        if self.kind == ENCODINGS["shaw"]:
            table, bias = state["r_emb"][layer], state["r_bias"][layer]
            row = max(0, len(table) - 1 - distance)
            u = state["r_w_bias"][layer][head]
            return float((query + u) @ key + query @ table[row, head] + bias[row, head])
        return float(query @ key)

    def log_prob(self, hidden: Vector, word: int) -> float:
        """Natural logarithm of the probability of *word*."""
        band, inside = self.place(word)
        logits = self.logits(hidden, 0)
        clusters = len(self.ends) - 2
        if clusters:
            narrow = self.narrow(hidden, 0)
            rows = self.state["crit.cluster_weight"] @ narrow + self.state["crit.cluster_bias"]
            logits = np.concatenate([logits, rows])
        if band == 0:
            return _log_softmax(logits, inside)
        return _log_softmax(logits, self.ends[1] + clusters - band) + _log_softmax(self.logits(hidden, band), inside)

    def narrow(self, hidden: Vector, band: int) -> Vector:
        projection = self.state.get(f"crit.out_projs.{band}")
        return hidden if projection is None else hidden @ projection

    def logits(self, hidden: Vector, band: int) -> Vector:
        part, table = (band, slice(None)) if self.config["div_val"] > 1 else (0, slice(*self.ends[band : band + 2]))
        weight, bias = (self.state[f"crit.out_layers.{part}.{kind}"][table] for kind in ("weight", "bias"))
        return weight @ self.narrow(hidden, band) + bias


def _log_softmax(logits: Vector, index: int) -> float:
    most = logits.max()
    return float(logits[index] - most - math.log(np.exp(logits - most).sum()))
