"""The benchmark of inference measures every line of its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import inference
from benchmarks.language_model import make_corpus


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    for paper in inference.VOCABULARIES:
        (folder / paper).mkdir()
        make_corpus(folder / paper, 1000)
    return folder


def test_inference_is_measured_in_every_way_of_the_papers(corpora: Path) -> None:
    cases = inference.cases(small=True)
    results = []
    for case in cases:
        found = inference.measure(case, corpora, bf16=case.mode == "token by token")
        assert len(found["speeds"]) == (1 if case.mode == "generation" else case.blocks) and min(found["speeds"]) > 0
        results.append({"case": vars(case), **found})
    tables = "\n".join(inference.table(results, paper) for paper in inference.VOCABULARIES)
    assert all(f"| {case.name} | " in tables for case in cases)
    published = {case.name: case.published for case in inference.cases(small=False)}
    assert published["Shortformer, token by token"] == pytest.approx(9.2) and published["memory of 3,800"] == 1874


def test_windows_are_measured_where_they_are_full(corpora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    class Blocks(inference.Scorer):
        def _read_blocks(self, model, blocks, collector, progress):  # type: ignore[no-untyped-def]
            read.extend((blocks.sizes + blocks.before).tolist())
            super()._read_blocks(model, blocks, collector, progress)

    monkeypatch.setattr(inference, "Scorer", Blocks)
    for case in inference.cases(small=True):
        if "window" in case.name:
            read.clear()
            inference.measure(case, corpora, bf16=False)
            assert read == [case.length] * (case.before + case.blocks)
