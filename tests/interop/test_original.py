"""Leaf modules under fairseq's names compute what the original computes.

Its answers to a few calls are recorded (``python tests/interop/test_original.py``). It is also
called as an oracle, with many arguments: ``python -m scripts.fairseq_original`` downloads it, and
without it these tests are skipped.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import original_scenarios
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.fairseq_original import cache

needs_original = pytest.mark.skipif(
    not (cache() / "fairseq").is_dir(), reason="no original; run python -m scripts.fairseq_original"
)
RECORDED = Path(__file__).parents[1] / "golden" / "fairseq_0_12" / "leaves.json"
HERE = Path(__file__).parents[1]
ROWS = st.lists(st.lists(st.integers(3, 9), min_size=1, max_size=6), min_size=1, max_size=5)
PADDED = st.integers(1, 6).flatmap(
    lambda length: st.lists(
        st.tuples(st.lists(st.integers(2, 9), min_size=length, max_size=length), st.integers(0, length - 1)),
        min_size=1,
        max_size=3,
    ).map(lambda rows: [row[: len(row) - pad] + [1] * pad for row, pad in rows])
)
SAMPLES = st.recursive(
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(sum),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
TEXTS = st.lists(st.sampled_from(["a", "b@@", "▁c", "d_EOW", "<SIL>", "_", "|", "x"]), max_size=6).map(" ".join)
PAIR = st.lists(st.integers(1, 9), min_size=2, max_size=2)
NUMBERS = st.floats(-50, 50, allow_nan=False, width=32)
SCENARIOS: dict[str, list[Any]] = {
    "collate_tokens": [ROWS, st.booleans(), st.booleans(), st.none() | st.integers(1, 9), st.integers(1, 4)],
    "post_process": [
        TEXTS,
        st.sampled_from([None, "none", *original_scenarios.SUBWORDS]),
    ],
    "masks": [st.lists(st.integers(1, 6), min_size=1, max_size=4)],
    "numbers_of_seeds": [st.integers(0, 1 << 20), st.lists(st.integers(0, 99), max_size=3)],
    "positions": [PADDED, st.booleans()],
    "perplexity": [st.floats(-5, 3000), st.integers(0, 4), st.sampled_from([2, 10])],
    "applied": [SAMPLES],
    "limits": [st.lists(st.none() | st.integers(1, 99), max_size=4) | st.lists(st.none() | PAIR, max_size=3)],
    "literals": [st.sampled_from(["[1, 2.5]", "(0.9, 0.98)", "3"])],
    "activations": [
        st.sampled_from(["relu", "relu_squared", "gelu", "gelu_accurate", "tanh", "linear"]),
        st.lists(NUMBERS, min_size=1, max_size=4),
    ],
    "shards": [st.integers(0, 12), st.integers(1, 4), st.integers(1, 5), st.booleans()],
    "epochs": [st.integers(1, 9), st.integers(0, 999), st.just(2), st.integers(0, 1), st.integers(0, 3), st.booleans()],
    "meters": [st.lists(st.tuples(NUMBERS, st.integers(1, 5)), max_size=5), st.none() | st.integers(0, 4)],
    "metrics": [st.lists(st.tuples(st.sampled_from("xyz"), NUMBERS, st.integers(1, 4)), min_size=1, max_size=5)],
    "wrapped": [st.sampled_from(sorted(original_scenarios.WRAPPERS)), ROWS, st.integers(1, 3)],
    "cropped": [ROWS, st.integers(1, 4), st.integers(0, 99), st.integers(0, 9)],
    "concatenated": [ROWS, ROWS, st.lists(st.integers(1, 3), min_size=2, max_size=2)],
    "joined": [ROWS, st.permutations([1, 2, 3])],
    "monolingual": [ROWS, st.none() | st.integers(1, 9), st.none() | st.integers(1, 6)],
    "nested": [ROWS, st.booleans()],
    "pairs": [ROWS, st.booleans(), st.booleans()],
    "smoothed": [
        st.lists(st.lists(NUMBERS, min_size=4, max_size=4), min_size=2, max_size=2),
        st.lists(st.integers(0, 3), min_size=2, max_size=2),
        st.sampled_from([0.0, 0.1, 0.5]),
        st.booleans(),
    ],
    "embedded": [PADDED, st.sampled_from([4, 6]), st.booleans()],
    "attention": [st.integers(0, 99), st.integers(1, 5), st.integers(0, 2), *[st.booleans()] * 3],
    "words": [
        st.lists(TEXTS, min_size=1, max_size=4),
        st.sampled_from([-1, 1, 2]),
        st.sampled_from([-1, 6, 20]),
        st.sampled_from([1, 8]),
    ],
}  # fmt: skip


@contextlib.contextmanager
def calling_the_original() -> Iterator[Callable[..., Any]]:
    """Calls a scenario in a process with the original."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "original_worker.py"), str(cache())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
    )
    assert process.stdin is not None and process.stdout is not None
    sink, source = process.stdin, process.stdout

    def call(name: str, arguments: list[Any]) -> Any:
        content = pickle.dumps((name, arguments))
        sink.write(struct.pack("Q", len(content)) + content)
        sink.flush()
        kind, answer = pickle.loads(source.read(*struct.unpack("Q", source.read(8))))
        assert kind == "value", f"the original: {answer}"
        return answer

    with process:
        yield call
        sink.close()


@pytest.fixture(scope="module")
def original() -> Iterator[Callable[..., Any]]:
    with calling_the_original() as call:
        yield call


def try_examples(name: str, count: int, use: Callable[[tuple[Any, ...]], None]) -> None:
    @settings(
        max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )
    @given(st.tuples(*SCENARIOS[name]))
    def use_each(arguments: tuple[Any, ...]) -> None:
        use(arguments)

    use_each()


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_has_the_recorded_values_of_the_original(name: str) -> None:
    torch.set_num_threads(1)
    recorded = json.loads(RECORDED.read_text())[name]
    assert len(recorded) > 2
    for arguments, expected in recorded:
        same(getattr(original_scenarios, name)(*arguments), expected)


@needs_original
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_has_the_values_of_the_original(name: str, original: Callable[..., Any]) -> None:
    torch.set_num_threads(1)

    def compare(arguments: tuple[Any, ...]) -> None:
        same(getattr(original_scenarios, name)(*arguments), original(name, list(arguments)))

    try_examples(name, 15, compare)


def same(found: Any, expected: Any) -> None:
    """Fail unless both have one structure, with numbers equal up to rounding."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            same(found[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), (found, expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5, nan_ok=True)
    else:
        assert found == expected


def record() -> None:
    """Write the answers of the original to a few calls of each scenario."""
    found: dict[str, list[Any]] = {name: [] for name in SCENARIOS}
    with calling_the_original() as call:
        for name, answers in found.items():
            try_examples(name, 12, lambda given, n=name, a=answers: a.append([given, call(n, list(given))]))
    lines = [f"{json.dumps(name)}: {json.dumps(answers)}" for name, answers in found.items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    record()
