"""More plug-ins as in :mod:`plugin_sources`: optimizers and schedules."""

from __future__ import annotations

from plugin_sources import LM

OPTIMIZERS = {
    "radam_of_9": (
        """
import torch
from fairseq.optim import FairseqOptimizer, register_optimizer

class RAdam(torch.optim.SGD):
    pass

@register_optimizer("radam_of_9")
class FairseqRAdam(FairseqOptimizer):
    def __init__(self, args, params):
        super().__init__(args)
        self._optimizer = RAdam(params, **self.optimizer_config)

    @staticmethod
    def add_args(parser):
        parser.add_argument("--radam-betas", default="(0.9, 0.999)", metavar="B")

    @property
    def optimizer_config(self):
        return {"lr": self.args.lr[0], "momentum": eval(self.args.radam_betas)[0]}
""",
        f"{LM} --optimizer radam_of_9",
    ),
    "adam_config_of_12": (
        """
from dataclasses import dataclass, field
import torch
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig

@dataclass
class Config(FairseqAdamConfig):
    decoupled: bool = field(default=True, metadata={"help": "decay"})

@register_optimizer("adam_config_of_12", dataclass=Config)
class Adam(FairseqOptimizer):
    def __init__(self, cfg, params):
        super().__init__(cfg)
        self._optimizer = torch.optim.AdamW(params, lr=cfg.lr[0], betas=tuple(cfg.adam_betas), eps=cfg.adam_eps)
""",
        f"{LM} --optimizer adam_config_of_12 --adam-betas 0.9,0.98",
    ),
    "adam_of_10": (
        """
from fairseq.optim import register_optimizer
from fairseq.optim.adam import FairseqAdam

@register_optimizer("adam_of_10")
class Adam(FairseqAdam):
    def __init__(self, args, params):
        super().__init__(args, params)

    @property
    def supports_flat_params(self):
        return True
""",
        f"{LM} --optimizer adam_of_10",
    ),
    "warmup_of_9": (
        """
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler

@register_lr_scheduler("warmup_of_9")
class Warmup(FairseqLRScheduler):
    def __init__(self, args, optimizer):
        super().__init__(args, optimizer)
        self.lr = args.lr[0]
        self.optimizer.set_lr(self.lr)

    @staticmethod
    def add_args(parser):
        parser.add_argument("--rise", default=4, type=int, metavar="N")

    def step(self, epoch, val_loss=None):
        super().step(epoch, val_loss)
        return self.optimizer.get_lr()

    def step_update(self, num_updates):
        self.optimizer.set_lr(self.lr * min(1, (num_updates + 1) / self.args.rise))
        return self.optimizer.get_lr()
""",
        f"{LM} --lr-scheduler warmup_of_9 --rise 3",
    ),
    "schedule_of_12": (
        """
from dataclasses import dataclass, field
from typing import List
from omegaconf import II
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from fairseq.optim.lr_scheduler.inverse_square_root_schedule import InverseSquareRootLRScheduleConfig

@dataclass
class Config(InverseSquareRootLRScheduleConfig):
    floor: float = field(default=0.001, metadata={"help": "lowest rate"})

@register_lr_scheduler("schedule_of_12", dataclass=Config)
class Schedule(FairseqLRScheduler):
    def __init__(self, cfg, optimizer):
        super().__init__(cfg, optimizer)
        self.cfg = cfg

    def step_update(self, num_updates):
        self.optimizer.set_lr(max(self.cfg.floor, self.cfg.lr[0] / (1 + num_updates)))
        return self.optimizer.get_lr()
""",
        f"{LM} --lr-scheduler schedule_of_12 --warmup-updates 5",
    ),
    "steps_of_no_parameter": (
        """
import torch
from fairseq.optim import FairseqOptimizer, register_optimizer

class Slowing(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.state["steps"] = torch.zeros(1)

    def step(self, closure=None):
        self.state["steps"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad * group["lr"] / self.state["steps"] ** 3)

@register_optimizer("slowing")
class FairseqSlowing(FairseqOptimizer):
    def __init__(self, args, params):
        super().__init__(args)
        self._optimizer = Slowing(params, **self.optimizer_config)

    @property
    def optimizer_config(self):
        return {"lr": self.args.lr[0]}
""",
        f"{LM} --optimizer slowing --lr 1.0",
    ),
    "lowest_rate_of_12": (
        """
from dataclasses import dataclass, field
from typing import List
from omegaconf import II
from fairseq.dataclass import FairseqDataclass
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler

@dataclass
class Config(FairseqDataclass):
    min_lr: float = field(default=0.0625, metadata={"help": "lowest rate"})
    lr: List[float] = II("optimization.lr")

@register_lr_scheduler("lowest_rate_of_12", dataclass=Config)
class Lowest(FairseqLRScheduler):
    def __init__(self, cfg, optimizer):
        super().__init__(cfg, optimizer)
        assert cfg.min_lr == 0.0625 and cfg.lr[0] == 0.5

    def step_update(self, num_updates):
        self.optimizer.set_lr(max(self.cfg.min_lr, self.cfg.lr[0] / (1 + num_updates)))
        return self.optimizer.get_lr()
""",
        f"{LM} --lr-scheduler lowest_rate_of_12 --lr 0.5 --stop-min-lr -1",
    ),
}
