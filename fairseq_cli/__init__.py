"""The commands: one file each, which parses flags, calls the library and prints."""

import os
import signal
import sys
from pathlib import Path


def _is_command(program: str) -> bool:
    """Return whether *program*, the process's ``sys.argv[0]``, is one of the commands."""
    path = Path(program)
    if program == "-m":  # its value while the module of ``python -m fairseq_cli.train`` is looked for
        return True
    at_root = path.suffix == ".py" and path.resolve().parent == Path(__file__).resolve().parents[1]
    return path.name.startswith("fairseq-") or at_root


if _is_command(sys.argv[0]) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Importing torch takes seconds, and Ctrl-C meanwhile would print its traceback. The commands restore the handler.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
