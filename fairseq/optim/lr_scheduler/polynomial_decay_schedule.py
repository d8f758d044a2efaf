"""Names that fairseq has in this module."""

from fairseq.dataclass import extendable
from fairseq.optim.lr_scheduler.decays import PolynomialDecaySchedule
from fairseq.optim.lr_scheduler.settings import PolynomialDecayConfig

PolynomialDecayLRSchedule, PolynomialDecayLRScheduleConfig = (
    PolynomialDecaySchedule,
    extendable("PolynomialDecayLRScheduleConfig", PolynomialDecayConfig),
)
