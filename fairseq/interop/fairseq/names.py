"""Names under which plug-ins written for fairseq import what is elsewhere here, most of it in this
package.

:mod:`~fairseq.interop.fairseq.former_names` has the tables; :data:`METHODS` are those that a class
does not have, or not with fairseq's arguments. All are looked up when a plug-in asks for them;
nothing in this package does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

_ITEMS = "__getitem__ collater num_tokens size ordered_indices"
METHODS = (  # module, class, names of functions in the module `methods`
    ("fairseq.criterions.fairseq_criterion", "FairseqCriterion", "add_args"),
    ("fairseq.data.masking", "MaskedBlocks", _ITEMS),
    ("fairseq.data.token_blocks", "TokenBlocks", _ITEMS),
    ("fairseq.interop.fairseq.roberta", "RobertaModel", "from_pretrained"),
    ("fairseq.models.base", "BaseFairseqModel", "add_args"),
    ("fairseq.models.base", "FairseqLanguageModel", "from_pretrained"),
    ("fairseq.models.bert", "EncoderModel", "register_classification_head"),
    ("fairseq.models.transformer_lm", "TransformerLanguageModel", "build_embedding"),
    ("fairseq.optim.fairseq_optimizer", "FairseqOptimizer", "add_args"),
    ("fairseq.optim.lr_scheduler.fairseq_lr_scheduler", "FairseqLRScheduler", "add_args"),
    (
        "fairseq.tasks.fairseq_task",
        "FairseqTask",
        "add_args load_dictionary load_dataset get_batch_iterator filter_indices_by_size "
        "can_reuse_epoch_itr max_positions begin_epoch begin_valid_epoch train_step valid_step "
        "optimizer_step reduce_metrics aggregate_logging_outputs logging_outputs_can_be_summed "
        "state_dict load_state_dict build_generator inference_step has_sharded_data "
        "build_dataset_for_inference get_interactive_tokens_and_lengths build_bpe build_tokenizer",
    ),
    ("fairseq.tasks.language_modeling", "LanguageModelingTask", "__init__ eval_lm_dataloader setup_dictionary"),
)
OF_CLASSES = ("add_args", "build_embedding", "from_pretrained", "load_dictionary", "setup_dictionary")
ATTRIBUTES = (
    ("fairseq.tasks.fairseq_task", "FairseqTask", "args cfg datasets layout"),
    ("fairseq.tasks.language_modeling", "LanguageModelingTask", "output_dictionary targets"),
    ("fairseq.tasks.masked_lm", "MaskedLMTask", "mask_idx"),
)

FROM_CHECKPOINT = {  # module: a task whose `build_model` fairseq calls with a further argument
    "fairseq.tasks.fairseq_task": "FairseqTask",
    "fairseq.tasks.sentence_prediction": "SentencePredictionTask",
}


def home_of(name: str) -> str:
    """The full name of a module here; without a dot it is one of this folder."""
    return name if "." in name else f"fairseq.interop.fairseq.{name}"


class _FormerNames(SourceFileLoader):
    """Loads a module of this package and gives it what it had in fairseq."""

    def exec_module(self, module: ModuleType) -> None:
        # After the module's own code: what it defines itself is never replaced by a former name.
        super().exec_module(module)
        for home, cls, names in METHODS:
            if home == module.__name__:
                part = getattr(module, cls)
                for name in names.split():
                    method = _method(name, getattr(part, name, None))
                    setattr(part, name, classmethod(method) if name in OF_CLASSES else method)
        for home, cls, names in ATTRIBUTES:
            if home == module.__name__:
                for name in names.split():
                    setattr(getattr(module, cls), name, _Attribute(name))
        if module.__name__ in FROM_CHECKPOINT:
            task = getattr(module, FROM_CHECKPOINT[module.__name__])
            task.build_model = _from_checkpoint(task.build_model)
        _find_names(module)


def _find_names(module: ModuleType) -> None:
    """Give *module* a ``__getattr__`` that finds its former names, and modules of a package."""
    present = vars(module).get("__getattr__")

    def find(name: str) -> Any:
        if present is not None:
            with contextlib.suppress(AttributeError):
                return present(name)
        full, path = f"{module.__name__}.{name}", vars(module).get("__path__")
        if not name.startswith("__"):
            # A true submodule comes first: `fairseq.optim.adam` is a module here, whatever names
            # the package had.
            is_module = PathFinder.find_spec(full, path or []) is not None
            if not is_module and name in _tables().NAMES.get(module.__name__, {}):
                return _tables().part(module.__name__, name)
            if is_module or full in _tables().MODULES:
                # As an attribute, without an import of it: a package of fairseq imports all its
                # modules.
                return importlib.import_module(full)
            former = (old for old, new in _tables().MODULES.items() if new == module.__name__)
            if path == [] and any(old.endswith(f".{name}") for old in former):
                # A package of fairseq that is one module here: its submodules are the module
                # itself.
                return module
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__getattr__ = find  # type: ignore[method-assign]


def _tables() -> ModuleType:
    return importlib.import_module("fairseq.interop.fairseq.former_names")


def _method(name: str, present: Callable[..., object] | None) -> Callable[..., object]:
    """The method *name*, imported when it is called; *present* is called for arguments that it
    takes."""
    known = set() if present is None else set(inspect.signature(present).parameters)

    def call(self: object, *args: object, **options: object) -> Any:
        # `known` has `self`, too. Calls that this package's own method understands stay with it;
        # only fairseq's further arguments need the other one.
        if present is not None and len(args) < len(known) and options.keys() <= known:
            return present(self, *args, **options)
        return getattr(importlib.import_module(home_of("methods")), name)(self, *args, **options)

    return call if present is None else functools.wraps(present)(call)


def _from_checkpoint(method: Callable[..., object]) -> Callable[..., object]:
    """*method* with the further argument, which has no meaning here."""

    @functools.wraps(method)
    def build_model(self: Any, cfg: object, from_checkpoint: bool = False) -> Any:
        return method(self, cfg)

    return build_model


class _Attribute:
    """An attribute of objects that have not set it, by the function in the module `attributes`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            raise AttributeError(f"type object {owner.__name__!r} has no attribute {self.name!r}")
        return getattr(importlib.import_module(home_of("attributes")), self.name)(instance)


class FormerNames(MetaPathFinder, Loader):
    """Finds modules of this package, which get their former names, and those that only fairseq has.

    Those are imported as the modules that they are here: one object under both names."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("fairseq."):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return importlib.util.spec_from_loader(name, self) if name in _tables().MODULES else None
        # Exactly this type: loaders of extensions and of other tools stay.
        if type(spec.loader) is SourceFileLoader:
            spec.loader = _FormerNames(name, str(spec.origin))
        return spec

    def exec_module(self, module: ModuleType) -> None:
        # One object, not a copy: a registry or a class under two names would be two.
        here = sys.modules[module.__name__] = importlib.import_module(_tables().MODULES[module.__name__])
        # fairseq may have a package where one module is here: fairseq.models.roberta.hub_interface
        # is that module, too.
        if any(old.startswith(f"{module.__name__}.") for old in _tables().MODULES):
            vars(here).setdefault("__path__", [])


def install() -> None:
    """Let the former modules and names be imported; repeated calls have no effect."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        # Before all finders, to see every module of this package.
        sys.meta_path.insert(0, FormerNames())
        # It is imported already, so that no loader gives it the names.
        _find_names(sys.modules["fairseq"])


def before_import() -> None:
    """Let plug-ins import the few names of omegaconf that settings of fairseq are written with, if
    it is missing."""
    if importlib.util.find_spec("omegaconf") is None:
        sys.modules["omegaconf"] = importlib.import_module("fairseq.interop.fairseq.omegaconf")


def adapt(kind: str, part: object) -> None:
    """See :mod:`fairseq.interop.fairseq.adapter`, which is imported for the first plug-in, and with
    it torch."""
    from fairseq.interop.fairseq import adapter

    adapter.adapt(kind, part)


def complete(args: Any) -> None:
    """See :func:`fairseq.interop.fairseq.defaults.complete_script`."""
    from fairseq.interop.fairseq import defaults

    defaults.complete_script(args)


def set_up(task: Any, settings: Any, dictionary: Any) -> Any:
    """See :mod:`fairseq.interop.fairseq.protocol`."""
    from fairseq.interop.fairseq import protocol

    return protocol.set_up(task, settings, dictionary)
