"""``fairseq.utils``: small functions that plug-ins call."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import importlib
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

from fairseq.config.literals import csv_str_list as csv_str_list
from fairseq.config.literals import eval_bool as eval_bool
from fairseq.config.literals import eval_str_dict as eval_str_dict
from fairseq.config.literals import eval_str_list as eval_str_list
from fairseq.errors import UserError
from fairseq.incremental_decoding_utils import get_incremental_state as get_incremental_state
from fairseq.incremental_decoding_utils import set_incremental_state as set_incremental_state
from fairseq.logging.meters import item as item
from fairseq.modules.fairseq_modules import get_activation_fn as get_activation_fn
from fairseq.modules.fairseq_modules import get_available_activation_fns as get_available_activation_fns
from fairseq.modules.fairseq_modules import make_positions as make_positions
from fairseq.modules.transformer_layer import relu_squared as relu_squared
from fairseq.system import plugins
from fairseq.system.opening import read_text

SPACE_NORMALIZER = re.compile(r"\s+")


def tokenize_line(line: str) -> list[str]:
    return line.split()


def split_paths(paths: str, separator: str = os.pathsep) -> list[str]:
    """The paths in a list joined by colons; URLs stay whole."""
    # A URL has a colon of its own, so that such lists are joined by bars.
    return paths.split(separator) if "://" not in paths else paths.split("|")


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


def apply_to_sample(f: Callable[[Tensor], object], sample: object) -> Any:
    """*sample*, nested dicts, lists, tuples and sets, with *f* applied to its tensors; ``{}`` for
    an empty one."""
    is_empty = isinstance(sample, Sized) and not isinstance(sample, Tensor) and len(sample) == 0
    return {} if is_empty else _applied(f, sample)


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


def fill_with_neg_inf(t: Tensor) -> Tensor:
    return torch.full_like(t, float("-inf"))


def clip_grad_norm_(params: Any, max_norm: float, aggregate_norm_fn: object = None) -> Tensor:
    """Scale gradients down to a norm of *max_norm* (0: no limit); return the norm before."""
    # A generator can be read once only, and torch needs the gradients twice: for the norm and for
    # the scaling.
    parameters = [p for p in ([params] if isinstance(params, Tensor) else params) if p.grad is not None]
    return nn.utils.clip_grad_norm_(parameters, max_norm if max_norm > 0 else float("inf"))


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
