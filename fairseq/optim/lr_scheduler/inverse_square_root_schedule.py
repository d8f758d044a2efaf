"""Names that fairseq has in this module."""

from fairseq.dataclass import extendable
from fairseq.optim.lr_scheduler.decays import InverseSqrtSchedule
from fairseq.optim.lr_scheduler.settings import InverseSqrtConfig

InverseSquareRootSchedule, InverseSquareRootLRScheduleConfig = (
    InverseSqrtSchedule,
    extendable("InverseSquareRootLRScheduleConfig", InverseSqrtConfig),
)
