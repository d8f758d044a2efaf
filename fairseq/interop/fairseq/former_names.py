"""Tables of modules and names of fairseq that this package has elsewhere;
:mod:`~fairseq.interop.fairseq.names` reads them when a plug-in asks for one."""

from __future__ import annotations

import importlib
import re
from typing import Any

from fairseq.config.fields import Config
from fairseq.interop.fairseq.names import home_of

_TRANSFORMERS = """
    base_lm_architecture transformer_lm_big transformer_lm_baevski_wiki103 transformer_lm_baevski_gbw
    transformer_lm_gpt transformer_lm_gpt2_small transformer_lm_gpt2_tiny transformer_lm_gpt2_medium
    transformer_lm_gpt2_big transformer_lm_gpt2_big_wide transformer_lm_gpt2_bigger transformer_lm_gpt3_small
    transformer_lm_gpt3_medium transformer_lm_gpt3_large transformer_lm_gpt3_xl transformer_lm_gpt3_2_7
    transformer_lm_gpt3_6_7 transformer_lm_gpt3_13 transformer_lm_gpt3_175 base_gpt3_architecture
"""
_ROBERTA = """
    base_architecture=roberta_architecture roberta_base_architecture roberta_large_architecture xlm_architecture
"""
_DATASETS = """
    FairseqDataset BaseWrapperDataset NestedDictionaryDataset IdDataset NumSamplesDataset NumelDataset PadDataset
    LeftPadDataset RightPadDataset PrependTokenDataset AppendTokenDataset TruncateDataset StripTokenDataset
    OffsetTokensDataset SortDataset RawLabelDataset ListDataset ConcatDataset LRUCacheDataset ConcatSentencesDataset
    RollDataset
"""
_BLOCK_DATASETS = "TokenBlockDataset MonolingualDataset MaskTokensDataset LMContextWindowDataset"
_GROUPS = """
    Common CommonEval DistributedTraining Dataset Optimization Checkpoint FairseqBMUF Generation EvalLM Interactive EMA
    Fairseq
"""
_PARSERS = """
    preprocess:preprocessing tokenize:tokenize symbols:symbols common:training eval_lm:eval_lm validate:validation
    recl:recl attention:attention import_model:import export_model:export
    average_checkpoints:average merge_checkpoint:merge finetune:finetune classify:classify notes:notes plot:plot
    harness:harness
"""


def _modules(datasets: str) -> str:
    return " ".join(
        # fairseq has one file a dataset, named like the class in lower case with underscores.
        "data." + re.sub(r"(?<=[a-z])([A-Z])|(?<=[A-Z])([A-Z])(?=[a-z])", r"_\1\2", name).lower()
        for name in datasets.split()
    )


_MODULES = {  # module here (without a dot in interop/fairseq): the names of it in fairseq
    "checkpoint_utils": "checkpoint_utils",
    "fairseq.text.dictionary": "data.dictionary",
    "data_utils": "data.data_utils data.data_utils_fast",
    "dataclass": "dataclass dataclass.configs dataclass.constants dataclass.utils",
    "fairseq.criterions.cross_entropy": "criterions.adaptive_loss criterions.label_smoothed_cross_entropy",
    "fairseq.criterions.fairseq_criterion": "criterions.subsets",
    "datasets": _modules(_DATASETS) + " data.shorten_dataset",
    "block_datasets": _modules(_BLOCK_DATASETS),
    "decoders": """
        incremental_decoding_utils models.fairseq_encoder models.fairseq_incremental_decoder models.fairseq_decoder
    """,
    "distributed_utils": "distributed.utils distributed_utils",
    "encoders": """
        data.encoders data.encoders.utils data.encoders.gpt2_bpe data.encoders.gpt2_bpe_utils
        data.encoders.sentencepiece_bpe
    """,
    "indexed_files": "data.plasma_utils data.token_block_utils_fast",
    "generator": "search sequence_generator sequence_scorer",
    "hub_utils": "hub_utils",
    "iterators": "data.iterators",
    "lstm": "models.lstm",
    "attention": "modules.multihead_attention",
    "inert": """
        data.language_pair_dataset models.squad models.transformer.transformer_legacy modules.base_layer
        data.transform_eos_dataset data.backtranslation_dataset modules.character_token_embedder ngram_repeat_block
        models.fconv models.bart models.bart.model
    """,
    "layers": "modules.transformer_sentence_encoder modules.transformer_sentence_encoder_layer",
    "meters": "meters logging.meters",
    "metrics": "metrics logging.metrics",
    "modules": """
        modules.fairseq_dropout modules.layer_norm modules.positional_embedding modules.learned_positional_embedding
        modules.sinusoidal_positional_embedding modules.layer_drop modules.checkpoint_activations modules.quant_noise
        modules.gelu modules.cross_entropy distributed.fully_sharded_data_parallel distributed.module_proxy_wrapper
    """,
    "parts": "optim.amp_optimizer optim.fused_adam logging.progress_bar progress_bar",
    "roberta": """
        models.roberta models.roberta.model models.roberta.model_camembert
        models.roberta.model_gottbert models.roberta.model_xlmr
    """,
    "roberta_hub": "models.roberta.hub_interface",
    "transformer": """
        models.transformer models.transformer.transformer_decoder models.transformer.transformer_encoder
        models.transformer.transformer_base
    """,
    "transformer_config": "models.transformer.transformer_config",
    "sentence_ranking": "tasks.sentence_ranking criterions.sentence_ranking",
    "utils": "utils tokenizer",
    "files": "file_io file_utils",
    "fairseq.config.options": "options",
    "fairseq.config.registry": "registry",
    "fairseq.models": "models.fairseq_model",
    "fairseq.modules.attention": "modules.visibility",
    "fairseq.text.tokenizers": "tokenizers",
    "fairseq.tasks.fairseq_task": "tasks.extension",
    "fairseq.training.state": "trainer",
    "fairseq.optim.adam": "optim.lamb",
    "fairseq.optim.sgd": "optim.adagrad optim.nag",
    "fairseq.optim.lr_scheduler.cycles": """
        optim.lr_scheduler.cosine optim.lr_scheduler.cosine_lr_scheduler
        optim.lr_scheduler.triangular optim.lr_scheduler.triangular_lr_scheduler
    """,
    "fairseq.optim.lr_scheduler.decays": """
        optim.lr_scheduler.fixed optim.lr_scheduler.fixed_schedule
        optim.lr_scheduler.inverse_sqrt optim.lr_scheduler.inverse_square_root_schedule
        optim.lr_scheduler.polynomial_decay optim.lr_scheduler.polynomial_decay_schedule
        optim.lr_scheduler.reduce_lr_on_plateau
        optim.lr_scheduler.tri_stage optim.lr_scheduler.tri_stage_lr_scheduler
        optim.lr_scheduler.wsd
    """,
}
# Module: names that it had in fairseq (=here), by the module that has them here, which may be
# itself (a dot).
_NAMES: dict[str, dict[str, str]] = {
    "criterions": {
        "parts": "LegacyFairseqCriterion",
        # Of a fork for mixtures of experts, which packages beside it import.
        "inert": "MoECriterion",
        "dataclass": "MoECriterionConfig=FairseqDataclass",
        "fairseq.config.registry": "CRITERION_REGISTRY=CRITERIONS",
    },
    "criterions.fairseq_criterion": {"parts": "LegacyFairseqCriterion"},
    "criterions.cross_entropy": {
        "fairseq.criterions.settings": """
            CrossEntropyCriterionConfig=CrossEntropyConfig
            LabelSmoothedCrossEntropyCriterionConfig=LabelSmoothedCrossEntropyConfig
        """,
        "fairseq.config.shared": "AdaptiveLossConfig=AdaptiveCriterionConfig",
        "criterions": "label_smoothed_nll_loss",
    },
    "criterions.masked_lm": {"criterions": "MaskedLmLoss", "dataclass": "MaskedLmConfig=FairseqDataclass"},
    "criterions.sentence_prediction": {
        "fairseq.tasks.sentence_prediction": "SentencePredictionConfig=SentencePredictionTaskConfig"
    },
    "config.options": {
        "utils": "csv_str_list eval_bool eval_str_dict eval_str_list",
        "fairseq_cli.interactive": "get_generation_parser get_interactive_generation_parser",
        **{f"fairseq_cli.{c}": f"get_{p}_parser" for c, p in (pair.split(":") for pair in _PARSERS.split())},
    },
    "data": {
        "datasets": f"{_DATASETS} RandomCropDataset",
        "block_datasets": f"""
            {_BLOCK_DATASETS} IndexedDataset MMapIndexedDataset=IndexedDataset IndexedCachedDataset=IndexedDataset
            TruncatedDictionary
        """,
        "iterators": "BufferedIterator CountingIterator EpochBatchIterator GroupedIterator ShardedIterator",
        "inert": """
            LanguagePairDataset BacktranslationDataset TransformEosDataset RoundRobinZipDatasets
            FairseqIterableDataset IndexedRawTextDataset
        """,
    },
    "text.dictionary": {"block_datasets": "TruncatedDictionary"},
    "data.indexed_dataset": {
        "block_datasets": """
            IndexedDataset MMapIndexedDataset=IndexedDataset IndexedCachedDataset=IndexedDataset dataset_exists
            get_available_dataset_impl make_dataset
        """,
        "indexed_files": """
            MMapIndexedDatasetBuilder IndexedDatasetBuilder=MMapIndexedDatasetBuilder make_builder
            best_fitting_int_dtype data_file_path index_file_path
        """,
        "inert": "IndexedRawTextDataset",
    },
    "distributed": {"modules": "fsdp_wrap ModuleProxyWrapper"},
    "interop.fairseq.checkpoint_utils": {"files": "PathManager"},
    "interop.fairseq.data_utils": {"block_datasets": "load_indexed_dataset", ".": "process_bpe_symbol=post_process"},
    "interop.fairseq.dataclass": {
        "omegaconf": " ".join(f"{group}Config=DictConfig" for group in _GROUPS.split()),
        "utils": "eval_str_list",
    },
    "interop.fairseq.distributed_utils": {"utils": "call_main"},
    "interop.fairseq.decoders": {"inert": "EncoderOut"},
    "interop.fairseq.generator": {
        "inert": """
            EnsembleModel DiverseBeamSearch DiverseSiblingsSearch LengthConstrainedBeamSearch
            PrefixConstrainedBeamSearch LexicallyConstrainedBeamSearch SequenceGeneratorWithAlignment
        """,
    },
    "interop.fairseq.roberta": {
        "parts": _ROBERTA,
        "layers": "TransformerSentenceEncoder",
        "roberta_hub": "RobertaHubInterface",
    },
    "interop.fairseq.transformer": {"inert": "TransformerModel TransformerModelBase CharacterTokenEmbedder"},
    "models": {
        "parts": """
            build_model ARCH_MODEL_REGISTRY ARCH_MODEL_NAME_REGISTRY ARCH_MODEL_INV_REGISTRY ARCH_CONFIG_REGISTRY
            MODEL_DATACLASS_REGISTRY
        """,
        "fairseq.models.base": "FairseqModel=BaseFairseqModel",
        "decoders": "FairseqDecoder FairseqEncoder FairseqEncoderModel FairseqIncrementalDecoder",
        "dataclass": "FairseqDataclass",
        "inert": "FairseqEncoderDecoderModel FairseqMultiModel CompositeEncoder BARTModel",
        "fairseq.config.registry": "MODEL_REGISTRY=MODELS",
        "utils": "import_models",
    },
    "models.lstm_lm": {
        ".": "LSTMLanguageModelConfig=LSTMLMConfig",
        "parts": "base_architecture=lstm_lm_architecture",
    },
    "models.transformer_lm": {
        ".": "TransformerLanguageModelConfig=TransformerLMConfig",
        "parts": _TRANSFORMERS,
        "transformer_config": "DEFAULT_MAX_TARGET_POSITIONS",
    },
    "modules": {
        "fairseq.modules.adaptive_softmax": "AdaptiveSoftmax",
        "modules": """
            AdaptiveInput FairseqDropout LayerNorm PositionalEmbedding LearnedPositionalEmbedding
            SinusoidalPositionalEmbedding LayerDropModuleList checkpoint_wrapper cross_entropy gelu gelu_accurate
        """,
        "attention": "MultiheadAttention",
        "inert": "BaseLayer CharacterTokenEmbedder DynamicConv LightweightConv",
        "layers": """
            TransformerDecoderLayer TransformerEncoderLayer TransformerSentenceEncoder
            TransformerSentenceEncoderLayer
        """,
    },
    "modules.transformer_layer": {
        "layers": """
            TransformerDecoderLayer TransformerEncoderLayer TransformerDecoderLayerBase=TransformerDecoderLayer
            TransformerEncoderLayerBase=TransformerEncoderLayer
        """,
    },
    "optim": {
        "parts": "AMPOptimizer",
        "fairseq.optim.fairseq_optimizer": "LegacyFairseqOptimizer=FairseqOptimizer",
        "fairseq.config.registry": "OPTIMIZER_REGISTRY=OPTIMIZERS",
    },
    "optim.adam": {".": "FairseqAdamConfig=AdamConfig"},
    "optim.fairseq_optimizer": {".": "LegacyFairseqOptimizer=FairseqOptimizer"},
    "optim.lr_scheduler": {
        "fairseq.optim.lr_scheduler.fairseq_lr_scheduler": "LegacyFairseqLRScheduler=FairseqLRScheduler",
        "fairseq.config.registry": "LR_SCHEDULER_REGISTRY=LR_SCHEDULERS",
    },
    "optim.lr_scheduler.fairseq_lr_scheduler": {".": "LegacyFairseqLRScheduler=FairseqLRScheduler"},
    "optim.lr_scheduler.cycles": {
        ".": """
            CosineLRSchedule=CosineSchedule CosineLRScheduleConfig=CosineConfig
            TriangularLRSchedule=TriangularSchedule TriangularLRScheduleConfig=TriangularConfig
        """
    },
    "optim.lr_scheduler.decays": {
        ".": """
            FixedLRSchedule=FixedSchedule FixedLRScheduleConfig=FixedConfig
            InverseSquareRootSchedule=InverseSqrtSchedule InverseSquareRootLRScheduleConfig=InverseSqrtConfig
            PolynomialDecayLRSchedule=PolynomialDecaySchedule PolynomialDecayLRScheduleConfig=PolynomialDecayConfig
            ReduceLROnPlateauLRSchedule=ReduceLROnPlateau
            ReduceLROnPlateauLRScheduleConfig=ReduceLROnPlateauConfig
            TriStageLRSchedule=TriStageSchedule TriStageLRScheduleConfig=TriStageConfig
        """
    },
    "optim.sgd": {"fairseq.optim.settings": "FairseqNAGConfig=NAGConfig"},
    "tasks": {
        "fairseq.tasks.fairseq_task": "LegacyFairseqTask=FairseqTask",
        "dataclass": "FairseqDataclass",
        "fairseq.config.registry": "TASK_REGISTRY=TASKS",
        "parts": "get_task",
        "utils": "import_tasks",
    },
    "tasks.fairseq_task": {".": "LegacyFairseqTask=FairseqTask"},
    "tasks.language_modeling": {".": "LanguageModelingConfig=LanguageModelingTaskConfig"},
    "tasks.masked_lm": {".": "MaskedLMConfig=MaskedLMTaskConfig"},
    "tasks.sentence_prediction": {".": "SentencePredictionConfig=SentencePredictionTaskConfig"},
    "training.state": {".": "Trainer=TrainingState"},
}
MODULES = {f"fairseq.{old}": home_of(home) for home, olds in _MODULES.items() for old in olds.split()}
NAMES = {  # module: name in fairseq: module here and name there
    f"fairseq.{module}": {
        name.partition("=")[0]: (f"fairseq.{module}" if home == "." else home_of(home), name.rpartition("=")[2])
        for home, names in homes.items()
        for name in names.split()
    }
    for module, homes in _NAMES.items()
}


def part(module: str, name: str) -> Any:
    """What *module* had as *name* in fairseq; settings as a dataclass that a plug-in's can
    extend."""
    home, original = NAMES[module][name]
    value = getattr(importlib.import_module(home), original)
    if isinstance(value, type) and issubclass(value, Config):
        return importlib.import_module(home_of("dataclass")).extendable(name, value)
    return value
