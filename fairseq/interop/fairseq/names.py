"""Names under which plug-ins written for fairseq import what is elsewhere here, most of it in this package.

:data:`MODULES` are modules that this package does not have under that name, :data:`NAMES` are names that a module of
this package does not have. Both are looked up when a plug-in asks for them; nothing in this package does.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_SCHEDULES = {
    "cosine_lr_scheduler": "cosine",
    "fixed_schedule": "fixed",
    "inverse_square_root_schedule": "inverse_sqrt",
    "polynomial_decay_schedule": "polynomial_decay",
    "tri_stage_lr_scheduler": "tri_stage",
    "triangular_lr_scheduler": "triangular",
}

TRANSFORMERS = (
    *("transformer_lm_big", "transformer_lm_baevski_wiki103", "transformer_lm_baevski_gbw"),
    *("transformer_lm_gpt", "transformer_lm_gpt2_small", "transformer_lm_gpt2_tiny", "transformer_lm_gpt2_medium"),
    *("transformer_lm_gpt2_big", "transformer_lm_gpt2_big_wide", "transformer_lm_gpt2_bigger"),
)

MODULES = {
    "fairseq.checkpoint_utils": "fairseq.interop.fairseq.checkpoint_utils",
    "fairseq.data.dictionary": "fairseq.text.dictionary",
    "fairseq.data.data_utils": "fairseq.interop.fairseq.data_utils",
    "fairseq.dataclass": "fairseq.interop.fairseq.dataclass",
    "fairseq.dataclass.configs": "fairseq.interop.fairseq.dataclass",
    "fairseq.dataclass.constants": "fairseq.interop.fairseq.dataclass",
    "fairseq.dataclass.utils": "fairseq.interop.fairseq.dataclass",
    "fairseq.distributed.utils": "fairseq.interop.fairseq.distributed_utils",
    "fairseq.distributed_utils": "fairseq.interop.fairseq.distributed_utils",
    "fairseq.hub_utils": "fairseq.interop.fairseq.hub_utils",
    "fairseq.incremental_decoding_utils": "fairseq.interop.fairseq.decoders",
    "fairseq.logging.meters": "fairseq.interop.fairseq.meters",
    "fairseq.logging.metrics": "fairseq.interop.fairseq.metrics",
    "fairseq.logging.progress_bar": "fairseq.logging.progress",
    "fairseq.meters": "fairseq.interop.fairseq.meters",
    "fairseq.metrics": "fairseq.interop.fairseq.metrics",
    "fairseq.models.fairseq_decoder": "fairseq.models",
    "fairseq.models.fairseq_incremental_decoder": "fairseq.interop.fairseq.decoders",
    "fairseq.models.fairseq_model": "fairseq.models",
    "fairseq.models.lstm": "fairseq.interop.fairseq.lstm",
    "fairseq.models.roberta": "fairseq.interop.fairseq.roberta",
    "fairseq.models.roberta.hub_interface": "fairseq.interop.fairseq.roberta",
    "fairseq.models.roberta.model": "fairseq.interop.fairseq.roberta",
    "fairseq.models.transformer": "fairseq.interop.fairseq.transformer",
    "fairseq.modules.visibility": "fairseq.modules.attention",
    "fairseq.optim.fused_adam": "fairseq.interop.fairseq.fused_adam",
    "fairseq.options": "fairseq.config.options",
    "fairseq.progress_bar": "fairseq.logging.progress",
    "fairseq.registry": "fairseq.config.registry",
    "fairseq.tokenizer": "fairseq.interop.fairseq.utils",
    "fairseq.tokenizers": "fairseq.text.tokenizers",
    "fairseq.trainer": "fairseq.training.trainer",
    "fairseq.utils": "fairseq.interop.fairseq.utils",
    **{f"fairseq.optim.lr_scheduler.{old}": f"fairseq.optim.lr_scheduler.{new}" for old, new in _SCHEDULES.items()},
}

NAMES: dict[str, dict[str, str]] = {
    "fairseq.criterions": {"LegacyFairseqCriterion": "fairseq.interop.fairseq.legacy"},
    "fairseq.criterions.fairseq_criterion": {"LegacyFairseqCriterion": "fairseq.interop.fairseq.legacy"},
    "fairseq.criterions.cross_entropy": {"CrossEntropyCriterionConfig": "fairseq.interop.fairseq.extendable"},
    "fairseq.criterions.label_smoothed_cross_entropy": {
        "LabelSmoothedCrossEntropyCriterionConfig": "fairseq.interop.fairseq.extendable",
        "label_smoothed_nll_loss": "fairseq.interop.fairseq.criterions",
    },
    "fairseq.models": {
        "build_model": "fairseq.models.build",
        "FairseqIncrementalDecoder": "fairseq.interop.fairseq.decoders",
    },
    "fairseq.models.transformer_lm": {
        **dict.fromkeys(("base_lm_architecture", *TRANSFORMERS), "fairseq.interop.fairseq.architectures"),
        "TransformerLanguageModelConfig": "fairseq.interop.fairseq.extendable",
    },
    "fairseq.modules": {
        "AdaptiveInput": "fairseq.interop.fairseq.modules",
        "AdaptiveSoftmax": "fairseq.interop.fairseq.modules",
        "CharacterTokenEmbedder": "fairseq.interop.fairseq.transformer",
        "FairseqDropout": "fairseq.interop.fairseq.modules",
        "LayerNorm": "fairseq.interop.fairseq.modules",
    },
    "fairseq.optim": {"LegacyFairseqOptimizer": "fairseq.interop.fairseq.legacy"},
    "fairseq.optim.lr_scheduler": {"LegacyFairseqLRScheduler": "fairseq.interop.fairseq.legacy"},
    "fairseq.config.options": {
        "eval_bool": "fairseq.interop.fairseq.utils",
        "eval_str_list": "fairseq.interop.fairseq.utils",
        "get_preprocessing_parser": "fairseq_cli.preprocess",
        "get_tokenize_parser": "fairseq_cli.tokenize",
        "get_symbols_parser": "fairseq_cli.symbols",
        "get_training_parser": "fairseq_cli.common",
        "get_eval_lm_parser": "fairseq_cli.eval_lm",
        "get_validation_parser": "fairseq_cli.validate",
        "get_recl_parser": "fairseq_cli.recl",
        "get_attention_parser": "fairseq_cli.attention",
        "get_interactive_generation_parser": "fairseq_cli.interactive",
        "get_generation_parser": "fairseq.interop.fairseq.utils",
        "get_import_parser": "fairseq_cli.import_model",
        "get_export_parser": "fairseq_cli.export_model",
        "get_average_parser": "fairseq_cli.average_checkpoints",
        "get_merge_parser": "fairseq_cli.merge_checkpoint",
        "get_finetune_parser": "fairseq_cli.finetune",
        "get_classify_parser": "fairseq_cli.classify",
        "get_notes_parser": "fairseq_cli.notes",
        "get_plot_parser": "fairseq_cli.plot",
        "get_harness_parser": "fairseq_cli.harness",
    },
    "fairseq.tasks": {"LegacyFairseqTask": "fairseq.interop.fairseq.legacy"},
    "fairseq.tasks.fairseq_task": {"LegacyFairseqTask": "fairseq.interop.fairseq.legacy"},
}


class _FormerNames(importlib.machinery.SourceFileLoader):
    """Loads a module of :data:`NAMES` and gives it a ``__getattr__`` that finds its former names."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)

        def find(name: str) -> Any:
            home = NAMES[module.__name__].get(name)
            paths = vars(module).get("__path__", [])
            if home is None and importlib.machinery.PathFinder.find_spec(f"{module.__name__}.{name}", paths):
                return importlib.import_module(f"{module.__name__}.{name}")  # a package once imported all its modules
            if home is None:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return getattr(importlib.import_module(home), name)

        module.__getattr__ = find  # type: ignore[method-assign]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a module of :data:`MODULES` as the module that it is here, and those of :data:`NAMES` with their names.

    A former module and its present one are one object under both names.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in MODULES:
            return importlib.util.spec_from_loader(name, self)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in NAMES else None
        if spec is not None and spec.origin is not None:
            spec.loader = _FormerNames(name, spec.origin)
        return spec

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(MODULES[module.__name__])


def install() -> None:
    """Let :data:`MODULES` and :data:`NAMES` be imported; repeated calls have no effect."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


def stand_in_for_omegaconf() -> None:
    """Let plug-ins import the few names of omegaconf that settings of fairseq are written with, if it is missing."""
    if importlib.util.find_spec("omegaconf") is None:
        sys.modules["omegaconf"] = importlib.import_module("fairseq.interop.fairseq.omegaconf")
