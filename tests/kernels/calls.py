"""Threads of Python that call all kernels at once, then a fork; each call must give what it gives
alone.

    python tests/kernels/calls.py ROUNDS

Two read with one model, one row and many, which kernels compute by different numbers of threads;
two train.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import runs

from fairseq.hub import LanguageModel
from fairseq.inference import kernels
from fairseq.kernels import attention, cross_entropy, dropout

Call = Callable[[], list[Tensor]]
TASKS = "/proc/self/task"  # a folder for each thread of this process


class Late:
    """A library whose kernels begin after other threads have come as far: what they share would be
    theirs by then."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            time.sleep(1e-4)
            return getattr(self.library, name)(*arguments)

        return call


def reading(model: LanguageModel, rows: int) -> Call:
    """Tokens read one by one by the kernels: hidden states, log-probabilities and the best
    words."""
    tokens = torch.randint(4, len(model.dictionary), (rows, 12), generator=torch.Generator().manual_seed(rows))

    def read() -> list[Tensor]:
        results: list[Tensor] = []
        with torch.inference_mode():
            reader = model.reader()
            cache = reader.new_cache(rows)
            for column in tokens.t():
                hidden = reader.read(column[:, None], cache)[:, -1]
                results += [hidden, reader.log_probs(hidden), *reader.best(hidden, 5)]
        return results

    return read


def training(dtype: torch.dtype) -> Call:
    """All kernels of training, forward and backward."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, 3, 48, 16, generator=generator).to(dtype) for _ in range(6)]
    wide = torch.randn(96, 1 << 11, generator=generator).to(dtype)
    target = torch.randint(1 << 11, (96,), generator=generator)

    def train() -> list[Tensor]:
        query, distance, key, value, past, past_value = (x.clone().requires_grad_() for x in inputs)
        table = torch.linspace(-1, 1, 3 * 96 * 16).view(3, 96, 16).to(dtype).requires_grad_()
        keys, values, x = [past, key], [past_value, value], wide.clone().requires_grad_()
        attended = [
            attention.attention(query, keys, values, None, 0.1, causal=True),
            attention.relative_attention(query, distance, keys, values, table, None, 0.1),
        ]
        results = [
            *attended,
            dropout.dropout(x, 0.3),
            dropout.dropout(x, 0.3, wide),
            dropout.dropout(x, 0.3, None, True),
        ]
        leaves = [query, distance, key, value, past, past_value, table, x]
        gradients = torch.autograd.grad([y.float().square().sum() for y in results], leaves)
        logits = wide.clone()
        return [*results, *gradients, cross_entropy.cross_entropy(logits, target, True), logits]

    return train


def main(rounds: int) -> None:
    """Exit with a message where a result differs."""
    torch.set_num_threads(2)
    # Noise is drawn from one generator for all threads; here each has the same.
    dropout.draw_seed = lambda: torch.tensor(7)
    model = LanguageModel.from_pretrained(runs.GOLDEN / "shortformer_stage2.pt", runs.DATA)
    packed = model.reader().packed
    if packed is None:
        sys.exit("no compiled kernels")
    packed.library = Late(packed.library)  # type: ignore[assignment]
    # One row is read by one thread, 16 by two.
    kernels.LEAST_WORK = 4 * packed.layer_size
    calls = [reading(model, 1), reading(model, 16), training(torch.float32), training(torch.bfloat16)]
    expected = [call() for call in calls]
    differing: list[int] = []
    errors: list[threading.ExceptHookArgs] = []
    threading.excepthook = errors.append

    def repeat(number: int) -> None:
        for _ in range(rounds):
            if not all(map(torch.equal, calls[number](), expected[number])):
                differing.append(number)

    before = len(os.listdir(TASKS))
    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if differing or errors:
        sys.exit(f"differing results of calls {sorted(set(differing))}, errors {errors}")
    # OpenMP's threads end after those of Python that they computed for. A process that is forked
    # meanwhile waits for ever, now and then, as for a lock that one of them held.
    while len(os.listdir(TASKS)) > before:
        time.sleep(0.01)
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends a child that waits for threads of its parent
        # By one thread: sums are in another order.
        pairs = (pair for i in (0, 2) for pair in zip(calls[i](), expected[i], strict=True))
        close = [torch.allclose(found, wanted, atol=1e-5) for found, wanted in pairs]
        os._exit(0 if all(close) else 1)
    if os.waitpid(child, 0)[1]:
        sys.exit("a forked process computes something else, or waits")


if __name__ == "__main__":
    main(int(sys.argv[1]))
