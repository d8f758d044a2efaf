"""Processor time of training on a CPU without each part of the kernels in C, and with it.

    OMP_NUM_THREADS=1 python -m benchmarks.kernels [--rounds 5] [--updates 2]
        [--cases "Shortformer, bf16" …] [--parts attention …]

With and without alternate in one process: the ratios hold on a machine that others share. Without a
part torch's operators run, as on a machine without a compiler. Medians and quartiles of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import in_turns, language_model, machine
from fairseq.config import options
from fairseq.config.settings import training_settings
from fairseq.distributed import World
from fairseq.modules import dispatch, linear, output_layer
from fairseq.system.allocator import keep_freed_memory
from fairseq.tasks import setup_task
from fairseq.training.state import TrainingState
from fairseq.training.update import update
from fairseq_cli.common import get_training_parser

MODERN = """--arch transformer_lm_fast_demo --tokens-per-sample 64 --batch-size 32 --optimizer muon --lr 0.004
    --clip-norm 1.0 --dropout 0 --lr-scheduler wsd --warmup-ratio 0.05 --decay-ratio 0.7 --decay-shape linear
    --rotary-fraction 1.0 --no-token-positional-embeddings --qk-norm --decoder-norm rms --decoder-biases none
    --decoder-gated-ffn --activation-fn silu --decoder-ffn-embed-dim 704 --max-update 1000 --cpu"""
FLAGS = {**in_turns.FLAGS, "modern decoder": MODERN}
CASES = tuple(f"{model}, {precision}" for model in FLAGS for precision in ("bf16", "fp32"))
KERNELS = ("attention", "dropout", "cross_entropy", "layers")
PARTS = ("all", *KERNELS, "oneDNN")


@contextlib.contextmanager
def without(part: str) -> Iterator[None]:
    """Let torch's operators compute what *part* does."""
    is_compiled, left_out = dispatch._is_compiled, KERNELS if part == "all" else (part,)
    with contextlib.ExitStack() as patches:
        if part == "oneDNN":
            for module in (linear, output_layer):
                patches.enter_context(mock.patch.object(module, "is_by_onednn", lambda *tensors: False))
        else:

            def others(name: str) -> bool:
                return name not in left_out and is_compiled(name)

            patches.enter_context(mock.patch.object(dispatch, "_is_compiled", others))
        yield


def start(case: str, folder: str) -> tuple[TrainingState, Iterator[Any]]:
    """The state of a run, and its batches."""
    model_name, precision = case.split(", ")
    flags = [folder, *FLAGS[model_name].split(), *(["--bf16"] if precision == "bf16" else [])]
    settings = training_settings(options.parse_args_and_arch(get_training_parser(), flags))
    torch.manual_seed(1)
    task, device = setup_task(settings), torch.device("cpu")
    model, criterion = task.build_model(settings), task.build_criterion(settings)
    batches = task.iterator("train", model, criterion, training=True, device=device)
    state = TrainingState(settings, task, model, criterion, World(device=device))
    return state, itertools.chain.from_iterable(itertools.repeat(batches))


def seconds(state: TrainingState, samples: list[Any]) -> float:
    """Processor time of one update for each of *samples*."""
    began = time.process_time()
    for sample in samples:
        update(state, [sample])
    return time.process_time() - began


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way, at least 2 (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=2, help="updates of a turn (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="what is trained (default: all)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is left out (default: each)")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: must be at least 2, for quartiles")
    keep_freed_memory()
    print(machine.describe(torch.device("cpu")))
    print("| training | without | time without / with (quartiles) |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        language_model.make_corpus(Path(folder), 19_768)
        for case in args.cases:
            state, batches = start(case, folder)
            samples = list(itertools.islice(batches, args.updates))
            for part in args.parts:
                ratios = []
                for number in range(args.rounds + 1):
                    with without(part):
                        slow = seconds(state, samples)
                    fast = seconds(state, samples)
                    ratios += [slow / fast] if number else []  # the first warms up
                low, middle, high = statistics.quantiles(ratios, n=4)
                print(f"| {case} | {part} | {middle:.2f} ({low:.2f}–{high:.2f}) |", flush=True)


if __name__ == "__main__":
    main()
