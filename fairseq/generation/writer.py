"""Models that write for a command: made from its flags, they continue prompts."""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fairseq import config, distributed
from fairseq.config import parse_dict
from fairseq.errors import UserError
from fairseq.generation.decoding import Decoding
from fairseq.generation.predictor import Autocast, can_generate, reach
from fairseq.generation.sampling import Progress, continuations, generator_of, stream
from fairseq.generation.text import Writing, never_written, writing_of
from fairseq.models import BaseFairseqModel
from fairseq.modules.precision import Precision
from fairseq.settings import CommonConfig, GenerationConfig
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.tasks.loading import load_language_models

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Writer:
    """Models that write, and all that writing needs.

    Attributes:
        how: what comes next; ``seed`` and a text's number decide what chance does.
        writing: text ⇄ tokens.
        autocast: the forward pass's precision.
    """

    models: list[BaseFairseqModel]
    task: FairseqTask
    how: Decoding
    seed: int
    batch_size: int
    writing: Writing
    autocast: Autocast
    device: torch.device

    @classmethod
    def load(cls, args: argparse.Namespace, cfg: GenerationConfig, paths: Sequence[str]) -> Writer:
        """The models of the checkpoints *paths*.

        Raises:
            UserError: flags contradict each other, or a checkpoint or the dictionary cannot be used.
        """
        how, common = decoding(cfg), config.extract(CommonConfig, args)
        if common.compile:
            raise UserError("--compile: generation reads token by token and is not compiled; leave it out")
        device, precision = distributed.device_of(args), Precision(args)
        overrides = parse_dict("--model-overrides", cfg.model_overrides)
        models, task, _ = load_language_models(paths, args.data, overrides, args)
        for path, model in zip(paths, models, strict=True):
            if not can_generate(model):
                raise UserError(f"--path {path}: {type(model).__name__} has no key-value cache and cannot generate")
            precision.place(model, device)
        writing = writing_of(task.source_dictionary, cfg.remove_bpe)
        autocast = functools.partial(precision.autocast, device)
        return cls(models, task, how, common.seed, cfg.batch_size, writing, autocast, device)

    @functools.cached_property
    def forbidden(self) -> list[int]:
        """Symbols that are never written."""
        return never_written(self.task.source_dictionary)

    @functools.cached_property
    def window(self) -> int:
        """How many tokens every model can look back."""
        with torch.inference_mode():
            return min(reach(model) for model in self.models)

    def continue_one(self, prompt: Sequence[int], number: int, sample: int) -> Iterator[int]:
        """The tokens of one text as they are chosen."""
        generator = generator_of(self.seed, number, sample)
        return stream(
            self.models, prompt, self.how, generator=generator, forbidden=self.forbidden, autocast=self.autocast
        )

    def continue_all(
        self, prompts: Sequence[Sequence[int]], samples: int, progress: Progress
    ) -> Iterator[tuple[tuple[int, int], list[int]]]:
        """*samples* texts for each prompt, each as soon as it is complete: ((prompt, sample), tokens)."""
        keys = [(number, sample) for number in range(len(prompts)) for sample in range(samples)]
        texts = continuations(
            self.models,
            [prompts[number] for number, _ in keys],
            self.how,
            generators=lambda index: generator_of(self.seed, *keys[index]),
            batch_size=self.batch_size,
            forbidden=self.forbidden,
            autocast=self.autocast,
            progress=progress,
        )
        return ((keys[index], tokens) for index, tokens in texts)

    def warn_of_length(self, prompts: dict[str, int]) -> None:
        """Say once which prompts, given as name → tokens, are longer than all that a model can look back to."""
        long = [f"{name} ({length} tokens)" for name, length in prompts.items() if length > self.window]
        if long:
            more = f" and {len(long) - 3} more" if len(long) > 3 else ""
            logger.warning(
                "%s%s: longer than the %d tokens of segment and memory that the model looks back",
                ", ".join(long[:3]),
                more,
                self.window,
            )


def decoding(cfg: GenerationConfig) -> Decoding:
    """What the flags ask for.

    Raises:
        UserError: they contradict one another.
    """
    if cfg.sampling:
        if cfg.beam > 1:
            raise UserError(
                f"--beam {cfg.beam} --sampling: a beam search draws nothing at random; choose one of the two"
            )
        return Decoding(cfg.max_new_tokens, cfg.temperature, cfg.sampling_topk, cfg.sampling_topp)
    given = {
        "--sampling-topk": cfg.sampling_topk != 0,
        "--sampling-topp": cfg.sampling_topp != 1,
        "--temperature": cfg.temperature != 1,
    }
    for flag in (flag for flag, is_given in given.items() if is_given):
        raise UserError(f"{flag}: has no effect without --sampling; add it")
    return Decoding(cfg.max_new_tokens, temperature=0.0, beam=cfg.beam)


def check_samples(cfg: GenerationConfig, each: int) -> None:
    """Refuse several continuations of one text where they would all be the same."""
    if each > 1 and not cfg.sampling:
        raise UserError(f"--num-samples: {each} continuations of one text are the same without --sampling; add it")
