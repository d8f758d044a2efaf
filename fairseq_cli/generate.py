"""Continue passages of a corpus with a language model, and set the continuations beside what really follows."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from fairseq import config, options
from fairseq.errors import UserError
from fairseq.evaluation import report
from fairseq.generation import passages
from fairseq.generation.passages import Passage
from fairseq.generation.writer import Writer, check_samples
from fairseq.settings import CommonConfig, GenerateConfig
from fairseq_cli.common import checkpoint_paths, escape_what_stdout_lacks, log_to_stderr, progress


def main(args: argparse.Namespace) -> list[Passage]:
    """Continue contexts of ``--gen-subset``; the texts go to stdout and to ``--results-path``, progress to stderr.

    Raises:
        UserError: flags contradict each other, or a checkpoint or the data cannot be used.
    """
    cfg, common = config.extract(GenerateConfig, args), config.extract(CommonConfig, args)
    paths, contexts = checkpoint_paths(cfg), _contexts(cfg)
    if cfg.results_path is not None:
        report.prepare_folder("--results-path", Path(cfg.results_path))
    writer = Writer.load(args, cfg, paths)
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


def cli_main() -> None:
    """``fairseq-generate``."""
    log_to_stderr()
    escape_what_stdout_lacks()
    options.run_command(main, options.get_generation_parser)


if __name__ == "__main__":
    cli_main()
