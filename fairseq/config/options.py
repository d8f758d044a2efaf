"""From a command line to settings, each of which knows where it comes from.

A command line is parsed once. What it gives comes first, then ``--config FILE.yaml``, the recipe of
the architecture, the architecture, the dataclasses. A checkpoint's settings come after those given:
an evaluation leaves open what it takes from there (:mod:`fairseq.inference.loading`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from fairseq.config import fields
from fairseq.config.fields import Setting, shortened
from fairseq.config.foreign_flags import check_architecture, foreign_flags
from fairseq.config.parser import EXTENSION, HELP, Parser, Part, title_of
from fairseq.config.registry import ARCHITECTURES, CHOICES, EXTENSIONS, chosen_part, extensions_of, is_outside
from fairseq.config.settings import DEFAULT_BATCH_SIZE, DataConfig, RateConfig
from fairseq.config.settings_file import for_another_run, read_yaml
from fairseq.errors import SettingError, UserError, nearest
from fairseq.system import deferred
from fairseq.system.plugins import import_user_module
from fairseq.system.program import as_program

__all__ = ["Parser", "parse_args_and_arch", "run_command"]

# Settings of one thing: one that is given takes the place of the others in --config.
SAME = (("warmup_updates", "warmup_ratio"), ("decay_updates", "decay_ratio"))


class Parsed(argparse.Namespace):
    """Settings by name; :attr:`origins`, which is none of them, says where each comes from."""

    __slots__ = ("origins",)

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.origins: dict[str, str] = {}


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
    # Both add flags, or settings that choose them: they are read before argparse reads all words.
    path = _value(argv, "--config") if "--config" in parser.by_flag else None
    file = read_yaml(path) if path is not None else {}
    user_dir = _value(argv, "--user-dir") or file.get("user_dir")
    if user_dir and "--user-dir" in parser.by_flag:
        import_user_module(str(user_dir))
    parser.add_parts({word.partition("=")[2] or word for word in argv} | set(map(str, file.values())))
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
    recipe, chosen, parts = _choose(parser, {**file, **given})
    if wanted := set(argv) & set(HELP):
        _show_help(parser, parts, recipe, {**file, **given}, all="--help-all" in wanted)
    known = _known(parser, parts)
    for flag, text, value in parser.unread:
        flag.refuse(text, value)
    if unknown and not parse_known:
        parser.refuse_unknown(unknown[0], known, chosen)
    args = Parsed(**_in_full(parser, _checked(parser, given, known, chosen)))
    if unread := [text for flag, text, _ in parser.unread if not flag.advice]:
        print(f"note: {', '.join(unread)}: no effect here", file=sys.stderr)
    if is_evaluation and not task_defaults:
        # The checkpoint has them.
        parts = []
    if suppress_defaults:
        vars(args).pop("config", None)
    else:
        _resolve(parser, args, file, known, recipe, chosen, parts, () if task_defaults else parser.left_open)
        if is_script:
            deferred.plugins().complete(args)
    return (args, unknown) if parse_known else args


def _value(argv: Sequence[str], flag: str) -> str | None:
    """The last value of *flag* on the command line."""
    value = None
    for word, following in zip(argv, [*argv[1:], "-"], strict=False):
        name, equals, text = word.partition("=")
        if name == flag and (equals or not following.startswith("-")):
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


def _choose(
    parser: Parser, settings: Mapping[str, Any]
) -> tuple[Mapping[str, object], dict[str, str], list[tuple[Part, Any]]]:
    """The recipe of the architecture, the names of the chosen parts, and the parts, with the
    extensions of the task."""
    arch = str(settings.get("arch", ARCHITECTURES.default))
    # What an architecture recommends counts before the parts are chosen: it may name the optimizer
    # and the schedule.
    recipe = parser.recommend(arch, settings) if parser.recommend is not None else {}
    chosen: dict[str, str] = {}
    parts: list[tuple[Part, Any]] = []
    for choice in parser.choices:
        chosen[choice] = name = str({**recipe, **settings}.get(choice, CHOICES[choice].default))
        if choice == "arch" and name not in ARCHITECTURES:  # a plug-in may have any name
            check_architecture(name)
        part = chosen_part(choice, name)
        # The task of an evaluation is the checkpoint's, and the few of its flags that matter are
        # among the command's. Which ones of a plug-in's matter is not known.
        if "arch" in parser.choices or is_outside(part):
            parts.append(((choice, ARCHITECTURES[name].model if choice == "arch" else name), part))
    tasks = [part for (choice, _), part in parts if choice == "task"]
    parts += [((EXTENSION, n), EXTENSIONS.declaration(n)) for task in tasks for n in extensions_of(task)]
    return recipe, chosen, parts


def _known(parser: Parser, parts: Sequence[tuple[Part, Any]]) -> dict[str, Setting | None]:
    """The settings of the command and its parts, by name; None: argparse has converted it."""
    owners = {part for part, _ in parts}
    known: dict[str, Setting | None] = {
        action.dest: None
        for _, action in parser.arguments
        if action.dest not in parser.owners or owners & set(parser.owners[action.dest])
    }
    known |= parser.settings
    for _, part in parts:
        config = getattr(part, "config_class", None)
        new = [s for s in fields.settings_of(config) if not known.get(s.name)] if config is not None else []
        known |= {setting.name: setting for setting in new}
    return known


def _show_help(
    parser: Parser, parts: Sequence[tuple[Part, Any]], recipe: Mapping[str, Any], given: Mapping[str, Any], all: bool
) -> NoReturn:
    """Print the help of a command with the chosen *parts*, and exit."""
    arch = str(given.get("arch", ARCHITECTURES.default))
    for (choice, name), part in parts:
        title = title_of(part, arch if choice == "arch" else name)
        if getattr(part, "config_class", None) is not None:
            parser.show_part(part.config_class, title)
        if choice == "arch" and "arch" in given:
            values = [f"{n.replace('_', '-')} {fields.shown(v)}" for n, v in recipe.items() if n not in given]
            parser.chosen_heading = title
            parser.lists = f"Recipe of {arch}, unless you choose: {', '.join(values) or 'none'}.\n{parser.lists}"
    if "arch" in parser.choices:
        parser.show_defaults(ARCHITECTURES[arch].complete(recipe))
    print(parser.format_help(all), end="")
    sys.exit(0)


# ---- values


def _checked(
    parser: Parser,
    values: Mapping[str, Any],
    known: Mapping[str, Setting | None],
    chosen: Mapping[str, str],
) -> dict[str, Any]:
    """The *values* of a command line or a file, by name, as the types of their settings.

    Raises:
        UserError: one is invalid, or belongs to a part that is not chosen.
    """
    found = {}
    for name, value in values.items():
        flag, setting = fields.flag_name(name), known.get(name)
        if name not in known:
            foreign = foreign_flags(parser.command).get(flag[2:]) if parser.command else None
            if foreign is None:
                parser.refuse_foreign_part(flag, name, known, chosen)
                parser.refuse_unknown(flag, known, chosen)
            foreign.refuse(flag, value)
            parser.unread.append((foreign, flag, value))
            continue
        if isinstance(value, list) and setting is not None and not setting.many:
            value = ",".join(map(str, value))  # as on a command line
        found[name] = value if setting is None else setting.read(value)
        if setting is None:
            # An empty file name would be the current folder. Settings check their text themselves.
            action = next(action for _, action in parser.arguments if action.dest == name)
            place = action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and "\0" in text:
                    raise UserError(f"{place}: contains a NUL character; remove it")
                if text == "" and action.type is None:
                    raise UserError(f"{place}: an empty value; give a name")
    return found


def _in_full(parser: Parser, values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """*values* with the settings that short forms among them stand for, in place of these.

    Raises:
        UserError: a short form is invalid, or contradicts the setting that it stands for.
    """
    if parser.short_forms is None:
        return dict(values)
    found = {name: value for name, value in values.items() if name not in fields.defaults(parser.short_forms)}
    try:
        for short, meaning in fields.typed(parser.short_forms, values).meaning().items():
            for name, value in meaning.items():
                if found.setdefault(name, value) != value:
                    raise SettingError(
                        f"`{short}` {values[short]}: contradicts `{name}` {fields.shown(found[name])}; give one of them"
                    )
    except SettingError as error:
        raise UserError(f"{where}{error.args[0]}") from None
    return found


def _from_file(
    parser: Parser, path: str, file: Mapping[str, Any], known: Mapping[str, Setting | None], chosen: Mapping[str, str]
) -> dict[str, Any]:
    """The settings of the --config file at *path*, as those of a command line."""
    actions = {action.dest: action for _, action in parser.arguments} | {
        name: action for flag, action in parser.by_flag.items() for name in [flag.lstrip("-").replace("-", "_")]
    }
    settings: dict[str, Any] = {}
    for name, value in file.items():
        if name not in known and name not in actions:
            meant = [flag[2:].replace("-", "_") for flag in parser.suggestions(fields.flag_name(name), known, True)]
            close = nearest(name, known) if not meant else f"did you mean {' or '.join(meant)}?"
            advice = close if close.startswith("did") else "see --help-all"
            raise UserError(f"--config {path}: {name}: no such setting; {advice}")
        try:
            if known.get(name) is None and value is not None:
                value = _converted(actions[name], value)
            settings |= _checked(parser, {name: value}, known, chosen)
        except (UserError, ValueError, TypeError, argparse.ArgumentTypeError) as error:
            reason = error.args[0] if isinstance(error, UserError) else f"{name}: {shortened(value)}: {error}"
            raise UserError(f"--config {path}: {reason}") from None
    return settings


def _converted(action: argparse.Action, value: Any) -> Any:
    """*value*, a text or a list or dict of texts, as the flag of *action*, which is none of a
    dataclass, would read it."""
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


def _resolve(
    parser: Parser,
    args: Parsed,
    file: Mapping[str, Any],
    known: Mapping[str, Setting | None],
    recipe: Mapping[str, Any],
    chosen: Mapping[str, str],
    parts: Sequence[tuple[Part, Any]],
    left_open: Collection[str],
) -> None:
    """Complete *args*, what is given, but for the settings *left_open*: by --config, the recipe,
    the architecture, defaults."""

    def fill(values: Mapping[str, Any], origin: str, open: Collection[str] = left_open) -> None:
        new = {name: value for name, value in values.items() if name not in args and name not in open}
        vars(args).update(new)
        args.origins |= dict.fromkeys(new, origin)

    # A checkpoint stores the settings, not the file that they came from.
    path = vars(args).pop("config", None)
    args.origins = dict.fromkeys(vars(args), "yours")
    for one, other in SAME:
        if hasattr(args, one) and hasattr(args, other):
            raise UserError(f"{fields.flag_name(one)} {fields.flag_name(other)}: choose one of the two")
    if path is not None:
        from_file = _in_full(parser, _from_file(parser, str(path), file, known, chosen), f"--config {path}: ")
        if hasattr(args, "save_dir"):
            from_file = for_another_run(from_file, args.save_dir)
        replaced = {name for group in SAME if any(hasattr(args, name) for name in group) for name in group}
        fill({name: value for name, value in from_file.items() if name not in replaced}, str(path), ())
    configs = [*parser.configs, *(config for _, part in parts if (config := getattr(part, "config_class", None)))]
    for part, cls in parts:
        fill(parser.plugins.get(part, {}), "default")
        if part[0] == "lr_scheduler" and is_outside(cls) and getattr(cls, "config_class", None):
            # All schedules share some settings; a plug-in's dataclass may have other defaults.
            declared = fields.defaults(cls.config_class)
            fill({n: declared[n] for n in fields.defaults(RateConfig) if declared.get(n) is not None}, "default")
    names = {name for config in configs for name in fields.defaults(config)} | set(CHOICES)
    fill({name: value for name, value in recipe.items() if name in names}, f"recipe of {chosen.get('arch')}")
    fill(chosen, "default")
    # Before the dataclasses' defaults, which fill what architectures leave open.
    if "arch" in chosen:
        # A plug-in's function may replace what is given.
        completed = ARCHITECTURES[args.arch].complete(vars(args))
        args.origins |= {name: args.arch for name, value in completed.items() if vars(args).get(name, args) != value}
        vars(args).update(completed)
    for config in configs:
        values = fields.checked(config, vars(args))
        vars(args).update({name: value for name, value in values.items() if name in args})
        fill(values, "default")
    _leave_out_extensions(args, parts)
    if "arch" in chosen and args.max_tokens is None and args.batch_size is None:
        args.batch_size = DEFAULT_BATCH_SIZE
    for name in ("fp16", "memory_efficient_fp16"):
        if getattr(args, name, False) and getattr(args, "bf16", False):
            raise UserError(f"{fields.flag_name(name)} --bf16: choose one of the two")
    # As in fairseq, this flag implies --fp16.
    if getattr(args, "memory_efficient_fp16", False):
        args.fp16 = True


def _leave_out_extensions(args: argparse.Namespace, parts: Sequence[tuple[Part, Any]]) -> None:
    """Remove settings of extensions that are off, so that no log or checkpoint has them; UserError
    if one was given."""
    for (choice, name), part in parts:
        if choice == EXTENSION and not getattr(args, name):
            for setting, default in fields.defaults(part.config_class).items():
                if getattr(args, setting) != default:
                    raise UserError(
                        f"{fields.flag_name(setting)}: has no effect without {fields.flag_name(name)}; add it"
                    )
                delattr(args, setting)
