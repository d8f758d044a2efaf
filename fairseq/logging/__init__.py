"""What a run reports: progress bars, lines, TensorBoard."""

from fairseq.logging.progress import ProgressBar, progress_bar

__all__ = ["ProgressBar", "progress_bar"]
