"""Kernels of other packages, which models and optimizers may use."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.fields import Config, flag


@dataclass(frozen=True)
class KernelConfig(Config):
    """Kernels of other packages, read by models and optimizers too."""

    no_apex: bool = flag(False, "do not use NVIDIA apex, even if it is installed")
