"""Names that fairseq has in this module."""

from fairseq.dataclass import extendable
from fairseq.optim.lr_scheduler.decays import ReduceLROnPlateau
from fairseq.optim.lr_scheduler.settings import ReduceLROnPlateauConfig

ReduceLROnPlateauLRSchedule, ReduceLROnPlateauLRScheduleConfig = (
    ReduceLROnPlateau,
    extendable("ReduceLROnPlateauLRScheduleConfig", ReduceLROnPlateauConfig),
)
