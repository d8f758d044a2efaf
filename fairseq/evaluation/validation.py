"""Compute the validation loss of checkpoints, as in training."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fairseq.analysis import plots
from fairseq.analysis.recl import distinct_names
from fairseq.config import fields
from fairseq.config.command_settings import ValidateConfig
from fairseq.config.settings import CommonConfig, DataConfig
from fairseq.criterions.fairseq_criterion import TOKEN_LOSSES
from fairseq.data.dataset import Sample
from fairseq.data.token_blocks import TokenBlocks
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.evaluation.by_frequency import (
    WordGroups,
    WordLosses,
    blocks_of,
    by_frequency,
    table,
    with_positions,
    word_counts,
)
from fairseq.evaluation.scorer import DEFAULT_MAX_TOKENS
from fairseq.inference.loading import data_and_models, load_models
from fairseq.logging.figures import RunningSums
from fairseq.logging.progress import progress_bar
from fairseq.models.base import BaseFairseqModel
from fairseq.models.layerwise import compile_model
from fairseq.modules.precision import Precision
from fairseq.notes.control import CONTROLS, control_figures, distance_table, mark_distances, without_rare_words
from fairseq.notes.state import dictionary_of
from fairseq.system.json_files import write_json
from fairseq.system.provenance import about_run
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.training.validation import raw_sizes, report_of, validate

logger = logging.getLogger(__name__)

BATCH_LIMITS = ("max_tokens", "max_tokens_valid", "batch_size", "batch_size_valid")


def validate_models(
    source: str,
    cfg: ValidateConfig,
    common: CommonConfig,
    batches: DataConfig,
    flat: Mapping[str, Any],
    world: World,
) -> dict[str, dict[str, dict[str, float]]]:
    """Validate each checkpoint of ``cfg.path`` on every split
    of ``batches.valid_subset``, and print a line for each.

    With ``cfg.by_frequency`` a table of each split follows, with the differences from the first
    checkpoint. Criterion, blocks and batches default to the training run's; with the same batches
    the metrics equal the ones of the training log. Several processes have batches of their own, and
    the first prints the metrics of all.

    Args:
        source: the data, or a model; see :func:`~fairseq.inference.loading.data_and_models`.
        flat: settings that the checkpoints' are changed by.

    Returns:
        For each checkpoint and split: loss and nll_loss in bits, ppl, ….
    """
    overrides = cfg.overrides
    splits = [split.strip() for split in batches.valid_subset.split(",") if split.strip()]
    results: dict[str, dict[str, dict[str, float]]] = {}
    data, paths = data_and_models(cfg, source)
    if cfg.by_frequency and cfg.results_path is not None:
        plots.require("`results_path`")
    names = distinct_names(paths, None) if cfg.by_frequency else list(paths)
    words: dict[str, dict[str, WordLosses]] = {split: {} for split in splits}
    # Data settings are the checkpoint's, so that blocks and batches are the training run's;
    # `_batches` adds the limits.
    of_checkpoint = fields.defaults(DataConfig).keys() - {"num_workers"}  # which this command line does not override
    flat = {name: value for name, value in flat.items() if name not in of_checkpoint}
    # Before anything is measured: one may be of another dictionary, and the counts may be missing.
    loaded = []
    for path in paths:
        loaded.append(load_models([path], data, overrides, flat))
        # The first one's, so that the same tokens of all masked models are chosen.
        if "seed" not in overrides:
            flat.setdefault("seed", loaded[0][2].common.seed)
    dictionary = loaded[0][1].source_dictionary
    counts = word_counts(cfg.word_counts, data, dictionary) if cfg.by_frequency else {}
    for path, name, (models, task, trained) in zip(paths, names, loaded, strict=True):
        keeps = cfg.keep_notes and dictionary_of(models[0]) is not None
        if cfg.keep_notes and not keeps:
            if len(paths) == 1:
                raise UserError(f"`keep_notes`: {path} has no notes; leave the flag out")
            logger.warning("%s has no notes", path)
        if keeps or cfg.rare_words:
            mark_distances(task)
        task.gives_positions = cfg.by_frequency
        task.settings = trained.changed(**_batches(trained.data, batches))
        Precision(common).move(models[0], world.device)
        if common.compile:
            compile_model(models[0])
        results[path], of_model = {}, dataclasses.replace(cfg, keep_notes=keeps)
        for split in splits:
            results[path][split], losses = _validate(split, models[0], task, world, of_model)
            words[split] |= {name + notes: each for notes, each in losses.items()}
    if world.is_first:
        _report(cfg, data, results, words if cfg.by_frequency else {}, counts)
    return results


def _report(
    cfg: ValidateConfig,
    data: str,
    results: Mapping[str, object],
    words: Mapping[str, Mapping[str, WordLosses]],
    counts: Mapping[str, int],
) -> None:
    """Print the tables of ``--by-frequency``, and write what ``--results-path`` asks for."""
    reports = {}
    for split, models in words.items():
        reports[split] = by_frequency(models, counts, cfg.frequency_bands)
        print(f"\n{split}", *table(reports[split]), sep="\n", flush=True)
    if cfg.results_path is not None:
        folder = Path(cfg.results_path)
        for split, report in reports.items():
            plots.draw_bands(folder / f"by-frequency-{split}.png", report)
        about = {"checkpoints": list(results), "data": data, **about_run()}
        write_json(folder / "results.json", {"figures": results, "by_frequency": reports, **about})


def _batches(trained: DataConfig, overrides: DataConfig) -> dict[str, object]:
    """Batch settings from *overrides*, else from *trained*,
    the settings of the training run, else the defaults."""
    # One limit replaces all of the training run's: a batch has to obey every limit that is left.
    changes = {name: getattr(overrides, name) for name in BATCH_LIMITS}
    if all(value is None for value in changes.values()):
        unlimited = all(getattr(trained, name) is None for name in BATCH_LIMITS)
        changes = {"max_tokens": DEFAULT_MAX_TOKENS} if unlimited else {}
    for name in ("required_batch_size_multiple", "skip_invalid_size_inputs_valid_test"):
        if getattr(overrides, name) != getattr(DataConfig, name):
            changes[name] = getattr(overrides, name)
    return changes


def _validate(
    split: str, model: BaseFairseqModel, task: FairseqTask, world: World, cfg: ValidateConfig
) -> tuple[dict[str, float], dict[str, WordLosses]]:
    """Compute and print the metrics of one split.

    Returns:
        The metrics; and with ``--by-frequency`` the losses of words as they are, with
        ``--keep-notes`` also by control.
    """
    criterion = task.build_criterion(task.settings).to(world.device)
    graph = task.loss_graph(model, criterion)
    batches = task.iterator(
        split,
        model,
        criterion,
        training=False,
        rank=cfg.shard_id * world.size + world.rank,
        world_size=cfg.num_shards * world.size,
        device=world.device,
    )
    raw_size = raw_sizes({split: batches}, task.settings.data_path).get(split)
    common = task.settings.common
    blocks, words = blocks_of(batches.dataset, task.settings.chosen.task) if cfg.by_frequency else None, {}

    def measure(samples: Iterable[Sample | None], notes: str = "") -> dict[str, float]:
        placed = samples if blocks is None else with_positions(samples, blocks)
        meter = validate(graph, task, placed, Precision(common), world)
        if blocks is not None:
            words[notes] = _word_losses(meter, blocks, task)
        return {**report_of(meter, task.figures(criterion), raw_size), "ntokens": meter.tokens}

    def measure_control(control: str) -> dict[str, float]:
        samples = without_rare_words(batches) if control == "hidden" else batches
        return measure(samples, f", {CONTROLS[control]}")

    controls = [*(("permuted", "dropped") if cfg.keep_notes else ()), *(("hidden",) if cfg.rare_words else ())]
    log_format = common.log_format or ("simple" if common.no_progress_bar else None)
    with progress_bar(
        batches,
        log_format=log_format if world.is_first else "none",
        log_interval=common.log_interval,
        prefix=f"valid on {split!r} subset",
    ) as bar:
        metrics = measure(bar)
        if controls:
            metrics |= control_figures(model, metrics, measure_control, controls)
        bar.print(metrics, tag=split)
    if controls and world.is_first:
        for line in distance_table(metrics):
            logger.info("%s", line)
    return metrics, words


def _word_losses(meter: RunningSums, blocks: TokenBlocks, task: FairseqTask) -> WordLosses:
    """The losses of the words of *blocks* that a validation gathered."""
    rows = meter.totals.rows.get(TOKEN_LOSSES)
    if rows is None:
        criterion = task.settings.chosen.criterion
        raise UserError(f"`by_frequency`: `criterion` {criterion} has no losses of tokens; leave it out")
    # Position −1 is no token of the corpus, but the symbol before a block.
    positions, losses = rows[rows[:, 0] >= 0].cpu().numpy().T
    tokens = np.asarray(blocks.corpus.tokens[:]).astype(np.int64)
    return WordLosses.of(WordGroups(task.source_dictionary), tokens, -losses, positions.astype(np.int64))
