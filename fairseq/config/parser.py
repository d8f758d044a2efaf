"""The argument parser of the commands: which flags there are, their help, and one-line errors.

A parser knows the flags of all built-in parts, whose dataclasses need no torch. The parts that a
command line chooses decide which of them it may have (:mod:`fairseq.config.options`).
"""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from fairseq.config import fields
from fairseq.config.fields import Setting
from fairseq.config.foreign_flags import ForeignFlag, foreign_flags, meant_by
from fairseq.config.registry import (
    ARCHITECTURES,
    CHOICES,
    EXTENSIONS,
    MODELS,
    TASKS,
    Declaration,
    Registry,
    extensions_of,
    is_outside,
)
from fairseq.config.settings import ShortForms
from fairseq.errors import UserError, first_of
from fairseq.system import deferred
from fairseq.system.terminal import WIDTH
from fairseq.system.version import __version__

EXTENSION = "extension"  # in place of a choice
POSITIONAL, RARE = "positional arguments", "rarely needed, and other names"
HELP = ("-h", "--help", "--help-all")
PartKey = tuple[str, str]  # what chooses a part ("extension" for one of the task), its name: of "arch" the model's
Recommend = Callable[[str, Mapping[str, Any]], Mapping[str, object]]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line.

    Args:
        description: one sentence.
        configs: dataclasses whose fields are flags.
        examples: command lines that ``--help`` begins with.
        first: names of the arguments that ``--help`` shows before all others.
    """

    def __init__(
        self, description: str, configs: Sequence[type] = (), *, examples: Sequence[str] = (), first: Sequence[str] = ()
    ) -> None:
        self.arguments: list[tuple[str, argparse.Action]] = []  # what --help shows, each with its heading
        self.by_flag: dict[str, argparse.Action] = {}
        super().__init__(
            description=description,
            epilog="\n".join(["examples:", *(f"  {line}" for line in examples)]) if examples else None,
            add_help=False,
            # Each added argument makes one, which would ask for the size of the terminal.
            formatter_class=functools.partial(argparse.HelpFormatter, width=WIDTH),
            # An abbreviation would change its meaning with every flag that is added.
            allow_abbrev=False,
            # A plug-in may declare a flag again that is here already.
            conflict_handler="resolve",
        )
        self.configs: list[type] = []  # dataclasses that give what is left open its value
        self.settings: dict[str, Setting] = {}  # of every command line, by name
        self.left_open: set[str] = set()  # settings that have no value unless they are given
        self.choices: list[str] = []  # settings that choose parts
        self.owners: dict[str, list[PartKey]] = {}  # of the settings of parts
        self.plugins: dict[PartKey, dict[str, object]] = {}  # named on the command line: defaults of their flags
        self.adopted: dict[PartKey, list[Setting]] = {}  # that ``add_args`` of a plug-in adds
        self.recommend: Recommend | None = None
        self.short_forms: type[ShortForms] | None = None
        self.reads_file = False
        self.command = ""  # which of fairseq's commands it stands for
        self.unread: list[tuple[ForeignFlag, str, object]] = []  # fairseq's flags on the command line, with values
        self.first, self.chosen_heading, self.lists = list(first), "", ""
        self.add_argument(
            "-h", "--help", action=_Help, nargs=0, default=argparse.SUPPRESS, help="show this help message and exit"
        )
        self.add_argument("--help-all", action=_Help, nargs=0, default=argparse.SUPPRESS, help="show all flags")
        self.add_argument("--version", action="version", version=version(), help="show the version")
        if configs:
            self.add_settings_file()
        for config in configs:
            self.add_settings(config)

    # ---- flags

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an argument. A positional one that there is already, as in fairseq's tasks ``data``,
        stays as it is."""
        for _, action in self.arguments:
            if not action.option_strings and args == (action.dest,):
                return action
        return self._noted("options", super().add_argument(*args, **kwargs))

    def add_argument_group(self, *args: Any, **kwargs: Any) -> Any:
        """Add a heading of ``--help``."""
        return self._noting(super().add_argument_group(*args, **kwargs))

    def add_mutually_exclusive_group(self, **kwargs: Any) -> Any:
        """Add a group of arguments, of which one at most may be given."""
        return self._noting(super().add_mutually_exclusive_group(**kwargs))

    def _noting(self, group: Any) -> Any:
        title, add = getattr(group, "title", None) or "options", group.add_argument
        group.by_flag = self.by_flag
        group.add_argument = lambda *args, **kwargs: self._noted(title, add(*args, **kwargs))
        return group

    def _noted(self, title: str, action: argparse.Action) -> argparse.Action:
        self.by_flag.update(dict.fromkeys(action.option_strings, action))
        self._drop_short_form(action.dest)
        if action.type is None and action.nargs != 0:
            action.type = _name
        if action.option_strings:
            self.arguments.append((title, action))
        else:
            place = sum(title == POSITIONAL for title, _ in self.arguments)
            self.arguments.insert(place, (POSITIONAL, action))
        return action

    def add_settings_file(self) -> None:
        """Take ``--config``, which names a file of settings."""
        self.reads_file = True
        help = "YAML file of flags, without dashes; command-line flags override it"
        self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=help)

    def add_user_dir(self) -> None:
        """Take ``--user-dir``, which commands that run a model have among their settings."""
        self.add_argument(
            "--user-dir", metavar="DIR", default=argparse.SUPPRESS, help="plug-in folder, a Python package"
        )

    def add_settings(self, config: type, only: Collection[str] | None = None, *, otherwise: str | None = None) -> None:
        """Add the flags of the dataclass *config*, or of *only* those of its fields.

        Its defaults are the values of what is left open, unless that has its value *otherwise*,
        such as from the checkpoint, which ``--help`` says in place of the default.
        """
        group, rare = self.add_argument_group(title_of(config)), self.add_argument_group(RARE)
        for setting in fields.settings_of(config):
            if setting.name not in self.settings and (only is None or setting.name in only):
                self.settings[setting.name] = setting
                heading = rare if setting.metadata.get("rare") else group
                heading.add_argument(*setting.flags, **setting.argument(otherwise))
        if otherwise is None:
            self.configs.append(config)

    def add_short_forms(self, config: type[ShortForms]) -> None:
        """Add the flags of *config*, each of which stands for other settings."""
        self.add_settings(config)
        self.configs.remove(config)
        self.short_forms = config

    def add_choices(self, *names: str, recommend: Recommend | None = None) -> None:
        """Let the settings *names* choose parts, whose flags join.

        *recommend* returns an architecture's recipe from its name and what is given.
        """
        self.choices, self.recommend = list(names), recommend
        for name in names:
            choice = CHOICES[name]
            help = f"{choice.help or choice.kind}, see --help-all (default: {choice.default})"
            self.add_argument(
                choice.flag, *choice.aliases, dest=name, metavar="NAME", default=argparse.SUPPRESS, help=help
            )

    def add_parts(self, named: Mapping[str, str]) -> None:
        """Let argparse know the flags of all built-in parts, and of plug-ins among the *named*
        ones, by what chooses them."""
        builds_models = "arch" in self.choices
        for choice in self.choices:
            registry: Registry[Any] = MODELS if choice == "arch" else CHOICES[choice]
            for name in registry if builds_models else ():
                part = registry.declaration(name)
                of_plugin = not isinstance(part, Declaration)
                self._add_part((choice, name), getattr(part, "config_class" if of_plugin else "settings", None))
            if (name := named[choice]) in CHOICES[choice]:
                name = ARCHITECTURES[name].model if choice == "arch" else name
                part = registry.declaration(name)
                # Others say in their dataclass what they read: a built-in task of an evaluation is
                # the checkpoint's, and the few of its flags that matter are among the command's.
                if not isinstance(part, Declaration) or part.settings is None:
                    part = registry[name]
                    self._add_part((choice, name), getattr(part, "config_class", None))
                    self.plugins[choice, name] = self._add_args((choice, name), part, title_of(part, named[choice]))
        for name in EXTENSIONS if builds_models else ():
            self._add_part((EXTENSION, name), EXTENSIONS.declaration(name).config_class)

    def _drop_short_form(self, name: str) -> bool:
        """Forget the short form *name*, whose flag is a plug-in's own; return whether there was
        one."""
        if self.short_forms is None or name not in self.short_forms.__dataclass_fields__:
            return False
        return self.settings.pop(name, None) is not None

    def _add_part(self, part: PartKey, config: type | None) -> None:
        for setting in fields.settings_of(config) if config is not None else ():
            if self._drop_short_form(setting.name):
                self.by_flag.pop(fields.flag_name(setting.name))
            self.owners.setdefault(setting.name, []).append(part)
            # Two dataclasses may declare a setting, such as a model and a task; it is one flag.
            if flags := [flag for flag in setting.flags if flag not in self.by_flag]:
                action = super().add_argument(*flags, **{**setting.argument(), "help": argparse.SUPPRESS})
                self.by_flag.update(dict.fromkeys(flags, action))

    def _add_args(self, key: PartKey, part: Any, title: str) -> dict[str, object]:
        """Call ``add_args`` of a plug-in's part; return the defaults that it names, which wait for
        ``--config`` and the recipe."""
        ours = {id(action) for _, action in self.arguments}
        # What a model's flags leave open, the architecture fills in: their defaults must not.
        model = key[0] == "arch"
        group = self.add_argument_group(title, argument_default=argparse.SUPPRESS if model else None)
        adopted = self.adopted[key] = []
        self.adopt = group.adopt = adopted.append
        if hasattr(part, "add_args"):
            part.add_args(group if model else self)
        if is_outside(part):
            deferred.plugins().add_flags(key[0], group if model else self)
        defaults: dict[str, object] = {}
        for _, action in [pair for pair in self.arguments if id(pair[1]) not in ours]:
            if action.default is not argparse.SUPPRESS:
                # argparse would convert a default that is text.
                convert = action.type if callable(action.type) and action.type is not _name else str
                is_text = isinstance(action.default, str)
                defaults[action.dest] = convert(action.default) if is_text else action.default
                action.default = argparse.SUPPRESS
        return defaults

    def add_foreign_flags(self) -> None:
        """Take the flags of fairseq's command that nothing reads; those that there are already
        stay."""
        for flag in foreign_flags(self.command).values():
            names = [*([f"-{flag.name[0]}"] if flag.name in ("arch", "target-lang") else []), f"--{flag.name}"]
            if names[-1] not in self.by_flag:
                options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
                action = super().add_argument(*names, action=_Foreign, flag=flag, **options)
                self.by_flag.update(dict.fromkeys(names, action))

    # ---- help

    def show_defaults(self, values: Mapping[str, object]) -> None:
        """Show *values* as the defaults of their flags: an architecture's differ from the
        dataclass's."""
        for _, action in self.arguments:
            if action.dest in values and action.help not in (None, argparse.SUPPRESS):
                text = re.sub(r" \(default: [^()]*\)$", "", str(action.help))
                action.help = f"{text} (default: {fields.format_value(values[action.dest])})"

    def show_part(self, settings: Iterable[Setting], title: str) -> None:
        """Show the flags of a chosen part under *title*."""
        scratch = argparse.ArgumentParser(add_help=False)
        shown = {action.dest for _, action in self.arguments}
        for setting in settings:
            if setting.name not in shown:
                shown.add(setting.name)
                heading = RARE if setting.metadata.get("rare") else title
                self.arguments.append((heading, scratch.add_argument(*setting.flags, **setting.argument())))

    @property
    def headings(self) -> list[str]:
        """The headings of ``--help-all``, in their order."""
        titles = dict.fromkeys(title for title, action in self.arguments if action.help != argparse.SUPPRESS)
        return sorted(titles, key=lambda title: title == RARE)

    def format_help(self, all: bool = False) -> str:
        """The help text: usage, examples, the most used flags; with *all* also the others and the
        names of parts."""
        shown = [(title, action) for title, action in self.arguments if action.help != argparse.SUPPRESS]
        # One that lost all its flags to a plug-in's is gone.
        shown = [pair for pair in shown if pair[1].option_strings or pair[0] == POSITIONAL]
        by_name = {action.dest: action for _, action in shown}
        first = [by_name[name] for name in dict.fromkeys(self.first) if name in by_name]
        groups = {
            title: [action for one, action in shown if one == title and action not in first] for title in self.headings
        }
        parts = [self._usage(), *map(_paragraph, filter(None, [self.description])), self.epilog or ""]
        if first:
            parts.append(_section("most used", first))
        if first and not all:
            parts += [_section(title, actions) for title, actions in groups.items() if title == self.chosen_heading]
            count = sum(bool(action.option_strings) for _, action in shown)
            parts += [*map(_paragraph, self.lists.splitlines()), f"{self.prog} --help-all shows all {count} flags."]
        else:
            parts += [_section(title, actions) for title, actions in groups.items() if actions]
            parts += [f"{CHOICES[name].flag}:\n{_paragraph(', '.join(CHOICES[name]), '  ')}" for name in self.choices]
        return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"

    def _usage(self) -> str:
        # argparse would list every flag, of which training has more than a hundred.
        words = [self.prog]
        for title, action in self.arguments:
            metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            if title == POSITIONAL:
                words.append(metavar if action.nargs not in ("?", "*") else f"[{metavar}]")
            elif action.required and action.option_strings:
                words.append(f"{action.option_strings[0]} {metavar}")
        return f"usage: {' '.join(words)} [flags]"

    # ---- errors

    def error(self, message: str) -> NoReturn:
        """Raise a :class:`UserError`."""
        # argparse gives its errors as text only.
        if unknown := re.match(r"unrecognized arguments: (\S+)", message):
            self.refuse_unknown(unknown[1], self.settings, {})
        flag = re.match(r"argument (\S+): (ignored explicit argument)?", message)
        if flag and flag[2]:
            raise UserError(f"{flag[1]}: takes no value; see --help")
        if flag and message.endswith(": expected one argument"):
            name = flag[1].split("/")[0]
            raise UserError(f"{flag[1]}: expected one argument; write {name}=VALUE where it begins with -")
        raise UserError(f"{message.removeprefix('argument ')}; see --help")

    def refuse_unknown(self, word: str, settings: Iterable[str], chosen: Mapping[str, str]) -> NoReturn:
        """Raise UserError for *word*, which is no flag; it suggests flags of *settings*."""
        if not word.startswith("-"):
            raise UserError(f"unrecognized arguments: {word}; see --help")
        # Names of Python and of YAML have underscores, flags dashes.
        flag = word.split("=")[0]
        dashed = "--" + flag.lstrip("-").replace("_", "-")
        action = self.by_flag.get(dashed)
        if action is not None and not flag.startswith("---") and action.dest not in settings:
            self.refuse_other_part(dashed, action.dest, settings, chosen)
        close = self.suggestions(dashed, settings)
        raise UserError(f"{flag}: no such flag; " + (f"did you mean {' or '.join(close)}?" if close else "see --help"))

    def refuse_other_part(self, flag: str, name: str, settings: Iterable[str], chosen: Mapping[str, str]) -> None:
        """Raise UserError for *flag* of the setting *name* of parts that are not *chosen*."""
        for choice in self.choices:
            owners = [part for kind, part in self.owners.get(name, ()) if kind == choice]
            if choice == "arch":
                owners = [arch for arch in ARCHITECTURES if ARCHITECTURES[arch].model in owners]
            elif choice == "task":
                extensions = {part for kind, part in self.owners.get(name, ()) if kind == EXTENSION}
                owners += [task for task in TASKS if extensions & {*extensions_of(TASKS.declaration(task))}]
            if owners:
                meant = [other for other in self.suggestions(flag, settings, others=True) if other != flag]
                end = f"; did you mean {' or '.join(meant)}?" if meant else ""
                choose = CHOICES[choice].flag
                reason = f"belongs to {choose} {first_of(owners)}, not to {choose} {chosen[choice]}"
                raise UserError(f"{flag}: {reason}{end}")

    def suggestions(self, flag: str, settings: Iterable[str], others: bool = False) -> list[str]:
        """The flags of *settings* and of the command that may be meant by *flag*; only the ones
        that *others*, programs, call so."""
        names = {*settings, *(a.dest for _, a in self.arguments if a.help != argparse.SUPPRESS)}
        flags = [known for known, action in self.by_flag.items() if action.dest in names and known.startswith("--")]
        if not others and flag in flags:
            return [flag]
        meant = [f"--{name}" for name in meant_by(flag[2:]) if f"--{name}" in flags]
        return meant or ([] if others else difflib.get_close_matches(flag, flags, n=2, cutoff=0.7))


class _Help(argparse.Action):
    """Shows help, and exits."""

    def __call__(self, parser: Any, namespace: object, values: object, option_string: str | None = None) -> NoReturn:
        print(parser.format_help(all=option_string == "--help-all"), end="")
        sys.exit(0)


class _Foreign(argparse.Action):
    """Notes a flag of fairseq's."""

    def __init__(self, option_strings: Sequence[str], dest: str, flag: ForeignFlag, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=flag.nargs, **kwargs)
        self.flag = flag

    def __call__(self, parser: Any, namespace: object, values: object, option_string: str | None = None) -> None:
        parser.unread.append((self.flag, str(option_string), values))


def _name(text: str) -> str:
    """Return *text*, of a flag that is none of a dataclass: a name, mostly of a file."""
    if not text:  # would be the current folder
        raise argparse.ArgumentTypeError("an empty value; give a name")
    if "\0" in text:
        raise argparse.ArgumentTypeError("contains a NUL character; remove it")
    return text


def _section(title: str, actions: Sequence[argparse.Action]) -> str:
    formatter = argparse.HelpFormatter("", max_help_position=30, width=WIDTH)
    formatter.start_section(title)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()


def _paragraph(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH - 2, initial_indent=indent, subsequent_indent=indent)


def version() -> str:
    return f"fairseq-short {__version__}"


def title_of(part: Any, name: str | None = None) -> str:
    """The heading of a dataclass's flags: the beginning of its docstring, and the *name* it is
    registered under; of a part without a dataclass, the name of its class."""
    config = getattr(part, "config_class", None) or part
    if not hasattr(config, "__dataclass_fields__"):
        return str(getattr(part, "__name__", name))
    text = " ".join((config.__doc__ or config.__name__).split())
    title = re.sub(r"^(The )?[Ss]ettings of (an? |the )?", "", re.split(r"[:;]|\.(?:\s|$)", text)[0])
    title = title[:1].upper() + title[1:]
    return f"{title} ({name})" if name else title
