"""Evaluate a language model: perplexity, probabilities of words, speed and memory."""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq.config import fields, options
from fairseq.config.command_settings import ShardConfig, SubwordMarkConfig, TextFormatConfig
from fairseq.config.fields import flag, parse_dict
from fairseq.config.parser import Parser
from fairseq.config.settings import CommonConfig, DistributedConfig, MemoryConfig, Settings, typed_settings
from fairseq.data.folders import data_folders
from fairseq.data.indexed_dataset import Corpus
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.evaluation import Scorer, Scoring, report
from fairseq.evaluation.scorer import Scores
from fairseq.inference import Decoding, generator_of, stream
from fairseq.inference.loading import load_language_models
from fairseq.inference.text import never_written
from fairseq.models.loading import compile_model
from fairseq.modules.precision import Precision
from fairseq.system.files import ARCHIVE, atomic_files, prepare_file, prepare_folder
from fairseq.system.provenance import about_run
from fairseq.system.terminal import log_to_stderr, printable
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.text.raw_text import STDIN, RawCounts
from fairseq.text.text_corpus import TextReader, log_tokens
from fairseq.text.tokenization import load_counts
from fairseq_cli.common import (
    evaluation_parser,
    progress,
    read_text,
    run_on_processes,
    with_models,
)

logger = logging.getLogger(__name__)

SAMPLE_TOKENS, SAMPLE_TOP_K, SAMPLE_SEED = 100, 40, 1  # fairseq-interactive has flags for them


@dataclass(frozen=True)
class EvalLMConfig(ShardConfig, TextFormatConfig, SubwordMarkConfig):
    """Evaluation: settings of ``fairseq-eval-lm``."""

    text: str | None = flag(None, "file of text to evaluate instead of `gen_subset` (-: stdin)", metavar="FILE")
    results_path: str | None = flag(None, "folder for results.json", metavar="DIR")
    score_documents: str | None = flag(None, "JSON lines with a score for each line or row of `text`", metavar="FILE")
    save_token_scores: str | None = flag(
        None, "NPZ file for tokens and their log-probabilities, in corpus order", metavar="FILE"
    )
    output_word_probs: bool = flag(False, "print every word's log-probability")
    output_word_stats: bool = flag(False, "print every word's count and mean log-probability")
    context_window: int = flag(0, "context tokens before each block that are not scored", low=0)
    sliding_inf: int = flag(
        -1,
        "1: score token by token with a cache",
        choices=(-1, 0, 1),
        metavar="{1}",
    )
    softmax_batch: int | None = flag(None, "maximum tokens in one softmax, to bound memory", low=1)
    int8: bool = flag(False, "int8 weights, one scale per output; also prints their effect on perplexity")
    sample: str | None = flag(None, "file for a text that the model writes, also printed", metavar="FILE")


def get_eval_lm_parser(default_task: str = "language_modeling") -> Parser:
    """The flags of ``fairseq-eval-lm``."""
    examples = [
        "fairseq-eval-lm checkpoints --text test.txt",
        "fairseq-eval-lm data-bin --path checkpoints/checkpoint_best.pt --context-window 400 --bf16",
    ]
    hidden = ("train_subset", "valid_subset", "max_tokens_valid", "batch_size_valid", "num_workers", "seed")
    return evaluation_parser(
        "Compute the perplexity of a language model.", examples, [EvalLMConfig, DistributedConfig], hidden=hidden
    )


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Score ``--gen-subset`` with the checkpoints of ``--path``; results go to stdout, progress to stderr.

    ``--tokens-per-sample`` overrides the checkpoint's if given; ``--sample-break-mode`` is ``none`` unless given.

    Several processes (``--distributed-world-size``, torchrun) share the batches; the first writes the result of all.

    Returns:
        The figures, as in ``results.json``; None if the work was done in other processes.

    Raises:
        UserError: flags contradict each other, or a checkpoint or the data cannot be used.
    """
    return run_on_processes(evaluate, args)


def evaluate(args: argparse.Namespace, world: World) -> dict[str, Any]:
    """Do the part of this process of *world*; see :func:`main`."""
    settings = typed_settings(args, EvalLMConfig)
    cfg: EvalLMConfig = settings.command
    common, data = settings.common, settings.data
    settings, paths = with_models(settings)
    if cfg.results_path is not None:
        prepare_folder("--results-path", cfg.results_path)
    inputs = {**{f"--path {path}": path for path in paths}, "--text": cfg.text}
    if cfg.save_token_scores is not None:
        prepare_file("--save-token-scores", cfg.save_token_scores, inputs, ARCHIVE)
    if cfg.sample is not None:
        prepare_file("--sample", cfg.sample, inputs)
    if cfg.score_documents is not None:
        if cfg.text is None or cfg.sliding_inf == 1 or cfg.num_shards > 1:
            raise UserError("--score-documents: needs --text, and excludes --sliding-inf 1 and --num-shards")
        prepare_file("--score-documents", cfg.score_documents, inputs)
    device = world.device
    overrides = parse_dict("--model-overrides", cfg.model_overrides)
    given = argparse.Namespace(**{"sample_break_mode": "none", **vars(args)})
    models, task, trained = load_language_models(paths, settings.data_path, overrides, vars(given))
    scoring = Scoring(
        tokens_per_sample=task.cfg.tokens_per_sample,
        break_mode=given.sample_break_mode,
        context_window=cfg.context_window,
        token_by_token=cfg.sliding_inf == 1,
        batch_size=data.batch_size,
        max_tokens=data.max_tokens,
        multiple=data.required_batch_size_multiple,
        softmax_batch=cfg.softmax_batch,
        add_bos_token=task.cfg.add_bos_token,
        texts=cfg.score_documents is not None,
        shard=cfg.shard_id,
        shards=cfg.num_shards,
    )
    scorer = Scorer(models, task.source_dictionary, scoring, Precision(common), device, int8=cfg.int8, world=world)
    if cfg.sample is not None and not all(model.can_generate for model in models):
        raise UserError("--sample: the model has no cache to generate with; leave it out")
    if common.compile:
        for reader in scorer.readers:
            compile_model(reader.module)
    name, corpus, counts = _evaluated_text(cfg, settings.data_path, data.gen_subset, task, world)
    start = time.perf_counter()
    scores = scorer.score(corpus, progress(common, name) if world.is_first else None)
    seconds = time.perf_counter() - start

    words = report.join_words(scores, task.source_dictionary, cfg.remove_bpe)
    figures = report.figures(words, seconds)
    if counts is not None and len(scores) == len(corpus.tokens):
        figures |= report.raw_figures(words, counts)
    figures |= report.peak_memory(device)
    if cfg.int8:
        exact = Scorer(models, task.source_dictionary, scoring, Precision(common), device, world=world).score(corpus)
        exact_words = report.join_words(exact, task.source_dictionary, cfg.remove_bpe)
        figures["perplexity_without_int8"] = report.figures(exact_words, seconds)["perplexity"]
    if not world.is_first:
        return figures
    _print_words(cfg, words)
    print(*report.summary(figures), sep="\n", flush=True)
    used = {**vars(scoring), **_memory(trained), **_precision(common), "int8": cfg.int8}
    used["model_overrides"] = overrides
    about = {"checkpoints": paths, "data": settings.data_path, "split": name, "mode": _mode(scoring)}
    text = None
    if cfg.sample is not None:
        text = _sample(scorer, TextReader.of(settings.data_path, task.source_dictionary))
    _write(cfg, scores, text, {**figures, **about, "device": str(device), "settings": used})
    if text is not None:
        print(f"Sample, saved to {printable(str(cfg.sample))}:", text, sep="\n", flush=True)
    return figures


def _write(cfg: EvalLMConfig, scores: Scores, sample: str | None, results: dict[str, Any]) -> None:
    """Write the files that the flags name, together or not at all."""
    with atomic_files() as files:
        if cfg.save_token_scores is not None:
            report.write_scores(Path(cfg.save_token_scores), scores, files.file)
        if cfg.score_documents is not None:
            with files.file(cfg.score_documents, "--score-documents") as file:
                file.writelines(json.dumps(line).encode() + b"\n" for line in report.document_scores(scores))
        if cfg.sample is not None and sample is not None:
            with files.file(cfg.sample, "--sample") as file:
                file.write(sample.encode() + b"\n")
        if cfg.results_path is not None:
            report.write_results(Path(cfg.results_path), {**results, **about_run()}, files.file)


def _sample(scorer: Scorer, reader: TextReader) -> str:
    """Return a text that the models write from the start of a paragraph."""
    eos, forbidden = scorer.dictionary.eos(), never_written(scorer.dictionary)
    how = Decoding(SAMPLE_TOKENS, top_k=SAMPLE_TOP_K)
    tokens = list(stream(scorer.readers, [eos], how, generator=generator_of(SAMPLE_SEED), forbidden=forbidden))
    return reader.text(tokens)


def _evaluated_text(
    cfg: EvalLMConfig, data: str, split: str, task: FairseqTask, world: World
) -> tuple[str, Corpus, RawCounts | None]:
    """Return what ``--text`` or ``--gen-subset`` names: its name, its tokens, and the size of the raw text if known.

    Raises:
        UserError: the file or the split cannot be read, or the tokenizer is invalid.
    """
    if cfg.text is None:
        corpus = task.corpus(split)  # type: ignore[attr-defined]
        counts = load_counts(data_folders(data)[0] / split)
        return split, corpus, counts if counts is not None and counts.lines == len(corpus.sizes) else None
    text = read_text(cfg.text, cfg, data, task.source_dictionary, world, cfg.score_documents is not None)
    if text.counts is None:
        log_tokens(task.source_dictionary)
    return "stdin" if cfg.text == STDIN else cfg.text, text, text.counts


def _print_words(cfg: EvalLMConfig, words: report.Words) -> None:
    if cfg.output_word_probs:
        for line in report.word_lines(words):
            print(line)
    if cfg.output_word_stats:
        for line in report.word_table(words):
            print(line)


def _mode(scoring: Scoring) -> str:
    if scoring.token_by_token:
        return "token by token"
    return "context window" if scoring.context_window else "non-overlapping"


def _memory(trained: Settings) -> dict[str, Any]:
    """Settings of memory, for a model that has them."""
    return {name: value for name, value in trained.flat.items() if name in fields.defaults(MemoryConfig)}


def _precision(common: CommonConfig) -> dict[str, bool]:
    return {name: getattr(common, name) for name in ("fp16", "bf16", "memory_efficient_fp16", "compile")}


def cli_main() -> None:
    """``fairseq-eval-lm``."""
    log_to_stderr()
    options.run_command(main, get_eval_lm_parser)


if __name__ == "__main__":
    cli_main()
