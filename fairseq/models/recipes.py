"""Tasks, losses, optimizers, schedules and gradient
clipping of architectures, unless the user chooses.

Those of the papers for the papers' models;
for small ones a rate at which they learn within a few hundred updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairseq.config import fields
from fairseq.config.registry import ARCHITECTURES, MODELS

Recipe = Mapping[str, Any]

SMALL: Recipe = {
    "optimizer": "adam",
    "lr": [0.001],
    "lr_scheduler": "inverse_sqrt",
    "warmup_updates": 200,
    "clip_norm": 0.25,
}
FAST: Recipe = {  # benchmarks/results/0.9.md: short blocks, and a rate that falls from early on
    "optimizer": "adam",
    "adam_betas": [0.9, 0.99],
    "lr": [0.004],
    "lr_scheduler": "wsd",
    "warmup_ratio": 0.05,
    "decay_ratio": 0.7,
    "decay_shape": "linear",
    "clip_norm": 0.25,
    "dropout": 0.0,
    "tokens_per_sample": 64,
    "batch_size": 32,
    "max_update": 560,
}
FAIRSEQ: Recipe = {  # examples/language_model of fairseq
    "optimizer": "adam",
    "adam_betas": [0.9, 0.98],
    "weight_decay": 0.01,
    "lr": [0.0005],
    "lr_scheduler": "inverse_sqrt",
    "warmup_updates": 4000,
    "warmup_init_lr": 1e-7,
    "clip_norm": 1.0,
}
BAEVSKI_AULI: Recipe = {  # Baevski & Auli 2019, section 4.2; Press et al. 2021 train with the same
    "optimizer": "nag",
    "lr": [0.0001],
    "lr_scheduler": "cosine",
    "max_lr": 1.0,
    "t_mult": 2.0,
    "lr_period_updates": 270000.0,
    "lr_shrink": 0.75,
    "warmup_updates": 16000,
    "warmup_init_lr": 1e-7,
    "clip_norm": 0.1,
}
BERT: Recipe = {  # Devlin et al. 2019, appendix A.2
    "optimizer": "adam",
    "adam_eps": 1e-6,
    "weight_decay": 0.01,
    "lr": [0.0001],
    "lr_scheduler": "polynomial_decay",
    "warmup_updates": 10000,
    "total_num_update": 1000000,
    "clip_norm": 1.0,
}
ROBERTA: Recipe = {  # Liu et al. 2019, table 9
    **BERT,
    "adam_betas": [0.9, 0.98],
    "lr": [0.0006],
    "warmup_updates": 24000,
    "total_num_update": 500000,
}
ELECTRA: Recipe = {**BERT, "lr": [0.0002], "total_num_update": 766000}  # Clark et al. 2020, table 6


def _transformer_xl(updates: int, warmup: int = 0) -> Recipe:
    """The authors' settings (Dai et al. 2019): Adam and a cosine to 0 over all updates."""
    return {
        "optimizer": "adam",
        "lr": [0.00025],
        "lr_scheduler": "cosine",
        "lr_period_updates": float(updates),
        "warmup_updates": warmup,
        "clip_norm": 0.25,
    }


RECIPES: dict[str, Recipe] = {  # by architecture, or else by model
    "transformer_lm": FAIRSEQ,
    **dict.fromkeys(("transformer_lm_wiki103", "transformer_lm_baevski_wiki103", "shortformer_wiki103"), BAEVSKI_AULI),
    **dict.fromkeys(("transformer_lm_gbw", "transformer_lm_baevski_gbw"), BAEVSKI_AULI),
    **dict.fromkeys(("transformer_lm_fast_demo", "transformer_lm_fast_tiny"), FAST),
    "lstm_lm": SMALL,
    "transformer_xl": _transformer_xl(200000),
    "transformer_xl_wiki103_large": _transformer_xl(4000000, warmup=16000),
    **dict.fromkeys(("transformer_xl_enwik8_base", "transformer_xl_text8_base"), _transformer_xl(400000)),
    **dict.fromkeys(
        ("transformer_xl_enwik8_medium", "transformer_xl_enwik8_large", "transformer_xl_text8_large"),
        _transformer_xl(400000, 4000),
    ),
    "transformer_xl_lm1b_base": _transformer_xl(500000, warmup=20000),
    "transformer_xl_lm1b_ablation": _transformer_xl(400000, warmup=20000),
    "transformer_xl_lm1b_large": _transformer_xl(1200000, warmup=30000),
    "bert": BERT,
    **dict.fromkeys(("roberta", "roberta_base", "roberta_large"), ROBERTA),
    "electra": ELECTRA,
    "electra_small": {**ELECTRA, "lr": [0.0005], "total_num_update": 1000000},
}
CHOICES = ("optimizer", "lr", "max_lr", "lr_scheduler")
"""If the user gives one of these settings, only the fast recipe still applies."""

AIMS = ("task", "adaptive_softmax_cutoff")
"""Settings that decide on task and criterion."""

OBJECTIVES = {  # of models that do not predict the next token: task, criterion
    "bert": ("masked_lm", "masked_lm"),
    "electra": ("masked_lm", "electra"),
}
CLASSES = "sentence_prediction"  # task and criterion of an encoder that is fine-tuned


def recommended(arch: str, chosen: Mapping[str, object]) -> dict[str, object]:
    """Return what *arch* recommends: recipe, task
    and criterion, unless the user has *chosen* them."""
    recipe = recipe_of(arch)
    # All or nothing, since commands written for fairseq choose one of them: a rate that suits Adam
    # diverges with another optimizer or schedule. fairseq has no fast architectures.
    if recipe is not FAST and set(CHOICES) & chosen.keys():
        recipe = {}
    # With a maximum, --lr is the minimum.
    unfit = ("lr" if "max_lr" in chosen else None, "adam_betas" if chosen.get("optimizer", "adam") != "adam" else None)
    recipe = {name: value for name, value in recipe.items() if name not in unfit}
    return {**recipe, **objective_of(arch, {name: chosen[name] for name in AIMS if name in chosen})}


def objective_of(arch: str, chosen: Mapping[str, object]) -> dict[str, str]:
    """Return task and criterion of *arch*, unless general
    defaults apply; *chosen* are the user's :data:`AIMS`."""
    model = ARCHITECTURES[arch].model if arch in ARCHITECTURES else ""
    if model in OBJECTIVES:
        task, criterion = OBJECTIVES[model]
        if chosen.get("task") == CLASSES:
            return {"criterion": CLASSES}
        return {"task": task, "criterion": criterion} if chosen.get("task", task) == task else {}
    settings_class = getattr(MODELS.declaration(model), "config_class", None) if model in MODELS else None
    if settings_class is None or "adaptive_softmax_cutoff" not in fields.defaults(settings_class):
        return {}
    settings = ARCHITECTURES[arch].complete(chosen)
    return {"criterion": "adaptive_loss"} if settings.get("adaptive_softmax_cutoff") else {}


def recipe_of(arch: str) -> Recipe:
    """The recipe of an architecture; empty where none is known."""
    if arch not in ARCHITECTURES:
        return {}
    model = ARCHITECTURES[arch].model
    # Published recipes warm up for more updates than a small model is trained at all.
    of_model = SMALL if arch.endswith(("_tiny", "_demo")) and model in RECIPES else RECIPES.get(model, {})
    return RECIPES.get(arch, of_model)
