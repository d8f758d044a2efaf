"""Start-up and memory of training on a corpus of many files and lines.

``python -m benchmarks.corpus --shards 2000 --lines 50000000 --folder DIR`` writes a synthetic
corpus to DIR once, and measures each break mode in a process of its own, as one rank of training:
from opening the folder to the first batch, under ``ulimit -n 1024``. Lines of the table are JSON
objects.

Figures: ``startup`` (s) from the task to the batches of the first epoch, ``cpu`` (s) its processor
time; ``first`` (s) and ``batch`` (ms) for one batch; ``rss`` and ``peak`` (MiB) of the process, of
which ``imports`` are there before the data are opened;
``descriptors`` open at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import describe, peak_rss
from fairseq.config import options
from fairseq.data.indexed_dataset import IndexedWriter
from fairseq.notes.spans import write_spans
from fairseq.notes.words import NoteWords
from fairseq.system import checksums
from fairseq.tasks import setup_task
from fairseq.text.dictionary import Dictionary
from fairseq_cli.common import get_training_parser

MODES = ("none", "complete", "complete_doc", "eos")
WORDS = 8000
BATCHES = 20
DOCUMENT = 50  # lines
LANGUAGE_MODEL = "--task language_modeling --criterion cross_entropy --arch transformer_lm_tiny --decoder-layers 1"
NOTES = "--task tnf_masked_lm --criterion masked_lm --arch tnf_bert_tiny --encoder-layers 1"


def write_corpus(folder: Path, shards: int, lines: int, notes: bool) -> None:
    """Write *lines* lines of 2 to 40 tokens, an empty one after every :data:`DOCUMENT`, to *shards*
    files."""
    folder.mkdir(parents=True)
    dictionary = Dictionary()
    dictionary.update({f"w{n:05d}": 9 for n in range(WORDS)})
    dictionary.save(folder / "dict.txt")
    words = NoteWords(tuple(f"w{n:05d}" for n in range(1000)), (9,) * 1000)
    if notes:
        words.save(folder)
    random = np.random.default_rng(1)
    ranges: dict[str, tuple[int, str]] = {}
    for shard in range(shards):
        sizes = random.integers(2, 41, lines * (shard + 1) // shards - lines * shard // shards, dtype=np.int32)
        sizes[DOCUMENT - 1 :: DOCUMENT] = 1
        tokens = random.integers(dictionary.nspecial, len(dictionary), int(sizes.sum()), dtype=np.uint16)
        tokens[np.cumsum(sizes) - 1] = dictionary.eos()
        for split in (f"train{shard or ''}", *(["valid"] if shard == 0 else [])):
            with IndexedWriter(folder / split, tokens.dtype) as writer:
                writer.add(tokens, sizes)
            if notes:
                numbers = np.where(tokens < len(words), tokens, 0)
                write_spans(folder / split, words, dictionary, [(numbers, np.ones(len(tokens), bool))])
            ranges[f"{split}.bin"] = int(tokens.max()), dictionary.digest()
    checksums.record(folder, folder, ranges)


def measure(folder: Path, mode: str, notes: bool, tokens: int) -> dict[str, Any]:
    """Open *folder* as one rank of training and read batches."""
    flags = f"{folder} --cpu --sample-break-mode {mode} --tokens-per-sample {tokens} --max-tokens {8 * tokens}"
    flags += f" --max-sentences-valid 8 --required-batch-size-multiple 1 {NOTES if notes else LANGUAGE_MODEL}"
    args = options.parse_args_and_arch(get_training_parser(), flags.split())
    imports = _rss()
    start, before = time.perf_counter(), time.process_time()
    task = setup_task(args)
    model = task.build_model(args)
    batches = task.iterator("train", model, task.build_criterion(args), training=True)
    batches.open()
    startup, cpu = time.perf_counter() - start, time.process_time() - before
    epoch = iter(batches)
    start = time.perf_counter()
    next(epoch)
    first = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(BATCHES):
        next(epoch)
    return {
        "mode": mode,
        "blocks": len(batches.dataset),
        "startup": round(startup, 1),
        "cpu": round(cpu, 1),
        "first": round(first, 2),
        "batch": round((time.perf_counter() - start) / BATCHES * 1e3, 1),
        "imports": round(imports),
        "rss": round(_rss()),
        "peak": round(peak_rss()),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def _rss() -> float:
    """Resident memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the corpus, written if it is not there")
    parser.add_argument("--shards", type=int, default=2000)
    parser.add_argument("--lines", type=int, default=50_000_000)
    parser.add_argument("--tokens-per-sample", type=int, default=512)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--notes", action="store_true", help="masked blocks with notes of rare words")
    parser.add_argument("--descriptors", type=int, default=1024, help="limit of open files")
    parser.add_argument("--measure", choices=MODES, help=argparse.SUPPRESS)  # in the process of a mode
    return parser.parse_args()


def main() -> None:
    """Write the corpus if needed, and print one line for each mode."""
    args = _arguments()
    if args.measure:
        resource.setrlimit(resource.RLIMIT_NOFILE, (args.descriptors, args.descriptors))
        print(json.dumps(measure(args.folder, args.measure, args.notes, args.tokens_per_sample)))
        return
    if not args.folder.exists():
        write_corpus(args.folder, args.shards, args.lines, args.notes)
    print(json.dumps({**describe(torch.device("cpu")), "shards": args.shards, "lines": args.lines}))
    for mode in args.modes.split(","):
        command = [sys.executable, "-m", "benchmarks.corpus", *sys.argv[1:], "--measure", mode]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
