"""``fairseq.utils``: small functions that plug-ins call."""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import importlib
import logging
import math
import os
import pkgutil
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.errors import UserError
from fairseq.logging.progress import through_logging
from fairseq.modules.transformer_layer import FUNCTIONS, relu_squared  # noqa: F401 - a name that plug-ins import
from fairseq.system import plugins
from fairseq.system.opening import read_text

SPACE_NORMALIZER = re.compile(r"\s+")
_ACTIVATIONS = {**FUNCTIONS, "swish": F.silu}


def tokenize_line(line: str) -> list[str]:
    return line.split()


def split_paths(paths: str, separator: str = os.pathsep) -> list[str]:
    """The paths in a list joined by colons; URLs stay whole."""
    # A URL has a colon of its own, so that such lists are joined by bars.
    return paths.split(separator) if "://" not in paths else paths.split("|")


def eval_str_dict(x: object, type: Callable[[Any], object] = dict) -> Any:
    """The value, such as a dict, that a text names; what is no text is a value already.

    Raises:
        UserError: the text is no literal; it is read, not run.
    """
    if not isinstance(x, str):
        return x
    try:
        return ast.literal_eval(x)
    # `literal_eval` of hostile text ends in any of these; deep nesting in the last two.
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise UserError(f"{x!r}: expected a Python literal such as (0.9, 0.98)") from None


def eval_str_list(
    x: object, type: Callable[[Any], object] = float, x_type: Callable[[Any], object] | None = None
) -> Any:
    """The list that a text such as ``[0.9, 0.98]`` names, its items as *type*; of a single value a
    list of one."""
    value = eval_str_dict(x)
    if value is None:
        return None
    return list(map(x_type or type, value if isinstance(value, list | tuple) else [value]))


def eval_bool(x: object, default: bool = False) -> bool:
    """The truth value that a text such as ``True`` names."""
    return default if x is None else bool(eval_str_dict(x))


def csv_str_list(x: str) -> list[str]:
    return x.split(",")


def item(tensor: object) -> Any:
    """The number in a tensor of one element; anything else unchanged."""
    return tensor.item() if hasattr(tensor, "item") else tensor


def get_perplexity(loss: Any, round: int = 2, base: int = 2) -> float:
    """The perplexity of *loss*, in bits unless *base* is another, to *round* decimal places."""
    if loss is None:
        return 0.0
    try:
        perplexity = float(base) ** float(loss)
    except OverflowError:  # early in training
        return float("inf")
    return perplexity if math.isinf(perplexity) else builtins.round(perplexity, round)


def softmax(x: Tensor, dim: int, onnx_trace: bool = False) -> Tensor:
    """Softmax in float32."""
    return F.softmax(x, dim=dim, dtype=torch.float32)


def log_softmax(x: Tensor, dim: int, onnx_trace: bool = False) -> Tensor:
    """Logarithm of the softmax, in float32."""
    return F.log_softmax(x, dim=dim, dtype=torch.float32)


def get_activation_fn(activation: str) -> Callable[[Tensor], Tensor]:
    """The activation called *activation*.

    Raises:
        UserError: there is none.
    """
    if activation not in _ACTIVATIONS:
        raise UserError(f"--activation-fn {activation}: choose from {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[activation]


def get_available_activation_fns() -> list[str]:
    return sorted(_ACTIVATIONS)


def apply_to_sample(f: Callable[[Tensor], object], sample: object) -> Any:
    """*sample*, nested dicts, lists, tuples and sets, with *f* applied to its tensors; ``{}`` for
    an empty one."""
    return {} if isinstance(sample, Sized) and len(sample) == 0 else _applied(f, sample)


def _applied(f: Callable[[Tensor], object], sample: object) -> Any:
    if isinstance(sample, Tensor):
        return f(sample)
    if isinstance(sample, OrderedDict):  # which may have attributes of its own
        changed = OrderedDict((name, _applied(f, value)) for name, value in sample.items())
        vars(changed).update(vars(sample))
        return changed
    if isinstance(sample, dict):
        return {name: _applied(f, value) for name, value in sample.items()}
    if isinstance(sample, list | set):
        return type(sample)(_applied(f, value) for value in sample)
    if isinstance(sample, tuple):
        values = (_applied(f, value) for value in sample)
        return type(sample)(*values) if hasattr(sample, "_fields") else tuple(values)
    return sample


def move_to_cuda(sample: object, device: torch.device | None = None) -> Any:
    return apply_to_sample(lambda tensor: tensor.cuda(device, non_blocking=True), sample)


def move_to_cpu(sample: object) -> Any:
    """*sample* on the host; half precision becomes float32."""
    # Many operators of the CPU lack half precision, as fairseq's own function assumes.
    halves = (torch.float16, torch.bfloat16)
    return apply_to_sample(lambda t: t.to("cpu", torch.float32 if t.dtype in halves else t.dtype), sample)


def make_positions(tensor: Tensor, padding_idx: int, onnx_trace: bool = False) -> Tensor:
    """The position of each token, from ``padding_idx`` + 1; padding is at *padding_idx*: [B, T]."""
    mask = tensor.ne(padding_idx).int()
    return (mask.cumsum(1).type_as(mask) * mask).long() + padding_idx


def convert_padding_direction(
    src_tokens: Tensor, padding_idx: int, right_to_left: bool = False, left_to_right: bool = False
) -> Tensor:
    """The rows *src_tokens* [B, T] with their padding on the other side."""
    if right_to_left == left_to_right:
        raise ValueError("convert_padding_direction: give right_to_left or left_to_right")
    # A stable sort keeps the order of the tokens.
    is_padding = src_tokens.eq(padding_idx)
    order = (is_padding if left_to_right else ~is_padding).int().argsort(dim=1, stable=True)
    return src_tokens.gather(1, order)


def strip_pad(tensor: Tensor, pad: int) -> Tensor:
    return tensor[tensor != pad]


def new_arange(x: Tensor, *size: int) -> Tensor:
    """Numbers from 0 along the last axis, of *size* or the size of *x*."""
    shape = size or tuple(x.shape)
    return torch.arange(shape[-1], device=x.device).expand(*shape).contiguous()


def fill_with_neg_inf(t: Tensor) -> Tensor:
    return torch.full_like(t, float("-inf"))


def clip_grad_norm_(params: Any, max_norm: float, aggregate_norm_fn: object = None) -> Tensor:
    """Scale gradients down to a norm of *max_norm* (0: no limit); return the norm before."""
    # A generator can be read once only, and torch needs the gradients twice: for the norm and for
    # the scaling.
    parameters = [p for p in ([params] if isinstance(params, Tensor) else params) if p.grad is not None]
    return nn.utils.clip_grad_norm_(parameters, max_norm if max_norm > 0 else float("inf"))


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


@contextlib.contextmanager
def model_eval(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


eval = model_eval  # the name until 0.9


@contextlib.contextmanager
def set_torch_seed(seed: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def get_incremental_state(module: nn.Module, incremental_state: Any, key: str) -> Any:
    """The entry *key* of *module* in the state of incremental decoding; None without one."""
    return None if incremental_state is None else incremental_state.get(f"{id(module)}.{key}")


def set_incremental_state(module: nn.Module, incremental_state: Any, key: str, value: object) -> Any:
    """The state of incremental decoding with the entry *key* of *module* set."""
    if incremental_state is not None:
        incremental_state[f"{id(module)}.{key}"] = value
    return incremental_state


def parse_embedding(embed_path: str) -> dict[str, Tensor]:
    """Vectors of words, from a text file: their number and width, then a word and its numbers on
    each line.

    Raises:
        UserError: the file cannot be read, or a line has another width.
    """
    advice = "give a text file of word vectors"
    head, *lines = read_text(Path(embed_path), advice).decode("utf-8", "replace").splitlines() or [""]
    vectors = {}
    for number, line in enumerate(lines, start=2):
        word, *values = line.rstrip().split(" ")
        try:
            vectors[word] = torch.tensor([float(value) for value in values])
        except ValueError:
            raise UserError(f"{embed_path}: line {number} is no word with numbers; {advice}") from None
        if head.split()[-1:] != [str(len(values))]:
            raise UserError(f"{embed_path}: line {number} has {len(values)} numbers, unlike line 1 says; {advice}")
    return vectors


def load_embedding(embed_dict: Mapping[str, Tensor], vocab: Any, embedding: nn.Embedding) -> nn.Embedding:
    """*embedding* with the vectors of words that *embed_dict* has."""
    with torch.no_grad():
        for number in range(len(vocab)):
            if vocab[number] in embed_dict:
                embedding.weight[number] = embed_dict[vocab[number]]
    return embedding


def import_user_module(args: argparse.Namespace) -> None:
    """Import the package that ``args.user_dir`` names, if any."""
    if folder := vars(args).get("user_dir"):
        plugins.import_user_module(folder)


def deprecation_warning(message: str, stacklevel: int = 3) -> None:
    warnings.warn(message, stacklevel=stacklevel)


def is_xla_tensor(tensor: object) -> bool:
    """Return False: there are no TPUs here."""
    return False


def safe_getattr(obj: object, k: str, default: object = None) -> Any:
    """The attribute *k* of settings, or *default*."""
    return getattr(obj, k, default)


def safe_hasattr(obj: object, k: str) -> bool:
    """Return whether settings have an attribute *k* that is not None."""
    return getattr(obj, k, None) is not None


def resolve_max_positions(*limits: Any) -> Any:
    """The smallest of *limits*, numbers, tuples of them or None; None without any."""
    known = [limit for limit in limits if limit is not None]
    tuples = [limit for limit in known if isinstance(limit, tuple)]
    return tuple(map(min, zip(*tuples, strict=True))) if tuples else min(known, default=None)


def import_tasks(tasks_dir: str, namespace: str) -> None:
    """Import the modules and packages in *tasks_dir*, which are parts of the package
    *namespace*."""
    for module in pkgutil.iter_modules([tasks_dir]):
        importlib.import_module(f"{namespace}.{module.name}")


import_models = import_tasks


def reset_logging() -> None:
    """Do nothing: the log is this package's."""


def call_main(cfg: object, main: Callable[..., object], **options: object) -> None:
    """Call *main*; a command of this package starts as many processes as it needs, and takes flat
    settings.

    Where the script has set up :mod:`logging`, lines of the log go there.
    """
    is_command = str(main.__module__).startswith("fairseq_cli.")
    with through_logging() if logging.getLogger().handlers else contextlib.nullcontext():
        main(cfg.flattened() if is_command and hasattr(cfg, "flattened") else cfg, **options)
