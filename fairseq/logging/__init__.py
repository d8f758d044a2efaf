"""Reports of a run: progress, figures, recorders."""

from fairseq.logging.progress import ProgressBar, progress_bar

__all__ = ["ProgressBar", "progress_bar"]
