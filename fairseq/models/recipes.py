"""Recipes: with which settings an architecture is trained, unless the user chooses.

Published architectures have their paper's, whole: optimizer, rate, schedule, clipping, lengths,
batch and last update. Small ones have a rate at which they learn within a few hundred updates. A
flag changes one setting; what is one thing in several settings (:data:`ONE_OF`) changes together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fairseq.config import fields
from fairseq.config.options import EXCLUSIVE
from fairseq.config.registry import ARCHITECTURES, LR_SCHEDULERS, MODELS, OPTIMIZERS
from fairseq.config.settings import RateConfig, TrainingSettings
from fairseq.errors import counted
from fairseq.models.architectures.transformer_lm import dial_width

Recipe = Mapping[str, Any]

SMALL: Recipe = {
    "optimizer": "adam",
    "lr": [0.001],
    "lr_scheduler": "inverse_sqrt",
    "warmup_updates": 200,
    "clip_norm": 0.25,
    "max_update": 2000,
}
FAST: Recipe = {  # benchmarks/results/README.md: short blocks, and a rate that falls from early on
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
DECODER: Recipe = {  # the optimizer of fairseq's example below, for decoders without a recipe of their own
    "optimizer": "adam",
    "adam_betas": [0.9, 0.98],
    "weight_decay": 0.01,
    "lr": [0.0005],
    "lr_scheduler": "inverse_sqrt",
    "warmup_updates": 4000,
    "warmup_init_lr": 1e-7,
    "clip_norm": 1.0,
    "max_update": 50000,
}
FAIRSEQ: Recipe = {  # examples/language_model of fairseq: clipping is off there, too
    **DECODER,
    "clip_norm": 0.0,
    "tokens_per_sample": 512,
    "max_tokens": 2048,
    "update_freq": [16],
}
BAEVSKI_AULI: Recipe = {  # Baevski & Auli 2019, "Optimization"
    "optimizer": "nag",
    "lr": [0.0001],
    "lr_scheduler": "cosine",
    "max_lr": 1.0,
    "min_lr": 1e-9,
    "t_mult": 2.0,
    "lr_period_updates": 270000.0,
    "lr_shrink": 0.75,
    "warmup_updates": 16000,
    "warmup_init_lr": 1e-7,
    "clip_norm": 0.1,
    "max_update": 286000,
}
WIKI103: Recipe = {  # fairseq's command for eight GPUs: blocks of 3,072 tokens, three a GPU and update
    **BAEVSKI_AULI,
    "tokens_per_sample": 3072,
    "max_tokens": 3072,
    "update_freq": [3],
    "skip_invalid_size_inputs_valid_test": True,
}
# The same paper on One Billion Word: three cycles after the warm-up, 16,000 + 137,000 · (1 + 2 + 4)
# updates. Batches are the user's.
GBW: Recipe = {**BAEVSKI_AULI, "lr_period_updates": 137000.0, "lr_shrink": 0.6, "max_update": 975000}
SHORTFORMER: Recipe = {  # Press et al. 2021, section 6: two stages, 9,216 tokens a GPU; validation in one row
    **BAEVSKI_AULI,
    "stages": "128:140100,512:286000",
    "tokens_per_sample": 512,
    "max_tokens": 9216,
    "batch_size_valid": 1,
    "curriculum": 1000,
    "required_batch_size_multiple": 1,
    "skip_invalid_size_inputs_valid_test": True,
}
BERT: Recipe = {  # Devlin et al. 2019, appendix A.2: 256 rows of 512 tokens
    "optimizer": "adam",
    "adam_eps": 1e-6,
    "weight_decay": 0.01,
    "no_decay_on_norms_and_biases": True,
    "lr": [0.0001],
    "lr_scheduler": "polynomial_decay",
    "warmup_updates": 10000,
    "total_num_update": 1000000,
    "clip_norm": 1.0,
    "tokens_per_sample": 512,
    "batch_size": 32,
    "update_freq": [8],
    "max_update": 1000000,
}
ROBERTA: Recipe = {  # Liu et al. 2019, table 9: 8,192 rows
    **BERT,
    "adam_betas": [0.9, 0.98],
    "lr": [0.0006],
    "warmup_updates": 24000,
    "total_num_update": 500000,
    "clip_norm": 0.0,
    "update_freq": [256],
    "max_update": 500000,
}
ROBERTA_LARGE: Recipe = {**ROBERTA, "lr": [0.0004], "warmup_updates": 30000}
FINE_TUNING: Recipe = {  # Liu et al. 2019, table 10, of any model
    "optimizer": "adam",
    "adam_betas": [0.9, 0.98],
    "adam_eps": 1e-6,
    "weight_decay": 0.1,
    "lr": [2e-5],
    "lr_scheduler": "polynomial_decay",
    "warmup_ratio": 0.06,
    "clip_norm": 0.0,
    "batch_size": 32,
    "max_epoch": 10,
}
# Clark et al. 2020, table 6; the small model's rows are a quarter as long and half as many (3.3).
ELECTRA: Recipe = {**BERT, "lr": [0.0002], "total_num_update": 766000, "max_update": 766000}
ELECTRA_SMALL: Recipe = {**BERT, "lr": [0.0005], "tokens_per_sample": 128, "update_freq": [4]}
# Wu et al. 2021, appendix: BERT and ELECTRA alike.
TNF: Recipe = {**BERT, "adam_betas": [0.9, 0.98]}


def _transformer_xl(rows: int, updates: int, warmup: int = 0) -> Recipe:
    """The authors' settings (Dai et al. 2019): Adam and a cosine to 0, which ends with the last
    update. Segments and memory are the architecture's."""
    return {
        "optimizer": "adam",
        "adam_torch_eps": True,
        "lr": [0.00025],
        "lr_scheduler": "cosine",
        "lr_period_updates": float(updates - warmup),
        "warmup_updates": warmup,
        "clip_norm": 0.25,
        "batch_size": rows,
        "required_batch_size_multiple": 1,
        "max_update": updates,
    }


DIAL = "transformer_lm_fast"  # the architecture whose sizes follow from its layers

OF_MODELS: dict[str, Recipe] = {
    "transformer_lm": DECODER,
    "lstm_lm": SMALL,
    "transformer_xl": _transformer_xl(8, 200000),
    "bert": BERT,
    "electra": ELECTRA,
}
OF_ARCHITECTURES: dict[str, Recipe] = {  # in place of their model's
    "transformer_lm": FAIRSEQ,
    **dict.fromkeys(("transformer_lm_wiki103", "transformer_lm_baevski_wiki103"), WIKI103),
    **dict.fromkeys(("transformer_lm_gbw", "transformer_lm_baevski_gbw"), GBW),
    **dict.fromkeys((DIAL, "transformer_lm_fast_demo", "transformer_lm_fast_tiny"), FAST),
    "shortformer_wiki103": SHORTFORMER,
    **dict.fromkeys(("transformer_xl_wiki103_base", "transformer_xl_wiki103_ablation"), _transformer_xl(60, 200000)),
    "transformer_xl_wiki103_large": _transformer_xl(128, 4000000, 16000),
    **dict.fromkeys(("transformer_xl_enwik8_base", "transformer_xl_text8_base"), _transformer_xl(22, 400000)),
    **dict.fromkeys(("transformer_xl_enwik8_medium", "transformer_xl_enwik8_large"), _transformer_xl(64, 400000, 4000)),
    "transformer_xl_text8_large": _transformer_xl(64, 400000),
    "transformer_xl_lm1b_base": {**_transformer_xl(224, 500000, 20000), "shuffle_lines": True},
    "transformer_xl_lm1b_ablation": {**_transformer_xl(224, 400000, 20000), "shuffle_lines": True},
    "transformer_xl_lm1b_large": {**_transformer_xl(512, 1200000, 30000), "shuffle_lines": True},
    "transformer_xl_ptb": {**_transformer_xl(20, 60000), "average_weights_from": 40000},
    **dict.fromkeys(("roberta", "roberta_base"), ROBERTA),
    "roberta_large": ROBERTA_LARGE,
    "electra_small": ELECTRA_SMALL,
}

# In a recipe alone: the first of those that are given ends a run, or fills a batch.
ONE_OF = (*EXCLUSIVE, ("max_update", "max_epoch", "stages"), ("batch_size", "max_tokens"))
ENDS = ("total_num_update", "lr_period_updates")
"""Settings of a schedule that ends with the published run. If the user chooses another length, it
ends with theirs."""
FOREIGN = ("optimizer", "lr", "lr_scheduler")
"""Commands that name all three bring their own recipe, as those for fairseq do."""
# Of fairseq's architectures two suffice: its commands may leave the schedule out, which is fixed.
OF_FAIRSEQ = re.compile(r"transformer_lm(?!_demo|_fast|_tiny)|roberta|xlm|lstm_lm(?!_tiny)|transformer_xl$")

AIMS = ("task", "adaptive_softmax_cutoff")
"""Settings that decide on task and criterion."""
OBJECTIVES = {  # of models that do not predict the next token: task, criterion
    "bert": ("masked_lm", "masked_lm"),
    "electra": ("masked_lm", "electra"),
}
CLASSES = "sentence_prediction"  # task and criterion of fine-tuning


def recommended(arch: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what *arch* recommends beside the *given* settings: recipe, task and criterion."""
    recipe, model = recipe_of(arch), ARCHITECTURES[arch].model if arch in ARCHITECTURES else ""
    task = given.get("task")
    if task == CLASSES or model in OBJECTIVES and task not in (None, OBJECTIVES[model][0]):
        recipe = {**FINE_TUNING, **({"lr": SMALL["lr"]} if recipe is SMALL else {})}
    is_foreign = given.keys() >= set(FOREIGN[:2] if OF_FAIRSEQ.match(arch) else FOREIGN)
    fitting = {} if is_foreign else _fitting(recipe, given)
    objective = objective_of(arch, {name: given[name] for name in AIMS if name in given})
    updates, epochs, layers, width = (
        int(text) if re.fullmatch(r"[1-9]\d{0,9}", text := str(given.get(name, ""))) else 0
        for name in ("max_update", "max_epoch", "decoder_layers", "decoder_embed_dim")
    )
    if arch == DIAL and "lr" in fitting and (width or layers):
        # Adam's steps do not depend on a gradient's size: in a wider layer, more of them add up
        # (Yang et al. 2022, table 3).
        fitting["lr"] = [round(FAST["lr"][0] * dial_width(4) / (width or dial_width(layers)), 6)]
    # A schedule with restarts has periods of its own.
    ends = {*ENDS} & fitting.keys() if "t_mult" not in fitting else set()
    if updates or epochs:
        fitting = {name: value for name, value in fitting.items() if name not in ends}
    if updates and (ends or "lr_scheduler" in given):
        fitting |= fit_schedule(fitting, updates)
    replaced = {name for group in ONE_OF if given.keys() & set(group) for name in group}
    if "tokens_per_sample" in given:
        replaced.add("stages")
    return {name: value for name, value in {**fitting, **objective}.items() if name not in replaced | given.keys()}


def fit_schedule(recipe: Recipe, updates: int) -> dict[str, Any]:
    """What of *recipe* is otherwise in a run of few *updates*: a warm-up that ends before it, and a
    mean of weights that begins before its end."""
    changed = {}
    if updates <= recipe.get("warmup_updates", 0):
        changed["warmup_updates"] = updates // 10  # most schedules need updates after it
    if updates <= (recipe.get("average_weights_from") or 0):
        changed["average_weights_from"] = max(1, updates * 2 // 3)
    return changed


def _fitting(recipe: Recipe, given: Mapping[str, Any]) -> dict[str, Any]:
    """*recipe* without what belongs to another optimizer or schedule than the *given* one."""
    fitting = dict(recipe)
    rates = given.get("lr", ())
    if len(rates.split(",") if isinstance(rates, str) else rates) > 1:
        given = {"lr_scheduler": "fixed", **given}  # the schedule that follows a list
        fitting["lr_scheduler"] = "fixed"
    shared = {*fields.defaults(RateConfig), "max_lr", "warmup_updates", "warmup_ratio"}
    for choice, registry in (("optimizer", OPTIMIZERS), ("lr_scheduler", LR_SCHEDULERS)):
        if recipe and str(given.get(choice, recipe[choice])) != recipe[choice]:
            own = fields.defaults(registry.declaration(recipe[choice]).config_class).keys() - shared
            fitting = {name: value for name, value in fitting.items() if name not in own}
    # A cosine with a maximum has the rate as its minimum.
    if "max_lr" in fitting and ("lr" in given or given.get("lr_scheduler", "cosine") != "cosine"):
        fitting["lr"] = [fitting.pop("max_lr")]
    elif "max_lr" in given and "max_lr" not in fitting:
        fitting["lr"] = [0.0]
    return fitting


def objective_of(arch: str, chosen: Mapping[str, object]) -> dict[str, str]:
    """Return task and criterion of *arch*, unless general
    defaults apply; *chosen* are the user's :data:`AIMS`."""
    model = ARCHITECTURES[arch].model if arch in ARCHITECTURES else ""
    if chosen.get("task") == CLASSES:
        return {"criterion": CLASSES}
    if model in OBJECTIVES:
        task, criterion = OBJECTIVES[model]
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
    of_model = SMALL if arch.endswith(("_tiny", "_demo")) and model in OF_MODELS else OF_MODELS.get(model, {})
    return OF_ARCHITECTURES.get(arch, of_model)


def summary(settings: TrainingSettings) -> list[str]:
    """How a run trains and for how long, and where each setting comes from, in two lines:
    ``adam, lr 0.001 (yours), inverse_sqrt, warm-up 200, clip 0.25 (recipe of llama_tiny)``."""
    cfg, data, flat = settings.optimization, settings.data, settings.flat
    ratio, warmup = flat.get("warmup_ratio"), flat.get("warmup_updates")
    how = [
        (settings.chosen.optimizer, "optimizer"),
        (f"lr {fields.format_value(cfg.lr)}", "lr")
        if flat.get("max_lr") is None
        else (f"lr {fields.format_value(cfg.lr)} to {flat['max_lr']}", "max_lr"),
        (settings.chosen.lr_scheduler, "lr_scheduler"),
        *([(f"warm-up {ratio:.0%}", "warmup_ratio")] if ratio else []),
        *([(f"warm-up {warmup}", "warmup_updates")] if warmup and not ratio else []),
        (f"clip {cfg.clip_norm:g}", "clip_norm"),
    ]
    ends = [
        *([(counted(cfg.max_update, "update"), "max_update")] if cfg.max_update and not cfg.stages else []),
        *([(counted(cfg.max_epoch, "epoch"), "max_epoch")] if cfg.max_epoch else []),
        *([(f"{cfg.stop_time_hours:g} hours", "stop_time_hours")] if cfg.stop_time_hours else []),
    ]
    # A schedule that ends without a last update trains for an epoch.
    no_end = "one epoch" if getattr(settings.lr_scheduler, "needs_max_update", False) else "no end"
    length, freq = flat.get("tokens_per_sample"), fields.format_value(cfg.update_freq)
    what = [
        *([(f"stages {cfg.stages}", "stages")] if cfg.stages else []),
        *([(f"blocks of {length}", "tokens_per_sample")] if length and not cfg.stages else []),
        (f"batches of {counted(data.max_tokens, 'token')}", "max_tokens")
        if data.max_tokens is not None
        else (f"batches of {counted(data.batch_size or 0, 'row')}", "batch_size"),
        *([(f"{freq} batches an update", "update_freq")] if cfg.update_freq != [1] else []),
        *(ends or ([] if cfg.stages else [(no_end, "max_update")])),
    ]
    return [_with_origins(parts, settings) for parts in (how, what)]


def _with_origins(parts: Sequence[tuple[str, str]], settings: TrainingSettings) -> str:
    """The texts of *parts*, settings by name, with their origins: the recipe's is the last."""
    recipe = f"recipe of {settings.chosen.arch}"
    origins = [settings.origins.get(name, "default") for _, name in parts]
    # The lengths that an architecture is made for are part of its recipe.
    origins = [recipe if origin == settings.chosen.arch else origin for origin in origins]
    common = recipe if recipe in origins else max(origins, key=origins.count)
    texts = [
        text if origin == common else f"{text} ({origin})" for (text, _), origin in zip(parts, origins, strict=True)
    ]
    # After another setting's origin, it would seem to be that setting's.
    return f"{', '.join(texts)} ({common})" if origins[-1] == common else f"{', '.join(texts)}; others: {common}"
