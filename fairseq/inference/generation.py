"""Continue passages of a corpus with a language model, and show the continuations next to the
original text."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fairseq.config.command_settings import GenerateConfig
from fairseq.config.settings import CommonConfig
from fairseq.data.indexed_dataset import Corpus
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.inference.loading import data_and_models, read_text, refuse_two_texts
from fairseq.inference.text import Detokenizer
from fairseq.inference.writer import Writer, check_samples
from fairseq.logging import show_progress
from fairseq.system.files import atomic_file, results_folder
from fairseq.system.json_files import write_json
from fairseq.system.provenance import about_run
from fairseq.text.raw_text import STDIN

PARTS = ("context", "continuation", "reference")
LONGEST_CONTEXT = 512  # tokens, unless a flag says
RECORDED = (  # settings in generate.json
    *("context_tokens", "max_new_tokens", "num_samples", "num_contexts", "sampling", "sampling_topk", "sampling_topp"),
    *("temperature", "beam", "batch_size", "int8", "model_overrides"),
)


@dataclass(frozen=True)
class Part:
    """A token sequence: ids, symbols separated by spaces
    (``</s>`` ends a line), and running text."""

    tokens: list[int]
    symbols: str
    text: str


@dataclass(frozen=True)
class Passage:
    """A context, one generated continuation and the original one (paper, appendix E)."""

    number: int  # of the passage, from 1
    start: int  # number of the context's first token in the corpus, from 0
    sample: int  # number of the continuation of this context, from 1
    context: Part
    continuation: Part
    reference: Part


def continue_passages(
    source: str, cfg: GenerateConfig, common: CommonConfig, flat: Mapping[str, Any], world: World
) -> list[Passage]:
    """Continue contexts of ``cfg.gen_subset``; the texts go to stdout and to ``cfg.results_path``,
    progress to stderr.

    A passage is printed as soon as it is complete. The folder has all complete passages, even if
    the run is interrupted. With fairseq's format each line of the split is continued, and fairseq's
    lines are printed. Several processes share the contexts or lines; the first prints all, in
    order, when they are complete.

    Args:
        source: the data, or a model; see :func:`~fairseq.inference.loading.data_and_models`.
        flat: settings that the checkpoint's are changed by.

    Returns:
        The passages.
    """
    refuse_two_texts(cfg.text, cfg.gen_subset)
    contexts = _contexts(cfg)
    data, paths = data_and_models(cfg, source)
    writer = Writer.load(cfg, common, paths, data, flat, world.device)
    if cfg.text is None:
        name, corpus = cfg.gen_subset, writer.task.corpus(cfg.gen_subset)  # type: ignore[attr-defined]
    else:
        name = "stdin" if cfg.text == STDIN else cfg.text
        # Hypotheses are written line by line.
        dictionary, lines_apart = writer.task.source_dictionary, cfg.finds_hypotheses
        corpus = read_text(cfg.text, cfg, data, dictionary, world, lines_apart=lines_apart)
    if cfg.finds_hypotheses:
        _print_hypotheses(cfg, writer, name, corpus, world)
        return []
    tokens = corpus.tokens
    context = min(LONGEST_CONTEXT, writer.window) if cfg.context_tokens is None else cfg.context_tokens
    starts = draw_starts(len(tokens), context, cfg.max_new_tokens, contexts, common.seed)
    writer.warn_of_length({"`context_tokens`": context})
    complete: list[Passage] = []
    begin = time.perf_counter()
    with results_folder(cfg.results_path):
        try:
            for passage in _continue(cfg, common, writer, tokens, starts, context, world):
                complete.append(passage)
                print(as_text(passage, cfg.num_samples, name), flush=True)
        # Also after an interruption: what was generated in hours is not thrown away.
        finally:
            if cfg.results_path is not None and complete:
                seconds = time.perf_counter() - begin
                about = {
                    "checkpoints": paths,
                    "data": data,
                    "split": cfg.text or cfg.gen_subset,
                    "device": str(writer.device),
                    "settings": {
                        **{name: getattr(cfg, name) for name in RECORDED},
                        "context_tokens": context,
                        "sampling": cfg.samples,
                        "beam": cfg.beam or 1,
                        "seed": writer.seed,
                        **{name: getattr(common, name) for name in ("fp16", "bf16", "memory_efficient_fp16")},
                    },
                    "seconds": seconds,
                    "tokens_per_second": len(complete) * cfg.max_new_tokens / seconds,
                }
                write_results(Path(cfg.results_path), complete, about, cfg.part)
    return complete


def _print_hypotheses(cfg: GenerateConfig, writer: Writer, name: str, corpus: Corpus, world: World) -> None:
    """Print fairseq's lines for every line of *corpus*; ``--results-path`` gets them as
    ``generate-NAME.txt``."""
    numbers = _numbers(cfg, world, len(corpus.sizes), "lines")

    def tokens_of(number: int) -> list[int]:
        start, size = corpus.offsets[number], corpus.sizes[number]
        tokens: list[int] = corpus.tokens[start : start + size - 1].tolist()  # without </s>
        return tokens

    with contextlib.ExitStack() as files:
        file = None
        if cfg.results_path is not None and world.is_first:
            files.enter_context(results_folder(cfg.results_path))
            path = Path(cfg.results_path) / f"generate-{Path(name).name}{cfg.part}.txt"
            # Lines are written as they come, but never through a link that an earlier file left.
            with atomic_file(path, "`results_path`"):
                pass
            file = files.enter_context(open(path, "w", encoding="utf-8"))
        found = writer.hypotheses(cfg, ((number, tokens_of(number)) for number in numbers))
        for number, texts in _of_all(found, world):
            for line in writer.lines_of(cfg, number, tokens_of(number), texts, target=True):
                print(line, flush=True)
                if file is not None:
                    print(line, file=file, flush=True)


def _numbers(cfg: GenerateConfig, world: World, count: int, what: str) -> range:
    """The contexts or lines of this process, of *count*; *what* they are is for the message.

    Raises:
        UserError: the part of ``--shard-id`` has none.
    """
    first = cfg.shard_id * world.size
    if first >= count:
        raise UserError(
            f"`shard_id` {cfg.shard_id}: no {what} are left for this part of `num_shards` {cfg.num_shards}; "
            f"there are {count}, so give fewer parts"
        )
    return range(first + world.rank, count, cfg.num_shards * world.size)


def _of_all(local: Iterable[tuple[Any, Any]], world: World) -> Iterator[tuple[Any, Any]]:
    """The (key, value) pairs of one process as they come;
    of several all of them by key, on the first one."""
    if world.size == 1:
        yield from local
    else:
        yield from sorted((item for part in world.gather(list(local)) for item in part), key=lambda item: item[0])


def _continue(
    cfg: GenerateConfig,
    common: CommonConfig,
    writer: Writer,
    tokens: np.ndarray,
    starts: list[int],
    length: int,
    world: World,
) -> Iterator[Passage]:
    """Passages for the contexts of *length* tokens at *starts* of *tokens*,
    in that order, each as soon as it is complete."""
    new = cfg.max_new_tokens
    prompts = [tokens[start : start + length].tolist() for start in starts]
    samples = cfg.num_samples // len(starts)
    numbers = _numbers(cfg, world, len(starts), "contexts")
    show = show_progress(common, "tokens", world.is_first)
    texts = _of_all(writer.continue_all(prompts, samples, show, numbers), world)
    # Contexts are of equal length and so complete in order.
    for (number, sample), text in texts:
        start = starts[number]
        reference = tokens[start + length : start + length + new].tolist()
        parts = parts_of(writer.detokenizer, prompts[number], text, reference)
        yield Passage(number * samples + sample + 1, start, sample + 1, *parts)


def _contexts(cfg: GenerateConfig) -> int:
    """Number of different contexts."""
    contexts = cfg.num_contexts or cfg.num_samples
    if cfg.num_samples % contexts:
        raise UserError(
            f"`num_samples` {cfg.num_samples}: must be a multiple of `num_contexts` {contexts}, "
            "so that all contexts have as many continuations"
        )
    check_samples(cfg, cfg.num_samples // contexts, contexts)
    return contexts


def draw_starts(tokens: int, context: int, reference: int, count: int, seed: int) -> list[int]:
    """Start positions of contexts in a corpus of *tokens* tokens, uniformly drawn; number i depends
    on seed and i only.

    Args:
        context: tokens of a context.
        reference: tokens that should follow a context; fewer follow if the corpus is too short.

    Raises:
        UserError: the context is as long as the corpus or longer.
    """
    if context >= tokens:
        raise UserError(
            f"`context_tokens` {context}: the split has {tokens} tokens; give {tokens - 1} or less"
            if tokens > 1
            else "`gen_subset`: the split has a single token; choose another"
        )
    candidates = max(1, tokens - context - reference + 1)
    # A generator a passage: more passages, or another number
    # of processes, leave the first ones as they are.
    return [int(np.random.default_rng([seed, number]).integers(candidates)) for number in range(count)]


def parts_of(detokenizer: Detokenizer, context: Sequence[int], *following: Sequence[int]) -> list[Part]:
    """The parts for *context* and for each of *following*, decoded as its continuation."""
    parts = []
    for tokens in (None, *following):
        stream = detokenizer.stream()
        text = stream.add(context) + stream.pause()
        if tokens is not None:
            text = stream.add(tokens) + stream.end()
        ids = [int(token) for token in (context if tokens is None else tokens)]
        parts.append(Part(ids, " ".join(detokenizer.dictionary[token] for token in ids), text))
    return parts


def as_text(passage: Passage, count: int, split: str) -> str:
    """One of *count* passages as plain text."""
    lines = [f"==== {title(passage, count, split)} ===="]
    for name in PARTS:
        lines += ["", f"---- {name} ----", getattr(passage, name).text.strip()]
    return "\n".join([*lines, ""])


def title(passage: Passage, count: int, split: str) -> str:
    """One-line description of a passage."""
    last = passage.start + len(passage.context.tokens) - 1
    return f"{passage.number} of {count}: tokens {passage.start}–{last} of {split}, continuation {passage.sample}"


def write_results(folder: Path, passages: Sequence[Passage], about: Mapping[str, object], part: str = "") -> None:
    """Write ``generate.json`` to *folder* atomically.

    Args:
        part: suffix of the file name, before the extension, if these are passages of a part.
        about: settings of the run: ``checkpoints``, ``data``, ``split``, ``settings`` and more.

    Raises:
        UserError: a file cannot be written.
    """
    samples = [asdict(passage) for passage in passages]
    write_json(folder / f"generate{part}.json", {**about, **about_run(), "samples": samples})
