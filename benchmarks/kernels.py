"""Speed of training on a CPU without and with the kernels in C, in turns in one process.

    python -m benchmarks.kernels [--rounds 5] [--updates 8] [--cases "Shortformer, bf16" …]

Without them torch's operators run, as on a machine without a compiler. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import language_model, machine, transformer_xl
from fairseq.config.settings import training_settings
from fairseq.distributed import World
from fairseq.kernels import build
from fairseq.system.allocator import keep_freed_memory
from fairseq.tasks import setup_task
from fairseq.training.state import TrainingState
from fairseq.training.update import update

CPU = torch.device("cpu")
CASES = {
    f"{name}, {case.precision}": (module, case)
    for name, module in (("Shortformer", language_model), ("Transformer-XL", transformer_xl))
    for case in module.CASES
    if case.name.startswith("training")
}


def command(name: str, folder: Path) -> argparse.Namespace:
    """The training command of the case *name*."""
    module, case = CASES[name]
    return module.command(case, folder, full_size=False, device=CPU)


def speeds(args: argparse.Namespace, rounds: int, updates: int) -> dict[bool, list[float]]:
    """Tokens per second, per second of CPU time, and page faults an update, without and with
    kernels: medians."""
    torch.manual_seed(1)
    settings = training_settings(args)
    task = setup_task(settings)
    model = task.build_model(settings)
    criterion = task.build_criterion(settings)
    trainer = TrainingState(settings, task, model, criterion, World(device=CPU))
    samples = itertools.cycle(task.iterator("train", model, criterion, training=True, device=CPU))
    measured: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for turn, kernels in itertools.product(range(rounds + 1), measured):
        with contextlib.nullcontext() if kernels else mock.patch.object(build, "library", lambda *arguments: None):
            found = _speed(trainer, samples, updates if turn else 2)
        if turn:  # the first warms up
            measured[kernels].append(found)
    return {
        kernels: [statistics.median(column) for column in zip(*turns, strict=True)]
        for kernels, turns in measured.items()
    }


def _speed(trainer: TrainingState, samples: Iterator[Any], updates: int) -> tuple[float, ...]:
    tokens, faults = 0, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(updates):
        sample = next(samples)
        tokens += sample["ntokens"]
        update(trainer, [sample])
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return tokens / wall, tokens / processor, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / updates


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=8, help="updates of a turn (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="what is trained (default: all)")
    args = parser.parse_args()
    keep_freed_memory()
    print(machine.describe(CPU))
    print("| | tokens/s without | with | with / without | of CPU time | page faults without | with |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        language_model.make_corpus(Path(name), 19_768)
        for case in args.cases:
            found = speeds(command(case, Path(name)), args.rounds, args.updates)
            (old, old_processor, old_faults), (new, new_processor, new_faults) = found[False], found[True]
            cells = f"{old:,.0f} | {new:,.0f} | {new / old:.2f} | {new_processor / old_processor:.2f}"
            print(f"| {case} | {cells} | {old_faults:,.0f} | {new_faults:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
