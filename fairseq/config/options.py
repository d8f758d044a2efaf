"""From a command line to settings, each of which knows where it comes from.

A command line is parsed once. What it gives comes first, then ``--config FILE.yaml``, the recipe of
the architecture, the architecture, the dataclasses. A checkpoint's settings come after those given:
an evaluation leaves open what it takes from there (:mod:`fairseq.inference.loading`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from fairseq.config import fields
from fairseq.config.fields import Setting, truncate
from fairseq.config.foreign_flags import check_architecture, foreign_flags
from fairseq.config.parser import EXTENSION, HELP, Parser, PartKey, title_of
from fairseq.config.registry import ARCHITECTURES, CHOICES, EXTENSIONS, chosen_part, extensions_of, is_outside
from fairseq.config.settings import DEFAULT_BATCH_SIZE, DataConfig, RateConfig
from fairseq.config.settings_file import for_another_run, read_yaml
from fairseq.errors import SettingError, UserError, nearest
from fairseq.system import deferred
from fairseq.system.plugins import import_user_module
from fairseq.system.program import as_program

__all__ = ["Parser", "parse_args_and_arch", "run_command"]

# Settings of one thing: one that is given takes the place of the others in --config.
EXCLUSIVE = (("warmup_updates", "warmup_ratio"), ("decay_updates", "decay_ratio"))


class Parsed(argparse.Namespace):
    """Settings by name; :attr:`origins`, which is none of them, says where each comes from."""

    __slots__ = ("origins",)

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.origins: dict[str, str] = {}


class Chosen(NamedTuple):
    """What a command line chooses."""

    names: dict[str, str]  # of the parts, by what chooses them
    recipe: Mapping[str, Any]  # of the architecture
    parts: dict[PartKey, Any]  # with the extensions of the task
    settings: dict[str, Setting | None]  # what may be given; None: argparse converts it


def run_command(main: Callable[[argparse.Namespace], object], make_parser: Callable[[], Parser]) -> None:
    """Parse the process's command line and run *main* as a program."""
    with as_program():
        main(parse_args_and_arch(make_parser(), task_defaults=False))


def parse_args_and_arch(
    parser: Parser,
    input_args: Sequence[str] | None = None,
    parse_known: bool = False,
    suppress_defaults: bool = False,
    modify_parser: Callable[[Parser], None] | None = None,
    *,
    task_defaults: bool = True,
) -> Any:
    """Parse a command line, and fill in what it leaves open.

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
    path, file = _add_parts(parser, argv)
    is_evaluation = "arch" not in parser.choices
    # Of a plug-in's own, which reads the data itself: a command reads them as its checkpoint says.
    is_script = is_evaluation and task_defaults and bool(parser.plugins)
    if is_script and DataConfig not in parser.configs:
        parser.add_settings(DataConfig)
    if modify_parser is not None:
        modify_parser(parser)
    # Last, since a part may have a flag of that name.
    if parser.command:
        parser.add_foreign_flags()
    given, unknown = _read(parser, argv)
    file = {_setting_named(parser, name): value for name, value in file.items()}
    chosen = _choose(parser, {name: value for name, value in {**file, **given}.items() if value is not None})
    if wanted := set(argv) & set(HELP):
        _show_help(parser, chosen, {**file, **given}, all="--help-all" in wanted)
    for flag, text, value in parser.unread:
        flag.refuse(text, value)
    if unknown and not parse_known:
        parser.refuse_unknown(unknown[0], chosen.settings, chosen.names)
    args = Parsed(**_expanded(parser, chosen, _checked(parser, chosen, given)))
    if unread := [text for flag, text, _ in parser.unread if not flag.advice]:
        print(f"note: {', '.join(unread)}: no effect here", file=sys.stderr)
    if parser.reads_file:
        # A checkpoint stores the settings, not the file that they came from.
        vars(args).pop("config", None)
    if not suppress_defaults:
        from_file = _expanded(parser, chosen, _from_file(parser, chosen, path, file), f"--config {path}: ")
        if is_evaluation and not task_defaults:
            # The checkpoint has them.
            chosen.parts.clear()
        _resolve(parser, chosen, args, from_file, f"{path}", () if task_defaults else parser.left_open)
        if is_script:
            deferred.plugins().complete(args)
    return (args, unknown) if parse_known else args


def _add_parts(parser: Parser, argv: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """Import the plug-in and add the flags of parts; return path and content of the --config file.

    What adds flags is read before argparse reads all words.
    """
    path = _value(argv, "--config") if parser.reads_file else None
    file = read_yaml(path) if path is not None else {}
    user_dir = _value(argv, "--user-dir") or file.get("user_dir")
    if user_dir and "--user-dir" in parser.by_flag:
        import_user_module(str(user_dir))
    named = {}
    for name in parser.choices:
        choice = CHOICES[name]
        named[name] = str(_value(argv, choice.flag, *choice.aliases) or file.get(name) or choice.default)
    parser.add_parts(named)
    return path, file


def _value(argv: Sequence[str], *flags: str) -> str | None:
    """The last value of one of *flags* on the command line."""
    value = None
    for word, following in zip(argv, [*argv[1:], "-"], strict=False):
        name, equals, text = word.partition("=")
        if name in flags and (equals or not following.startswith("-")):
            value = text if equals else following
    return value


# ---- what is given, and by that the parts


def _read(parser: Parser, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What the command line gives, by name, mostly as text; and the words that argparse does not
    know."""
    given: dict[str, Any] = {}
    words = []
    for word in argv:
        name, _, value = word.partition("=")
        action = parser.by_flag.get(name)
        has_two = isinstance(action, argparse.BooleanOptionalAction)
        if value not in ("true", "false") or action is None or action.nargs not in (0, "?"):
            words.append(word)
        elif value == "true":
            words.append(name)
        elif has_two or action.const is True:
            # Off, even if --config or the architecture turns it on.
            given[action.dest] = has_two and name.startswith("--no-")
    actions = [action for _, action in parser.arguments]
    if wants_help := bool(set(words) & set(HELP)):
        # Help depends on the chosen parts, and on nothing that may be missing.
        words = [word for word in words if word not in HELP]
        for action in actions:
            action.required = False
    # argparse would give an optional positional its default at the first flag, and reject
    # `CHECKPOINT --cpu TEXT`.
    optional = any(not action.option_strings and action.nargs == "?" for action in actions) and not wants_help
    parse = parser.parse_known_intermixed_args if optional else parser.parse_known_args
    parser.unread = []
    args, unknown = parse(words)
    return given | vars(args), unknown


def _setting_named(parser: Parser, name: str) -> str:
    """The setting that a file calls *name*: itself, or that of an alias."""
    action = parser.by_flag.get(fields.flag_name(name)) or parser.by_flag.get(f"--{name}")
    # A file says `name: false`, never `no_name: true`.
    is_negation = isinstance(action, argparse.BooleanOptionalAction) and name != action.dest
    return name if action is None or is_negation or action.dest == argparse.SUPPRESS else action.dest


def _choose(parser: Parser, given: Mapping[str, Any]) -> Chosen:
    """The parts that *given* settings choose, the recipe, or the defaults."""
    arch = str(given.get("arch", ARCHITECTURES.default))
    # What an architecture recommends counts before the parts are chosen: it may name the optimizer
    # and the schedule.
    recipe = parser.recommend(arch, given) if parser.recommend is not None else {}
    names: dict[str, str] = {}
    parts: dict[PartKey, Any] = {}
    for choice in parser.choices:
        names[choice] = name = str({**recipe, **given}.get(choice, CHOICES[choice].default))
        if choice == "arch" and name not in ARCHITECTURES:  # a plug-in may have any name
            check_architecture(name)
        part = chosen_part(choice, name)
        # The task of an evaluation is the checkpoint's, and the few of its flags that matter are
        # among the command's. Which ones of a plug-in's matter is not known.
        if "arch" in parser.choices or is_outside(part):
            parts[choice, ARCHITECTURES[name].model if choice == "arch" else name] = part
    for task in [part for (choice, _), part in parts.items() if choice == "task"]:
        parts |= {(EXTENSION, name): EXTENSIONS.declaration(name) for name in extensions_of(task)}
    settings: dict[str, Setting | None] = dict.fromkeys(action.dest for _, action in parser.arguments)
    settings |= parser.settings
    for key in parts:
        settings |= {s.name: s for s in _settings_of(parser, key, parts[key]) if not settings.get(s.name)}
    return Chosen(names, recipe, parts, settings)


def _settings_of(parser: Parser, key: PartKey, part: Any) -> list[Setting]:
    """The settings of a part's dataclass, and those that a plug-in's ``add_args`` takes over."""
    return [s for config in _configs({key: part}) for s in fields.settings_of(config)] + parser.adopted.get(key, [])


def _configs(parts: Mapping[PartKey, Any]) -> list[type]:
    """The dataclasses of *parts*; a plug-in's part may have none."""
    return [config for part in parts.values() if (config := getattr(part, "config_class", None)) is not None]


def _show_help(parser: Parser, chosen: Chosen, given: Mapping[str, Any], all: bool) -> NoReturn:
    """Print the help of a command with its *chosen* parts, and exit."""
    arch = chosen.names.get("arch", "")
    for (choice, name), part in chosen.parts.items():
        title = title_of(part, arch if choice == "arch" else name)
        parser.show_part(_settings_of(parser, (choice, name), part), title)
        if choice == "arch" and "arch" in given:
            values = [
                f"{n.replace('_', '-')} {fields.format_value(v)}" for n, v in chosen.recipe.items() if n not in given
            ]
            parser.chosen_heading = title
            parser.lists = f"Recipe of {arch}, unless you choose: {', '.join(values) or 'none'}.\n{parser.lists}"
    if arch:
        parser.show_defaults(ARCHITECTURES[arch].complete(chosen.recipe))
    print(parser.format_help(all), end="")
    sys.exit(0)


# ---- values


def _checked(parser: Parser, chosen: Chosen, values: Mapping[str, Any]) -> dict[str, Any]:
    """The *values* of a command line or a file, by name, as the types of their settings.

    Raises:
        UserError: one is invalid, or belongs to a part that is not chosen.
    """
    found = {}
    for name, value in values.items():
        flag, setting = fields.flag_name(name), chosen.settings.get(name)
        if name in chosen.settings:
            if isinstance(value, list) and setting is not None and not setting.many:
                value = ",".join(map(str, value))  # as on a command line
            found[name] = value if setting is None else setting.read(value)
        elif foreign := foreign_flags(parser.command).get(flag[2:]):
            if foreign.nargs != 0 and value is not None:
                foreign.refuse(flag, value)
            elif foreign.nargs == 0 and fields.SWITCHES.get(str(value).lower(), value is not None):
                foreign.refuse(flag, None)
            parser.unread.append((foreign, flag, value))
        else:
            parser.refuse_other_part(flag, name, chosen.settings, chosen.names)
            parser.refuse_unknown(flag, chosen.settings, chosen.names)
    return found


def _expanded(parser: Parser, chosen: Chosen, values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """*values* with the settings that short forms among them stand for, in place of these.

    A plug-in's setting may have the name of a short form, which then does not exist.

    Raises:
        UserError: a short form is invalid, or contradicts the setting that it stands for.
    """
    if parser.short_forms is None:
        return dict(values)
    short_forms = [s.name for s in fields.settings_of(parser.short_forms) if chosen.settings.get(s.name) is s]
    found = {name: value for name, value in values.items() if name not in short_forms}
    given = {name: value for name, value in values.items() if name in short_forms}
    try:
        for short, meaning in fields.typed(parser.short_forms, given).meaning().items():
            for name, value in meaning.items():
                if found.setdefault(name, value) != value:
                    other = f"`{name}` {fields.format_value(found[name])}"
                    raise SettingError(f"`{short}` {values[short]}: contradicts {other}; give one of them")
    except SettingError as error:
        raise UserError(f"{where}{error.args[0]}") from None
    return found


def _from_file(parser: Parser, chosen: Chosen, path: str | None, file: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the --config file at *path*, as those of a command line."""
    actions = {action.dest: action for _, action in parser.arguments}
    settings: dict[str, Any] = {}
    for name, value in file.items():
        flag = fields.flag_name(name)
        if name not in chosen.settings and flag not in parser.by_flag:
            meant = parser.suggestions(flag, chosen.settings, others=True)
            text = nearest(name, chosen.settings)
            close = f"did you mean {' or '.join(f[2:].replace('-', '_') for f in meant)}?" if meant else text
            advice = close if close.startswith("did") else "see --help-all"
            raise UserError(f"--config {path}: {name}: no such setting; {advice}")
        action = parser.by_flag.get(flag)
        if action is not None and action.nargs == "?" and value in ("true", "false"):
            if value == "false":
                continue
            value = action.const  # of the flag without a value
        try:
            if chosen.settings.get(name) is None and name in actions and value is not None:
                value = _converted(actions[name], value)
            settings |= _checked(parser, chosen, {name: value})
        except (UserError, ValueError, TypeError, argparse.ArgumentTypeError) as error:
            reason = error.args[0] if isinstance(error, UserError) else f"{name}: {truncate(value)}: {error}"
            raise UserError(f"--config {path}: {reason}") from None
    return settings


def _converted(action: argparse.Action, value: Any) -> Any:
    """*value*, a text or a list or dict of texts, as the flag of *action*, which is none of a
    dataclass, would read it."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, str) or value.lower() not in fields.SWITCHES:
            raise SettingError(f"`{action.dest}`: expected true or false, got {truncate(value)}")
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


def _resolve(
    parser: Parser,
    chosen: Chosen,
    args: Parsed,
    file: Mapping[str, Any],
    path: str,
    left_open: Collection[str],
) -> None:
    """Complete *args*, what is given, but for the settings *left_open*: by those of the *file* at
    *path*, the recipe, the architecture, defaults."""

    def fill(values: Mapping[str, Any], origin: str, open: Collection[str] = left_open) -> None:
        new = {name: value for name, value in values.items() if name not in args and name not in open}
        vars(args).update(new)
        args.origins |= dict.fromkeys(new, origin)

    args.origins = dict.fromkeys(vars(args), "yours")
    for one, other in EXCLUSIVE:
        if hasattr(args, one) and hasattr(args, other):
            raise UserError(f"{fields.flag_name(one)} {fields.flag_name(other)}: choose one of the two")
    if hasattr(args, "save_dir"):
        file = for_another_run(file, args.save_dir)
    replaced = {name for group in EXCLUSIVE if any(hasattr(args, name) for name in group) for name in group}
    fill({name: value for name, value in file.items() if name not in replaced}, path, ())
    for key, part in chosen.parts.items():
        fill(parser.plugins.get(key, {}), "default")
        if key[0] == "lr_scheduler" and is_outside(part) and getattr(part, "config_class", None):
            # All schedules share some settings; a plug-in's dataclass may have other defaults.
            declared = fields.defaults(part.config_class)
            fill({n: declared[n] for n in fields.defaults(RateConfig) if declared.get(n) is not None}, "default")
    configs = [*parser.configs, *_configs(chosen.parts)]
    names = {name for config in configs for name in fields.defaults(config)} | set(CHOICES)
    recipe = {name: value for name, value in chosen.recipe.items() if name in names}
    fill(recipe, f"recipe of {chosen.names.get('arch')}")
    fill(chosen.names, "default")
    # Before the dataclasses' defaults, which fill what architectures leave open.
    if "arch" in chosen.names:
        # A plug-in's function may replace what is given.
        completed = ARCHITECTURES[args.arch].complete(vars(args))
        args.origins |= {name: args.arch for name, value in completed.items() if vars(args).get(name, args) != value}
        vars(args).update(completed)
    for config in configs:
        values = fields.checked(config, vars(args))
        vars(args).update({name: value for name, value in values.items() if name in args})
        fill(values, "default")
    _leave_out_extensions(args, chosen.parts)
    if "arch" in chosen.names and args.max_tokens is None and args.batch_size is None:
        args.batch_size = DEFAULT_BATCH_SIZE
    for name in ("fp16", "memory_efficient_fp16"):
        if getattr(args, name, False) and getattr(args, "bf16", False):
            raise UserError(f"{fields.flag_name(name)} --bf16: choose one of the two")
    # As in fairseq, this flag implies --fp16.
    if getattr(args, "memory_efficient_fp16", False):
        args.fp16 = True


def _leave_out_extensions(args: argparse.Namespace, parts: Mapping[PartKey, Any]) -> None:
    """Remove settings of extensions that are off, so that no log or checkpoint has them; UserError
    if one was given."""
    for (choice, name), part in parts.items():
        if choice == EXTENSION and not getattr(args, name):
            for setting, default in fields.defaults(part.config_class).items():
                if getattr(args, setting) != default:
                    raise UserError(
                        f"{fields.flag_name(setting)}: has no effect without {fields.flag_name(name)}; add it"
                    )
                delattr(args, setting)
