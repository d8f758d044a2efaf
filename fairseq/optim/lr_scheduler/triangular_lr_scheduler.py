"""Names that fairseq has in this module."""

from fairseq.dataclass import extendable
from fairseq.optim.lr_scheduler.cycles import TriangularSchedule
from fairseq.optim.lr_scheduler.settings import TriangularConfig

TriangularLRSchedule, TriangularLRScheduleConfig = (
    TriangularSchedule,
    extendable("TriangularLRScheduleConfig", TriangularConfig),
)
