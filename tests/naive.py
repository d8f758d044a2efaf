"""Checkpoints in fairseq's own layout with random weights, and a naive forward pass over their
tensors.

Nothing here uses the package: the formulas are written out, a token at a time where that is
clearest, in float64.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

PAD, EOS = 1, 2
FIRST_POSITION = PAD + 1

DEFAULTS = {
    "arch": "transformer_lm",
    "task": "language_modeling",
    "criterion": "cross_entropy",
    "data": "/nowhere/data-bin",
    "tokens_per_sample": 16,
    "max_target_positions": None,
    "sample_break_mode": "none",
    "max_tokens": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_embed_dim": 16,
    "decoder_input_dim": 16,
    "decoder_output_dim": 16,
    "decoder_ffn_embed_dim": 24,
    "dropout": 0.3,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "adaptive_softmax_dropout": 0.2,
    "activation_fn": "relu",
    "adaptive_input": False,
    "adaptive_input_cutoff": None,
    "adaptive_input_factor": 4,
    "adaptive_softmax_cutoff": None,
    "adaptive_softmax_factor": 4,
    "tie_adaptive_weights": False,
    "tie_adaptive_proj": False,
    "share_decoder_input_output_embed": False,
    "decoder_learned_pos": False,
    "no_token_positional_embeddings": False,
    "no_scale_embedding": False,
    "decoder_normalize_before": True,
    "no_decoder_final_norm": False,
    "layernorm_embedding": False,
    "decoder_layerdrop": 0,
    "character_embeddings": False,
}


def checkpoint(path: Path, vocabulary: int, seed: int = 0, old_names: bool = False, **settings) -> tuple[dict, dict]:
    """Write a checkpoint as fairseq 0.10 (with *old_names*: 0.9) would, and return its settings and
    tensors."""
    args = {**DEFAULTS, **settings}
    state = parameters(args, vocabulary, torch.Generator().manual_seed(seed), old_names)
    history = [{"criterion_name": "CrossEntropyCriterion", "optimizer_name": "NAG", "num_updates": 7}]
    history[0]["lr_scheduler_state"] = {"best": None}
    torch.save(
        {
            "args": argparse.Namespace(**args),
            "model": state,
            "optimizer_history": history,
            "extra_state": {"epoch": 1, "val_loss": 9.9, "train_iterator": {"epoch": 1, "iterations_in_epoch": 3}},
            "last_optimizer_state": None,
        },
        path,
    )
    return args, state


def parameters(args: dict, vocabulary: int, generator: torch.Generator, old_names: bool) -> dict[str, torch.Tensor]:
    def random(*shape: int, scale: float = 0.4) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale / math.sqrt(shape[-1])

    dim, ffn, wide_in, wide_out = (
        args[f"decoder_{n}"] for n in ("embed_dim", "ffn_embed_dim", "input_dim", "output_dim")
    )
    state = {"decoder.version": torch.tensor([3.0])}
    if args["adaptive_input"]:
        state["decoder.embed_tokens._float_tensor"] = torch.zeros(1)
        bounds = [0, *map(int, args["adaptive_input_cutoff"].split(",")), vocabulary]
        for band, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
            width = int(wide_in // args["adaptive_input_factor"] ** band)
            state[f"decoder.embed_tokens.embeddings.{band}.0.weight"] = random(last - first, width)
            state[f"decoder.embed_tokens.embeddings.{band}.1.weight"] = random(dim, width)
    else:
        state["decoder.embed_tokens.weight"] = random(vocabulary, wide_in)
        if wide_in != dim:
            state["decoder.project_in_dim.weight"] = random(dim, wide_in)
    if args["decoder_learned_pos"]:
        length = args["max_target_positions"] or args["tokens_per_sample"]
        state["decoder.embed_positions.weight"] = random(length + PAD + 1, dim)
    elif not args["no_token_positional_embeddings"]:
        state["decoder.embed_positions._float_tensor"] = torch.zeros(1)

    def norm(name: str) -> None:
        state[f"{name}.weight"] = 1 + random(dim)
        state[f"{name}.bias"] = random(dim)

    if args["layernorm_embedding"]:
        norm("decoder.layernorm_embedding")
    for layer in range(args["decoder_layers"]):
        prefix = f"decoder.layers.{layer}"
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            state[f"{prefix}.self_attn.{name}.weight"] = random(dim, dim, scale=2.0)
            state[f"{prefix}.self_attn.{name}.bias"] = random(dim)
        norm(f"{prefix}.self_attn_layer_norm")
        state[f"{prefix}.fc1.weight"], state[f"{prefix}.fc1.bias"] = random(ffn, dim), random(ffn)
        state[f"{prefix}.fc2.weight"], state[f"{prefix}.fc2.bias"] = random(dim, ffn), random(dim)
        norm(f"{prefix}.final_layer_norm")
    if args["decoder_normalize_before"] and not args["no_decoder_final_norm"]:
        norm("decoder.layer_norm")
    if wide_out != dim and not args["tie_adaptive_weights"]:
        state["decoder.project_out_dim.weight"] = random(wide_out, dim)
    if args["adaptive_softmax_cutoff"]:
        bounds = [0, *map(int, args["adaptive_softmax_cutoff"].split(",")), vocabulary]
        tails = len(bounds) - 2
        state["decoder.adaptive_softmax.version"] = torch.tensor([1])
        if args["tie_adaptive_weights"]:
            state["decoder.adaptive_softmax.head.word_proj.weight"] = state[
                "decoder.embed_tokens.embeddings.0.0.weight"
            ]
            state["decoder.adaptive_softmax.head.class_proj.weight"] = random(tails, dim)
            state["decoder.adaptive_softmax.head._float_tensor"] = torch.zeros(1)
        else:
            state["decoder.adaptive_softmax.head.weight"] = random(bounds[1] + tails, wide_out)
        for tail in range(tails):
            width = int(wide_out // args["adaptive_softmax_factor"] ** (tail + 1))
            name, source = f"decoder.adaptive_softmax.tail.{tail}", f"decoder.embed_tokens.embeddings.{tail + 1}"
            tied = args["tie_adaptive_proj"]
            state[f"{name}.0.weight"] = state[f"{source}.1.weight"] if tied else random(width, wide_out)
            words = bounds[tail + 2] - bounds[tail + 1]
            tied = args["tie_adaptive_weights"]
            state[f"{name}.2.weight"] = state[f"{source}.0.weight"] if tied else random(words, width)
    elif args["share_decoder_input_output_embed"]:
        if not old_names:
            state["decoder.output_projection.weight"] = state["decoder.embed_tokens.weight"]
    else:
        state["decoder.embed_out" if old_names else "decoder.output_projection.weight"] = random(vocabulary, wide_out)
    return state


class NaiveLM:
    """The forward pass, from the tensors and settings of a checkpoint."""

    def __init__(self, args: dict, state: dict[str, torch.Tensor]) -> None:
        self.args = args
        self.state = {name: tensor.double() for name, tensor in state.items()}

    def score(self, tokens: np.ndarray, length: int, window: int = 0, rows: int = 1) -> np.ndarray:
        """Log-probability of each token, in blocks as fairseq cuts them; with a cache, *rows*
        contiguous parts."""
        source = torch.from_numpy(np.concatenate([[EOS], tokens[:-1]]).astype(np.int64))
        target = torch.from_numpy(tokens.astype(np.int64))
        starts = list(range(0, len(tokens), length - window))
        segments_in_row = math.ceil(len(starts) / rows)
        found, cache = [], None
        for number, start in enumerate(starts):
            if number % segments_in_row == 0:
                cache = None
            end, before = min(start + length - window, len(tokens)), max(0, start - window)
            hidden, cache = self.hidden(source[before:end], cache)
            lprobs = self.log_probs(hidden[start - before :])
            found.append(lprobs.gather(1, target[start:end, None])[:, 0])
        return torch.cat(found).numpy()

    def hidden(self, tokens: torch.Tensor, cache: list | None = None) -> tuple[torch.Tensor, list]:
        """Hidden states [T, C], and what the Shortformer's layers remember."""
        args, state = self.args, self.state
        memory = max(0, args.get("tokens_from_prev", 0))
        infused = "tokens_from_prev" in args  # the Shortformer's fork, with a cache or without
        x = torch.stack([self.embedding(int(token)) for token in tokens])
        if not args["no_scale_embedding"]:
            x = x * math.sqrt(args["decoder_embed_dim"])
        if "decoder.project_in_dim.weight" in state:
            x = x @ state["decoder.project_in_dim.weight"].T
        if not infused and not args["no_token_positional_embeddings"]:
            x = x + torch.stack([self.position(i) for i in range(len(tokens))])
        if args["layernorm_embedding"]:
            x = self.norm("decoder.layernorm_embedding", x)
        kept = []
        pre = args["decoder_normalize_before"]
        for layer in range(args["decoder_layers"]):
            name = f"decoder.layers.{layer}"
            read = self.norm(f"{name}.self_attn_layer_norm", x) if pre else x
            context = read if not memory or cache is None else torch.cat([cache[layer], read])
            kept.append(context[-memory:] if memory else None)
            x = x + self.attention(f"{name}.self_attn", context, len(tokens), infused)
            x = x if pre else self.norm(f"{name}.self_attn_layer_norm", x)
            h = self.norm(f"{name}.final_layer_norm", x) if pre else x
            h = self.linear(f"{name}.fc1", h)
            h = F.gelu(h) if args["activation_fn"] == "gelu" else h.clamp(min=0)
            x = x + self.linear(f"{name}.fc2", h)
            x = x if pre else self.norm(f"{name}.final_layer_norm", x)
        if "decoder.layer_norm.weight" in state:
            x = self.norm("decoder.layer_norm", x)
        if "decoder.project_out_dim.weight" in state:
            x = x @ state["decoder.project_out_dim.weight"].T
        return x, kept

    def attention(self, name: str, context: torch.Tensor, queries: int, infused: bool) -> torch.Tensor:
        dim, heads = self.args["decoder_embed_dim"], self.args["decoder_attention_heads"]
        placed = context + torch.stack([self.position(i) for i in range(len(context))]) if infused else context
        query, key = self.linear(f"{name}.q_proj", placed), self.linear(f"{name}.k_proj", placed)
        value = self.linear(f"{name}.v_proj", context)
        result = torch.zeros(queries, dim, dtype=torch.float64)
        for i in range(queries):
            place = len(context) - queries + i
            for head in range(heads):
                part = slice(head * dim // heads, (head + 1) * dim // heads)
                scores = key[: place + 1, part] @ query[place, part] / math.sqrt(dim / heads)
                result[i, part] = scores.softmax(0) @ value[: place + 1, part]
        return self.linear(f"{name}.out_proj", result)

    def embedding(self, token: int) -> torch.Tensor:
        if not self.args["adaptive_input"]:
            return self.state["decoder.embed_tokens.weight"][token]
        bounds = [0, *map(int, self.args["adaptive_input_cutoff"].split(","))]
        band = sum(token >= bound for bound in bounds) - 1
        name = f"decoder.embed_tokens.embeddings.{band}"
        return self.state[f"{name}.1.weight"] @ self.state[f"{name}.0.weight"][token - bounds[band]]

    def position(self, index: int) -> torch.Tensor:
        place = FIRST_POSITION + index
        if self.args["decoder_learned_pos"]:
            return self.state["decoder.embed_positions.weight"][place]
        half = self.args["decoder_embed_dim"] // 2
        angles = [place * math.exp(-i * math.log(10000) / (half - 1)) for i in range(half)]
        return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)

    def log_probs(self, hidden: torch.Tensor) -> torch.Tensor:
        """All words' log-probabilities [T, V]."""
        state = self.state
        if not self.args["adaptive_softmax_cutoff"]:
            shared = self.args["share_decoder_input_output_embed"]
            names = (
                ("decoder.embed_tokens.weight",)
                if shared
                else ("decoder.output_projection.weight", "decoder.embed_out")
            )
            return (hidden @ next(state[name] for name in names if name in state).T).log_softmax(-1)
        name = "decoder.adaptive_softmax"
        if self.args["tie_adaptive_weights"]:
            head = torch.cat([state[f"{name}.head.word_proj.weight"], state[f"{name}.head.class_proj.weight"]])
        else:
            head = state[f"{name}.head.weight"]
        tails = len(self.args["adaptive_softmax_cutoff"].split(","))
        found = (hidden @ head.T).log_softmax(-1)
        words, bands = found[:, :-tails], found[:, -tails:]
        parts = [words]
        for tail in range(tails):
            projection = state[f"{name}.tail.{tail}.0.weight"]
            narrow = hidden @ (projection if self.args["tie_adaptive_proj"] else projection.T)
            inside = (narrow @ state[f"{name}.tail.{tail}.2.weight"].T).log_softmax(-1)
            parts.append(bands[:, tail : tail + 1] + inside)
        return torch.cat(parts, dim=1)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return (x - mean) / (variance + 1e-5).sqrt() * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]


def pointed(hidden, tokens, place, states, sharpness, word):
    """The probability of *word* at *place* by a pointer over cached states of a text (Grave et al.
    2016), a state at a time; −1 where there is none."""
    total = found = 0.0
    for earlier in range(max(0, place - states), place):
        a, b = hidden[place].double(), hidden[earlier].double()
        share = math.exp(sharpness * float(a @ b / (a.norm() * b.norm())))
        total += share
        found += share * (int(tokens[earlier]) == word)
    return found / total if total else -1.0
