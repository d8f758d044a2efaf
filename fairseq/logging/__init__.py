"""Reports of a run: progress, figures, recorders."""

from fairseq.logging.progress import Progress, ProgressBar, no_progress, show_progress

__all__ = ["Progress", "ProgressBar", "no_progress", "show_progress"]
