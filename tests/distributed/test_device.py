"""A process computes on the device that it is given, as exactly as it is asked to."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import accelerators
import pytest
import runs
import torch
from mistakes import logged, user_error

from fairseq import distributed
from fairseq.config.settings import CommonConfig, training_settings
from fairseq.modules import devices, precision


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Four GPUs that do nothing; the numbers of those that were selected."""
    return accelerators.found(monkeypatch, "cuda", 4)


@pytest.fixture(autouse=True)
def restored_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def worlds(*flags: Any) -> list[distributed.World]:
    """The worlds in which the job of these flags runs."""
    settings = training_settings(runs.arguments(runs.BASELINE.replace("--cpu", ""), *flags))
    seen: list[distributed.World] = []
    job = distributed.Job(lambda value, world: seen.append(world), None, settings.common, settings.distributed)
    distributed.run(job)
    return seen


def test_one_process_uses_the_gpu_that_it_is_given(selected: list[int]) -> None:
    (world,) = worlds("--distributed-world-size 1 --device-id 3")
    assert world.device == torch.device("cuda", 3) and selected == [3]
    assert worlds("--distributed-world-size 1")[0].device == torch.device("cuda", 0)
    assert worlds("--cpu --distributed-world-size 1")[0].device == torch.device("cpu")


def test_a_command_of_one_process_uses_the_first_gpu(selected: list[int]) -> None:
    assert distributed.device_of(CommonConfig()) == torch.device("cuda", 0) and selected == [0]


def test_a_gpu_that_does_not_exist_is_refused(selected: list[int]) -> None:
    with user_error("--device-id 4: there are 4 GPUs, numbered from 0"):
        worlds("--distributed-world-size 1 --device-id 4")


@pytest.mark.parametrize("name", ["cuda", "xpu", None])
def test_auto_is_a_gpu_where_there_is_one_and_other_names_are_devices(
    monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    accelerators.found(monkeypatch, name)
    assert devices.chosen("auto") == torch.device(name or "cpu")
    assert devices.chosen("cpu") == torch.device("cpu")
    assert devices.chosen(torch.device("cuda", 1)) == torch.device("cuda", 1)


def test_float32_is_exact_unless_tf32_is_asked_for() -> None:
    torch.set_float32_matmul_precision("medium")
    distributed.device_of(CommonConfig(cpu=True))
    assert torch.get_float32_matmul_precision() == "highest"
    distributed.device_of(CommonConfig(cpu=True, tf32=True))
    assert torch.get_float32_matmul_precision() == "high"


def test_deterministic_algorithms_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    distributed.device_of(CommonConfig(cpu=True))
    assert not torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    try:
        distributed.device_of(CommonConfig(cpu=True, deterministic=True))
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.parametrize("supported, lines", [(False, 1), (True, 0)])
@pytest.mark.parametrize("flag", ["fp16", "memory_efficient_fp16"])
def test_float16_on_a_cpu_without_its_arithmetic_names_bf16(
    flag: str, supported: bool, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precision, "has_float16_arithmetic", lambda: supported)
    with caplog.at_level(logging.WARNING):
        distributed.device_of(CommonConfig(cpu=True, **{flag: True}))
        distributed.device_of(CommonConfig(cpu=True, bf16=True))
    assert len(logged(caplog)) == lines
    start = f"--{flag.replace('_', '-')}: this CPU has no float16 arithmetic"
    assert all(message.startswith(start) and "use --bf16" in message for message in logged(caplog))


@pytest.mark.parametrize("reported, supported", [(True, True), (False, False), (None, True)])
def test_the_build_of_pytorch_reports_float16_arithmetic(
    monkeypatch: pytest.MonkeyPatch, reported: bool | None, supported: bool
) -> None:
    build = SimpleNamespace() if reported is None else SimpleNamespace(_is_mkldnn_fp16_supported=lambda: reported)
    monkeypatch.setattr(torch.ops, "mkldnn", build)
    assert precision.has_float16_arithmetic() is supported
