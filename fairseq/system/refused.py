"""Names that files of plug-ins import beside what they use, and whose parts are not implemented."""

from __future__ import annotations

from typing import Any

from fairseq.errors import UserError

TRANSLATION = "encoders with decoders, and translation, are not implemented"


def refused(name: str, base: type, reason: str, module: str) -> Any:
    """The class *name* of *module*, which can be imported and extended; making one is a UserError
    with the *reason*."""

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise UserError(f"{name}: {reason}")

    return type(name, (base,), {"__init__": refuse, "__module__": module, "__doc__": f"Refused: {reason}."})
