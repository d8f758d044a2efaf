"""Import of checkpoints of Transformer-XL's authors (PyTorch).

In their files the rows of ``cluster_weight`` are reversed: the last belongs to band 1. With
``div_val`` 1 (bands of equal width) the softmax is one table there and one table a band here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fairseq.errors import UserError
from fairseq.interop.pickles.named_tensors import Tensors, cut, view

POSITION_ENCODINGS = ("relative", "shaw", "absolute", "learned")  # by attn_type
SIZES = ("n_layer", "n_head", "d_model", "d_head", "d_inner", "tgt_len", "div_val")
SWITCHES = ("pre_lnorm", "same_length", "tie_weight")
OTHERS = ("mem_len", "clamp_len", "cutoffs", "attn_type", "tie_projs")
LAYER_NAMES = {  # theirs: ours
    "dec_attn.o_net.weight": "self_attn.out_proj.weight",
    "dec_attn.layer_norm.weight": "self_attn_layer_norm.weight",
    "dec_attn.layer_norm.bias": "self_attn_layer_norm.bias",
    "pos_ff.CoreNet.0.weight": "fc1.weight",
    "pos_ff.CoreNet.0.bias": "fc1.bias",
    "pos_ff.CoreNet.3.weight": "fc2.weight",
    "pos_ff.CoreNet.3.bias": "fc2.bias",
    "pos_ff.layer_norm.weight": "final_layer_norm.weight",
    "pos_ff.layer_norm.bias": "final_layer_norm.bias",
}
TABLE = "word_emb.emb_layers.0.weight"
MOST = (1 << 31) - 1  # of any count
BANDS = 64  # most bands of a vocabulary

Args = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Validated configuration of a model of the authors."""

    n_layer: int
    n_head: int
    d_model: int
    d_head: int
    d_inner: int
    tgt_len: int
    div_val: int
    mem_len: int
    clamp_len: int
    cutoffs: tuple[int, ...]
    vocab_size: int
    d_embed: int
    attn_type: int
    pre_lnorm: bool
    same_length: bool
    tie_weight: bool
    untie_r: bool
    dropout: float
    dropatt: float
    tied_bands: tuple[int, ...]

    @property
    def bounds(self) -> tuple[int, ...]:
        """First word of each band, and the end of the last."""
        return (0, *self.cutoffs, self.vocab_size)

    @property
    def bands(self) -> int:
        """Number of bands of the softmax."""
        return len(self.cutoffs) + 1

    @property
    def projected(self) -> bool:
        """True if embeddings are projected: narrower than the model, or of different widths."""
        return self.div_val > 1 or self.d_embed != self.d_model

    def words(self, band: int) -> int:
        """Return the number of words in *band*."""
        return self.bounds[band + 1] - self.bounds[band]

    def width(self, band: int) -> int:
        """Channels of the embeddings of *band*."""
        return int(self.d_embed // self.div_val**band)


def convert(
    state: Mapping[str, Tensor], config: Mapping[str, object], where: str = "state dict"
) -> tuple[dict[str, Tensor], Args]:
    """Return parameters and settings of the authors' model under the names of this project.

    Args:
        state: its tensors under the authors' names. Tied tensors may be absent.
        config: its settings under the authors' names; ``d_embed`` may be absent, ``dropout``,
            ``dropatt`` and ``untie_r`` (Hugging Face's: a pair of biases a layer) are 0, 0 and
            false where they are.
        where: name of the source in error messages.

    Returns:
        Parameters by name (tied ones share memory), and ``args`` as stored in a checkpoint.

    Raises:
        UserError: the configuration lacks a key or has
            an invalid value, or the tensors do not match it.
    """
    tensors = Tensors(state, where)
    shape = read_config(config, tensors, where)
    # Before the loops over layers: a configuration
    # could otherwise name two thousand million of them.
    if shape.n_layer > len(tensors.left):
        raise UserError(f"{where}: n_layer is {shape.n_layer} in the configuration, more layers than there are tensors")
    # The embeddings come first, because the softmax may be tied to them.
    model = _embeddings(tensors, shape) | _attention_tables(tensors, shape)
    model |= _softmax(tensors, shape, model)
    for layer in range(shape.n_layer):
        model |= _layer(tensors, shape, layer)
    tensors.finish()
    return _own_memory({f"decoder.{name}": value for name, value in model.items()}), _args(shape, model)


def read_config(config: Mapping[str, Any], tensors: Tensors, where: str) -> Shape:
    """Validate the configuration, or raise UserError;
    missing values are taken from the shapes of *tensors*."""
    for key in (*SIZES, *SWITCHES, *OTHERS):
        if key not in config:
            raise UserError(f"{where}: the configuration has no {key}; add it")
    if TABLE not in tensors.left:
        raise UserError(f"{where}: not a Transformer-XL (no {TABLE}); give the state dict of one")
    table = tensors.left[TABLE]
    if table.dim() != 2:
        raise UserError(f"{where}: {TABLE} is {list(table.shape)}, expected [words, channels]; the file is damaged")
    tables = [value for name, value in tensors.left.items() if name.startswith("word_emb.emb_layers.") and value.dim()]
    # A state dict alone has neither, but its tables do; values that the configuration has come last
    # and are compared with the tensors later.
    derived = {"vocab_size": sum(map(len, tables)), "d_embed": table.size(1), "dropout": 0.0, "dropatt": 0.0}
    config = {"untie_r": False, **derived, **config}
    for key, fine, valid in _conditions(config):
        if not fine:
            raise UserError(f"{where}: {key} is {cut(config[key])} in the configuration; it must be {valid}")
    known = {field.name for field in fields(Shape)} - {"cutoffs", "tied_bands"}
    bands = tuple(band for band, tied in enumerate(config["tie_projs"]) if tied)
    return Shape(**{key: config[key] for key in known}, cutoffs=_cutoffs(config), tied_bands=bands)


def _conditions(config: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """Yield the condition on each value as (key, fulfilled,
    valid values); later ones rely on earlier ones."""
    for key in (*SIZES, "vocab_size", "d_embed"):
        yield key, _is_count(config[key], 1), f"a whole number from 1 to {MOST}"
    for key in (*SWITCHES, "untie_r"):
        yield key, isinstance(config[key], bool), "true or false"
    for key in ("dropout", "dropatt"):
        yield key, type(config[key]) in (int, float) and 0 <= config[key] < 1, "a number from 0 to below 1"
    yield "mem_len", _is_count(config["mem_len"], 0), f"a whole number from 0 to {MOST}"
    yield "clamp_len", _is_count(config["clamp_len"], -MOST), f"a whole number up to {MOST} (-1: no clamping)"
    yield "attn_type", _is_count(config["attn_type"], 0) and config["attn_type"] < 4, "0, 1, 2 or 3"
    cutoffs, tie_projs = config["cutoffs"], config["tie_projs"]
    yield "cutoffs", isinstance(cutoffs, list | tuple) and all(_is_count(cut, 1) for cut in cutoffs), "a list of words"
    bounds = (0, *_cutoffs(config), config["vocab_size"])
    yield "cutoffs", all(a < b for a, b in pairwise(bounds)), f"rising and below {config['vocab_size']}"
    bands = len(bounds) - 1
    yield "cutoffs", bands <= BANDS, f"a list of fewer than {BANDS} words"
    fine = isinstance(tie_projs, list | tuple) and all(isinstance(tied, bool) for tied in tie_projs)
    yield "tie_projs", fine and len(tie_projs) <= bands, f"{bands} times true or false"
    narrow = config["d_embed"] // config["div_val"] ** (bands - 1)
    yield "div_val", narrow > 0, f"less: the last band would have no channels of {config['d_embed']}"


def _cutoffs(config: Mapping[str, Any]) -> tuple[int, ...]:
    """First word of each band after the first;
    the cutoffs of a saved module include the vocabulary size."""
    cutoffs = tuple(config["cutoffs"])
    return cutoffs[:-1] if cutoffs and cutoffs[-1] == config["vocab_size"] else cutoffs


def _is_count(value: object, low: int) -> bool:
    return type(value) is int and low <= value <= MOST


def _tables(tensors: Tensors, shape: Shape, name: str, kind: str = "weight") -> list[Tensor]:
    """Weights or biases of all bands, which are one
    tensor there where the bands are equally wide."""
    words = [shape.words(band) for band in range(shape.bands)]
    widths = [(shape.width(band),) if kind == "weight" else () for band in range(shape.bands)]
    if shape.div_val == 1:
        return list(tensors.take(f"{name}.0.{kind}", shape.vocab_size, *widths[0]).split(words))
    return [tensors.take(f"{name}.{band}.{kind}", words[band], *widths[band]) for band in range(shape.bands)]


def _embeddings(tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """Embedding tables of all bands, and their projections to the width of the model."""
    tables, projections = _tables(tensors, shape, "word_emb.emb_layers"), list[Tensor]()
    if shape.projected:
        files = 1 if shape.div_val == 1 else shape.bands  # one projection there for bands that are equally wide
        sizes = [(shape.d_model, shape.width(band)) for band in range(files)]
        projections = [tensors.take(f"word_emb.emb_projs.{band}", *size) for band, size in enumerate(sizes)]
        projections *= shape.bands // files
    model = {f"embed_tokens.embeddings.{band}.0.weight": table for band, table in enumerate(tables)}
    return model | {f"embed_tokens.embeddings.{band}.1.weight": value for band, value in enumerate(projections)}


def _softmax(tensors: Tensors, shape: Shape, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights, biases and projections of all bands,
    tied to the embeddings of *model* as configured."""
    # The authors' `sample_softmax` keeps its only output table under this name.
    if "out_layer.weight" in tensors.left:
        raise UserError(f"{tensors.where}: sampled softmax; only full and adaptive softmax are supported")
    biases = _tables(tensors, shape, "crit.out_layers", "bias")
    if shape.tie_weight:
        tables = [model[f"embed_tokens.embeddings.{band}.0.weight"] for band in range(shape.bands)]
        for band, copy in enumerate([torch.cat(tables)] if shape.div_val == 1 else tables):
            tensors.tied(f"crit.out_layers.{band}.weight", copy)
    else:
        tables = _tables(tensors, shape, "crit.out_layers")
    softmax = {}
    for band in range(shape.bands):
        name, projection = f"adaptive_softmax.bands.{band}", f"crit.out_projs.{band}"
        softmax[f"{name}.weight"], softmax[f"{name}.bias"] = tables[band], biases[band]
        if shape.projected and band in shape.tied_bands:
            embedded = model[f"embed_tokens.embeddings.{band}.1.weight"]
            softmax[f"{name}.projection"] = tensors.tied(projection, embedded)
        elif shape.projected:
            softmax[f"{name}.projection"] = tensors.take(projection, shape.d_model, shape.width(band))
    if shape.bands > 1:
        weight = tensors.take("crit.cluster_weight", shape.bands - 1, shape.d_embed)
        # Their loss reads the column −i for band i: band 1 is the last row of the file.
        softmax["adaptive_softmax.cluster_weight"] = weight.flip(0)
        softmax["adaptive_softmax.cluster_bias"] = tensors.take("crit.cluster_bias", shape.bands - 1).flip(0)
    return softmax


def _attention_tables(tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """Attention parameters that all layers share there
    and that each layer names separately here."""
    model, heads, encoding = {}, (shape.n_head, shape.d_head), POSITION_ENCODINGS[shape.attn_type]
    layers = range(shape.n_layer)
    if encoding == "relative":
        for bias in ("r_w_bias", "r_r_bias"):
            # Each layer there has its own reference to the one pair, so that a file names it once
            # or once a layer.
            shared = None if shape.untie_r else tensors.take(bias, *heads)
            for layer in layers:
                name = f"layers.{layer}.dec_attn.{bias}"
                biases = tensors.take(name, *heads) if shared is None else tensors.tied(name, shared)
                model[f"layers.{layer}.self_attn.{bias}"] = biases
    elif encoding == "shaw":
        rows = _rows(tensors)
        tables = {"r_emb": (rows, *heads), "r_bias": (rows, shape.n_head), "r_w_bias": heads}
        for table, size in tables.items():
            stacked = tensors.take(table, shape.n_layer, *size)
            model |= {f"layers.{layer}.self_attn.{table}": stacked[layer] for layer in layers}
    elif encoding == "learned":
        # That table is added to the inputs of the layers, which are d_model wide, although it is
        # stored by heads.
        if shape.n_head * shape.d_head != shape.d_model:
            raise UserError(f"{tensors.where}: attn_type 3 needs n_head times d_head to be d_model, {shape.d_model}")
        model["layer_positions"] = tensors.take("r_emb", shape.n_layer, _rows(tensors), *heads).flatten(2)
    return model


def _rows(tensors: Tensors) -> int:
    """Rows of the position table of a layer."""
    table = tensors.left.get("r_emb")
    return 0 if table is None or table.dim() < 2 else table.size(1)


def _layer(tensors: Tensors, shape: Shape, layer: int) -> dict[str, Tensor]:
    """Projections and norms of one layer, with separate queries, keys and values."""
    theirs, ours = f"layers.{layer}.", f"layers.{layer}."
    inner, d_model = shape.n_head * shape.d_head, shape.d_model
    # Types 2 and 3 read no memory; their attention computes keys and values apart from the queries.
    if shape.attn_type < 2:
        fused = tensors.take(f"{theirs}dec_attn.qkv_net.weight", 3 * inner, d_model)
    else:
        queries = tensors.take(f"{theirs}dec_attn.q_net.weight", inner, d_model)
        fused = torch.cat([queries, tensors.take(f"{theirs}dec_attn.kv_net.weight", 2 * inner, d_model)])
    parts = zip(("q_proj", "k_proj", "v_proj"), fused.chunk(3), strict=True)
    model = {f"{ours}self_attn.{part}.weight": value for part, value in parts}
    if shape.attn_type == 0:
        model[f"{ours}self_attn.r_proj.weight"] = tensors.take(f"{theirs}dec_attn.r_net.weight", inner, d_model)
    # All other parameters of a layer, norms and the last bias, are [d_model].
    sizes: dict[str, tuple[int, ...]] = {"o_net.weight": (d_model, inner), "CoreNet.0.weight": (shape.d_inner, d_model)}
    sizes |= {"CoreNet.0.bias": (shape.d_inner,), "CoreNet.3.weight": (d_model, shape.d_inner)}
    for name, our_name in LAYER_NAMES.items():
        model[f"{ours}{our_name}"] = tensors.take(f"{theirs}{name}", *sizes.get(name.partition(".")[2], (d_model,)))
    return model


def _own_memory(model: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy every tensor to memory of its own size; names of one tensor still share it."""
    copies: dict[object, Tensor] = {}
    for name, value in model.items():
        # A checkpoint stores a whole storage for each view: slices of one fused table would each
        # carry the full table.
        key = view(value)
        if key not in copies:
            copies[key] = value.clone(memory_format=torch.contiguous_format)
        model[name] = copies[key]
    return model


def _args(shape: Shape, model: Mapping[str, Tensor]) -> Args:
    """The settings under the names of this project."""
    args: Args = {"arch": "transformer_xl", "task": "language_modeling", "criterion": "cross_entropy"}
    for key in ("n_layer", "n_head", "d_model", "d_head", "d_inner", "d_embed", "pre_lnorm", "same_length"):
        args[key] = getattr(shape, key)
    encoding = POSITION_ENCODINGS[shape.attn_type]
    args |= {
        "dropout": float(shape.dropout),
        "dropatt": float(shape.dropatt),
        "untie_r": shape.untie_r,
        "cutoffs": list(shape.cutoffs) or None,
        "div_val": shape.div_val,
        "tie_weight": shape.tie_weight,
        "tie_projs": _tied(shape),
        "position_encoding": encoding,
        "mem_len": shape.mem_len,
        # 0 means no clamping there, as −1 does, and only `relative` reads the setting.
        "clamp_len": shape.clamp_len if shape.clamp_len > 0 and encoding == "relative" else -1,
        "tokens_per_sample": shape.tgt_len,
    }
    if encoding == "shaw":
        # The tables in the file decide: the authors size them by segment and memory of the
        # training, which evaluation changes.
        args["max_relative_length"] = model["layers.0.self_attn.r_emb"].size(0)
    elif encoding == "learned":
        args["max_relative_length"] = model["layer_positions"].size(1)
    return args


def _tied(shape: Shape) -> str:
    """The value of ``--tie-projs``: the bands with tied projections."""
    tied = shape.tied_bands if shape.projected else ()
    if tied == tuple(range(shape.bands)):
        return "all"
    if tied and tied == tuple(range(1, shape.bands)):
        return "tails"
    return ",".join(map(str, tied)) or "none"
