"""Models for EleutherAI's lm-eval."""

from fairseq.interop.harness.library import harness_model, require_harness, task_data

__all__ = ["harness_model", "require_harness", "task_data"]
