"""Plots of evaluation results. matplotlib, an optional dependency, is imported on demand.

All functions that draw raise UserError where the file cannot be written.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fairseq.analysis.attention_maps import AtPosition, AttentionMaps
from fairseq.analysis.curves import Curve
from fairseq.analysis.recl import ContextLosses, Gains
from fairseq.errors import UserError
from fairseq.system.files import atomic_file
from fairseq.system.terminal import printable

# Okabe and Ito's colour-blind-safe palette; dashes and markers differ, too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
NEAREST = 24  # tokens labelled on the axis
STRONGEST = 5  # tokens labelled beside their weight
CURVE_FORMATS = (".png", ".svg", ".pdf")
MOST_ROWS = 60  # of a map with names
DISTANCE = "distance (tokens; 0: the token just read)"
MOST_MARKERS = 60  # of a curve, at full size
FLOOR = 1e-3  # lower end of a map's colour scale, as a share of the largest weight


def is_available() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require(flag: str) -> None:
    """Raise UserError, which names *flag*, if matplotlib
    is missing or unusable, before any work is done."""
    if not is_available():
        raise UserError(f"{flag}: plots need matplotlib: pip install matplotlib")
    _figure(1, 1)


def draw_gains(path: Path, measured: ContextLosses, gains: Sequence[Gains]) -> None:
    """Plot gains in perplexity over pairs of contexts, one panel per r (Figure 3)."""
    figure = _figure(4.2 * len(gains) + 0.6, 4.2)
    pairs = [f"{a}→{b}" for a, b in zip(measured.contexts, measured.contexts[1:], strict=False)]
    positions = np.arange(len(pairs))
    panels = figure.subplots(1, len(gains), squeeze=False)[0]
    for panel, gain in zip(panels, gains, strict=True):
        for i, name in enumerate(measured.names):
            panel.plot(positions, gain.absolute[i], label=_escaped(name), **_line(i))
        share = "all positions" if gain.top_r == 1 else f"hardest {100 * gain.top_r:g} % of positions"
        panel.set_title(f"r = {gain.top_r:g} ({share})", fontsize=10)
        step = -(-len(pairs) // 12)  # more labels would cover one another
        panel.set_xticks(positions[::step], pairs[::step], rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
        panel.set_xlabel("context, from → to (tokens)")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("gain in perplexity")
    panels[0].legend(fontsize=9)
    _save(figure, path)


def draw_perplexities(path: Path, measured: ContextLosses) -> None:
    """Plot perplexity over context length, one line per model, without a baseline (Figure 4)."""
    figure = _figure(6.4, 4.2)
    panel = figure.subplots()
    for i, (name, values) in enumerate(zip(measured.names, measured.perplexities(), strict=True)):
        panel.plot(measured.contexts, values, label=_escaped(name), **_line(i))
    _label_axes(panel, "context length (tokens)", "perplexity")
    _save(figure, path)


def draw_distances(path: Path, maps: AttentionMaps) -> None:
    """Plot every head's mean attention over distance:
    one row per head, grouped by layer (Figure 5)."""
    layers, heads, _ = maps.attention.shape
    figure = _figure(9, _map_height(layers * heads))
    panel = figure.subplots()
    image = _draw_map(panel, _visible(maps.given_reach(maps.attention)))
    figure.colorbar(image, ax=panel, label="mean weight (log scale)", fraction=0.05, pad=0.02)
    title = f"attention of {heads} heads a layer, head 0 on top; mean of {maps.queries:,} positions"
    panel.set_title(title, fontsize=10)
    _save(figure, path)


def draw_terms(path: Path, maps: AttentionMaps) -> None:
    """Plot the same for each term of the attention score alone,
    its softmax taken over the span (Figure 7)."""
    titles = {"a": "content", "b": "content and position", "c": "content bias", "d": "position bias"}
    layers, heads, _ = maps.attention.shape
    figure = _figure(16, _map_height(layers * heads))
    panels = figure.subplots(1, len(maps.terms), sharey=True, squeeze=False)[0]
    span = _visible(maps.attention).shape[2]
    values = {name: maps.given_reach(term)[..., :span] for name, term in maps.terms.items()}
    # One scale for all terms, which are compared.
    scale = np.stack(list(values.values()))
    for panel, name in zip(panels, sorted(values), strict=True):
        image = _draw_map(panel, values[name], scale)
        panel.set_title(f"term ({name}): {titles[name]}", fontsize=10)
        panel.label_outer()
    figure.colorbar(image, ax=list(panels), label="mean weight (log scale)", fraction=0.02, pad=0.01)
    _save(figure, path)


def draw_position(path: Path, at: AtPosition, heads: Sequence[tuple[int, int]]) -> None:
    """Plot the attention of (layer, head) pairs at one position: the whole span, and the nearest
    words (Figure 6)."""
    span = len(at.words)
    near = min(NEAREST, span)
    figure = _figure(12, 2.4 * len(heads) + 1)
    panels = figure.subplots(len(heads), 2, squeeze=False, width_ratios=(3, 2))
    for (full, close), (layer, head) in zip(panels, heads, strict=True):
        weights = at.weights[layer, head]
        full.vlines(np.arange(span), 0, weights, color=COLOURS[0], linewidth=max(0.6, min(4, 300 / span)))
        # Distances fall to the right, so that the words stand in the order of the text.
        full.set_xlim(span - 0.5, -0.5)
        # Room above the highest bar for its word.
        full.set_ylim(0, 1.25 * float(weights.max()))
        _name_strongest(full, weights, at.words)
        full.set_ylabel(f"layer {layer}, head {head}\nattention weight")
        close.bar(np.arange(near), weights[:near], color=COLOURS[1])
        close.set_xlim(near - 0.5, -0.5)
        close.set_ylim(0)
        close.set_ylabel("attention weight")
        close.set_xticks(np.arange(near), [_label(word) for word in at.words[:near]], rotation=90, fontsize=8)
    panels[-1, 0].set_xlabel(DISTANCE)
    panels[-1, 1].set_xlabel(f"the last {near} tokens")
    figure.suptitle(f"attention when token {at.position:,}, “{_label(at.target, 30)}”, is predicted", fontsize=11)
    _save(figure, path)


def draw_positions(path: Path, rows: Sequence[AtPosition], heads: Sequence[tuple[int, int]]) -> None:
    """Plot the attention of (layer, head) pairs over distance,
    one row per position (the rows of Figure 6)."""
    span = max(len(at.words) for at in rows)
    figure = _figure(12, len(heads) * _map_height(len(rows), 0.2))
    panels = figure.subplots(len(heads), 1, squeeze=False, sharex=True)[:, 0]
    step = -(-len(rows) // MOST_ROWS)
    for panel, (layer, head) in zip(panels, heads, strict=True):
        values = np.full((len(rows), span), np.nan)  # of tokens before the beginning, which stay white
        for row, at in zip(values, rows, strict=True):
            row[: len(at.words)] = at.weights[layer, head]
        image = _draw_rows(panel, values, values[~np.isnan(values)])
        panel.set_xlim(span - 0.5, -0.5)
        names = [f"{_label(at.target)}  {at.position:,}" for at in rows]
        panel.set_yticks(range(0, len(rows), step), names[::step], fontsize=7)
        panel.set_title(f"layer {layer}, head {head}", fontsize=10)
        figure.colorbar(image, ax=panel, label="weight (log scale)", fraction=0.05, pad=0.02)
    panels[-1].set_xlabel(DISTANCE)
    figure.supylabel("predicted token and its position", fontsize=10)
    _save(figure, path)


def draw_curves(path: Path, curves: Sequence[Curve], x: str, y: str, reach: float | None, splits: int = 1) -> None:
    """Plot the mean of each of *curves*, with the range
    of its runs; dotted lines are beginnings of stages.

    Args:
        path: a file of one of :data:`CURVE_FORMATS`.
        curves: one line each; validations have markers, training is pale.
        x, y: labels of the axes.
        reach: value of a horizontal line; None: no line.
        splits: neighbouring curves that are of one run, and of one colour.
    """
    figure = _figure(7, 4.5)
    panel = figure.subplots()
    for i, curve in enumerate(curves):
        line = {**_line(i // splits), "markersize": 2 if len(curve.x) > MOST_MARKERS else 4}
        if curve.is_training:
            line |= {"marker": None, "alpha": 0.55 if splits > 1 else 1.0}
        panel.plot(curve.x, curve.mean, label=_escaped(curve.name), **line)
        if len(curve.values) > 1:
            lowest, highest = curve.values.min(0), curve.values.max(0)
            panel.fill_between(curve.x, lowest, highest, color=line["color"], alpha=0.2, linewidth=0)
    for number, boundary in enumerate(sorted({boundary for curve in curves for boundary in curve.stages})):
        panel.axvline(boundary, color="#666666", linestyle=":", label="" if number else "next stage")
    if reach is not None:
        panel.axhline(reach, color="#666666", linewidth=0.8, label=f"{reach:g}")
    _label_axes(panel, x, _escaped(y))
    if max(curve.x[-1] for curve in curves) >= 10_000:
        from matplotlib.ticker import EngFormatter

        panel.xaxis.set_major_formatter(EngFormatter())  # 100 k, 1 M
    _save(figure, path, path.suffix[1:])


def draw_bands(path: Path, report: Mapping[str, Any]) -> None:
    """Plot the losses of words by their counts in training, with standard errors; one line a model.

    *report* is of :func:`fairseq.evaluation.by_frequency.by_frequency`; *path* is a PNG file.
    """
    figure = _figure(7, 4.5)
    panel = figure.subplots()
    bands = [band for band in report["bands"] if "low" in band and band["words"]]
    for i, name in enumerate(report["models"]):
        means, errors = (
            np.array([band[column][i] for band in bands], dtype=float) for column in ("bits_per_word", "standard_error")
        )
        panel.errorbar(range(len(bands)), means, np.nan_to_num(errors), label=_escaped(name), capsize=3, **_line(i))
    panel.set_xticks(range(len(bands)), [f"{band['band']}\n{band['words']:,} words" for band in bands], fontsize=8)
    _label_axes(panel, "count in the training text", "loss (bits per word)")
    _save(figure, path)


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    # Where no picture is on a screen, the backend counts for nothing, but for this check.
    except ValueError as error:
        reason = str(error).split(";")[0]
        raise UserError(f"MPLBACKEND or matplotlibrc: {reason}; correct or unset it") from None
    # Not pyplot, which keeps every figure and may look for a display.
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path, kind: str = "png") -> None:
    # In memory first: matplotlib's writers answer a full
    # disk with errors of their own, such as zlib's.
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=120)
    with atomic_file(path, "`results_path`") as file:
        file.write(content.getbuffer())


def _label_axes(panel: Any, x: str, y: str) -> None:
    """Name the axes of a panel of lines, which are named in a legend."""
    panel.set(xlabel=x, ylabel=y)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=9)


def _line(i: int) -> dict[str, object]:
    style = ("-", "--", "-.", ":")[i // len(COLOURS) % 4]
    colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
    return {"color": colour, "marker": marker, "linestyle": style, "markersize": 4}


def _map_height(rows: int, each: float = 0.13) -> float:
    return min(14.0, max(2.6, 1.2 + each * rows))


def _visible(values: np.ndarray) -> np.ndarray:
    """*values* [L, H, D] up to the largest distance with nonzero attention."""
    return values[..., : int(np.flatnonzero(values.any(axis=(0, 1)))[-1]) + 1]


def _draw_map(panel: Any, values: np.ndarray, scale: np.ndarray | None = None) -> Any:
    """Draw *values* [L, H, D], one row per head, layer 0 on top;
    the colours span *scale* (default: *values*)."""
    layers, heads, span = values.shape
    image = _draw_rows(panel, values.reshape(-1, span), values if scale is None else scale)
    for layer in range(1, layers):
        panel.axhline(layer * heads - 0.5, color="white", linewidth=0.8)
    panel.set_yticks([layer * heads + (heads - 1) / 2 for layer in range(layers)], range(layers))
    panel.set_ylabel("layer")
    panel.set_xlabel(DISTANCE)
    return image


def _draw_rows(panel: Any, rows: np.ndarray, scale: np.ndarray) -> Any:
    """Draw *rows* [R, D] of weights by distance,
    the first on top; the logarithmic colours span *scale*."""
    from matplotlib.colors import LogNorm

    highest = float(scale.max())
    lowest = max(FLOOR * highest, min(float(scale[scale > 0].min()), highest / 10))
    # Clipped: a weight of 0 has no logarithm, and takes the lowest colour.
    norm = LogNorm(lowest, highest, clip=True)
    extent = (-0.5, rows.shape[1] - 0.5, len(rows) - 0.5, -0.5)
    return panel.imshow(rows, aspect="auto", norm=norm, cmap="viridis", interpolation="nearest", extent=extent)


def _name_strongest(panel: Any, weights: np.ndarray, words: Sequence[str]) -> None:
    """Label the largest weights with their words; labels that would overlap are left out."""
    labels: list[int] = []
    for index in np.argsort(-weights, kind="stable"):
        if len(labels) == STRONGEST or weights[index] < weights.max() / 10:
            return
        if all(abs(index - other) > len(weights) / 9 for other in labels):
            labels.append(int(index))
            point = index, weights[index]
            panel.annotate(_label(words[index]), point, (0, 2), textcoords="offset points", fontsize=8, ha="center")


def _label(word: str, longest: int = 14) -> str:
    """*word* as a label: truncated and escaped."""
    return _escaped(word if len(word) <= longest else word[: longest - 1] + "…")


def _escaped(text: str) -> str:
    """*text* with dollar signs escaped, which matplotlib
    reads as mathematics, and control characters.

    No font has these, and matplotlib's warning would write them to the terminal.
    """
    return printable(text).replace("$", r"\$")
