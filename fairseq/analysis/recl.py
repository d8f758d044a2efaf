"""Relative effective context length (RECL): the longest context that still helps (Dai et al. 2019,
§4.3, App. C).

With l_i(c, t) = −log P_i(x_t | x_{t−c} … x_{t−1}), the loss in nats of model i of a group on token
t, given exactly the c tokens before it:

* baseline   b(c, t) = min_i l_i(c, t), the best of the group with the short context;
* hard positions T = the share r of positions with the largest b(c, t);
* relative loss   f_i(c, c′) = 1/|T| Σ_{t∈T} min(b(c, t), l_i(c′, t)): only improvements on the
  baseline count;
* relative gain   g_i(c, c′) = (exp f_i(c, c) − exp f_i(c, c′)) / exp f_i(c, c), a relative
  reduction of perplexity.

Since b(c, t) ≤ l_i(c, t), f_i(c, c) is the mean of b(c, ·) over T, the same for every model. The
RECL of model i is the first c of Δ, 2Δ, … for which g_i(c, c + Δ) is below the threshold.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq.errors import UserError
from fairseq.inference.loading import check_no_begin, load_language_models
from fairseq.logging import Progress, no_progress
from fairseq.models.base import BaseFairseqModel
from fairseq.modules.output_layer import OutputLayer
from fairseq.modules.precision import Precision

RISING = "↑"  # marks a model whose perplexity rises with the context


@dataclass(frozen=True)
class ContextLosses:
    """Losses of a group of models on the same positions with contexts of several lengths."""

    names: list[str]  # of the M models
    contexts: np.ndarray  # context lengths in tokens, int64 [K], rising
    losses: np.ndarray  # float64 [M, K, N] in nats, at N positions

    def perplexities(self) -> np.ndarray:
        """Perplexity over all positions, without a baseline: float64 [M, K] (Figure 4)."""
        return np.exp(self.losses.mean(axis=2))

    def risen_from(self) -> list[int | None]:
        """For each model the context length with its lowest
        perplexity if it rises beyond, else None.

        It rises if at the longest context it is higher than at the shortest, or higher than the
        lowest by more than two standard errors of the difference.
        """
        lengths: list[int | None] = []
        for losses in self.losses:  # (K, N)
            lowest = int(losses.mean(axis=1).argmin())
            change = losses[-1] - losses[lowest]
            error = float(change.std()) / math.sqrt(len(change))
            rises = change.mean() > 2 * error or losses[-1].mean() > losses[0].mean()
            lengths.append(int(self.contexts[lowest]) if rises else None)
        return lengths


@dataclass(frozen=True)
class Gains:
    """Gains of each step from a context c to the next longer one, on the hardest positions."""

    top_r: float  # the share r of counted positions
    positions: int  # their number
    baseline: np.ndarray  # float64 [K − 1], exp f(c, c), the perplexity of the group's best with the short context
    relative: np.ndarray  # float64 [M, K − 1], g_i(c, c′)
    errors: np.ndarray  # float64 [M, K − 1], standard errors of *relative*, from the sample of positions

    @property
    def absolute(self) -> np.ndarray:
        """exp f_i(c, c) − exp f_i(c, c′), the unnormalised gain
        in perplexity: float64 [M, K − 1] (Figure 3)."""
        return self.baseline * self.relative


@dataclass(frozen=True)
class EffectiveLength:
    """A RECL in tokens. ``bound`` is ``exact``, or ``at least``
    or ``at most`` at the ends of the measured range."""

    tokens: int
    bound: str = "exact"

    def __str__(self) -> str:
        return {"exact": "", "at least": "≥ ", "at most": "≤ "}[self.bound] + str(self.tokens)


def draw_positions(tokens: int, longest: int, count: int, seed: int) -> np.ndarray:
    """Up to *count* positions of a corpus of *tokens* tokens with *longest* tokens before each:
    int64 [N], rising.

    Raises:
        UserError: the corpus is too short.
    """
    if tokens <= longest:
        raise UserError(f"`max_context` {longest}: the corpus has {tokens} tokens; give {tokens - 1} or less")
    # Positions with the longest context before them, also for short contexts: all lengths measure
    # the same tokens.
    chosen = np.random.default_rng(seed).choice(tokens - longest, min(count, tokens - longest), replace=False)
    return np.sort(chosen) + longest


def hardest(baseline: np.ndarray, top_r: float) -> np.ndarray:
    """The positions T with the largest baseline losses [N]:
    indices int64 [⌈r·N⌉]; the first of equal ones."""
    # Products of decimal fractions are inexact: 0.07 · 100 is 7.000000000000001, of which the
    # ceiling is 8.
    count = max(1, math.ceil(top_r * len(baseline) - 1e-9))
    return np.argsort(-baseline, kind="stable")[:count]


def relative_gains(losses: np.ndarray, top_r: float) -> Gains:
    """The gains of all steps between neighbouring contexts, on the share *top_r* of hardest
    positions, in (0, 1]."""
    baselines, means, deviations = [], [], []
    for short, long in zip(losses.swapaxes(0, 1)[:-1], losses.swapaxes(0, 1)[1:], strict=True):  # each (M, N)
        best = short.min(axis=0)
        hard = hardest(best, top_r)
        change = np.minimum(long[:, hard] - best[hard], 0.0)  # (M, n): min(b, l) − b
        baselines.append(best[hard].mean())
        means.append(change.mean(axis=1))
        deviations.append(change.std(axis=1))
    mean, count = np.stack(means, axis=1), len(hard)  # (M, K - 1)
    # The gain is 1 − exp(mean), whose derivative is −exp(mean).
    errors = np.exp(mean) * np.stack(deviations, axis=1) / math.sqrt(count)
    return Gains(top_r, count, np.exp(baselines), -np.expm1(mean), errors)


def effective_length(relative: np.ndarray, contexts: np.ndarray, threshold: float) -> EffectiveLength:
    """The RECL of one model from its relative gains
    [K − 1] between neighbours of *contexts* [K]."""
    below = np.flatnonzero(relative < threshold)
    if not len(below):
        return EffectiveLength(int(contexts[-1]), "at least")
    return EffectiveLength(int(contexts[below[0]]), "exact" if below[0] else "at most")


class WindowReader:
    """Losses of tokens for a model that reads exactly the c tokens before each.

    A model without memory reads a window at once. A model with memory reads it in segments, as
    ``fairseq-eval-lm`` reads a corpus; the memory is empty at the start of the window, and the last
    segment is a full one.

    Args:
        name: of the model, for messages.
        segment: tokens of a segment; None: windows are read at once.
    """

    def __init__(self, name: str, model: BaseFairseqModel, segment: int | None) -> None:
        self.name = name
        self.model = model.eval()
        self.segment = segment

    @torch.inference_mode()
    def losses(self, windows: Tensor, targets: Tensor) -> Tensor:
        """The loss of the token after each window, in nats:
        windows [B, c], targets [B] → float32 [B]."""
        # The odd part first, so that the last segment,
        # in which the prediction stands, is a full one.
        first = windows.size(1) if self.segment is None else windows.size(1) % self.segment or self.segment
        net_output = self.model(windows[:, :first])
        for start in range(first, windows.size(1), self.segment or 1):
            part = windows[:, start : start + (self.segment or 1)]
            net_output = self.model(part, memory=net_output[1]["memory"])
        last = net_output[0][:, -1]  # (B, C)
        layer = self.model.output_layer
        # A model without an output layer has probabilities only.
        if isinstance(layer, OutputLayer):
            return -layer.target_log_probs(last, targets).float()
        lprobs = self.model.get_normalized_probs((last[:, None], *net_output[1:]), log_probs=True)[:, -1]
        return -lprobs.float().gather(1, targets.to(lprobs.device)[:, None])[:, 0]


def load_reader(
    path: str,
    name: str,
    data: str,
    longest: int,
    overrides: Mapping[str, object],
    settings: Mapping[str, object],
) -> tuple[WindowReader, Any]:
    """Load a checkpoint's model, and its task, for windows of up to *longest* tokens.

    Args:
        data, overrides, settings: see :func:`~fairseq.inference.loading.load_language_models`.

    Raises:
        UserError: the checkpoint cannot be used, has no positions for *longest* tokens, or was
            trained with ``<s>``.
    """
    (model,), task, _ = load_language_models([path], data, overrides, settings)
    check_no_begin(task, path)
    if model.memory_length:
        return WindowReader(name, model, task.cfg.tokens_per_sample), task
    limit = model.max_positions()
    if limit is None or limit >= longest:
        return WindowReader(name, model, None), task
    longer = {**settings, "tokens_per_sample": longest}
    with contextlib.suppress(UserError):  # learned positions: their number is fixed
        (model,), task, _ = load_language_models([path], data, overrides, longer)
        if (model.max_positions() or longest) >= longest:
            return WindowReader(name, model, None), task
    raise UserError(f"`max_context` {longest}: {path} has positions for {limit} tokens; give {limit} or less")


def measure(
    readers: Sequence[WindowReader],
    tokens: np.ndarray,
    positions: np.ndarray,
    contexts: np.ndarray,
    *,
    max_tokens: int | None = 8192,
    batch_size: int | None = None,
    precision: Precision | None = None,
    device: torch.device | str = "cpu",
    progress: Progress = no_progress,
) -> ContextLosses:
    """Measure losses of *readers* at *positions* [N] of *tokens* with each of *contexts* [K]; one
    forward pass each.

    Args:
        tokens: the corpus; token t is predicted from ``tokens[t − c : t]``.
        max_tokens: most tokens of a batch (None: no limit);
            a longer window forms a batch of its own.
        batch_size: most windows of a batch (None: no limit).

    Raises:
        UserError: a model's loss is NaN.
    """
    device = torch.device(device)
    precision = precision or Precision()
    batches = list(_batches(len(positions), contexts, max_tokens, batch_size))
    losses = np.zeros((len(readers), len(contexts), len(positions)))
    work = [(number, *batch) for number in range(len(readers)) for batch in batches]
    for reader in readers:
        precision.move(reader.model, device)
    for number, k, part in progress(work, len(work)):
        ends = positions[part]
        windows = tokens[ends[:, None] + np.arange(-int(contexts[k]), 0)]  # (B, c), the tokens before *ends*
        sources, targets = (torch.from_numpy(array.astype(np.int64)).to(device) for array in (windows, tokens[ends]))
        with precision.autocast(device):
            batch_losses = readers[number].losses(sources, targets)
        if not batch_losses.isfinite().all():
            raise UserError(f"{readers[number].name}: its loss is NaN; use a checkpoint that has not diverged")
        losses[number, k, part] = batch_losses.cpu().numpy()
    return ContextLosses([reader.name for reader in readers], contexts, losses)


def _batches(
    positions: int, contexts: np.ndarray, max_tokens: int | None, batch_size: int | None
) -> Iterator[tuple[int, slice]]:
    """(context index, positions) pairs; longest contexts first,
    so that memory runs out early if at all."""
    for k in range(len(contexts) - 1, -1, -1):
        fitting = positions if max_tokens is None else max(1, max_tokens // int(contexts[k]))
        rows = min(fitting, batch_size or positions)
        for start in range(0, positions, rows):
            yield k, slice(start, start + rows)


def table(measured: ContextLosses, gains: Sequence[Gains], threshold: float) -> list[list[str]]:
    """Rows of cells: each model's RECL for each r,
    and its perplexity with the shortest and longest context.

    Where the perplexity rises with the context, the longest
    and the RECLs beyond the lowest are marked ``↑``.
    """
    contexts = measured.contexts
    heads = [f"RECL, r = {gain.top_r:g}" for gain in gains]
    rows = [["model", *heads, f"perplexity at {contexts[0]}", f"at {contexts[-1]}"]]
    for i, (name, lowest) in enumerate(zip(measured.names, measured.risen_from(), strict=True)):
        lengths = [effective_length(gain.relative[i], contexts, threshold) for gain in gains]
        recls = [f"{length}{_mark(lowest is not None and length.tokens > lowest)}" for length in lengths]
        first, *_, last = measured.perplexities()[i]
        rows.append([name, *recls, f"{first:.2f}", f"{last:.2f}{_mark(lowest is not None)}"])
    return rows


def remarks(measured: ContextLosses) -> list[str]:
    """One line for each model whose perplexity rises with the context."""
    lines = []
    for i, (name, lowest) in enumerate(zip(measured.names, measured.risen_from(), strict=True)):
        if lowest is not None:
            perplexities = measured.perplexities()[i]
            least, last, longest = perplexities.min(), perplexities[-1], measured.contexts[-1]
            lines.append(
                f"{RISING} {name}: its perplexity rises, from {least:.2f} at {lowest} tokens of context to {last:.2f} "
                f"at {longest}; a RECL above {lowest} shows fluctuating losses, not a use of the context"
            )
    return lines


def _mark(rises: bool) -> str:
    return f" {RISING}" if rises else ""


def results(measured: ContextLosses, gains: Sequence[Gains], threshold: float) -> dict[str, object]:
    """The results and every gain as values for JSON;
    lists of gains are by neighbouring pairs of ``contexts``."""
    models = zip(measured.names, measured.perplexities(), measured.risen_from(), strict=True)
    return {
        "contexts": measured.contexts.tolist(),
        "positions": measured.losses.shape[2],
        "threshold": threshold,
        "models": [
            {"name": name, "perplexity": perplexity.tolist(), "perplexity_rises_from": lowest}
            for name, perplexity, lowest in models
        ],
        "groups": [
            {
                "top_r": gain.top_r,
                "positions": gain.positions,
                "baseline_perplexity": gain.baseline.tolist(),
                "models": [_model_results(measured, gain, i, threshold) for i in range(len(measured.names))],
            }
            for gain in gains
        ],
    }


def _model_results(measured: ContextLosses, gain: Gains, i: int, threshold: float) -> dict[str, object]:
    length = effective_length(gain.relative[i], measured.contexts, threshold)
    return {
        "name": measured.names[i],
        "recl": length.tokens,
        "bound": length.bound,
        "relative_gain": gain.relative[i].tolist(),
        "standard_error": gain.errors[i].tolist(),
        "perplexity_gain": gain.absolute[i].tolist(),
    }


def distinct_names(paths: Sequence[str], names: str | None) -> list[str]:
    """Names of the models: *names*, separated by commas,
    or else the parts in which their paths differ.

    Raises:
        UserError: the numbers of names and paths differ;
            a name is repeated or empty; a path is repeated.
    """
    if len({*paths}) < len(paths):
        raise UserError("`path`: a checkpoint is named twice; name each model of the group once")
    if names is None:
        folders = [Path(path).parent.name or Path(path).stem for path in paths]
        stems = [Path(path).stem for path in paths]
        return next((labels for labels in (folders, stems) if len({*labels}) == len(paths)), list(paths))
    labels = [name.strip() for name in names.split(",")]
    if len(labels) != len(paths):
        raise UserError(
            f"`names` {names}: {len(labels)} names for the {len(paths)} checkpoints of `path`; give one each"
        )
    if len({*labels}) < len(labels) or not all(labels):
        raise UserError(f"`names` {names}: names must differ, and none may be empty")
    return labels
