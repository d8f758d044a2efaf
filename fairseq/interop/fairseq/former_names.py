"""Tables of modules and names of fairseq that this package has elsewhere; :mod:`~fairseq.interop.fairseq.names` reads
them when a plug-in asks for one."""

from __future__ import annotations

import re

from fairseq.interop.fairseq.names import home_of

TRANSFORMERS = (
    *("transformer_lm_big", "transformer_lm_baevski_wiki103", "transformer_lm_baevski_gbw"),
    *("transformer_lm_gpt", "transformer_lm_gpt2_small", "transformer_lm_gpt2_tiny", "transformer_lm_gpt2_medium"),
    *("transformer_lm_gpt2_big", "transformer_lm_gpt2_big_wide", "transformer_lm_gpt2_bigger"),
)
_DATASETS = """
    FairseqDataset BaseWrapperDataset NestedDictionaryDataset IdDataset NumSamplesDataset NumelDataset PadDataset
    LeftPadDataset RightPadDataset PrependTokenDataset AppendTokenDataset TruncateDataset StripTokenDataset
    OffsetTokensDataset SortDataset RawLabelDataset ListDataset ConcatDataset LRUCacheDataset
"""
_BLOCK_DATASETS = "TokenBlockDataset MonolingualDataset MaskTokensDataset"
_PARSERS = """
    preprocess:preprocessing tokenize:tokenize symbols:symbols common:training eval_lm:eval_lm validate:validation
    recl:recl attention:attention interactive:interactive_generation import_model:import export_model:export
    average_checkpoints:average merge_checkpoint:merge finetune:finetune classify:classify notes:notes plot:plot
    harness:harness
"""


def _modules(datasets: str) -> str:
    return " ".join("data." + re.sub(r"(?<=[a-z])([A-Z])", r"_\1", name).lower() for name in datasets.split())


_MODULES = {  # module here (without a dot in interop/fairseq): the names of it in fairseq
    "checkpoint_utils": "checkpoint_utils",
    "fairseq.text.dictionary": "data.dictionary",
    "data_utils": "data.data_utils",
    "dataclass": "dataclass dataclass.configs dataclass.constants dataclass.utils",
    "datasets": _modules(_DATASETS),
    "block_datasets": _modules(_BLOCK_DATASETS),
    "decoders": "incremental_decoding_utils models.fairseq_encoder models.fairseq_incremental_decoder",
    "distributed_utils": "distributed.utils distributed_utils",
    "fused_adam": "optim.fused_adam",
    "generator": "search sequence_generator",
    "hub_utils": "hub_utils",
    "iterators": "data.iterators",
    "lstm": "models.lstm",
    "meters": "meters logging.meters",
    "metrics": "metrics logging.metrics",
    "modules": """
        modules.fairseq_dropout modules.layer_norm modules.positional_embedding modules.learned_positional_embedding
        modules.sinusoidal_positional_embedding modules.layer_drop modules.checkpoint_activations modules.quant_noise
    """,
    "roberta": "models.roberta models.roberta.hub_interface models.roberta.model",
    "sentence_encoder": """
        modules.multihead_attention modules.transformer_sentence_encoder modules.transformer_sentence_encoder_layer
    """,
    "transformer": "models.transformer modules.character_token_embedder",
    "utils": "utils tokenizer",
    "fairseq.config.options": "options",
    "fairseq.config.registry": "registry",
    "fairseq.logging.progress": "logging.progress_bar progress_bar",
    "fairseq.models": "models.fairseq_decoder models.fairseq_model",
    "fairseq.modules.attention": "modules.visibility",
    "fairseq.text.tokenizers": "tokenizers",
    "fairseq.training.trainer": "trainer",
    "fairseq.optim.lr_scheduler.cosine": "optim.lr_scheduler.cosine_lr_scheduler",
    "fairseq.optim.lr_scheduler.fixed": "optim.lr_scheduler.fixed_schedule",
    "fairseq.optim.lr_scheduler.inverse_sqrt": "optim.lr_scheduler.inverse_square_root_schedule",
    "fairseq.optim.lr_scheduler.polynomial_decay": "optim.lr_scheduler.polynomial_decay_schedule",
    "fairseq.optim.lr_scheduler.tri_stage": "optim.lr_scheduler.tri_stage_lr_scheduler",
    "fairseq.optim.lr_scheduler.triangular": "optim.lr_scheduler.triangular_lr_scheduler",
}
_NAMES = {  # module: the names that it had in fairseq, by the module here that has them
    "criterions": {"legacy": "LegacyFairseqCriterion"},
    "criterions.fairseq_criterion": {"legacy": "LegacyFairseqCriterion"},
    "criterions.adaptive_loss": {"extendable": "AdaptiveLossConfig"},
    "criterions.cross_entropy": {"extendable": "CrossEntropyCriterionConfig"},
    "criterions.label_smoothed_cross_entropy": {
        "extendable": "LabelSmoothedCrossEntropyCriterionConfig",
        "criterions": "label_smoothed_nll_loss",
    },
    "criterions.masked_lm": {"criterions": "MaskedLmLoss"},
    "config.options": {
        "utils": "eval_bool eval_str_list get_generation_parser",
        **{f"fairseq_cli.{c}": f"get_{p}_parser" for c, p in (pair.split(":") for pair in _PARSERS.split())},
    },
    "data": {"datasets": _DATASETS, "block_datasets": _BLOCK_DATASETS, "iterators": "EpochBatchIterator"},
    "distributed": {"modules": "fsdp_wrap"},
    "interop.fairseq.data_utils": {"block_datasets": "load_indexed_dataset"},
    "models": {
        "fairseq.models.loading": "build_model",
        "decoders": "FairseqEncoder FairseqEncoderModel FairseqIncrementalDecoder",
    },
    "models.transformer_lm": {
        "architectures": " ".join(("base_lm_architecture", *TRANSFORMERS)),
        "extendable": "TransformerLanguageModelConfig",
    },
    "modules": {
        "modules": """
            AdaptiveInput AdaptiveSoftmax FairseqDropout LayerNorm PositionalEmbedding LearnedPositionalEmbedding
            SinusoidalPositionalEmbedding LayerDropModuleList checkpoint_wrapper
        """,
        "sentence_encoder": "MultiheadAttention TransformerSentenceEncoder TransformerSentenceEncoderLayer",
        "transformer": "CharacterTokenEmbedder",
    },
    "optim": {"legacy": "LegacyFairseqOptimizer"},
    "optim.adam": {"extendable": "FairseqAdamConfig"},
    "optim.lr_scheduler": {"legacy": "LegacyFairseqLRScheduler"},
    "optim.lr_scheduler.cosine": {"extendable": "CosineLRScheduleConfig"},
    "optim.lr_scheduler.inverse_sqrt": {"extendable": "InverseSquareRootLRScheduleConfig"},
    "optim.lr_scheduler.polynomial_decay": {"extendable": "PolynomialDecayLRScheduleConfig"},
    "tasks": {"legacy": "LegacyFairseqTask"},
    "tasks.fairseq_task": {"legacy": "LegacyFairseqTask"},
    "tasks.language_modeling": {"extendable": "LanguageModelingConfig"},
}


MODULES = {f"fairseq.{old}": home_of(home) for home, olds in _MODULES.items() for old in olds.split()}
NAMES = {
    f"fairseq.{module}": {name: home_of(home) for home, names in homes.items() for name in names.split()}
    for module, homes in _NAMES.items()
}
