"""Efficient transformer language models,
with fairseq's command lines, formats and plug-in points."""

from types import ModuleType

from fairseq.interop.fairseq import connection
from fairseq.system import deferred
from fairseq.system.version import __version__

__all__ = ["__version__"]


def _parts() -> ModuleType:
    # At the first lookup: most modules need no part but themselves.
    from fairseq import parts

    return parts


def __getattr__(name: str) -> ModuleType:
    return deferred.submodule(__name__, name)


deferred.connect(_parts, connection)
