"""Evaluate a language model on minimal pairs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq.config.command_settings import HarnessConfig
from fairseq.errors import UserError
from fairseq.evaluation.pairs import accuracies, accuracy_table, have_known_words, read_pairs
from fairseq.hub import LanguageModel, load_scorer
from fairseq.interop.harness.requests import EncoderRequests, Requests
from fairseq.system.files import results_folder
from fairseq.system.json_files import write_json
from fairseq.system.provenance import about_run

logger = logging.getLogger(__name__)


def evaluate(model: str, cfg: HarnessConfig) -> dict[str, Any]:
    """Print the table of minimal pairs of the checkpoint *model*, and write it to
    ``cfg.results_path``.

    Returns:
        The metrics of each phenomenon.
    """
    if cfg.pairs is None:
        raise UserError("`pairs`: give minimal pairs; `fairseq-harness lm-eval` runs tasks of lm-eval")
    with results_folder(cfg.results_path):
        pairs = read_pairs(cfg.pairs, cfg.limit)
        kept = None if cfg.known_words is None else have_known_words(pairs, cfg.known_words)
        totals = _log_probabilities([text for pair in pairs for text in (pair.good, pair.bad)], model, cfg)
        good, bad = totals[::2], totals[1::2]
        whole, known = accuracies(pairs, good, bad), None
        if kept is not None and any(kept):
            good, bad = list(itertools.compress(good, kept)), list(itertools.compress(bad, kept))
            known = accuracies(list(itertools.compress(pairs, kept)), good, bad)
        print(*accuracy_table(whole, known), sep="\n")
        metrics = whole.metrics()
        if cfg.results_path is not None:
            results: dict[str, Any] = {"pairs": cfg.pairs, "no_start": cfg.no_start, **metrics}
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
