"""The commands: one file each, with a parser and a main.

``main`` imports the library, and with it torch: a command line that is wrong, or asks for help, is
answered before.

What a user got wrong, in flags or in files, ends a ``main`` with a
:class:`~fairseq.errors.UserError`.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def command(main: Callable[..., Any], make_parser: Callable[[], Any] | None = None, logs: bool = True) -> Callable:
    """Return the entry point of a command: it calls *main* with the process's parsed command line.

    Args:
        main: the command; without a parser it reads the command line.
        make_parser: of its :class:`~fairseq.config.parser.Parser`.
        logs: whether messages of the library go to stderr.
    """

    def cli_main() -> None:
        # Imported here: worker processes import the module of their command, and parse nothing.
        from fairseq.config import options
        from fairseq.system.program import as_program
        from fairseq.system.terminal import log_to_stderr

        if logs:
            log_to_stderr()
        with as_program():
            if make_parser is None:
                main()
            else:
                main(options.parse_args_and_arch(make_parser(), task_defaults=False))

    return cli_main


def _is_command(program: str) -> bool:
    """Return whether *program*, the process's ``sys.argv[0]``, is one of the commands."""
    path = Path(program)
    # Its value while the module of ``python -m fairseq_cli.train`` is looked for.
    if program == "-m":
        return True
    at_root = path.suffix == ".py" and path.resolve().parent == Path(__file__).resolve().parents[1]
    return path.name.startswith("fairseq-") or at_root


if _is_command(sys.argv[0]) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Importing torch takes seconds, and Ctrl-C would print
    # its traceback. The commands restore the handler.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
