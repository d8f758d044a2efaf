"""Evaluate a language model: perplexity, probabilities of words, losses of rare words, speed and
memory."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fairseq.analysis import plots
from fairseq.analysis.recl import distinct_names
from fairseq.checkpoint.manager import DICTIONARY, find_checkpoint
from fairseq.config import fields
from fairseq.config.command_settings import EvalLMConfig
from fairseq.config.registry import is_outside
from fairseq.config.settings import CommonConfig, DataConfig, MemoryConfig
from fairseq.data.folders import data_folders, open_corpus
from fairseq.data.indexed_dataset import Corpus
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.evaluation import report
from fairseq.evaluation.by_frequency import WordGroups, WordLosses, by_frequency, table, word_counts
from fairseq.evaluation.cache_pointer import Pointer
from fairseq.evaluation.pseudo_likelihood import PseudoScorer
from fairseq.evaluation.scorer import Scorer, Scores, Scoring
from fairseq.evaluation.surprisal import surprisals, warn_of_blocks
from fairseq.evaluation.surprisal import table as surprisal_table
from fairseq.evaluation.task_scores import task_scores
from fairseq.inference import Search, generator_of, stream
from fairseq.inference.loading import data_and_models, existing_checkpoint, load_models, read_text, refuse_two_texts
from fairseq.inference.text import never_written
from fairseq.logging import Progress, show_progress
from fairseq.models.base import BaseFairseqModel
from fairseq.models.language_model import language_model
from fairseq.models.layerwise import compile_model
from fairseq.modules.precision import Precision
from fairseq.system.files import ARCHIVE, atomic_file, prepare_file
from fairseq.system.json_files import write_json
from fairseq.system.provenance import about_run
from fairseq.system.terminal import printable
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.text.dictionary import Dictionary
from fairseq.text.raw_text import STDIN, RawCounts
from fairseq.text.text_corpus import TextCorpus, TextReader, log_tokens
from fairseq.text.tokenization import load_counts
from fairseq.text.tokenizers.tokenizer import chosen_rule

logger = logging.getLogger(__name__)

SAMPLE_TOKENS = 100  # fairseq-interactive has a flag for it

PICTURE = "by-frequency.png"
ROWS = 32  # of an encoder, read at once
OF_DECODERS = (  # settings that encoders do not read
    *("tokens_per_sample", "sample_break_mode", "add_bos_token", "context_window", "sliding_inf", "softmax_batch"),
    *("int8", "sample", "cache_pointer", "surprisal"),
)


def evaluate(
    source: str,
    cfg: EvalLMConfig,
    common: CommonConfig,
    batches: DataConfig,
    flat: Mapping[str, Any],
    world: World,
) -> dict[str, Any]:
    """Evaluate the checkpoints of ``cfg.path``, as one model, on ``cfg.text`` or a split; print the
    metrics and write the files that *cfg* names.

    Args:
        source: the data, or a model; see :func:`~fairseq.inference.loading.data_and_models`.
        flat: settings that the checkpoints' are changed by.

    Returns:
        The metrics, as in ``results.json``.
    """
    refuse_two_texts(cfg.text, batches.gen_subset)
    data, paths = data_and_models(cfg, source)
    _prepare_files(cfg, paths)
    evaluation = _Evaluation(cfg, common, batches, flat, world)
    model = evaluation.load(data, paths)
    name, corpus, counts = evaluation.text(data, model)
    # Before anything is scored: a model, the counts or a mark may be missing.
    if cfg.remove_bpe is not None:
        chosen_rule(cfg.remove_bpe, model.dictionary)
    baseline = evaluation.baseline(cfg.baseline, data) if cfg.baseline is not None else None
    in_training = word_counts(cfg.word_counts, data, model.dictionary) if cfg.by_frequency else {}
    # Loading is no part of the speed.
    start = time.perf_counter()
    scores = model.score(corpus, show_progress(common, name, world.is_first))
    seconds = time.perf_counter() - start

    words = report.join_words(scores, model.dictionary, cfg.remove_bpe)
    metrics = report.metrics(words, seconds)
    # Bytes and words were counted in the whole text:
    # a part of it, as with `num_shards`, has no such metrics.
    if counts is not None and counts.words and len(scores) == len(corpus.tokens):
        metrics |= report.raw_metrics(words, counts)
    if model.scorer is not None and cfg.num_shards == 1 and len(scores) < len(corpus.tokens):
        metrics["left_out_tokens"] = len(corpus.tokens) - len(scores)
    # Before the model without int8 is run, which takes more.
    metrics |= report.peak_memory(world.device)
    if model.exact is not None:
        exact_words = report.join_words(model.exact.score(corpus), model.dictionary, cfg.remove_bpe)
        metrics["perplexity_without_int8"] = report.metrics(exact_words, seconds)["perplexity"]
    if cfg.by_frequency:
        losses = {}
        if baseline is not None:
            path, other, text_of_other = baseline
            show = show_progress(common, f"{path}, baseline", world.is_first)
            losses[path] = other.word_losses(other.score(text_of_other, show))
        losses[paths[0] if len(paths) == 1 else "model"] = model.word_losses(scores)
        by_name = dict(zip(distinct_names(list(losses), None), losses.values(), strict=True))
        metrics["by_frequency"] = by_frequency(by_name, in_training, cfg.frequency_bands)
    if not world.is_first:
        return metrics
    _print_words(cfg, words)
    print(*report.summary(metrics, model.measure), sep="\n", flush=True)
    if cfg.by_frequency:
        print("", *table(metrics["by_frequency"]), sep="\n", flush=True)
    if cfg.surprisal is not None and isinstance(corpus, TextCorpus) and corpus.texts is not None:
        if (scorer := model.scorer) is not None and scorer.scoring.texts:
            warn_of_blocks(corpus.sizes, scorer.scoring.tokens_per_sample, scorer.readers[0].model.memory_length)
        rows = surprisals(TextReader.of(data, model.dictionary), corpus.texts, scores)
        with atomic_file(cfg.surprisal, "`surprisal`") as file:
            file.writelines(surprisal_table(rows))
    about = {"checkpoints": paths, "data": data, "split": name, "mode": model.mode}
    sample = None
    if cfg.sample is not None and model.scorer is not None:
        sample = _sample(model.scorer, TextReader.of(data, model.dictionary), common.seed)
    _write(cfg, scores, sample, {**metrics, **about, "device": str(world.device), "settings": model.used})
    if sample is not None:
        print(f"Sample, saved to {printable(str(cfg.sample))}:", sample, sep="\n", flush=True)
    return metrics


def _prepare_files(cfg: EvalLMConfig, paths: Sequence[str]) -> None:
    """See before any work is done that the files to write can be written."""
    if cfg.by_frequency and cfg.results_path is not None:
        plots.require("`results_path`")
    if cfg.baseline is not None and existing_checkpoint(cfg.baseline) in paths:
        raise UserError(f"`baseline` {cfg.baseline}: is the checkpoint that is evaluated; give another")
    if cfg.text == STDIN and cfg.baseline is not None:
        raise UserError("`text` -: cannot be read for `baseline`, too; save the text to a file")
    inputs = {**{f"`path` {path}": path for path in paths}, "`text`": cfg.text, "`word_counts`": cfg.word_counts}
    if cfg.save_token_scores is not None:
        prepare_file("`save_token_scores`", cfg.save_token_scores, inputs, ARCHIVE)
        inputs["`save_token_scores`"] = cfg.save_token_scores
    if cfg.sample is not None:
        prepare_file("`sample`", cfg.sample, inputs)
        inputs["`sample`"] = cfg.sample
    if cfg.score_documents is not None:
        if cfg.text is None or cfg.sliding_inf == 1 or cfg.num_shards > 1:
            raise UserError("`score_documents`: needs `text`, and excludes `sliding_inf` 1 and `num_shards`")
        prepare_file("`score_documents`", cfg.score_documents, inputs)
        inputs["`score_documents`"] = cfg.score_documents
    if cfg.surprisal is not None:
        if cfg.text is None or cfg.num_shards > 1:
            raise UserError("`surprisal`: needs `text`, and excludes `num_shards`")
        prepare_file("`surprisal`", cfg.surprisal, inputs)


@dataclass(frozen=True)
class _Model:
    """A loaded model, or several whose probabilities are averaged, and how it is scored."""

    task: FairseqTask  # of the first
    # The scores of a corpus's tokens: a decoder's after those before them, an encoder's among the
    # others of their line.
    score: Callable[[Corpus, Progress], Scores]
    mode: str  # of scoring
    used: dict[str, object]  # settings of scoring
    scorer: Scorer | None = None  # of decoders; None: an encoder
    exact: Scorer | None = None  # the scorer without ``--int8``

    @property
    def dictionary(self) -> Dictionary:
        return self.task.source_dictionary

    @property
    def measure(self) -> str:
        return "Pseudo-perplexity" if self.mode.startswith("pseudo") else "Perplexity"

    def word_losses(self, scores: Scores) -> WordLosses:
        return WordLosses.of(WordGroups(self.dictionary), scores.tokens, scores.lprobs, lines=scores.lines)


@dataclass(frozen=True)
class _Evaluation:
    """The settings of an evaluation, typed and as *flat* ones
    for the loading of checkpoints, and its process."""

    cfg: EvalLMConfig
    common: CommonConfig
    batches: DataConfig
    flat: Mapping[str, Any]
    world: World

    def load(self, data: str, paths: Sequence[str]) -> _Model:
        """Load the checkpoints *paths* for scoring with the dictionary of *data*."""
        cfg, overrides = self.cfg, self.cfg.overrides
        # Whatever the blocks of training were, the text is read as one stream unless the command
        # line names another mode.
        flat = {"sample_break_mode": "none", **self.flat}
        models, task, trained = load_models(paths, data, overrides, flat)
        if len(paths) == 1 and not models[0].predicts_next_token:
            usual = fields.defaults(EvalLMConfig)
            if unread := [name for name in OF_DECODERS if self.flat.get(name) not in (None, usual.get(name))]:
                raise UserError(f"`{unread[0]}`: {paths[0]} is an encoder, which reads whole lines; leave it out")
            model = self._encoder(models[0], task)
        elif _makes_its_batches(task):
            model = self._plugin(models, task)
        else:
            for path, one in zip(paths, models, strict=True):
                # Raises an error for a model without a distribution
                # over words, before the corpus is read.
                language_model(one, path)
            model = self._decoder(models, task, flat["sample_break_mode"])
            if cfg.cache_pointer:
                self._set_pointer(model, data)
            memory = fields.defaults(MemoryConfig)
            model.used.update({name: value for name, value in trained.flat.items() if name in memory})
        precision = {name: getattr(self.common, name) for name in ("fp16", "bf16", "memory_efficient_fp16", "compile")}
        model.used.update(precision, model_overrides=overrides)
        return model

    def _set_pointer(self, model: _Model, data: str) -> None:
        """Give *model* the pointer of the flags, or one that is fitted on the validation split."""
        cfg, scorer = self.cfg, model.scorer
        assert scorer is not None
        if cfg.pointer is not None:
            pointer = Pointer(cfg.cache_pointer, *cfg.pointer)
        elif cfg.text is not None:
            raise UserError("`cache_pointer`: with `text` needs `pointer`; evaluate the split valid to have it fitted")
        else:
            corpus = open_corpus(data_folders(data)[0], "valid", model.dictionary)
            pointer = scorer.fit_pointer(corpus, show_progress(self.common, "valid", self.world.is_first))
        for each in (scorer, model.exact):
            if each is not None:
                each.pointer = pointer
        logger.info("`cache_pointer` %d: `pointer` %g,%.3g", pointer.states, pointer.sharpness, pointer.weight)
        model.used["pointer"] = [pointer.sharpness, pointer.weight]

    def _encoder(self, model: BaseFairseqModel, task: FairseqTask) -> _Model:
        cfg, precision, longest = self.cfg, Precision(self.common), model.max_positions() or 1
        rows = self.batches.batch_size or max(1, (self.batches.max_tokens or ROWS * longest) // longest)
        precision.move(model, self.world.device)
        if self.common.compile:
            compile_model(model)
        scorer = PseudoScorer(model, task.source_dictionary, cfg.within_words, rows, precision)
        return _Model(
            task,
            lambda corpus, show: scorer.score_corpus(corpus, show, self.world, cfg.shard_id, cfg.num_shards),
            "pseudo-log-likelihood" + " within words" * cfg.within_words,
            {"batch_size": rows, "within_words": cfg.within_words, "shard": cfg.shard_id, "shards": cfg.num_shards},
        )

    def _plugin(self, models: Sequence[BaseFairseqModel], task: FairseqTask) -> _Model:
        cfg, common = self.cfg, self.common
        refused = {"text": cfg.text, "sliding_inf": cfg.sliding_inf == 1, "int8": cfg.int8, "sample": cfg.sample}
        refused |= {
            "cache_pointer": cfg.cache_pointer > 0,
            "num_shards": cfg.num_shards > 1,
            "compile": common.compile,
            "bf16": common.bf16,
            "fp16": common.fp16,
        }
        for name, value in refused.items():
            if value:
                raise UserError(f"`{name}`: {type(task).__name__} makes its batches; leave it out")
        window = self.cfg.context_window
        score = functools.partial(task_scores, task, models, self.batches, window, self.world)
        return _Model(task, lambda corpus, show: score(show), "batches of the task", {"context_window": window})

    def _decoder(self, models: Sequence[BaseFairseqModel], task: FairseqTask, break_mode: str) -> _Model:
        cfg = self.cfg
        if cfg.within_words:
            raise UserError("`within_words`: the model is a decoder, which masks nothing; leave it out")
        scoring = Scoring(
            tokens_per_sample=task.cfg.tokens_per_sample,
            break_mode=break_mode,
            context_window=cfg.context_window,
            token_by_token=cfg.sliding_inf == 1,
            batch_size=self.batches.batch_size,
            max_tokens=self.batches.max_tokens,
            multiple=self.batches.required_batch_size_multiple,
            softmax_batch=cfg.softmax_batch,
            add_bos_token=task.cfg.add_bos_token,
            document_mask=task.cfg.document_mask,
            texts=_reads_documents(cfg),
            shard=cfg.shard_id,
            shards=cfg.num_shards,
            cache_pointer=cfg.cache_pointer,
        )
        make = functools.partial(
            Scorer, models, task.source_dictionary, scoring, Precision(self.common), self.world.device, world=self.world
        )
        scorer = make(int8=cfg.int8)
        if cfg.sample is not None and not all(model.can_generate for model in models):
            raise UserError("`sample`: the model has no cache to generate with; leave it out")
        if self.common.compile:
            for reader in scorer.readers:
                compile_model(reader.module)
        mode = "context window" if scoring.context_window else "non-overlapping"
        mode = "token by token" if scoring.token_by_token else mode
        used = {**vars(scoring), "int8": cfg.int8}
        return _Model(task, scorer.score, mode, used, scorer, exact=make() if cfg.int8 else None)

    def text(self, data: str, model: _Model) -> tuple[str, Corpus, RawCounts | None]:
        """Return what ``--text`` or ``--gen-subset`` names: its name, its tokens, and the size of
        raw text if known.

        Raises:
            UserError: the file or the split cannot be read, or the tokenizer is invalid.
        """
        cfg, split = self.cfg, self.batches.gen_subset
        if cfg.text is None:
            folder = data_folders(data)[0]
            corpus = open_corpus(folder, split, model.dictionary)
            counts = load_counts(folder / split)
            # A split that was made again by another program has other lines than its counts.
            return split, corpus, counts if counts is not None and counts.lines == len(corpus.sizes) else None
        # An encoder predicts a token from the others of its line.
        lines_apart = model.scorer is None or self.flat.get("sample_break_mode", "none") != "none"
        documents = cfg.score_documents is not None or cfg.surprisal is not None
        text = read_text(cfg.text, cfg, data, model.dictionary, self.world, documents, lines_apart)
        if text.counts is None:
            log_tokens(model.dictionary)
        return "stdin" if cfg.text == STDIN else cfg.text, text, text.counts

    def baseline(self, path: str, data: str) -> tuple[str, _Model, Corpus]:
        """The path of the model to compare with, the model, and the same text for it.

        With ``--text`` it reads the text with the dictionary
        and the tokenizer next to it, if there are any.
        """
        checkpoint = find_checkpoint(path)
        if self.cfg.text is not None and os.path.isfile(checkpoint.parent / DICTIONARY):
            data = str(checkpoint.parent)
        model = self.load(data, [str(checkpoint)])
        return str(checkpoint), model, self.text(data, model)[1]


def _reads_documents(cfg: EvalLMConfig) -> bool:
    """Whether each line or row of the text is read alone: surprisal is, unless a flag gives words
    the text before their line."""
    in_order = cfg.context_window or cfg.sliding_inf == 1 or cfg.cache_pointer
    return cfg.score_documents is not None or (cfg.surprisal is not None and not in_order)


def _makes_its_batches(task: FairseqTask) -> bool:
    """Whether a plug-in's class of *task* defines the batches of an evaluation."""
    return any("eval_lm_dataloader" in vars(cls) and is_outside(cls) for cls in type(task).__mro__)


def _write(cfg: EvalLMConfig, scores: Scores, sample: str | None, results: dict[str, Any]) -> None:
    """Write the files that the flags name, the results last."""
    if cfg.save_token_scores is not None:
        with atomic_file(cfg.save_token_scores, "`save_token_scores`") as file:
            np.savez(file, tokens=scores.tokens, lprobs=scores.lprobs)
    if cfg.score_documents is not None:
        with atomic_file(cfg.score_documents, "`score_documents`") as file:
            file.writelines(json.dumps(line).encode() + b"\n" for line in report.document_scores(scores))
    if cfg.sample is not None and sample is not None:
        with atomic_file(cfg.sample, "`sample`") as file:
            file.write(sample.encode() + b"\n")
    if cfg.results_path is not None:
        if "by_frequency" in results:
            plots.draw_bands(Path(cfg.results_path) / PICTURE, results["by_frequency"])
        write_json(Path(cfg.results_path) / f"results{cfg.part}.json", {**results, **about_run()})


def _sample(scorer: Scorer, reader: TextReader, seed: int) -> str:
    """Return a text that the models write from the start of a paragraph."""
    eos, forbidden = scorer.dictionary.eos(), never_written(scorer.dictionary)
    generator, stop = generator_of(seed), scorer.dictionary.stop()
    return reader.text(
        list(stream(scorer.readers, [eos], Search(SAMPLE_TOKENS), generator=generator, forbidden=forbidden, stop=stop))
    )


def _print_words(cfg: EvalLMConfig, words: report.Words) -> None:
    if cfg.output_word_probs:
        for first, last in itertools.pairwise(words.lines):
            print(*(f"{words.word(i)} [{words.lprobs[i]:.6f}]" for i in range(first, last)), sep="\t")
    if cfg.output_word_stats:
        for line in report.word_table(words):
            print(line)
