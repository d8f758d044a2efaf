"""Speed of training of two checkouts of this repository on a CPU, some updates each in turns.

    python -m benchmarks.in_turns CHECKOUT [--rounds 11] [--updates 6] \
        [--cases "Shortformer, bf16" …]

CHECKOUT is the older one, as ``git worktree add CHECKOUT COMMIT`` makes it. Each of the two has one
process, with the cases of ``benchmarks.language_model`` and ``benchmarks.transformer_xl``; only one
computes at a time. Medians of the rounds, and the median of the rounds' ratios with its quartiles.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The models of the two programs, as flags: an older checkout may build them otherwise.
FLAGS = {
    "Shortformer": """--arch shortformer_wiki103 --decoder-layers 4 --decoder-embed-dim 256 --decoder-attention-heads 4
        --decoder-ffn-embed-dim 1024 --adaptive-softmax-cutoff 2000,8000 --adaptive-input-cutoff 2000,8000
        --criterion adaptive_loss --optimizer nag --lr 0.01 --clip-norm 0.1 --tokens-per-sample 128
        --required-batch-size-multiple 1 --max-tokens 2048 --seed 1 --cpu""",
    "Transformer-XL": """--arch transformer_xl --n-layer 4 --d-model 256 --n-head 4 --d-inner 1024 --cutoffs 2000,8000
        --tokens-per-sample 128 --mem-len 128 --criterion cross_entropy --optimizer adam --lr 0.00025 --clip-norm 0.25
        --batch-size 16 --required-batch-size-multiple 1 --cpu""",
}
CASES = tuple(f"{model}, {precision}" for model in FLAGS for precision in ("bf16", "fp32"))


def serve(folder: str) -> None:
    """Train where the process's checkout is: for each line on stdin, a case and a number of
    updates, print tokens/s."""
    from fairseq.system.allocator import keep_freed_memory

    keep_freed_memory()
    trained: dict[str, tuple[Any, Iterator[Any]]] = {}
    for line in sys.stdin:
        name, _, updates = line.rpartition(" ")
        if name not in trained:
            trained[name] = _start(name, Path(folder))
        train, samples = trained[name]
        tokens, start = 0, time.perf_counter()
        for sample in itertools.islice(samples, int(updates)):
            tokens += sample["ntokens"]
            train([sample])
        print(tokens / (time.perf_counter() - start), flush=True)


def _start(name: str, folder: Path) -> tuple[Any, Iterator[Any]]:
    """A function that trains the case *name* on a list of batches, and its batches."""
    import torch

    # Imported here, where the checkout is known.
    from fairseq.config import options
    from fairseq.config.settings import training_settings
    from fairseq.distributed import World
    from fairseq.tasks import setup_task
    from fairseq_cli.common import get_training_parser

    model_name, precision = name.split(", ")
    flags = [str(folder), *FLAGS[model_name].split(), *(["--bf16"] if precision == "bf16" else [])]
    settings = training_settings(options.parse_args_and_arch(get_training_parser(), flags))
    device = torch.device("cpu")
    torch.manual_seed(1)
    task = setup_task(settings)
    model = task.build_model(settings)
    criterion = task.build_criterion(settings)
    parts = (settings, task, model, criterion, World(device=device))
    train: Any
    try:
        from fairseq.training import TrainingState
        from fairseq.training.update import update

        train = functools.partial(update, TrainingState(*parts))
    except ImportError:  # until 0.9
        train = importlib.import_module("fairseq.training.trainer").Trainer(*parts).train_step
    batches = task.iterator("train", model, criterion, training=True, device=device)
    return train, itertools.chain.from_iterable(itertools.repeat(batches))


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="folder of the older checkout")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=6, help="updates of a turn (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="what is trained (default: all)")
    args = parser.parse_args()
    if not (args.checkout / "fairseq").is_dir():
        parser.error(f"CHECKOUT {args.checkout}: expected a checkout of this repository")
    from benchmarks import language_model

    print("| training | old, tokens/s | new, tokens/s | new / old (quartiles) |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        language_model.make_corpus(Path(folder), 19_768)
        checkouts = (args.checkout.resolve(), Path(__file__).resolve().parents[1])
        processes = [_process(checkout, folder) for checkout in checkouts]
        for case in args.cases:
            rounds = [
                [_turn(process, case, args.updates if number else 3) for process in processes]
                for number in range(args.rounds + 1)
            ][1:]  # the first warms up
            low, middle, high = statistics.quantiles([new / old for old, new in rounds], n=4)
            old, new = (statistics.median(column) for column in zip(*rounds, strict=True))
            print(f"| {case} | {old:,.0f} | {new:,.0f} | {middle:.2f} ({low:.2f}–{high:.2f}) |", flush=True)
        for process in processes:
            process.communicate()


def _process(checkout: Path, folder: str) -> subprocess.Popen[str]:
    # This file as text: the older checkout may not have it.
    command = [sys.executable, "-c", Path(__file__).read_text(encoding="utf-8"), "--serve", folder]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    return subprocess.Popen(
        command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _turn(process: subprocess.Popen[str], case: str, updates: int) -> float:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{case} {updates}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


if __name__ == "__main__":
    main()
