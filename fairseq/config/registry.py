"""Registries of named parts: models, architectures,
tasks, criterions, optimizers, schedules and tokenizers.

They are below the packages of the parts and name none:
:mod:`fairseq.parts` declares the built-in ones.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fairseq.errors import UserError, nearest
from fairseq.system import deferred, plugins

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = TypeVar("P")
C = TypeVar("C", bound=type)
Fill = Callable[[argparse.Namespace], None]
Complete = Callable[[Mapping[str, Any]], dict[str, Any]]

# Names of parts that fairseq 0.12.2 does not have:
# plug-ins written for it may have parts of these names.
_ADDED = re.compile(
    r"bert|electra|tnf_|shortformer|transformer_xl|truncated_bptt_lm|muon|wsd|transformer_lm_(demo|fast|tiny)|lstm_lm_tiny"
)
# Folders and modules of this package; others in it are copies of a plug-in.
OWN_MODULES = (
    *("analysis", "checkpoint", "config", "criterions", "data", "distributed", "errors", "evaluation", "hub"),
    *("inference", "interop", "kernels", "logging", "models", "modules", "notes", "optim", "parts", "preprocessing"),
    *("system", "tasks", "text", "train", "training"),
    # fairseq's names
    *(
        "checkpoint_utils",
        "dataclass",
        "distributed_utils",
        "file_chunker_utils",
        "file_io",
        "hub_utils",
        "incremental_decoding_utils",
    ),
    *("meters", "metrics", "options", "progress_bar", "registry", "search", "sequence_generator", "sequence_scorer"),
    *("tokenizer", "trainer", "utils"),
)
# Names that transformers and torch have for parts.
FORMER = {
    "linear": "polynomial_decay",
    "constant": "fixed",
    "adamw": "adam",
}
_copied_modules: set[str] = set()


@dataclass(frozen=True)
class Declaration:
    """A built-in part, imported when it is used.

    Attributes:
        target: its class, as ``module:name``.
        settings: the dataclass of its settings; None: the class names it.
    """

    target: str
    settings: Any = None

    def load(self) -> Any:
        """Import the part."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)

    @property
    def config_class(self) -> Any:
        """The dataclass of its settings."""
        return self.settings or self.load().config_class


@dataclass(eq=False)
class Registry(Generic[T]):
    """Parts of one kind, by name.

    Attributes:
        kind: what a part is called in messages, e.g. ``"criterion"``.
        flag: the flag that chooses one, e.g. ``"--criterion"``.
        default: the part that is chosen without the flag.
        help: what ``--help`` says of the flag, where that is not *kind*.
        aliases: further names of the flag.
        base: the class that every part extends.
    """

    kind: str
    flag: str
    default: str = ""
    help: str = ""
    aliases: Sequence[str] = ()
    base: type = object
    _parts: dict[str, T] = field(default_factory=dict)
    _declared: dict[str, Declaration] = field(default_factory=dict)

    def declare(self, name: str, target: str, settings: type | None = None) -> None:
        """Declare the built-in part *name*: its class
        as ``module:name``, and the dataclass of its *settings*.

        Command lines are parsed without importing that module,
        and with it torch, if *settings* are given.
        """
        self._declared[name] = Declaration(target, settings)

    def extend(self, base: C) -> C:
        """Class decorator: every part must be a subclass of *base*."""
        self.base = base
        return base

    def register(self, name: str, dataclass: type | None = None) -> Callable[[P], P]:
        """Decorator that registers a part as *name*.

        Args:
            name: the value of the flag that chooses the part.
            dataclass: the config whose fields become flags; without one the part's own
                ``add_args(parser)`` makes them.

        Raises:
            ValueError: another part has that name,
                or the part does not extend the base class of its kind.
        """

        def keep(part: P) -> P:
            if self.base is not object and not (isinstance(part, type) and issubclass(part, self.base)):
                part_name = getattr(part, "__name__", repr(part))
                raise ValueError(f"{self.kind} {name!r} ({part_name}) must extend {self.base.__name__}")
            # A plug-in's dataclass for fairseq tells how it is read here.
            if dataclass is not None:
                translate = getattr(dataclass, "as_config", lambda: dataclass)
                part.config_class = translate()  # type: ignore[attr-defined]
            _note_module(part)
            known = self._find(name)
            if known is not None and is_replaceable(known, part, name):
                logger.warning("%s %s: the plug-in's replaces the built-in one", self.kind, name)
            elif known is not None and not _same_source(known, part):
                raise ValueError(f"{self.kind} {name!r} is registered already; leave yours out or give it another name")
            self._parts[name] = part  # type: ignore[assignment]
            return part

        return keep

    def replace(self, name: str, part: T) -> None:
        """Let *part* be the one called *name*, whatever was."""
        self._parts[name] = part

    def parts(self) -> Mapping[str, T]:
        """All parts by name, after the import of their modules."""
        for name in self:
            self._find(name)
        return self._parts

    def declaration(self, name: str) -> T | Declaration:
        """The declaration of the part called *name*,
        or a plug-in's part; UserError if there is neither."""
        deferred.declare_parts()
        if name in self._declared and (name not in self._parts or not is_outside(self._parts[name])):
            return self._declared[name]
        return self[name]

    def __getitem__(self, name: str) -> T:
        """The part called *name*; UserError, which names the nearest ones, if there is none."""
        part = self._find(name) if name in self else None
        if part is None:
            raise UserError(f"{self.flag} {name}: no such {self.kind}; {nearest(FORMER.get(name, name), list(self))}")
        return part

    def __contains__(self, name: str) -> bool:
        deferred.declare_parts()
        if name not in self._declared and name not in self._parts:
            plugins.import_copies()
        return name in self._declared or name in self._parts

    def __iter__(self) -> Iterator[str]:
        deferred.declare_parts()
        return iter(sorted({*self._parts, *self._declared}))

    def _find(self, name: str) -> T | None:
        deferred.declare_parts()
        if name not in self._parts and name in self._declared:
            self._parts[name] = self._declared[name].load()
        return self._parts.get(name)


def is_outside(part: object) -> bool:
    """Return whether *part*, a class or a function, is a plug-in's: of another package, or in a
    module that was copied into this one."""
    package, _, module = str(part.__module__).partition(".")
    is_copy = module and (module.partition(".")[0] not in OWN_MODULES or part.__module__ in _copied_modules)
    return package != __name__.partition(".")[0] or bool(is_copy)


def _note_module(part: object) -> None:
    """Note that the module of the class *part*, which registers itself, is a plug-in's: built-in
    parts are declared."""
    deferred.declare_parts()
    registries = (MODELS, TOKENIZERS, BPES, *CHOICES.values())
    declared = {d.target.partition(":")[0] for registry in registries for d in registry._declared.values()}
    if isinstance(part, type) and part.__module__ not in declared:
        _copied_modules.add(part.__module__)


def is_plugin(chosen: Mapping[str, str]) -> bool:
    """Return whether model, task or criterion among the names *chosen* is a plug-in's."""
    names = [(choice, chosen.get(choice)) for choice in ("task", "arch", "criterion")]
    return any(name and name in CHOICES[choice] and is_outside(chosen_part(choice, name)) for choice, name in names)


def set_up(task: Any, settings: Any, dictionary: object = None) -> Any:
    """The *task* of *settings*, with *dictionary* where there are no data;
    with a plug-in's part under fairseq's protocol, which plug-ins are written for."""
    if is_plugin(vars(settings.chosen)):
        return deferred.plugins().set_up(task, settings, dictionary)
    return task.setup_task(settings) if dictionary is None else task(settings, dictionary)


def is_replaceable(known: object, part: object, name: str) -> bool:
    """Whether *part*, a plug-in's called *name*, may take the place of *known*, of which fairseq
    has no such name."""
    return is_outside(part) and not is_outside(known) and _ADDED.match(name) is not None


def _same_source(known: object, part: object) -> bool:
    """Return whether two parts are one definition imported
    twice (a ``--user-dir`` that is also a package)."""
    return getattr(known, "__qualname__", None) == getattr(part, "__qualname__", object()) and getattr(
        getattr(known, "__code__", None), "co_filename", getattr(known, "__module__", None)
    ) == getattr(getattr(part, "__code__", None), "co_filename", getattr(part, "__module__", None))


@dataclass(frozen=True)
class Architecture:
    """A model's name, and a function that returns settings with the defaults of what they lack."""

    model: str
    complete: Complete

    def fill(self, args: argparse.Namespace) -> None:
        vars(args).update(self.complete(vars(args)))


def chosen_part(choice: str, name: str) -> Any:
    """Declaration or class that *choice* chooses
    with the value *name*, of an architecture its model's.

    Raises:
        UserError: there is none.
    """
    return MODELS.declaration(ARCHITECTURES[name].model) if choice == "arch" else CHOICES[choice].declaration(name)


def extensions_of(task: object) -> list[str]:
    """Names of the extensions that *task*, a class or its declaration, has settings of."""
    return [name for name in EXTENSIONS if EXTENSIONS.declaration(name).config_class.extends(task)]


def completed(defaults: Mapping[str, object], settings: Mapping[str, object]) -> dict[str, Any]:
    """*settings* with *defaults* of what they lack;
    defaults that are functions are computed from all others."""
    # Plain values first, so that the functions see all of them, and whatever the user gave.
    known = {**{name: value for name, value in defaults.items() if not callable(value)}, **settings}
    return {**{name: value(known) for name, value in defaults.items() if callable(value)}, **known}


MODELS: Registry[Any] = Registry("model", "--arch")
ARCHITECTURES: Registry[Architecture] = Registry("architecture", "--arch", default="transformer_lm", aliases=("-a",))
TASKS: Registry[Any] = Registry("task", "--task", default="language_modeling")
CRITERIONS: Registry[Any] = Registry("criterion", "--criterion", default="cross_entropy", help="loss function")
OPTIMIZERS: Registry[Any] = Registry("optimizer", "--optimizer", default="nag")
LR_SCHEDULERS: Registry[Any] = Registry("learning-rate schedule", "--lr-scheduler", default="fixed")
EXTENSIONS: Registry[Any] = Registry("extension", "a switch")
TOKENIZERS: Registry[Any] = Registry("word tokenizer", "--tokenizer")
BPES: Registry[Any] = Registry("subword encoding", "--bpe")

CHOICES: dict[str, Registry[Any]] = {  # by the name of the setting that chooses a part
    "task": TASKS,
    "arch": ARCHITECTURES,
    "criterion": CRITERIONS,
    "optimizer": OPTIMIZERS,
    "lr_scheduler": LR_SCHEDULERS,
}

register_task = TASKS.register
register_criterion = CRITERIONS.register
register_optimizer = OPTIMIZERS.register
register_lr_scheduler = LR_SCHEDULERS.register
register_tokenizer = TOKENIZERS.register
register_bpe = BPES.register


def register_model(name: str, dataclass: type | None = None) -> Callable[[C], C]:
    """Class decorator: register a model as *name*,
    with the dataclass of its settings if it has one.

    A plug-in's dataclass also makes an architecture of that name, with the dataclass's defaults.
    """

    def keep(model: C) -> C:
        _note_module(model)
        is_free = is_outside(model) and (name not in MODELS or is_replaceable(MODELS[name], model, name))
        # As in fairseq, where the name of a model with a dataclass is an architecture.
        if is_free and (dataclass is not None or name in ARCHITECTURES):
            ARCHITECTURES.replace(name, Architecture(name, dict))
        return MODELS.register(name, dataclass)(model)

    return keep


def register_model_architecture(model_name: str, arch_name: str) -> Callable[[Fill], Fill]:
    """Decorator for a function that sets on a ``Namespace``
    the defaults of a plug-in's architecture."""

    def keep(fill: Fill) -> Fill:
        @functools.wraps(fill)
        def complete(settings: Mapping[str, object]) -> dict[str, Any]:
            args = argparse.Namespace(**settings)
            fill(args)
            return vars(args)

        known = ARCHITECTURES[arch_name].complete if arch_name in ARCHITECTURES else None
        if known is dict:  # of the dataclass alone
            ARCHITECTURES.replace(arch_name, Architecture(model_name, complete))
        elif known is not None and is_outside(fill) and _ADDED.match(arch_name) and not is_outside(known):
            logger.warning("architecture %s: the plug-in's replaces the built-in one", arch_name)
            ARCHITECTURES.replace(arch_name, Architecture(model_name, complete))
        elif known is None or not _same_source(getattr(known, "__wrapped__", known), fill):
            ARCHITECTURES.register(arch_name)(Architecture(model_name, complete))
        return fill

    return keep


def declare_model(
    name: str,
    target: str,
    settings: type | None = None,
    architectures: Mapping[str, Mapping[str, object] | Complete] | None = None,
) -> None:
    """Declare a built-in model, see :meth:`Registry.declare`, with its architectures.

    Args:
        architectures: by name, their defaults, completed as :func:`completed` says, or a function
            that completes settings. Default: one called *name*, with the defaults of *settings*.
    """
    MODELS.declare(name, target, settings)
    for arch, defaults in (architectures or {name: {}}).items():
        complete = defaults if callable(defaults) else functools.partial(completed, defaults)
        ARCHITECTURES.replace(arch, Architecture(name, complete))
