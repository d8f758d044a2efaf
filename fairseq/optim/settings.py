"""Settings of the optimizers. Nothing here imports torch: command lines are parsed without it."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.fields import flag
from fairseq.config.settings import PrecisionConfig, RateConfig
from fairseq.config.shared import KernelConfig
from fairseq.errors import SettingError


@dataclass(frozen=True)
class SGDConfig(RateConfig):
    """Stochastic gradient descent with momentum."""

    momentum: float = flag(0.0, "momentum", low=0, below=1)
    weight_decay: float = flag(0.0, "weight decay, added to the gradient", low=0)


@dataclass(frozen=True)
class NAGConfig(RateConfig):
    """Nesterov accelerated gradient."""

    momentum: float = flag(0.99, "momentum", low=0, below=1)
    weight_decay: float = flag(0.0, "weight decay", low=0)


@dataclass(frozen=True)
class AdagradConfig(RateConfig):
    """Adagrad."""

    weight_decay: float = flag(0.0, "weight decay, added to the gradient", low=0)


@dataclass(frozen=True)
class AdafactorConfig(RateConfig):
    """Adafactor."""

    adafactor_eps: list[float] = flag([1e-30, 1e-3], "term added to squares; minimum scale", low=0, metavar="E1,E2")
    clip_threshold: float = flag(1.0, "maximum root mean square of an update", above=0)
    decay_rate: float = flag(-0.8, "exponent of the second moment's decay", below=0)
    beta1: float | None = flag(None, "decay of the first moment (default: none is kept)", low=0, below=1)
    scale_parameter: bool = flag(False, "scale the rate by each parameter's root mean square")
    relative_step: bool = flag(False, "use a rate of 1 / sqrt(updates) instead of `lr`")
    warmup_init: bool = flag(False, "start `relative_step` at 1e-6, rising linearly")
    weight_decay: float = flag(0.0, "weight decay, decoupled from the gradient", low=0)

    def check(self) -> None:
        check_pair("adafactor_eps", self.adafactor_eps, "1e-30,1e-3")
        if self.warmup_init and not self.relative_step:
            raise SettingError("`warmup_init`: needs `relative_step`; give both or neither")


@dataclass(frozen=True)
class AdamConfig(RateConfig, KernelConfig):
    """Adam."""

    adam_betas: list[float] = flag([0.9, 0.999], "decay rates of the two moments", low=0, below=1, metavar="B1,B2")
    adam_eps: float = flag(1e-8, "term added to the root of the second moment", low=0)
    adam_torch_eps: bool = flag(False, "add `adam_eps` after bias correction, as torch.optim.Adam does, not before")
    weight_decay: float = flag(0.0, "weight decay, decoupled from the gradient", low=0)

    def check(self) -> None:
        check_pair("adam_betas", self.adam_betas, "0.9,0.98")


@dataclass(frozen=True)
class LAMBConfig(RateConfig):
    """LAMB."""

    lamb_betas: list[float] = flag([0.9, 0.999], "decay rates of the two moments", low=0, below=1, metavar="B1,B2")
    lamb_eps: float = flag(1e-8, "term added to the root of the second moment", low=0)
    weight_decay: float = flag(0.0, "weight decay, part of the update", low=0)

    def check(self) -> None:
        check_pair("lamb_betas", self.lamb_betas, "0.9,0.999")


@dataclass(frozen=True)
class MuonConfig(AdamConfig, PrecisionConfig):
    """Muon."""

    muon_lr: float | None = flag(None, "learning rate of the hidden matrices (default: `lr`)", above=0)
    muon_momentum: float = flag(0.95, "momentum of the hidden matrices", low=0, below=1)
    muon_iterations: int = flag(5, "Newton-Schulz iterations per update", low=1, high=100)


def check_pair(setting: str, numbers: list[float], example: str) -> None:
    """Raise SettingError unless *setting* has two *numbers*."""
    if len(numbers) != 2:
        raise SettingError(f"`{setting}` {','.join(map(str, numbers))}: expected two numbers, e.g. {example}")
