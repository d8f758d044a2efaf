"""Checkpoints: saved atomically, loaded without running
anything in them, named and kept as fairseq does."""

from fairseq.checkpoint.manager import CheckpointManager
from fairseq.checkpoint.store import describe_mismatch, load, read, save, verify

__all__ = ["CheckpointManager", "describe_mismatch", "load", "read", "save", "verify"]
