"""Names that fairseq has in this module."""

from fairseq.dataclass import extendable
from fairseq.optim.lr_scheduler.decays import FixedSchedule
from fairseq.optim.lr_scheduler.settings import FixedConfig

FixedLRSchedule, FixedLRScheduleConfig = FixedSchedule, extendable("FixedLRScheduleConfig", FixedConfig)
