"""Names that fairseq has in this module."""

from fairseq.dataclass import extendable
from fairseq.optim.lr_scheduler.cycles import CosineSchedule
from fairseq.optim.lr_scheduler.settings import CosineConfig

CosineLRSchedule, CosineLRScheduleConfig = CosineSchedule, extendable("CosineLRScheduleConfig", CosineConfig)
