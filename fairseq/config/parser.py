"""The argument parser of the commands: flags of dataclasses
and registered parts, help, and one-line errors."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fairseq.config import fields
from fairseq.config.fields import LARGEST_INT, shortened
from fairseq.config.registry import CHOICES, EXTENSIONS, chosen_part, extensions_of
from fairseq.errors import UserError, first_of
from fairseq.system.terminal import WIDTH
from fairseq.system.version import __version__

# Flags, and what nanoGPT, Hugging Face's Trainer and others call them.
OTHER_NAMES = """
decoder-layers encoder-layers n-layer: num-layers num-hidden-layers n-layer n-layers layers depth
decoder-embed-dim encoder-embed-dim d-model: n-embd n-embed hidden-size hidden-dim embedding-dim embed-dim d-model dim
decoder-attention-heads encoder-attention-heads n-head: num-attention-heads num-heads n-head n-heads heads
decoder-ffn-embed-dim encoder-ffn-embed-dim d-inner: intermediate-size n-inner d-inner d-ff ffn-dim mlp-dim
max-new-tokens: max-length
tokens-per-sample: block-size seq-len seq-length sequence-length max-seq-len max-seq-length max-length
tokens-per-sample: model-max-length context-length n-ctx n-positions max-position-embeddings tgt-len
max-update: max-steps max-iters num-steps num-iters train-steps steps iters lr-decay-iters
max-epoch: num-train-epochs num-epochs epochs
batch-size: bs train-batch-size per-device-train-batch-size per-device-eval-batch-size eval-batch-size
batch-size-valid: eval-batch-size per-device-eval-batch-size
update-freq: gradient-accumulation-steps grad-accumulation-steps grad-accum-steps grad-acc-steps grad-accum accum
lr-scheduler: lr-scheduler-type scheduler
optimizer: optim
adam-betas: beta1 beta2 adam-beta1 adam-beta2
adam-eps: adam-epsilon
weight-decay: wd
warmup-updates: warmup-steps warmup-iters
clip-norm: grad-clip clip-grad max-grad-norm gradient-clip-val
attention-dropout dropatt: attn-pdrop attention-probs-dropout-prob
dropout: resid-pdrop embd-pdrop hidden-dropout-prob
save-dir: output-dir out-dir
results-path: output-dir out-dir output
log-interval: logging-steps
validate-interval-updates: eval-interval eval-steps eval-every
save-interval-updates: save-steps save-every
keep-interval-updates: save-total-limit
max-valid-steps: eval-iters
restore-file: resume-from-checkpoint resume
finetune-from-model: init-from
path: model-name-or-path model checkpoint checkpoint-path ckpt
arch: model-name-or-path model-name model-type model
cpu: device no-cuda use-cpu
bf16 fp16: dtype precision mixed-precision
checkpoint-activations: gradient-checkpointing
num-workers: dataloader-num-workers
wandb-project: wandb-log report-to wandb
tensorboard-logdir: report-to logging-dir
sampling-topk: top-k
sampling-topp: top-p
beam: num-beams
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(
        self,
        description: str,  # one sentence
        configs: Sequence[type] = (),  # dataclasses whose flags there always are
        choices: Sequence[str] = (),  # settings that choose parts (:data:`~fairseq.config.registry.CHOICES`)
        # Dataclasses, and which of their fields are flags whose default is a checkpoint's setting.
        optional: Sequence[tuple[type, Sequence[str]]] = (),
        *,
        examples: Sequence[str] = (),  # command lines that ``--help`` begins with
        first: Sequence[str] = (),  # names of the arguments that ``--help`` shows before all others
        hidden: Collection[str] = (),  # fields whose flags are taken for fairseq's sake, neither shown nor read
        settings_file: bool = True,  # whether ``--config`` names a YAML file with settings
        takes_unused: bool = False,  # whether fairseq's flags without meaning here are taken
        # What an architecture recommends, from its name
        # and what the command line and ``--config`` choose.
        recommend: Callable[[str, Mapping[str, Any]], Mapping[str, object]] | None = None,
    ) -> None:
        # Every argument with the title of its group, in the order in which it was added.
        self.arguments: list[tuple[str, argparse.Action]] = []
        super().__init__(
            description=description,
            epilog="\n".join(["examples:", *(f"  {line}" for line in examples)]) if examples else None,
            # An abbreviation would change its meaning with every flag that is added.
            allow_abbrev=False,
            # A plug-in may declare a flag again that is here already.
            conflict_handler="resolve",
        )
        self.configs = list(configs)
        self.first = list(first)
        self.chosen_group = ""  # title of the flags that --help shows beside the first ones
        self.lists = ""  # what --help says last: further flags that list something
        self.left_open: tuple[str, ...] = ()  # settings that have no value unless they are given
        self.choices = list(choices)
        self.settings_file = settings_file
        self.takes_unused = takes_unused
        self.recommend = recommend
        # What the command line chooses, by the name of the setting; set while it is parsed.
        self.chosen: dict[str, str] = {}
        self.add_argument("--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS, help="show all flags")
        self.add_argument("--version", action="version", version=version(), help="show the version")
        if settings_file:
            help = "YAML file of flags, without dashes; command-line flags override it"
            self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=help)
        for name in choices:
            choice = CHOICES[name]
            help = f"{choice.help or choice.kind}, see --help-all (default: {choice.default})"
            flags = (choice.flag, *choice.aliases)
            self.add_argument(*flags, dest=name, metavar="NAME", default=argparse.SUPPRESS, help=help)
        for cls in configs:
            fields.add_flags(self.add_argument_group(title_of(cls)), cls)
        for cls, names in optional:
            fields.add_flags(self.add_argument_group(title_of(cls)), cls, names, otherwise="the checkpoint's")
        # Flags that nothing reads: *hidden* ones,
        # and others on the command line, while it is parsed.
        self.unread: list[str] = []
        for _, action in self.arguments:
            if action.dest in hidden:
                action.help = argparse.SUPPRESS
                self.unread += action.option_strings

    @property
    def by_flag(self) -> dict[str, argparse.Action]:
        """Every flag's argument."""
        return {flag: action for _, action in self.arguments for flag in action.option_strings}

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an argument. A positional one that there is already, as in fairseq's tasks ``data``,
        stays as it is."""
        for _, action in self.arguments:
            if not action.option_strings and args == (action.dest,):
                return action
        title = "options" if args and args[0].startswith("-") else "positional arguments"
        return self._noted(title, super().add_argument, args, kwargs)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> Any:
        """Add a group of arguments, which :attr:`arguments` has, too."""
        return self._noting(super().add_argument_group(*args, **kwargs))

    def add_mutually_exclusive_group(self, **kwargs: Any) -> Any:
        """Add a group of arguments, of which one at most may be given."""
        return self._noting(super().add_mutually_exclusive_group(**kwargs))

    def _noted(self, title: str, add: Callable[..., argparse.Action], args: Any, kwargs: Any) -> argparse.Action:
        action = add(*args, **kwargs)
        # One that lost all its flags to another is gone.
        positional = bool(args) and not args[0].startswith("-")
        self.arguments = [each for each in self.arguments if each[1].option_strings or each[0].startswith("positional")]
        place = sum(not each.option_strings for _, each in self.arguments) if positional else len(self.arguments)
        self.arguments.insert(place, ("positional arguments" if positional else title, action))
        return action

    def _noting(self, group: Any) -> Any:
        title, add = getattr(group, "title", None) or "options", group.add_argument
        group.root = self
        group.add_argument = lambda *args, **kwargs: self._noted(title, add, args, kwargs)
        return group

    def add_user_dir(self) -> None:
        """Take ``--user-dir``, which commands that run a model have among their settings."""
        self.add_argument(
            "--user-dir", metavar="DIR", default=argparse.SUPPRESS, help="plug-in folder, a Python package"
        )

    def show_defaults(self, values: Mapping[str, object]) -> None:
        """Show *values* as the defaults of their flags:
        an architecture's differ from the dataclass's."""
        for _, action in self.arguments:
            if action.dest in values and action.help not in (None, argparse.SUPPRESS):
                text = re.sub(r" \(default: [^()]*\)$", "", str(action.help))
                action.help = f"{text} (default: {fields.shown(values[action.dest])})"

    def describe(self, group: str, arch: str, recipe: Mapping[str, object]) -> None:
        """Show *group*, the flags of the architecture *arch*, and its *recipe* in short help."""
        values = ", ".join(f"{name.replace('_', '-')} {fields.shown(value)}" for name, value in recipe.items())
        self.chosen_group = group
        self.lists = f"Recipe of {arch}, unless you choose: {values or 'none'}.\n{self.lists}"

    def format_help(self, all: bool = False) -> str:
        """The help text: usage, examples, the flags one needs first;
        with *all* also the others and the parts."""
        shown = [(title, action) for title, action in self.arguments if action.help != argparse.SUPPRESS]
        by_name = {action.dest: action for _, action in shown}
        first = [by_name[name] for name in dict.fromkeys(self.first) if name in by_name]
        groups = {
            title: [action for one, action in shown if one == title and action not in first] for title, _ in shown
        }
        parts = [self._usage(), *map(_paragraph, filter(None, [self.description])), self.epilog or ""]
        if first:
            parts.append(_section("most used", first))
        if first and not all:
            parts += [_section(title, actions) for title, actions in groups.items() if title == self.chosen_group]
            count = sum(bool(action.option_strings) for _, action in shown)
            parts += [*map(_paragraph, self.lists.splitlines()), f"{self.prog} --help-all shows all {count} flags."]
        else:
            parts += [_section(title, actions) for title, actions in groups.items() if actions]
            parts += [f"{CHOICES[name].flag}:\n{_paragraph(', '.join(CHOICES[name]), '  ')}" for name in self.choices]
        return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"

    def _usage(self) -> str:
        # argparse would list every flag, of which training has more than a hundred.
        words = [self.prog]
        for _, action in self.arguments:
            metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            if not action.option_strings:
                words.append(metavar if action.required and action.nargs != "?" else f"[{metavar}]")
            elif action.required:
                words.append(f"{action.option_strings[0]} {metavar}")
        return f"usage: {' '.join(words)} [flags]"

    def error(self, message: str) -> NoReturn:
        """Raise a :class:`UserError`; an unknown flag gets
        the nearest one, or the part that it belongs to."""
        # argparse gives its errors as text only.
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown and unknown[1].startswith("-"):
            # Names of Python and of YAML have underscores, flags dashes.
            flag = unknown[1].split("=")[0]
            dashed = "--" + flag.lstrip("-").replace("_", "-")
            if dashed != flag and not flag.startswith("---") and len(flag) > 2:
                owner = None if dashed in self.by_flag else self._owner(dashed)
                raise UserError(owner or f"{flag}: no such flag; {self._close(dashed)}")
            raise UserError(self._owner(flag) or f"{flag}: no such flag; {self._close(flag)}")
        flag = re.match(r"argument (\S+): (ignored explicit argument)?", message)
        if flag and flag[2]:
            raise UserError(f"{flag[1]}: takes no value; see --help")
        if flag and message.endswith(": expected one argument"):
            name = flag[1].split("/")[0]
            raise UserError(f"{flag[1]}: expected one argument; write {name}=VALUE where it begins with -")
        raise UserError(f"{message.removeprefix('argument ')}; see --help")

    def _owner(self, flag: str) -> str | None:
        """The error for a flag of parts that are not chosen, if *flag* is one; without a model no
        part has flags."""
        for name in self.choices if "arch" in self.choices else ():
            choice = CHOICES[name]
            owners = [part for part in choice if flag in _flags(chosen_part(name, part))]
            if owners:
                chosen = self.chosen.get(name, choice.default)
                meant = " or ".join(self.meant(flag))
                end = f"; did you mean {meant}?" if meant else ""
                return f"{flag}: belongs to {choice.flag} {first_of(owners)}, not to {choice.flag} {chosen}{end}"
        return None

    def _visible(self) -> list[str]:
        visible = [action for _, action in self.arguments if action.help != argparse.SUPPRESS]
        return [s for action in visible for s in action.option_strings if s.startswith("--")]

    def meant(self, flag: str) -> list[str]:
        """The flags of this parser that other programs call *flag*."""
        rows = [row.split(": ") for row in OTHER_NAMES.strip().splitlines()]
        names = [name for names, others in rows if flag[2:] in others.split() for name in names.split()]
        return [f"--{name}" for name in names if f"--{name}" in self._visible()]

    def _close(self, flag: str) -> str:
        flags = self._visible()
        close = [flag] if flag in flags else self.meant(flag) or difflib.get_close_matches(flag, flags, n=2, cutoff=0.7)
        return f"did you mean {' or '.join(close)}?" if close else "see --help"


class _HelpAll(argparse.Action):
    """Shows the help of all flags, and exits."""

    def __call__(self, parser: Any, *args: object, **kwargs: object) -> NoReturn:
        print(parser.format_help(all=True), end="")
        sys.exit(0)


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


def title_of(cls: type, name: str | None = None) -> str:
    """The title of a dataclass's flags: the beginning
    of its docstring, and the *name* it is registered under."""
    text = " ".join((cls.__doc__ or cls.__name__).split())
    title = re.sub(r"^(The )?[Ss]ettings of (an? |the )?", "", re.split(r"[:;]|\.(?:\s|$)", text)[0])
    title = title[:1].upper() + title[1:]
    return f"{title} ({name})" if name else title


def _flags(part: object) -> set[str]:
    """Every flag of the dataclasses of *part* and of its extensions."""
    parts = [part, *(EXTENSIONS.declaration(name) for name in extensions_of(part))]
    configs = filter(None, (getattr(one, "config_class", None) for one in parts))
    declared = [field for cls in configs for field in dataclasses.fields(cls)]
    return {flag for field in declared for flag in (fields.flag_name(field.name), *field.metadata.get("aliases", ()))}


def folder_path(text: str) -> Path:
    """Return *text*, which must not be empty, as a path."""
    if not text:
        raise argparse.ArgumentTypeError("an empty value; give a folder")
    return Path(text)


def check_words(most: int | None) -> None:
    """Raise UserError unless *most*, the value of ``--max-words``, is a count."""
    if most is not None and not 1 <= most <= LARGEST_INT:
        raise UserError(f"--max-words {shortened(most)}: must be from 1 to {LARGEST_INT}")
