"""Limits on what settings may ask for, checked before processes are started."""

from __future__ import annotations

import os

from fairseq.errors import UserError, counted

PROCESSES_PER_CORE = 16


def check_processes(flag: str, count: int) -> None:
    """Raise UserError, which names *flag*,
    if this machine cannot run *count* processes on its CPUs."""
    most = PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if count > most:
        raise UserError(
            f"{flag} {count}: at most {most} processes run on {counted(os.cpu_count() or 1, 'core')} of this machine"
        )
