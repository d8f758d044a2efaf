"""The evaluation harness on a machine without a GPU or a network; a stand-in where it is not
installed."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import accelerators
import pytest
import runs
from exports import imported

from fairseq.errors import UserError
from fairseq.interop.harness import harness_model
from fairseq.interop.harness.requests import EncoderRequests

GOLDEN = Path(__file__).parents[1] / "golden" / "hf_encoders" / "bert"
MODULE = "fairseq.interop.harness.model"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The harness, or modules with the names that the adapter imports."""
    known, find = MODULE in sys.modules, importlib.util.find_spec
    if find("lm_eval") is None:
        for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["lm_eval.api.model"].LM = object  # type: ignore[attr-defined]
        sys.modules["lm_eval.api.registry"].register_model = lambda name: lambda cls: cls  # type: ignore[attr-defined]
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there" if name == "lm_eval" else find(name))
    yield
    if not known:
        sys.modules.pop(MODULE, None)


@pytest.mark.parametrize("device", ["cuda:0", "cuda", None])
def test_without_a_gpu_the_model_runs_on_the_cpu(
    device: str | None, harness: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accelerators.found(monkeypatch, None)
    lm = harness_model()(str(runs.GOLDEN / "baseline.pt"), str(runs.DATA), device=device)
    assert lm.requests.device.type == "cpu"
    warnings = [message for message in caplog.messages if "no GPU" in message]
    assert warnings == ([f"device {device}: there is no GPU, the CPU is used"] if device else [])


def test_an_encoder_answers_with_pseudo_log_likelihoods(harness: None, tmp_path: Path) -> None:
    path = str(imported(GOLDEN, tmp_path / "bert"))
    lm = harness_model()(path, within_words="true", device="cpu")
    assert isinstance(lm.requests, EncoderRequests) and lm.requests.within_words
    [(lprob, _)] = lm.loglikelihood([types.SimpleNamespace(args=("the", " cat"))])
    assert lprob < 0
    with pytest.raises(UserError, match="within_words maybe: expected true or false"):
        harness_model()(path, within_words="maybe")
    with pytest.raises(UserError, match="within.words: the model is a decoder"):
        harness_model()(str(runs.GOLDEN / "baseline.pt"), str(runs.DATA), within_words=True, device="cpu")
