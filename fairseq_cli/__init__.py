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


def _limit_spinning() -> None:
    """Let OpenMP's waiting threads sleep soon, unless the user has said how they wait; before torch is imported.

    Those of libgomp spin for several milliseconds. Beside other programs they take the cores from the threads that they
    wait for. A tenth of a millisecond outlasts the gaps between torch's operators (``benchmarks/beside.py``).
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "3000"  # processes started later inherit it


if _is_command(sys.argv[0]):
    _limit_spinning()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Importing torch takes seconds, and Ctrl-C would print its traceback. The commands restore the handler.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
