"""Text generation for commands: models, decoding
and text conversion, made from the command's flags."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fairseq import distributed
from fairseq.config.command_settings import LONGEST_TEXT, GenerationConfig
from fairseq.config.settings import CommonConfig
from fairseq.errors import UserError
from fairseq.inference.loading import load_language_models
from fairseq.inference.reader import Reader, reach
from fairseq.inference.search import Hypothesis, Search, generate, generator_of, stream
from fairseq.inference.text import Detokenizer, detokenizer_of, never_written
from fairseq.logging import Progress
from fairseq.modules.precision import Precision
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.text.dictionary import Dictionary
from fairseq.text.text_corpus import TextReader

logger = logging.getLogger(__name__)

MOST_TOKENS = 10**8  # of all continuations of a run
DEFAULT_BATCH = 16  # texts, if no setting says how many


@dataclass(frozen=True)
class Writer:
    """Models and settings of a generating command."""

    models: list[Reader]  # their weights in the precision of the command, cast and packed once
    task: FairseqTask
    search: Search
    seed: int  # samples depend on it and the number of the text only
    batch_size: int
    detokenizer: Detokenizer
    device: torch.device

    @classmethod
    def load(
        cls,
        cfg: GenerationConfig,
        common: CommonConfig,
        paths: Sequence[str],
        data: str,
        settings: Mapping[str, Any],
        device: torch.device | None = None,
    ) -> Writer:
        """Load the checkpoints *paths* with the dictionary and the tokenizer of *data*.

        Args:
            settings: that replace the ones of the checkpoints; see :func:`load_models`.
            device: where the models run; None: as *common* says.

        Raises:
            UserError: flags contradict each other,
                or a checkpoint or the dictionary cannot be used.
        """
        search = search_of(cfg)
        if common.compile:
            raise UserError("`compile`: generation reads token by token and is not compiled; leave it out")
        device, precision = device or distributed.device_of(common), Precision(common)
        models, task, _ = load_language_models(paths, data, cfg.overrides, settings)
        for path, model in zip(paths, models, strict=True):
            if not model.can_generate:
                raise UserError(f"`path` {path}: {type(model).__name__} has no key-value cache and cannot generate")
            precision.move(model, device)
        dictionary: Dictionary = task.source_dictionary
        begin = dictionary.begin() if task.cfg.add_bos_token else None
        readers = [Reader(model, precision.on(device), int8=cfg.int8, begin=begin) for model in models]
        detokenizer = detokenizer_of(dictionary, cfg.remove_bpe, TextReader.of(data, dictionary).tokenizer)
        return cls(readers, task, search, common.seed, cfg.batch_size or DEFAULT_BATCH, detokenizer, device)

    @functools.cached_property
    def forbidden(self) -> list[int]:
        """Tokens that are never generated."""
        return never_written(self.task.source_dictionary)

    @property
    def stop(self) -> int:
        """The token at which a text ends, or -1."""
        dictionary: Dictionary = self.task.source_dictionary
        return dictionary.stop()

    @functools.cached_property
    def window(self) -> int:
        """The shortest attention distance of the models, in tokens."""
        with torch.inference_mode():
            return min(reach(reader) for reader in self.models)

    def continue_one(self, prompt: Sequence[int], number: int, sample: int) -> Iterator[int]:
        """Tokens of one text, each as soon as it is chosen."""
        generator = generator_of(self.seed, number, sample)
        return stream(self.models, prompt, self.search, generator=generator, forbidden=self.forbidden, stop=self.stop)

    def continue_all(
        self, prompts: Sequence[Sequence[int]], samples: int, progress: Progress, numbers: Sequence[int] | None = None
    ) -> Iterator[tuple[tuple[int, int], list[int]]]:
        """*samples* continuations of each prompt, each
        as soon as it is complete: ((prompt, sample), tokens).

        With *numbers*, of those prompts only; a text does not depend on which others are continued.
        """
        chosen = range(len(prompts)) if numbers is None else numbers
        keys = [(number, sample) for number in chosen for sample in range(samples)]
        texts = generate(
            self.models,
            [prompts[number] for number, _ in keys],
            self.search,
            generators=lambda index: generator_of(self.seed, *keys[index]),
            batch_size=self.batch_size,
            forbidden=self.forbidden,
            stop=self.stop,
            progress=progress,
        )
        return ((keys[index], best.tokens) for index, [best, *_] in texts)

    def hypotheses(
        self, cfg: GenerationConfig, lines: Iterable[tuple[int, list[int]]], together: int | None = None
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        """The hypotheses of each of *lines*, numbers with tokens without ``</s>``, in their order.

        Of a line, ``--prefix-size`` tokens begin every hypothesis (0: all). Sampling depends on the
        number. Lines are searched for several at once, *together* or as many as the batch size
        allows.
        """
        dictionary: Dictionary = self.task.source_dictionary
        # fairseq reads `<s>` in place of `</s>`, not before it.
        start = [dictionary.eos()] if self.models[0].begin is None else []
        # A dictionary without padding, such as GPT-2's, has the index -1, which would be the last
        # word.
        forbidden = [dictionary.pad()] if dictionary.pad() >= 0 else []
        together = together or max(1, self.batch_size // (cfg.beam or 1))

        def longest(line: tuple[int, list[int]]) -> int:
            # fairseq limits a text by a · (tokens of the source) + b; its default is 0 · x + 200.
            return int((cfg.max_len_a or 0) * len(line[1])) + (LONGEST_TEXT if cfg.max_len_b is None else cfg.max_len_b)

        for max_len, alike in itertools.groupby(lines, key=longest):
            search = Search(
                max_len,
                temperature=cfg.temperature if cfg.sampling else 0.0,
                top_k=cfg.sampling_topk,
                top_p=cfg.sampling_topp,
                beam=cfg.beam or 1,
                eos=dictionary.eos() if dictionary.stop() < 0 else dictionary.stop(),
                min_tokens=1 if cfg.min_len is None else cfg.min_len,
                lenpen=1.0 if cfg.lenpen is None else cfg.lenpen,
                no_repeat_ngram=cfg.no_repeat_ngram_size or 0,
            )
            while batch := list(itertools.islice(alike, together)):
                found = generate(
                    self.models,
                    [[*start, *line[: cfg.prefix_size or len(line)]] for _, line in batch],
                    search,
                    generators=lambda index, batch=batch: generator_of(self.seed, batch[index][0], 0),  # type: ignore[misc]
                    batch_size=len(batch) * search.beam,
                    forbidden=forbidden,
                )
                yield from ((batch[index][0], texts) for index, texts in sorted(found, key=lambda item: item[0]))

    def lines_of(
        self, cfg: GenerationConfig, number: int, line: Sequence[int], found: Sequence[Hypothesis], target: bool
    ) -> Iterator[str]:
        """fairseq's lines of text *number*: ``S-``, with *target* ``T-``, then ``H-``, ``D-`` and
        ``P-`` of each hypothesis, with scores to base 2.

        ``D-`` has plain text where the data has a tokenizer; the others have symbols.
        """
        dictionary: Dictionary = self.task.source_dictionary
        yield f"S-{number}\t{dictionary.string(line)}"
        if target:
            yield f"T-{number}\t{dictionary.string(line)}"
        for hypothesis in found[: cfg.nbest or 1]:
            text = dictionary.string(hypothesis.tokens, cfg.remove_bpe)
            score = hypothesis.score / math.log(2)
            yield f"H-{number}\t{score}\t{text}"
            if self.detokenizer.tokenizer is not None:
                text = self.detokenizer.decode(hypothesis.tokens[:-1])  # without </s>
            yield f"D-{number}\t{score}\t{text}"
            yield f"P-{number}\t" + " ".join(f"{lprob / math.log(2):.4f}" for lprob in hypothesis.lprobs)

    def warn_of_length(self, prompts: dict[str, int]) -> None:
        """Log once the prompts, given as name → tokens,
        that exceed the attention distance of a model."""
        long = [f"{name} ({length} tokens)" for name, length in prompts.items() if length > self.window]
        if long:
            more = f" and {len(long) - 3} more" if len(long) > 3 else ""
            logger.warning(
                "%s%s: longer than segment and memory of the model, %d tokens",
                ", ".join(long[:3]),
                more,
                self.window,
            )


def search_of(cfg: GenerationConfig) -> Search:
    """The search that the flags describe.

    Raises:
        UserError: flags contradict each other.
    """
    if cfg.without_effect:
        what = "fairseq's lines, whose length `max_len_a` and `max_len_b` limit"
        what = what if cfg.finds_hypotheses else "`results_format` text"
        logger.warning("%s: no effect on %s", ", ".join(f"`{name}`" for name in cfg.without_effect), what)
    beam = cfg.beam or 1
    if cfg.finds_hypotheses and (cfg.nbest or 1) > beam:
        raise UserError(f"`nbest` {cfg.nbest}: a beam has {beam} hypotheses; raise `beam`")
    if cfg.samples:
        if beam > 1 and not cfg.finds_hypotheses:
            raise UserError(f"`beam` {beam} `sampling`: beam search does not sample; give one of the two")
        return Search(cfg.max_new_tokens, cfg.temperature, cfg.sampling_topk, cfg.sampling_topp)
    choices = {
        "`sampling_topk`": cfg.sampling_topk != 0,
        "`sampling_topp`": cfg.sampling_topp != 1,
        "`temperature`": cfg.temperature != 1,
    }
    # Flags that change nothing are errors: a user who gave them expects an effect.
    for flag in (flag for flag, is_chosen in choices.items() if is_chosen):
        raise UserError(f"{flag}: has no effect without `sampling`; add it")
    return Search(cfg.max_new_tokens, temperature=0.0, beam=beam)


def check_samples(cfg: GenerationConfig, each: int, texts: int = 1) -> None:
    """Reject *each* continuations of *texts* if one text's would be equal, or all be more than a
    run can generate.

    Raises:
        UserError: there is no sampling, or the continuations
            have more than :data:`MOST_TOKENS` tokens.
    """
    if texts * each * cfg.max_new_tokens > MOST_TOKENS:
        raise UserError(
            f"`num_samples`: {texts * each} continuations of `max_new_tokens` {cfg.max_new_tokens} are more than "
            f"{MOST_TOKENS:,} tokens; lower one of them"
        )
    if each > 1 and not cfg.samples:
        raise UserError(f"`num_samples`: {each} continuations of one text are equal without `sampling`; add it")
