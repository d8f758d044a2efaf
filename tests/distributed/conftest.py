"""Fixtures of :mod:`launches`, which several files use."""

from __future__ import annotations

from launches import forked, gpus

__all__ = ["forked", "gpus"]
