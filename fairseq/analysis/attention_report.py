"""Plot the attention of a model's heads: over distance, at one position, and by the terms of the
score."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fairseq import distributed
from fairseq.analysis import plots
from fairseq.analysis.attention_maps import AttentionMaps, AttentionReader, attention_modules, has_terms
from fairseq.config.command_settings import AttentionConfig
from fairseq.config.settings import CommonConfig, StreamConfig
from fairseq.data.samplers import rows_per_batch
from fairseq.data.token_blocks import TokenBlocks
from fairseq.errors import UserError
from fairseq.inference.loading import check_no_begin, data_and_models, load_language_models, stream_settings
from fairseq.logging import show_progress
from fairseq.models.base import BaseFairseqModel
from fairseq.modules.precision import Precision
from fairseq.system.files import atomic_folder, results_folder
from fairseq.system.json_files import write_json
from fairseq.system.provenance import about_run
from fairseq.system.tables import table
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.text.text_corpus import TextCorpus

logger = logging.getLogger(__name__)
PICTURES = ("attention-distance.png", "attention-position.png", "attention-terms.png")
# results.json is the last to move: where it is, the other files are of the same run.
FILES = ("attention.npz", *PICTURES, "results.json")
SMALL_BATCH = 4096  # default tokens of a batch without memory

Head = tuple[int, int]


def report_attention(
    data: str, cfg: AttentionConfig, stream: StreamConfig, common: CommonConfig, flat: Mapping[str, Any]
) -> dict[str, object]:
    """Plot the attention of the checkpoint ``cfg.path`` on a split of *data*; print a table.

    Args:
        flat: settings that the checkpoint's are changed by.

    Returns:
        The metrics, as in ``results.json``.
    """
    data, paths = data_and_models(cfg, data)
    if len(paths) > 1:
        raise UserError(f"`path`: {len(paths)} checkpoints; give one")
    if cfg.results_path is None:
        raise UserError("`results_path`: is missing; give a folder for the plots and the metrics")
    plots.require("`results_path`")
    (model,), task, _ = load_language_models(paths, data, cfg.overrides, stream_settings(flat))
    check_no_begin(task, paths[0])
    modules = attention_modules(model)
    heads = parse_heads(cfg.heads, len(modules), modules[0].num_heads)
    reader = _reader(cfg, stream, common, model, task)
    # Each position once, in the order of the command line: the plots show one beside the other.
    positions = list(dict.fromkeys(cfg.positions or [reader.choose_position(common.seed)]))
    with results_folder(cfg.results_path):
        maps = reader.read(positions, show_progress(common, stream.gen_subset))
        print(*table(_table(maps)), sep="\n", flush=True)
        metrics = {
            "positions": maps.queries,
            "at_positions": [at.position for at in maps.at_positions],
            "mean_distance": maps.mean_distance().tolist(),
            "terms": sorted(maps.terms),
            "checkpoint": paths[0],
            "data": data,
            "split": stream.gen_subset,
            "segment": task.cfg.tokens_per_sample,
            "memory": model.memory_length,
            "rows": reader.sampler.rows,
        }
        with atomic_folder(cfg.results_path, FILES, "`results_path`") as folder:
            _write(folder, maps, heads or maps.widest(), {**metrics, **about_run()})
    return metrics


def _reader(
    cfg: AttentionConfig, stream: StreamConfig, common: CommonConfig, model: BaseFairseqModel, task: FairseqTask
) -> AttentionReader:
    """The reader of the split, or of its first tokens, with *model*."""
    has_four = has_terms(attention_modules(model))
    if cfg.terms is None and not has_four:
        logger.info("the terms of the score are not plotted: only relative attention has them")
    dictionary, length = task.source_dictionary, task.cfg.tokens_per_sample
    corpus = task.corpus(stream.gen_subset)  # type: ignore[attr-defined]
    if cfg.first_tokens is not None:
        tokens = corpus.tokens[: cfg.first_tokens]
        # Blocks are cut from the stream of tokens; where lines end does not matter to them.
        corpus = TextCorpus(tokens, np.array([len(tokens)], dtype=np.int32))  # as one line
    if stream.batch_size is None and stream.max_tokens is None:
        # Each row begins with an empty memory, and positions are not counted until it is full.
        rows = 1 if model.memory_length else max(1, SMALL_BATCH // length)
    else:
        rows = rows_per_batch(stream.max_tokens, stream.batch_size, length)
    return AttentionReader(
        model,
        TokenBlocks(corpus, length, "none", pad=dictionary.pad(), eos=dictionary.eos()),
        dictionary,
        rows=rows,
        terms=has_four if cfg.terms is None else cfg.terms,
        precision=Precision(common),
        device=distributed.device_of(common),
    )


def parse_heads(text: str | None, layers: int, heads: int) -> list[Head]:
    """``0:3,15:8`` → [(0, 3), (15, 8)], without duplicates; None → [].

    Raises:
        UserError: *text* is malformed, or a number is out
            of range for *layers* layers and *heads* heads.
    """
    chosen_heads = []
    for item in text.split(",") if text is not None else []:
        match = re.fullmatch(r"\s*(\d{1,9}):(\d{1,9})\s*", item)
        if match is None:
            raise UserError(f"`heads` {text}: expected layer:head pairs such as 0:3,{layers - 1}:0, numbered from 0")
        layer, head = int(match[1]), int(match[2])
        if layer >= layers or head >= heads:
            raise UserError(
                f"`heads` {layer}:{head}: out of range; layers go from 0 to {layers - 1}, heads from 0 to {heads - 1}"
            )
        chosen_heads.append((layer, head))
    return list(dict.fromkeys(chosen_heads))


def _table(maps: AttentionMaps) -> list[list[str]]:
    """Rows of cells: for each layer the mean distance
    of its heads in tokens, the narrowest and the widest head."""
    rows = [["layer", "mean distance (tokens)", "narrowest head", "widest head"]]
    for layer, far in enumerate(maps.mean_distance()):
        ends = [f"{head} ({far[head]:.1f})" for head in (int(far.argmin()), int(far.argmax()))]
        rows.append([str(layer), f"{far.mean():.1f}", *ends])
    return rows


def _write(folder: Path, maps: AttentionMaps, heads: list[Head], results: dict[str, object]) -> None:
    """Write the arrays, the plots and the results to *folder*."""
    distance, position, terms = (folder / name for name in PICTURES)
    maps.save(folder / "attention.npz")
    plots.draw_distances(distance, maps)
    if len(maps.at_positions) == 1:
        plots.draw_position(position, maps.at_positions[0], heads)
    else:
        plots.draw_positions(position, maps.at_positions, heads)
    if maps.terms:
        plots.draw_terms(terms, maps)
    write_json(folder / "results.json", results)
