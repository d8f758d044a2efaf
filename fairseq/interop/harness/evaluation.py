"""Evaluate a language model on tasks of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairseq.config.command_settings import HarnessConfig
from fairseq.errors import UserError
from fairseq.evaluation.pairs import accuracies, accuracy_table, have_known_words, read_pairs
from fairseq.hub import LanguageModel, load_scorer
from fairseq.interop.harness.library import harness_model, require_harness, task_data
from fairseq.interop.harness.requests import EncoderRequests, Requests
from fairseq.system.files import results_folder
from fairseq.system.json_files import write_json
from fairseq.system.provenance import about_run

logger = logging.getLogger(__name__)


def evaluate(checkpoint: str, cfg: HarnessConfig) -> dict[str, Any]:
    """Print a table of the metrics of tasks, or of minimal pairs; write it to ``cfg.results_path``.

    Returns:
        For each task, or each phenomenon, its metrics.
    """
    with results_folder(cfg.results_path):
        if cfg.pairs is not None:
            return _minimal_pairs(checkpoint, cfg.pairs, cfg)
        if unused := next((name for name in ("known_words", "no_start") if getattr(cfg, name)), None):
            raise UserError(f"`{unused}`: needs `pairs`; leave it out")
        return _tasks(checkpoint, cfg)


def _tasks(checkpoint: str, cfg: HarnessConfig) -> dict[str, dict[str, float]]:
    """Print the metrics of the tasks, and write them
    with ``--results-path``; return them by task."""
    names = [name for name in (cfg.tasks or "").split(",") if name]
    if not names:
        raise UserError("`tasks`: name one task or several, separated by commas; or give `pairs`")
    require_harness()
    if cfg.include_path is not None and not os.path.isdir(cfg.include_path):
        raise UserError(f"`include_path` {cfg.include_path}: folder not found; give one with task files")
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    device = "cpu" if cfg.cpu else "auto"
    model = harness_model()(checkpoint, cfg.data, cfg.batch_size, device, cfg.max_gen_toks, cfg.within_words)
    metrics = _evaluate(model, names, cfg)
    for task, of_task in metrics.items():
        for name, value in of_task.items():
            print(f"{task}\t{name}\t{value:.6g}")
    if cfg.results_path is not None:
        write_json(Path(cfg.results_path) / "results.json", {"tasks": metrics, **about_run()})
    return metrics


def _minimal_pairs(checkpoint: str, path: str, cfg: HarnessConfig) -> dict[str, dict[str, float]]:
    """Print the table of minimal pairs, and write it
    with ``--results-path``; return the metrics of each phenomenon."""
    if cfg.tasks is not None:
        raise UserError("`pairs`: excludes `tasks`; run one after the other")
    pairs = read_pairs(path, cfg.limit)
    kept = None if cfg.known_words is None else have_known_words(pairs, cfg.known_words)
    totals = _log_probabilities([text for pair in pairs for text in (pair.good, pair.bad)], checkpoint, cfg)
    good, bad = totals[::2], totals[1::2]
    whole, known = accuracies(pairs, good, bad), None
    if kept is not None:
        good, bad = list(itertools.compress(good, kept)), list(itertools.compress(bad, kept))
        known = accuracies(list(itertools.compress(pairs, kept)), good, bad)
    print(*accuracy_table(whole, known), sep="\n")
    metrics = whole.metrics()
    if cfg.results_path is not None:
        results: dict[str, Any] = {"pairs": path, "no_start": cfg.no_start, **metrics}
        if known is not None:
            results["known_words"] = {"file": cfg.known_words, **known.metrics()}
        write_json(Path(cfg.results_path) / "results.json", {**results, **about_run()})
    return metrics["phenomena"]


def _log_probabilities(texts: Sequence[str], checkpoint: str, cfg: HarnessConfig) -> list[float]:
    """Return the log-probabilities of *texts*, a good sentence and a bad one in turn: without the
    end of the line, which says how long paragraphs are, as in published figures."""
    model = load_scorer(checkpoint, cfg.data, device="cpu" if cfg.cpu else "auto")
    if isinstance(model, LanguageModel):
        if cfg.within_words:
            raise UserError("`within_words`: the model is a decoder, which masks nothing; leave it out")
        decoder = Requests(model, cfg.batch_size)
        totals, reader = decoder.rolling(texts, starts=not cfg.no_start), decoder.reader
    else:
        if cfg.no_start:
            raise UserError("`no_start`: the model is an encoder, which scores every token; leave it out")
        encoder = EncoderRequests(model, cfg.batch_size, cfg.within_words)
        totals, reader = encoder.rolling(texts), encoder.reader
    # The same tokens in two batches may differ by rounding: they are a tie.
    rows = reader.rows(texts)
    equal = [number for number in range(0, len(rows), 2) if rows[number] == rows[number + 1]]
    for number in equal:
        totals[number + 1] = totals[number]
    if equal:
        logger.warning("%d pairs have the same tokens in both sentences, which counts as wrong", len(equal))
    return totals


def _evaluate(model: object, names: list[str], cfg: HarnessConfig) -> dict[str, dict[str, float]]:
    # Optional, and its import takes seconds.
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = None
    # The harness's own index takes many seconds.
    if cfg.include_path is not None:
        manager = TaskManager(include_path=cfg.include_path, include_defaults=False)
    if manager is None or not all(manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=cfg.include_path)
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        raise UserError(f"`tasks` {unknown[0]}: no such task; run `lm_eval ls tasks`, or give `include_path`")
    try:
        with task_data():
            results = simple_evaluate(
                model=model,
                tasks=list(names),
                task_manager=manager,
                num_fewshot=cfg.num_fewshot,
                limit=cfg.limit,
                bootstrap_iters=cfg.bootstrap_iters,
                log_samples=False,
            )
    # The harness raises it for tasks of images, of code to run, and without data.
    except ValueError as error:
        raise UserError(f"`tasks` {cfg.tasks}: {' '.join(str(error).split())[:300]}") from error
    return {task: _numbers(metrics) for task, metrics in results["results"].items()} if results is not None else {}


def _numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    """The metrics with a value; names without the filter ``none``."""
    return {
        # "none" is the name of the filter that changes nothing.
        name.removesuffix(",none"): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "sample_len"
    }
