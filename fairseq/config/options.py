"""The parsers of the commands, made from the registries.

A parser knows at first only the flags that choose parts (``--arch``, ``--task``, …). Once they are
read, the chosen parts' own flags join. What the user leaves open is filled from ``--config``, the
architecture and the dataclasses.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fairseq.config import fields
from fairseq.config.fields import shortened
from fairseq.config.parser import Parser, title_of
from fairseq.config.registry import ARCHITECTURES, CHOICES, EXTENSIONS, TASKS, chosen_part, extensions_of, is_outside
from fairseq.config.settings import DEFAULT_BATCH_SIZE, DataConfig, RateConfig
from fairseq.config.settings_file import for_another_run, read_yaml
from fairseq.config.unused_flags import add_unused_flags, check_architecture
from fairseq.errors import SettingError, UserError, is_out_of_memory, nearest, out_of_memory_message, with_flags
from fairseq.system import deferred
from fairseq.system.allocator import keep_freed_memory
from fairseq.system.files import FULL, removing_empty_folders
from fairseq.system.plugins import import_user_module
from fairseq.system.terminal import printable, write_line_by_line

__all__ = ["Parser", "parse_args_and_arch", "run_command"]

EXTENSION = "extension"  # in place of a choice
# Settings of one thing: one that is given takes the place of the others in --config.
SAME = (("warmup_updates", "warmup_ratio"), ("decay_updates", "decay_ratio"))


class Parsed(argparse.Namespace):
    """Settings by name; :attr:`origins`, which is none of them, says where each comes from."""

    __slots__ = ("origins",)

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.origins: dict[str, str] = {}


def parse_args_and_arch(
    parser: Parser,
    input_args: Sequence[str] | None = None,
    parse_known: bool = False,
    suppress_defaults: bool = False,
    modify_parser: Callable[[Parser], None] | None = None,
    *,
    task_defaults: bool = True,
) -> Any:
    """Parse a command line, let the chosen parts add their flags, and fill in what is left open.

    Args:
        input_args: the command line; the process's when None.
        parse_known: return also what is not understood.
        suppress_defaults: leave open what the command line does not give.
        modify_parser: called with the parser before it parses.
        task_defaults: fill in what a plug-in's task or *parser* leaves open, where the latter is an
            evaluation's; a command leaves it to the checkpoint.

    Returns:
        A ``Namespace``; with *parse_known* the namespace and a list.

    Raises:
        UserError: the command line is wrong.
    """
    argv = list(sys.argv[1:] if input_args is None else input_args)
    chosen = _first_look(argv) if parser.settings_file else {}
    # Before parts are chosen: the folder may define them.
    if "user_dir" in chosen and chosen["user_dir"]:
        import_user_module(str(chosen["user_dir"]))
    arch = str(chosen.get("arch", ARCHITECTURES.default))
    # What an architecture recommends counts before the parts are chosen: it may name the optimizer
    # and the schedule.
    recommended = parser.recommend(arch, chosen) if parser.recommend is not None else {}
    parts = _choose(parser, {**recommended, **chosen})
    defaults: dict[str, Any] = {}
    is_evaluation = "arch" not in parser.choices
    # Of a plug-in's own, which reads the data itself: a command reads them as its checkpoint says.
    is_script = is_evaluation and task_defaults and any(c == "task" and is_outside(part) for c, _, part in parts)
    if is_script and DataConfig not in parser.configs:
        parser.configs.append(DataConfig)
        fields.add_flags(parser, DataConfig)
    for choice, name, part in parts:
        defaults.update(_add_part_flags(parser, choice, name, part))
    if "arch" in parser.choices and {"-h", "--help", "--help-all"} & set(argv):
        parser.show_defaults(ARCHITECTURES[arch].complete(recommended))
        if "arch" in chosen:
            [model] = [part for choice, _, part in parts if choice == "arch"]
            parser.describe(_title(arch, model), arch, {n: v for n, v in recommended.items() if n not in chosen})
    if modify_parser is not None:
        modify_parser(parser)
    # Last, since a part may have a flag of that name.
    if parser.takes_unused:
        add_unused_flags(parser)
    # argparse would give an optional positional its default at the first flag, and reject
    # `CHECKPOINT --cpu TEXT`.
    optional = any(not action.option_strings and action.nargs == "?" for _, action in parser.arguments)
    parse = parser.parse_known_intermixed_args if optional else parser.parse_known_args
    words = _switched(parser, argv)
    args, unknown = parse(words, Parsed())
    if unread := [flag for flag in (word.partition("=")[0] for word in words) if flag in parser.unread]:
        print(f"note: {', '.join(unread)}: no effect here", file=sys.stderr)
    if unknown and not parse_known:
        parser.error(f"unrecognized arguments: {unknown[0]}")
    _check_names(parser, args)
    if is_evaluation and not task_defaults:
        # The checkpoint has them.
        parts, defaults = [], {}
    if not suppress_defaults:
        _fill(parser, args, [part for _, _, part in parts], defaults, () if task_defaults else parser.left_open)
        _leave_out_extensions(args, parts)
        if is_script:
            deferred.plugins().complete(args)
    return (args, unknown) if parse_known else args


def _switched(parser: Parser, argv: Sequence[str]) -> list[str]:
    """Return *argv* with ``--switch=true`` as ``--switch``, and without ``--switch=false``.

    A switch that is off is off in *parser*, even if ``--config`` or the architecture turns it on.
    """
    words, by_flag = [], parser.by_flag
    for word in argv:
        name, _, value = word.partition("=")
        action = by_flag.get(name)
        has_two = isinstance(action, argparse.BooleanOptionalAction)
        if value not in ("true", "false") or action is None or action.nargs not in (0, "?"):
            words.append(word)
        elif value == "true":
            words.append(name)
        elif has_two or action.const is True:
            parser.set_defaults(**{action.dest: has_two and name.startswith("--no-")})
    return words


def run_command(main: Callable[[argparse.Namespace], object], make_parser: Callable[[], Parser]) -> None:
    """Parse the process's command line and run *main* inside :func:`as_program`."""
    with as_program():
        main(parse_args_and_arch(make_parser(), task_defaults=False))


def run_program(program: Callable[[], object]) -> None:
    """Run *program* inside :func:`as_program`."""
    with as_program():
        program()


@contextlib.contextmanager
def as_program() -> Iterator[None]:
    """Context of a command's work: a user's mistake in it is one line on stderr and exit code 2.

    Once nobody reads its output, as behind ``| head``, it ends as SIGPIPE ends other programs.
    """
    write_line_by_line()
    keep_freed_memory()
    # A shell's background job ignores interrupts, and continues to.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Until here an interrupt ended the process without a traceback: imports are done now.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with removing_empty_folders():
            yield
        sys.stdout.flush()
    except UserError as error:
        fail(error.args[0])
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        fail(out_of_memory_message(error))
    except KeyboardInterrupt:
        # As shells number a process that SIGINT ended.
        sys.exit(130)
    except BrokenPipeError:
        # Without Python's own end, at which what is left in stdout's buffer would fail again.
        os._exit(128 + signal.SIGPIPE)
    except OSError as error:
        # Paths that no system call takes are a user's mistake, whichever file they name.
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES) and error.filename is not None:
            name = str(error.filename)
            fail(f"{name if len(name) <= 80 else f'{name[:80]}…'}: {error.strerror}; give another path")
        # Errors without a file name are stdout's.
        if error.filename is not None or error.errno not in FULL:
            raise
        print(f"{Path(sys.argv[0]).name}: error: the output cannot be written ({error.strerror})", file=sys.stderr)
        os._exit(2)


def fail(message: str) -> NoReturn:
    """Print *message* with flags for the names in backticks
    as one line on stderr, and exit with code 2."""
    # What a message quotes from a file may hold line ends.
    line = printable(" ".join(with_flags(message).split()))
    print(f"{Path(sys.argv[0]).name}: error: {line}", file=sys.stderr, flush=True)
    sys.exit(2)


def _first_look(argv: list[str]) -> dict[str, object]:
    """What of *argv*, and of the --config file it names, decides which other flags there are."""
    look = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    # The full parser will complain, and knows better.
    look.error = lambda message: None  # type: ignore[method-assign, assignment, return-value]
    # Beside what chooses parts, the settings that recipes and objectives depend on.
    for flag in ("--config", "--user-dir", "--max-lr", "--adaptive-softmax-cutoff"):
        look.add_argument(flag)
    look.add_argument("--lr", "--learning-rate", dest="lr")
    for name, choice in CHOICES.items():
        look.add_argument(choice.flag, *choice.aliases, dest=name)
    settings = vars(look.parse_known_args(argv)[0])
    return {**(read_yaml(settings["config"]) if "config" in settings else {}), **settings}


def _check_names(parser: Parser, args: argparse.Namespace) -> None:
    """Raise UserError for an empty file name,
    which would be the current folder, or one with a NUL character.

    Flags of dataclasses check their text themselves.
    """
    for _, action in parser.arguments:
        value = getattr(args, action.dest, None)
        name = action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and "\0" in text:
                raise UserError(f"{name}: contains a NUL character; remove it")
            if text == "" and action.type is None:
                raise UserError(f"{name}: an empty value; give a name")


def _choose(parser: Parser, chosen: dict[str, object]) -> list[tuple[str, str, object]]:
    """The parts that *chosen* names, or their defaults, and extensions: (name of the choice, the
    part's, the part)."""
    parts = []
    for name in parser.choices:
        part = str(chosen.get(name, CHOICES[name].default))
        if name == "arch" and part not in ARCHITECTURES:  # a plug-in may have any name
            check_architecture(part)
        parser.chosen[name] = part
        # The task of an evaluation is the checkpoint's;
        # the few of its flags that matter are among the command's.
        # Which ones of a plug-in's matter is not known.
        if name != "task" or "arch" in parser.choices or part not in TASKS or is_outside(TASKS.declaration(part)):
            parts.append((name, part, chosen_part(name, part)))
    tasks = [part for choice, _, part in parts if choice == "task"]
    return parts + [(EXTENSION, n, EXTENSIONS.declaration(n)) for task in tasks for n in extensions_of(task)]


def _leave_out_extensions(args: argparse.Namespace, parts: list[tuple[str, str, Any]]) -> None:
    """Remove settings of extensions that are off, so that no log or checkpoint has them; UserError
    if one was given."""
    for choice, name, part in parts:
        if choice == EXTENSION and not getattr(args, name):
            for setting, default in fields.defaults(part.config_class).items():
                if getattr(args, setting) != default:
                    raise UserError(
                        f"{fields.flag_name(setting)}: has no effect without {fields.flag_name(name)}; add it"
                    )
                delattr(args, setting)


def _add_part_flags(parser: Parser, choice: str, name: str, part: object) -> dict[str, object]:
    """Add the flags of *part*; returns the defaults that its ``add_args`` names, and a plug-in
    schedule's, which wait for ``--config``."""
    cls = getattr(part, "config_class", None)
    group = parser.add_argument_group(_title(name, part), argument_default=argparse.SUPPRESS)
    if cls is not None:
        fields.add_flags(group, cls)
    defaults = {}
    if cls is not None and choice == "lr_scheduler" and is_outside(part):
        # All schedules share some settings; a plug-in's dataclass may have other defaults of them.
        declared = fields.defaults(cls)
        defaults = {name: declared[name] for name in fields.defaults(RateConfig) if declared.get(name) is not None}
    if not hasattr(part, "add_args"):
        return defaults
    ours = [action for _, action in parser.arguments]
    # What a model's flags leave open, the architecture fills in: their defaults must not.
    part.add_args(group if choice == "arch" else parser)
    if is_outside(part):
        deferred.plugins().add_flags(choice, group if choice == "arch" else parser)
    for _, action in parser.arguments:
        if action not in ours and action.default is not argparse.SUPPRESS:
            # argparse would convert a default that is text;
            # here it waits for --config, and is converted now.
            convert = action.type if isinstance(action.default, str) and callable(action.type) else None
            defaults[action.dest] = action.default if convert is None else convert(action.default)
            action.default = argparse.SUPPRESS
    return defaults


def _title(name: str, part: object) -> str:
    cls = getattr(part, "config_class", None)
    return getattr(part, "__name__", name) if cls is None else title_of(cls, name)


def _from_file(parser: Parser, path: str) -> dict[str, object]:
    """The settings in the --config file at *path*, by the names that parsing gives them."""
    known = {action.dest: action for _, action in parser.arguments if action.dest != argparse.SUPPRESS}
    for _, action in parser.arguments:
        names = action.option_strings
        # A file says `name: false`, never `no_name: true`.
        if isinstance(action, argparse.BooleanOptionalAction):
            names = names[:1]
        known.update((name.lstrip("-").replace("-", "_"), action) for name in names)
    settings = {}
    for name, value in read_yaml(path).items():
        if name not in known:
            close = nearest(name, known)
            advice = close if close.startswith("did") else "see --help-all"
            raise UserError(f"--config {path}: {name}: no such setting; {advice}")
        try:
            settings[known[name].dest] = _converted(known[name], value)
        except (UserError, ValueError, TypeError, argparse.ArgumentTypeError) as error:
            reason = error.args[0] if isinstance(error, UserError) else f"{name}: {shortened(value)}: {error}"
            raise UserError(f"--config {path}: {reason}") from None
    return settings


def _converted(action: argparse.Action, value: Any) -> Any:
    """*value*, a text, a list or dict of texts, or None, as the flag of *action* would read it."""
    if value is None:
        return None
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, str) or value.lower() not in fields.SWITCHES:
            raise SettingError(f"`{action.dest}`: expected true or false, got {shortened(value)}")
        return fields.SWITCHES[value.lower()]
    convert: Any = action.type if callable(action.type) else str
    is_several = isinstance(value, list) and action.nargs not in (None, "?")
    if isinstance(value, list) and not is_several:
        value = ",".join(map(str, value))  # as on a command line
    converted = [convert(item) for item in value] if is_several else convert(value)
    for item in converted if is_several else [converted]:
        if action.choices is not None and item not in action.choices:
            raise SettingError(f"`{action.dest}` {item}: choose from {', '.join(map(str, action.choices))}")
    return converted


def _fill(
    parser: Parser,
    args: argparse.Namespace,
    parts: list[object],
    defaults: dict[str, object],
    left_open: Collection[str],
) -> None:
    """Complete *args*, but for the settings *left_open*: what is given, then --config,
    a plug-in's *defaults*, the recipe, the architecture, the dataclasses' defaults."""

    def fill(values: Mapping[str, object], origin: str, open: Collection[str] = left_open) -> None:
        new = {name: value for name, value in values.items() if name not in args and name not in open}
        vars(args).update(new)
        args.origins |= dict.fromkeys(new, origin)

    # A checkpoint stores the settings, not the file that they came from.
    path = vars(args).pop("config", None)
    args.origins |= dict.fromkeys(vars(args), "yours")
    for one, other in SAME:
        if hasattr(args, one) and hasattr(args, other):
            raise UserError(f"{fields.flag_name(one)} {fields.flag_name(other)}: choose one of the two")
    if path is not None:
        from_file = _from_file(parser, path)
        if hasattr(args, "save_dir"):
            from_file = for_another_run(from_file, args.save_dir)
        replaced = {name for group in SAME if any(hasattr(args, name) for name in group) for name in group}
        fill({name: value for name, value in from_file.items() if name not in replaced}, str(path), ())
    fill(defaults, "default")
    dataclasses = [*parser.configs, *(getattr(part, "config_class", None) for part in parts)]
    known = {name for cls in dataclasses if cls is not None for name in fields.defaults(cls)} | set(CHOICES)
    if parser.recommend is not None:
        recipe = parser.recommend(parser.chosen["arch"], vars(args))
        fill({name: value for name, value in recipe.items() if name in known}, f"recipe of {parser.chosen['arch']}")
    fill(parser.chosen, "default")
    # Before the dataclasses' defaults, which fill what architectures leave open.
    if hasattr(args, "arch"):
        # A plug-in's function may replace what is given.
        completed = ARCHITECTURES[args.arch].complete(vars(args))
        args.origins |= {name: args.arch for name, value in completed.items() if vars(args).get(name, args) != value}
        vars(args).update(completed)
    for cls in dataclasses:
        if cls is not None:
            values = fields.checked(cls, vars(args))
            vars(args).update({name: value for name, value in values.items() if name in args})
            fill(values, "default")
    if "arch" in parser.choices and args.max_tokens is None and args.batch_size is None:
        args.batch_size = DEFAULT_BATCH_SIZE
    for name in ("fp16", "memory_efficient_fp16"):
        if getattr(args, name, False) and getattr(args, "bf16", False):
            raise UserError(f"{fields.flag_name(name)} --bf16: choose one of the two")
    # As in fairseq, this flag implies --fp16.
    if getattr(args, "memory_efficient_fp16", False):
        args.fp16 = True
