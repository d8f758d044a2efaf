"""Names that fairseq has in this module."""

from fairseq.dataclass import extendable
from fairseq.optim.lr_scheduler.decays import TriStageSchedule
from fairseq.optim.lr_scheduler.settings import TriStageConfig

TriStageLRSchedule, TriStageLRScheduleConfig = TriStageSchedule, extendable("TriStageLRScheduleConfig", TriStageConfig)
