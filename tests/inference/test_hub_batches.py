"""Lists of texts in Python: read and generated in batches, with the results of the loop over single
texts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import accelerators
import numpy as np
import pytest
import runs
import torch

from fairseq.hub import LanguageModel, load_model
from fairseq.inference.reader import Predictor, Reader

WORDS = (runs.GOLDEN / "text" / "test.txt").read_text(encoding="utf-8").split()
LENGTHS = (3, 150, 0, 64, 7, 63, 200, 130, 1, 65)  # tokens; segments have 64
TEXTS = [" ".join(WORDS[start : start + length]) for start, length in enumerate(LENGTHS)]


def tiny_xl(folder: Any) -> LanguageModel:
    flags = "--arch transformer_xl_tiny --cpu --max-tokens 64 --tokens-per-sample 16 --mem-len 24"
    runs.train(folder, flags, "--train-subset valid --valid-subset test --disable-validation --max-update 1")
    return LanguageModel.from_pretrained(folder)


@pytest.fixture(scope="module", params=["baseline", "shortformer_stage2", "transformer_xl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    if request.param == "transformer_xl":
        return tiny_xl(tmp_path_factory.mktemp("xl"))
    return LanguageModel.from_pretrained(runs.GOLDEN / f"{request.param}.pt", runs.DATA)


@pytest.fixture
def forwards(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of each forward pass of scoring."""
    rows: list[int] = []
    if model.model.memory_length:
        read = Reader.read

        def counted(self: Reader, tokens: torch.Tensor, *rest: Any) -> Any:
            rows.append(len(tokens))
            return read(self, tokens, *rest)

        monkeypatch.setattr(Reader, "read", counted)
        yield rows
        return

    def hook(module: Any, inputs: Any, output: Any) -> None:
        if type(module) is type(model.model):
            rows.append(len(inputs[0]))

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    yield rows
    handle.remove()


def test_scores_of_a_list_are_those_of_its_texts(model: LanguageModel) -> None:
    together, alone = model.score(TEXTS, batch_size=4), [model.score(text) for text in TEXTS]
    for (words, lprobs), (expected_words, expected) in zip(together, alone, strict=True):
        assert words == expected_words and lprobs.shape == expected.shape
        torch.testing.assert_close(lprobs, expected, atol=2e-5, rtol=1e-5)
    mean = torch.cat([lprobs for _, lprobs in alone]).double().mean()
    assert model.perplexity(TEXTS) == pytest.approx(math.exp(-mean), rel=1e-5)
    assert model.score([]) == []


def test_texts_of_a_list_are_read_together(model: LanguageModel, forwards: list[int]) -> None:
    texts = ["= dun = dun = dun"] * 40
    model.score(texts, batch_size=16)
    assert forwards == [16, 16, 8]
    forwards.clear()
    model.score(TEXTS, batch_size=len(TEXTS))
    segments = [math.ceil((length + 1) / model.tokens_per_sample) for length in LENGTHS]
    assert sum(forwards) == sum(segments), "every segment is read once"
    assert len(forwards) <= max(segments)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"seed": 3, "top_k": 20}, {"seed": 3, "max_tokens": 0}])
def test_samples_of_a_list_are_those_of_its_prompts(model: LanguageModel, settings: dict[str, Any]) -> None:
    prompts = ["= dun", "", "= dun =\nthe", "= dun"]
    settings = {"max_tokens": 30, **settings}
    assert model.sample(prompts, **settings) == [model.sample(prompt, **settings) for prompt in prompts]


def test_prompts_of_a_list_are_continued_together(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, read = list[int](), Predictor.read
    monkeypatch.setattr(Predictor, "read", lambda self, tokens: rows.append(len(tokens)) or read(self, tokens))  # type: ignore[func-returns-value]
    model.sample(["= dun"] * 6, max_tokens=5, seed=1, batch_size=4)
    assert rows == [4] * 5 + [2] * 5


def test_without_a_seed_texts_differ(model: LanguageModel) -> None:
    assert len(set(model.sample(["= dun"] * 3, max_tokens=60))) == 3


@pytest.mark.parametrize("text", ["= dun", "= dun =\n= =", "", "= =\n"])
def test_encode_and_decode_are_inverse(model: LanguageModel, text: str) -> None:
    ids = model.encode(text)
    assert ids.dtype == torch.int64 and ids[-1] == model.dictionary.eos()
    assert model.decode(ids) == text.removesuffix("\n") and model.decode(ids.tolist()) == model.decode(ids)
    assert [model.dictionary[int(index)] for index in ids] == model.score(text)[0]


def test_the_device_can_be_left_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators.found(monkeypatch, None)
    path = runs.GOLDEN / "baseline.pt"
    lm = LanguageModel.from_pretrained(path, runs.DATA, device="auto")
    assert next(lm.model.parameters()).device.type == "cpu"
    accelerators.found(monkeypatch, "cuda")
    moved: list[torch.device] = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: moved.append(device) or module)
    load_model(path, runs.DATA, device="auto")
    assert moved[-1] == torch.device("cuda")


def test_mistakes_name_the_argument(model: LanguageModel) -> None:
    for size in (0, 1.5, True):
        with pytest.raises(ValueError, match="batch_size"):
            model.score(["a"], batch_size=size)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="batch_size"):
            model.sample(["a"], batch_size=size)  # type: ignore[arg-type]
    assert np.isfinite(model.perplexity([""]))
