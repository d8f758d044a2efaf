"""Memory for blocks and batches does not grow with the lines, only with the blocks."""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from benchmarks.corpus import measure, write_corpus
from fairseq.data import samplers, token_blocks
from fairseq.data.indexed_dataset import IndexedCorpus, IndexedWriter, JoinedCorpus
from fairseq.data.samplers import Batching
from fairseq.data.token_blocks import TokenBlocks
from fairseq.system import lazy_array, stored_array

LINES = 100_000  # a file
LINE, BLOCK = 10, 400  # tokens


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[int, JoinedCorpus]:
    """The same lines once and five times; every 41st is the end of a document."""
    prefix = str(tmp_path_factory.mktemp("data") / "train")
    sizes = np.full(LINES, LINE, np.int32)
    sizes[40::41] = 1
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.add(np.full(int(sizes.sum()), 4, np.uint16), sizes)
    return {count: JoinedCorpus([IndexedCorpus(prefix) for _ in range(count)]) for count in (1, 5)}


def bytes_a_line(corpora: dict[int, JoinedCorpus], mode: str) -> tuple[float, float]:
    """Bytes that blocks and batches take for each further line: at their peak, and to the end."""
    used = {}
    for count, corpus in corpora.items():
        gc.collect()
        tracemalloc.start()
        blocks = TokenBlocks(corpus, BLOCK, mode, pad=1, eos=2)
        sampler = Batching(4 * BLOCK, None).blocks(blocks.sizes, by_size=mode != "none")
        assert blocks.batch(next(sampler.epoch(1)))["ntokens"] > 0
        used[count] = np.array(tracemalloc.get_traced_memory()[::-1])
        tracemalloc.stop()
    peak, kept = (used[5] - used[1]) / (4 * LINES)
    return peak, kept


@pytest.mark.parametrize(("mode", "peak", "kept"), [
    ("none", 1.0, 0.5), ("complete", 1.0, 0.5), ("complete_doc", 2.0, 1.0), ("eos", 14.0, 9.0),
])  # fmt: skip
def test_memory_grows_with_blocks_and_not_with_lines(
    corpora: dict[int, JoinedCorpus], monkeypatch: pytest.MonkeyPatch, mode: str, peak: float, kept: float
) -> None:
    for module in (lazy_array, samplers, stored_array, token_blocks):
        monkeypatch.setattr(module, "_PIECE", 1 << 12)
    found = bytes_a_line(corpora, mode)
    assert found[0] < peak and found[1] < kept
    assert "offsets" not in vars(corpora[5])


def test_the_benchmark_measures_every_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", os.preadv)  # the benchmark counts its calls, in a process of its own
    write_corpus(tmp_path / "data", 3, 4000, notes=True)
    eos = measure(tmp_path / "data", "eos", notes=False, tokens=64)
    assert eos["blocks"] == 4000 and eos["reads"] >= 8
    assert measure(tmp_path / "data", "complete", notes=True, tokens=64)["reads"] <= 8 * 4 * 2
