"""Half precision: loss scaling, and losses that follow full precision."""

from __future__ import annotations

import itertools
import math

import pytest
import runs
import torch

from fairseq import checkpoint
from fairseq.config.command_settings import GenerationConfig
from fairseq.config.settings import CommonConfig
from fairseq.errors import with_flags
from fairseq.evaluation.scorer import Scorer, Scoring
from fairseq.inference.loading import load_language_models
from fairseq.inference.writer import Writer
from fairseq.modules import precision
from fairseq.training import log as training_log
from fairseq.training import update as update_module


def test_fp16_lowers_the_loss_scale_on_overflow_and_recovers(tmp_path):
    flags = [runs.BASELINE, runs.NAG, "--max-update 30 --fp16 --fp16-init-scale 1e9 --fp16-scale-window 8 --no-save"]
    log = runs.updates(runs.train(tmp_path, *flags))
    assert [line["num_updates"] for line in log] == list(range(1, 31)), "every update happened in the end"
    scales = [line["loss_scale"] for line in log]
    assert scales[0] < 1e9 and any(b > a for a, b in itertools.pairwise(scales)), (
        "down until nothing overflows, then up again"
    )
    assert all(math.isfinite(line["gnorm"]) for line in log)
    # From 8.75 bits, which are near those of guessing, by the frequencies of the words.
    assert log[-1]["loss"] < log[0]["loss"] - 0.5


@pytest.fixture
def overflowing(monkeypatch):
    """Make gradients infinite in some of the updates that are tried, numbered from 1."""

    def overflow(is_bad):
        tried = itertools.count(1)
        norm = update_module.norm_and_factor

        def spoiled(parameters, *args):
            if is_bad(next(tried)):
                parameters[0].grad.fill_(torch.inf)
            return norm(parameters, *args)

        monkeypatch.setattr(update_module, "norm_and_factor", spoiled)

    return overflow


EPOCHS = [runs.BASELINE, runs.NO_DROPOUT, "--fp16 --max-tokens 256"]  # of 11 batches


def test_epoch_whose_last_batch_overflows_is_finished_all_the_same(tmp_path, overflowing, caplog):
    overflowing(lambda number: number == 11)
    with caplog.at_level("INFO"):
        log = runs.train(tmp_path, EPOCHS, "--max-epoch 2")
    done = runs.updates(log)
    assert [line["num_updates"] for line in done] == list(range(1, 22))
    assert [line["num_updates"] for line in runs.summaries(log, "train")] == [10, 21]
    assert [line["num_updates"] for line in runs.summaries(log, "test")] == [10, 21]
    tokens = [line["wpb"] for line in done[:10]]
    loss = sum(line["loss"] * count for line, count in zip(done, tokens, strict=False)) / sum(tokens)
    assert runs.summaries(log, "train")[0]["loss"] == pytest.approx(loss, rel=1e-6), "the last batch is left out"
    saved = {path.name: checkpoint.read(path) for path in tmp_path.glob("checkpoint[12].pt")}
    assert {name: state["optimizer_history"][-1]["num_updates"] for name, state in saved.items()} == {
        "checkpoint1.pt": 10,
        "checkpoint2.pt": 21,
    }
    assert saved["checkpoint1.pt"]["extra_state"]["train_iterator"]["epoch"] == 2
    overflows = [line for line in caplog.messages if "overflow" in line]
    assert overflows == ["NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: 64.0"]


def test_an_epoch_without_updates_has_no_figures_and_validates_what_it_has(tmp_path, overflowing):
    overflowing(lambda number: 11 < number <= 22)
    log = runs.train(tmp_path, EPOCHS, "--max-epoch 3 --threshold-loss-scale 1e-3 --patience 2 --no-save")
    first, second, third = runs.summaries(log, "train")
    assert [first["num_updates"], second["num_updates"], third["num_updates"]] == [11, 11, 22]
    assert second["loss"] is None and second["ppl"] is None, "NaN, which JSON lines have as null"
    assert second["wpb"] == 0 and second["loss_scale"] == 128 / 2**11
    assert 0 < third["loss"] < first["loss"]
    validations = runs.summaries(log, "test")
    assert [line["num_updates"] for line in validations] == [11, 22], "weights are validated once"
    assert validations[0]["loss"] > validations[1]["loss"]


@pytest.fixture(scope="module", params=[runs.BASELINE, runs.SHORTFORMER], ids=["baseline", "shortformer"])
def full(request, tmp_path_factory):
    """Flags of a run, and its losses in full precision."""
    flags = [request.param, runs.NO_DROPOUT, runs.NAG, "--max-update 12 --no-save --disable-validation"]
    return flags, runs.losses(runs.train(tmp_path_factory.mktemp("full"), *flags))


@pytest.mark.parametrize("flag, tolerance", [("--fp16", 2e-3), ("--bf16", 2e-2), ("--memory-efficient-fp16", 2e-2)])
def test_lower_precision_follows_full_precision(tmp_path, full, flag, tolerance):
    flags, losses = full
    lower = runs.losses(runs.train(tmp_path, *flags, flag))
    assert lower == pytest.approx(losses, rel=tolerance)
    assert lower != losses, "the flag is read"


BFLOAT16_IS_SLOWER = precision.bfloat16_is_slower


@pytest.mark.parametrize(
    "slower, features",
    [
        (True, {"cpu_name": "Intel Xeon", "avx512_bf16": True}),  # Sapphire Rapids whose AMX a virtual machine hides
        (True, {"cpu_name": "AMD EPYC", "avx512_bf16": False}),  # before Zen 4
        (False, {"cpu_name": "AMD EPYC", "avx512_bf16": True}),
        (False, {"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}),
        (False, {"architecture": "arm64"}),
    ],
)
def test_bfloat16_is_float32_on_processors_that_are_faster_so(tmp_path, monkeypatch, caplog, slower, features):
    features = {"architecture": "x86_64", "amx_bf16": False, **features}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features, raising=False)
    BFLOAT16_IS_SLOWER.cache_clear()
    monkeypatch.setattr(precision, "bfloat16_is_slower", BFLOAT16_IS_SLOWER)
    flags = [runs.SHORTFORMER, runs.NO_DROPOUT, "--max-update 2 --no-save --disable-validation --optimizer muon"]
    flags += ["--lr-scheduler wsd"]
    configs, recording = [], training_log.recording
    monkeypatch.setattr(training_log, "recording", lambda *args: configs.append(args[-1]) or recording(*args))
    with caplog.at_level("INFO"):
        losses = runs.losses(runs.train(tmp_path, *flags, "--bf16"))
    ran = "fp32" if slower else "bf16"
    assert configs[0]["precision"] == ran and any(f"to come (0.048 epochs); {ran};" in line for line in caplog.messages)
    assert (losses == runs.losses(runs.train(tmp_path, *flags))) == slower
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    lines = [with_flags(record.getMessage()) for record in warned if "faster in float32" in record.getMessage()]
    assert lines == ["--bf16: this processor is faster in float32, which is used instead"] * slower
    assert precision.fastest(torch.bfloat16, torch.device("cuda")) == torch.bfloat16
    BFLOAT16_IS_SLOWER.cache_clear()


@pytest.mark.parametrize("slower", [True, False])
def test_trained_models_are_read_in_float32_there_too(tmp_path, monkeypatch, slower):
    monkeypatch.setattr(precision, "bfloat16_is_slower", lambda: slower)
    path, common = runs.saved(tmp_path / "model.pt", runs.BASELINE), CommonConfig(bf16=True, cpu=True)
    writer = Writer.load(GenerationConfig(), common, [str(path)], str(runs.DATA), {})
    models, _, _ = load_language_models([str(path)], str(runs.DATA), {}, {})
    scorer = Scorer(models, writer.task.source_dictionary, Scoring(16), precision.Precision(common))
    for reader in (*writer.models, *scorer.readers):
        weight = reader.model.decoder.layers[0].fc1.weight
        assert weight.dtype == (torch.float32 if slower else torch.bfloat16)


def test_memory_efficient_fp16_keeps_half_parameters_and_full_optimizer_state(tmp_path):
    runs.train(tmp_path, runs.BASELINE, runs.ADAM, "--max-update 2 --memory-efficient-fp16")
    state = checkpoint.read(tmp_path / "checkpoint_last.pt")
    assert state["model"]["decoder.layers.0.fc1.weight"].dtype == torch.float16
    assert state["last_optimizer_state"]["state"]["decoder.layers.0.fc1.weight"]["exp_avg"].dtype == torch.float32
