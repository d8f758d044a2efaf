"""The cost of notes: training steps of an encoder with and without them, at equal shape.

    python -m benchmarks.tnf [--arch bert_base] [--layers 12] [--words 200000] [--seconds 60] \
        [--bf16] [--json FILE]

Both models train in one process on the same batches with alternating steps; the result is the
median ratio of pairs of steps. Memory is measured in separate processes. With several ranks the end
of an update is measured: the exchange of touched rows and the update of the table, which must be
equal on all ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import machine
from fairseq.config import options
from fairseq.config.settings import training_settings
from fairseq.data.indexed_dataset import IndexedWriter, token_dtype
from fairseq.distributed import World
from fairseq.models import BaseFairseqModel
from fairseq.notes.dictionary import NoteDictionary
from fairseq.notes.spans import number_dtype, write_spans
from fairseq.notes.state import gather_notes
from fairseq.notes.words import NoteWords
from fairseq.system.allocator import keep_freed_memory
from fairseq.tasks import setup_task
from fairseq.text.dictionary import Dictionary
from fairseq.training.state import TrainingState
from fairseq.training.update import update
from fairseq_cli.common import get_training_parser

VOCABULARY, SUBWORDS, TOKENS = 8192, 3, 1 << 20
PREFIX = "tnf_"


def make_corpus(folder: Path, words: int, share: float, seed: int = 1) -> None:
    """Write random text in which *share* of the words are rare, with three subwords each."""
    rng = np.random.default_rng(seed)
    dictionary = Dictionary()
    for i in range(VOCABULARY - 4):
        dictionary.add_symbol(f"w{i}", max(1, 10**7 // (i + 1)))
    dictionary.save(str(folder / "dict.txt"))
    notes = NoteWords(tuple(f"rare{i}" for i in range(words)), (100,) * words)
    notes.save(folder)
    frequencies = 1 / np.arange(1, VOCABULARY - 3)
    for split, size in (("train", TOKENS), ("valid", 4096)):
        rare = rng.random(size) < share
        lengths = np.where(rare, SUBWORDS, 1)
        numbers = np.repeat(np.where(rare, rng.integers(1, words + 1, size), 0), lengths)[:size]
        begins = np.zeros(lengths.sum(), dtype=bool)
        begins[np.cumsum(lengths) - lengths] = True
        tokens = (rng.choice(VOCABULARY - 4, size, p=frequencies / frequencies.sum()) + 4).astype(np.int64)
        with IndexedWriter(str(folder / split), token_dtype(len(dictionary))) as writer:
            writer.add(tokens, np.full(size // 32, 32, dtype=np.int32))
        write_spans(folder / split, notes, dictionary, [(numbers.astype(number_dtype(words)), begins[:size])])


def trainer_of(arch: str, args: argparse.Namespace, folder: Path, device: torch.device) -> TrainingState:
    """A trainer of *arch* with random weights."""
    task_name = "tnf_masked_lm" if arch.startswith(PREFIX) else "masked_lm"
    flags = [str(folder), "--arch", arch, "--task", task_name, "--sample-break-mode", "none", "--seed", "1"]
    flags += ["--criterion", "electra" if "electra" in arch else "masked_lm", "--optimizer", "adam", "--lr", "1e-4"]
    flags += ["--encoder-layers", str(args.layers), "--tokens-per-sample", str(args.length)]
    flags += ["--batch-size", str(args.rows), "--required-batch-size-multiple", "1", "--clip-norm", "1"]
    flags += ["--bf16"] if args.bf16 else []
    flags += ["--cpu"] if device.type == "cpu" else []
    settings = training_settings(options.parse_args_and_arch(get_training_parser(), flags))
    torch.manual_seed(1)
    task = setup_task(settings)
    return TrainingState(
        settings, task, task.build_model(settings), task.build_criterion(settings), World(device=device)
    )


def batches_of(trainer: TrainingState) -> list[Any]:
    """A few batches for *trainer*."""
    batches = trainer.task.iterator(
        "train", trainer.model, trainer.criterion, training=True, device=trainer.world.device
    )
    return [sample for _, sample in zip(range(8), batches, strict=False)]


def step_times(args: argparse.Namespace, folder: Path, device: torch.device) -> dict[str, Any]:
    """Milliseconds per step of both models, and the ratio of pairs."""
    trainers = [trainer_of(arch, args, folder, device) for arch in (args.arch, PREFIX + args.arch)]
    samples = [batches_of(trainer) for trainer in trainers]
    times: list[list[float]] = [[], []]
    started, number = time.perf_counter(), 0
    while time.perf_counter() - started < args.seconds or number < 5:
        for which in (0, 1) if number % 2 else (1, 0):
            machine.synchronize(device)
            start = time.perf_counter()
            update(trainers[which], [samples[which][number % len(samples[which])]])
            machine.synchronize(device)
            times[which].append(1000 * (time.perf_counter() - start))
        number += 1
    plain, noted = (one[2:] for one in times)
    ratios = [b / a for a, b in zip(plain, noted, strict=True)]
    spans = [sample["net_input"]["spans"].size(0) for sample in samples[1]]
    return {
        "plain_ms": statistics.median(plain),
        "noted_ms": statistics.median(noted),
        "ratio": statistics.median(ratios),
        "steps": len(ratios),
        "spans": statistics.mean(spans),
        "parts_ms": part_times(trainers[1].model, samples[1][0], device),
    }


@torch.no_grad()
def part_times(model: BaseFairseqModel, sample: Any, device: torch.device) -> dict[str, float]:
    """Milliseconds for reading, collecting and writing the notes of one batch."""
    notes = model.notes
    assert isinstance(notes, NoteDictionary)
    net_input = sample["net_input"]
    spans, longest = net_input["spans"], net_input["longest_span"]
    x = torch.randn(*net_input["src_tokens"].shape, notes.table.size(1), device=device)
    lengths = torch.full((x.size(0),), x.size(1), device=device)
    taken = notes.take(x, spans, lengths, longest)
    parts: dict[str, Callable[[], Any]] = {
        "read": lambda: notes.read(x, spans, longest),
        "take": lambda: notes.take(x, spans, lengths, longest),
        "write": lambda: notes.write(*taken),
    }
    return {name: 1000 * machine.best_seconds(part, device, 10) for name, part in parts.items()}


def peak_memory(arch: str, args: argparse.Namespace, folder: Path) -> float:
    """Peak MiB of a process that trains *arch*."""
    flags = ["--peak-of", arch, "--folder", str(folder)]
    flags += [f"--{name}" for name in ("cpu", "bf16") if getattr(args, name)]
    for name in ("layers", "rows", "length"):
        flags += [f"--{name}", str(getattr(args, name))]
    command = [sys.executable, "-m", "benchmarks.tnf", *flags]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def print_peak(args: argparse.Namespace, device: torch.device) -> None:
    """Train ``args.peak_of`` for a few steps, and print the peak memory."""
    trainer = trainer_of(args.peak_of, args, args.folder, device)
    for sample in batches_of(trainer)[:3]:
        update(trainer, [sample])
    print(machine.peak_gpu(device) or machine.peak_rss())


def rank_main(rank: int, ranks: int, words: int, dim: int, spans: int, folder: str) -> None:
    """Measure the end of updates on one of several ranks; rank 0 writes the result."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    world = World(rank, ranks)
    torch.manual_seed(1)
    notes = NoteDictionary(words, dim)
    generator = torch.Generator().manual_seed(rank)
    row = torch.arange(spans) % 8
    first = torch.randint(0, 120, (spans,), generator=generator)
    word = torch.randint(0, words, (spans,), generator=generator)
    hidden = torch.randn(8, 128, dim, generator=generator)
    taken = notes.take(hidden, torch.stack([row, first, first + 3, word], 1), torch.full((8,), 128), 3)
    times = []
    for _ in range(12):
        world.barrier()
        start = time.perf_counter()
        notes.write(*gather_notes((taken,), notes, world))
        times.append(1000 * (time.perf_counter() - start))
    sums = world.gather(float(notes.table.double().sum()), everywhere=True)
    if rank == 0:
        figures = {"ranks": ranks, "end_of_update_ms": statistics.median(times[2:]), "same": len(set(sums)) == 1}
        Path(folder, "ranks.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    args = _parser().parse_args(argv)
    keep_freed_memory()
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    if args.peak_of:
        print_peak(args, device)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_corpus(folder, args.words, args.rare)
        peaks = [peak_memory(arch, args, folder) for arch in (args.arch, PREFIX + args.arch)]
        times = step_times(args, folder, device)
        dim = trainer_width(args)
        if args.ranks > 1:
            occurrences = max(1, round(times["spans"]))
            torch.multiprocessing.spawn(rank_main, (args.ranks, args.words, dim, occurrences, name), args.ranks)
            times |= json.loads((folder / "ranks.json").read_text())
    dictionary = args.words * dim * 4 / 2**20
    results = {**times, "plain_mib": peaks[0], "noted_mib": peaks[1], "dictionary_mib": dictionary}
    _print(results, args)
    report = {"machine": machine.describe(device), "settings": _plain(args), "results": results}
    print(f"\n{json.dumps(report)}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def trainer_width(args: argparse.Namespace) -> int:
    """Channels of the models."""
    settings = options.parse_args_and_arch(
        get_training_parser(), [".", "--arch", args.arch, "--task", "masked_lm", "--criterion", "masked_lm"]
    )
    return int(settings.encoder_embed_dim)


def _print(results: dict[str, Any], args: argparse.Namespace) -> None:
    parts = ", ".join(f"{name} {ms:.2f}" for name, ms in results["parts_ms"].items())
    print(f"| {args.arch}, {args.layers} layers, {args.rows} × {args.length} tokens | without | with notes | |")
    print("|---|---|---|---|")
    print(f"| ms a step | {results['plain_ms']:.1f} | {results['noted_ms']:.1f} | × {results['ratio']:.3f} |")
    more = results["noted_mib"] - results["plain_mib"]
    share = f"{more / results['dictionary_mib']:.2f} of the dictionary's {results['dictionary_mib']:.0f} MiB"
    print(f"| peak MiB | {results['plain_mib']:,.0f} | {results['noted_mib']:,.0f} | + {more:,.0f}: {share} |")
    print(f"| parts, ms | | {parts} | {results['spans']:.0f} occurrences a batch |")
    if "ranks" in results:
        same = "the same table" if results["same"] else "DIFFERENT TABLES"
        print(f"| end of an update, {results['ranks']} ranks, ms | | {results['end_of_update_ms']:.2f} | {same} |")


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if isinstance(value, bool | int | float | str)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="bert_base", help="architecture without notes (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="layers (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--words", type=int, default=200_000, help="rare words (default: %(default)s)")
    parser.add_argument("--rare", type=float, default=0.02, help="share of words that are rare (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="processes that exchange notes (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="duration in seconds (default: %(default)s)")
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU even if a GPU is available")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
