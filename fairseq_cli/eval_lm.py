"""Evaluate a language model: perplexity, probabilities of words, speed and memory."""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from typing import Any

from fairseq import config, distributed, options
from fairseq.config import parse_dict
from fairseq.evaluation import Scorer, Scoring, report
from fairseq.files import prepare_file, prepare_folder
from fairseq.models.loading import compile_model
from fairseq.modules.precision import Precision
from fairseq.settings import DataConfig, EvalLMConfig, MemoryConfig
from fairseq.tasks.loading import load_language_models
from fairseq_cli.common import checkpoint_paths, log_to_stderr, progress

logger = logging.getLogger(__name__)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Score ``--gen-subset`` with the checkpoints of ``--path``; results go to stdout, progress to stderr.

    Of the settings that a checkpoint holds too, ``--tokens-per-sample`` is taken from *args* where it is there;
    ``--sample-break-mode`` is ``none`` unless given.

    Returns:
        The figures, as in ``results.json``.

    Raises:
        UserError: flags contradict each other, or a checkpoint or the data cannot be used.
    """
    cfg, data = config.extract(EvalLMConfig, args), config.extract(DataConfig, args)
    paths = checkpoint_paths(cfg)
    if cfg.results_path is not None:
        prepare_folder("--results-path", cfg.results_path)
    if cfg.save_token_scores is not None:
        prepare_file("--save-token-scores", cfg.save_token_scores)
    device = distributed.device_of(args)
    overrides = parse_dict("--model-overrides", cfg.model_overrides)
    settings = argparse.Namespace(**{"sample_break_mode": "none", **vars(args)})
    models, task, model_args = load_language_models(paths, args.data, overrides, settings)
    scoring = Scoring(
        tokens_per_sample=model_args.tokens_per_sample,
        break_mode=settings.sample_break_mode,
        context_window=cfg.context_window,
        token_by_token=cfg.sliding_inf == 1,
        batch_size=data.batch_size,
        max_tokens=data.max_tokens,
        multiple=data.required_batch_size_multiple,
        softmax_batch=cfg.softmax_batch,
        skip_too_long=data.skip_invalid_size_inputs_valid_test,
        add_bos_token=bool(getattr(model_args, "add_bos_token", False)),
    )
    scorer = Scorer(models, task.source_dictionary, scoring, Precision(args), device, int8=cfg.int8)
    if getattr(args, "compile", False):
        for model in scorer.models:
            compile_model(model)
    corpus = task.corpus(data.gen_subset)  # type: ignore[attr-defined]
    start = time.perf_counter()
    scores = scorer.score(corpus, progress(args, data.gen_subset))
    seconds = time.perf_counter() - start

    words = report.join_words(scores, task.source_dictionary, cfg.remove_bpe)
    figures = {**report.figures(words, seconds), **report.peak_memory(device)}
    if cfg.int8:
        exact = Scorer(models, task.source_dictionary, scoring, Precision(args), device).score(corpus)
        exact_words = report.join_words(exact, task.source_dictionary, cfg.remove_bpe)
        figures["perplexity_without_int8"] = report.figures(exact_words, seconds)["perplexity"]
    _print_words(cfg, words)
    print(*report.summary(figures), sep="\n", flush=True)
    if cfg.save_token_scores is not None:
        report.write_scores(Path(cfg.save_token_scores), scores)
    if cfg.results_path is not None:
        about = {"checkpoints": paths, "data": args.data, "split": data.gen_subset, "mode": _mode(scoring)}
        about |= {
            "device": str(device),
            "settings": {
                **vars(scoring),
                **{name: vars(model_args)[name] for name in config.defaults(MemoryConfig) if name in vars(model_args)},
                **_precision(args),
                "int8": cfg.int8,
                "model_overrides": overrides,
            },
        }
        report.write_results(Path(cfg.results_path), {**figures, **about})
    return figures


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


def _precision(args: argparse.Namespace) -> dict[str, bool]:
    return {name: bool(getattr(args, name, False)) for name in ("fp16", "bf16", "memory_efficient_fp16", "compile")}


def cli_main() -> None:
    """``fairseq-eval-lm``."""
    log_to_stderr()
    options.run_command(main, options.get_eval_lm_parser)


if __name__ == "__main__":
    cli_main()
