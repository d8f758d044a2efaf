"""What a run reports: meters and progress bars."""

from fairseq.logging.meters import AverageMeter, StopwatchMeter, TimeMeter
from fairseq.logging.progress import ProgressBar, progress_bar

__all__ = ["AverageMeter", "ProgressBar", "StopwatchMeter", "TimeMeter", "progress_bar"]
