"""The commands: one file each, with its parsers and what they run.

``main`` imports the library, and with it torch: a command line that is wrong, or asks for help, is
answered before.

What a user got wrong, in flags or in files, ends a ``main`` with a
:class:`~fairseq.errors.UserError`.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
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
        from fairseq.config.options import run_command
        from fairseq.system.program import as_program
        from fairseq.system.terminal import log_to_stderr

        if logs:
            log_to_stderr()
        if make_parser is not None:
            run_command(main, make_parser)
            return
        with as_program():
            main()

    cli_main.make_parser = make_parser  # type: ignore[attr-defined]
    return cli_main


def group(description: str, default: Callable[[], None] | None = None, **members: Callable[[], None]) -> Callable:
    """Return the entry point of a command whose first word chooses one of *members*, entry points
    themselves; ``_`` in their names is ``-`` there.

    Args:
        description: one sentence for ``--help``.
        default: called with any other first word; without it that is an error.
    """
    by_word = {name.replace("_", "-"): member for name, member in members.items()}

    def cli_main() -> None:
        if sys.argv[1:2] and sys.argv[1] in by_word:
            # The two words together are the name of the program, in help and in errors.
            sys.argv[:2] = [f"{sys.argv[0]} {sys.argv[1]}"]
            by_word[sys.argv[0].rpartition(" ")[2]]()
        elif default is not None:
            default()
        else:
            _choose(description, by_word)

    return cli_main


def _choose(description: str, members: Mapping[str, Any]) -> None:
    """Answer a command line that begins with none of *members*: help, version or an error."""
    from fairseq.config.parser import Parser
    from fairseq.system.program import as_program

    parser = Parser(description)
    lines = [f"  {word:10}  {member.make_parser().description}" for word, member in members.items()]
    parser.epilog = "\n".join(["commands:", *lines])
    parser.add_argument("command", metavar="COMMAND", choices=members, help="COMMAND --help shows its flags")
    with as_program():
        parser.parse_args()


FORMER = {  # commands of 1.0, and what each is now
    "fairseq-attention": "fairseq-analyze attention",
    "fairseq-average-checkpoints": "fairseq-checkpoint average",
    "fairseq-classify": "fairseq-finetune predict",
    "fairseq-demo-corpus": "fairseq-corpus pydoc",
    "fairseq-lm-eval": "fairseq-harness lm-eval",
    "fairseq-merge-checkpoint": "fairseq-checkpoint merge",
    "fairseq-notes": "fairseq-analyze notes",
    "fairseq-plot": "fairseq-analyze curves",
    "fairseq-recl": "fairseq-analyze recl",
    "fairseq-symbols": "fairseq-corpus symbols",
}


def former() -> None:
    """Run what the process's program, a command of 1.0, is now, and say its new name on stderr."""
    path = Path(sys.argv[0])
    name, word = FORMER[path.name].split()
    print(f"note: {path.name} is now {name} {word}", file=sys.stderr)
    sys.argv[:1] = [str(path.with_name(name)), word]
    import_module(f"fairseq_cli.{name.removeprefix('fairseq-')}").cli_main()


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
