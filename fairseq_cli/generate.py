"""Continue passages of a corpus with a language model, and set the continuations beside what really follows."""

from __future__ import annotations

import argparse
import functools
import io
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fairseq import config, distributed, options
from fairseq.errors import UserError
from fairseq.evaluation import load_models, report
from fairseq.generation import Decoding, continuations, generator_of, passages, stream
from fairseq.generation.passages import Passage
from fairseq.generation.predictor import Autocast, can_generate, reach
from fairseq.generation.text import Writing, never_written, writing_of
from fairseq.models import BaseFairseqModel
from fairseq.precision import Precision
from fairseq.settings import CommonConfig, GenerateConfig, GenerationConfig
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.trainer import parse_dict
from fairseq_cli.common import checkpoint_paths, log_to_stderr, progress

logger = logging.getLogger(__name__)


def main(args: argparse.Namespace) -> list[Passage]:
    """Continue contexts of ``--gen-subset``; the texts go to stdout and to ``--results-path``, progress to stderr.

    Raises:
        UserError: flags contradict each other, or a checkpoint or the data cannot be used.
    """
    cfg, common = config.extract(GenerateConfig, args), config.extract(CommonConfig, args)
    paths, contexts = checkpoint_paths(cfg), _contexts(cfg)
    if cfg.results_path is not None:
        report.prepare_folder("--results-path", Path(cfg.results_path))
    writer = Writer.load(args, cfg)
    tokens = writer.task.corpus(cfg.gen_subset).tokens  # type: ignore[attr-defined]
    length, new = cfg.context_tokens, cfg.max_new_tokens
    starts = passages.draw_starts(len(tokens), length, new, contexts, common.seed)
    writer.warn_of_length({"--context-tokens": length})
    prompts = [tokens[start : start + length].tolist() for start in starts]
    each = cfg.num_samples // contexts
    begin = time.perf_counter()
    texts = dict(writer.continue_all(prompts, each, progress(args, "tokens")))
    seconds = time.perf_counter() - begin

    found: list[Passage] = []
    for (number, sample), text in sorted(texts.items()):
        start = starts[number]
        reference = tokens[start + length : start + length + new].tolist()
        parts = passages.parts_of(writer.writing, prompts[number], text, reference)
        found.append(Passage(len(found) + 1, start, sample + 1, *parts))
    if cfg.results_path is not None:
        about = {
            "checkpoints": paths,
            **_about(args, cfg, writer),
            "seconds": seconds,
            "tokens_per_second": len(found) * new / seconds,
        }
        passages.write_results(Path(cfg.results_path), found, about)
    print(passages.as_text(found, cfg.gen_subset), flush=True)
    return found


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
    def load(cls, args: argparse.Namespace, cfg: GenerationConfig) -> Writer:
        """The models of ``--path``.

        Raises:
            UserError: flags contradict each other, or a checkpoint or the dictionary cannot be used.
        """
        how, paths = decoding(cfg), checkpoint_paths(cfg)
        common = config.extract(CommonConfig, args)
        if common.compile:
            raise UserError("--compile: generation reads token by token and is not compiled; leave it out")
        device, precision = distributed.device_of(args), Precision(args)
        overrides = parse_dict("--model-overrides", cfg.model_overrides)
        models, task, _ = load_models(paths, args.data, overrides, args)
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
        self, prompts: Sequence[Sequence[int]], samples: int, progress: Any
    ) -> Iterator[tuple[tuple[int, int], list[int]]]:
        """*samples* texts for each prompt, each as soon as it is complete: ((prompt, sample), tokens)."""
        keys = [(number, sample) for number in range(len(prompts)) for sample in range(samples)]
        texts = continuations(
            self.models,
            [prompts[number] for number, _ in keys],
            self.how,
            generators=[generator_of(self.seed, *key) for key in keys],
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


def _contexts(cfg: GenerateConfig) -> int:
    """How many different contexts there are."""
    contexts = cfg.num_contexts or cfg.num_samples
    if cfg.num_samples % contexts:
        raise UserError(
            f"--num-samples {cfg.num_samples}: must be a multiple of --num-contexts {contexts}, "
            "so that each context has as many continuations"
        )
    check_samples(cfg, cfg.num_samples // contexts)
    return contexts


def _about(args: argparse.Namespace, cfg: GenerateConfig, writer: Writer) -> dict[str, Any]:
    names = ["context_tokens", "max_new_tokens", "num_samples", "num_contexts", "sampling", "sampling_topk"]
    names += ["sampling_topp", "temperature", "beam", "batch_size", "model_overrides"]
    settings = {name: getattr(cfg, name) for name in names}
    flags = {name: bool(getattr(args, name, False)) for name in ("fp16", "bf16", "memory_efficient_fp16")}
    return {
        "data": args.data,
        "split": cfg.gen_subset,
        "device": str(writer.device),
        "settings": {**settings, "seed": writer.seed, **flags},
    }


def escape_what_stdout_lacks() -> None:
    """Let a terminal that has not every character show the rest of a text."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def cli_main() -> None:
    """``fairseq-generate``."""
    log_to_stderr()
    escape_what_stdout_lacks()
    options.run_command(main, options.get_generation_parser)


if __name__ == "__main__":
    cli_main()
