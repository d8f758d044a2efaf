"""Measure the relative effective context length of each model of a group."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fairseq import distributed
from fairseq.analysis import plots, recl
from fairseq.config.command_settings import ReclConfig
from fairseq.config.settings import CommonConfig, StreamConfig
from fairseq.inference.loading import data_and_models, stream_settings
from fairseq.logging import show_progress
from fairseq.models.layerwise import compile_model
from fairseq.modules.precision import Precision
from fairseq.system.files import atomic_file, atomic_folder, results_folder
from fairseq.system.json_files import write_json
from fairseq.system.provenance import about_run
from fairseq.system.tables import table

logger = logging.getLogger(__name__)
DEFAULT_MAX_TOKENS = 8192
PICTURES = ("recl-gain.png", "recl-perplexity.png")
# results.json is the last to move: where it is, the other files are of the same run.
FILES = ("losses.npz", *PICTURES, "results.json")


def report_recl(
    source: str, cfg: ReclConfig, stream: StreamConfig, common: CommonConfig, flat: Mapping[str, Any]
) -> dict[str, object]:
    """Measure the checkpoints of ``cfg.path`` on a split of the data *source*;
    the table goes to stdout, progress to stderr.

    Args:
        flat: settings that the checkpoints' are changed by.

    Returns:
        The metrics, as in ``results.json``.
    """
    data, paths = data_and_models(cfg, source)
    names = recl.distinct_names(paths, cfg.names)
    contexts = np.arange(cfg.step, cfg.max_context + 1, cfg.step, dtype=np.int64)
    longest = int(contexts[-1])
    if cfg.results_path is not None:
        plots.require("`results_path`")
    device, precision = distributed.device_of(common), Precision(common)
    overrides, flat = cfg.overrides, stream_settings(flat)
    loaded = [
        recl.load_reader(path, name, data, longest, overrides, flat) for path, name in zip(paths, names, strict=True)
    ]
    if common.compile:
        for reader, _ in loaded:
            compile_model(reader.model)
    tokens = loaded[-1][1].corpus(stream.gen_subset).tokens
    positions = recl.draw_positions(len(tokens), longest, cfg.positions, common.seed)
    unlimited = stream.max_tokens is None and stream.batch_size is None
    with results_folder(cfg.results_path):
        if len(paths) == 1:
            logger.info("a single model is compared with itself; its RECL is not comparable with other runs")
        measured = recl.measure(
            [reader for reader, _ in loaded],
            tokens,
            positions,
            contexts,
            max_tokens=DEFAULT_MAX_TOKENS if unlimited else stream.max_tokens,
            batch_size=stream.batch_size,
            precision=precision,
            device=device,
            progress=show_progress(common, "contexts"),
        )
        gains = [recl.relative_gains(measured.losses, top_r) for top_r in dict.fromkeys(cfg.top_r)]
        remarks = [line for remark in recl.remarks(measured) for line in ("", remark)]
        print(*table(recl.table(measured, gains, cfg.threshold), left=1), *remarks, sep="\n")
        count = measured.losses.shape[2]
        print(f"\nContexts in tokens, step {cfg.step}, threshold {cfg.threshold:g}, {count} positions.", flush=True)
        metrics = recl.results(measured, gains, cfg.threshold)
        if cfg.results_path is not None:
            about = {"checkpoints": paths, "data": source, "split": stream.gen_subset, "seed": common.seed}
            with atomic_folder(cfg.results_path, FILES, "`results_path`") as folder:
                _write(folder, {**metrics, **about, **about_run()}, measured, positions, gains)
    return metrics


def _write(
    folder: Path,
    results: dict[str, Any],
    measured: recl.ContextLosses,
    positions: np.ndarray,
    gains: Sequence[recl.Gains],
) -> None:
    """Write the results, every loss and the plots to *folder*."""
    with atomic_file(folder / "losses.npz", "`results_path`") as file:
        names = np.array(measured.names)
        np.savez(file, names=names, contexts=measured.contexts, positions=positions, losses=measured.losses)
    gain, perplexity = (folder / name for name in PICTURES)
    plots.draw_gains(gain, measured, gains)
    plots.draw_perplexities(perplexity, measured)
    write_json(folder / "results.json", results)
