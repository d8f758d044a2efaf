"""The parser of each command: its flags, its help and two examples."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fairseq.config import fields
from fairseq.config.command_settings import (
    AttentionConfig,
    ClassifyConfig,
    EvalLMConfig,
    FinetuneConfig,
    GenerateConfig,
    HarnessConfig,
    InteractiveConfig,
    NotesConfig,
    PlotConfig,
    PreprocessConfig,
    ReclConfig,
    TokenizeConfig,
    ValidateConfig,
)
from fairseq.config.parser import Parser
from fairseq.config.settings import (
    CheckpointConfig,
    CommonConfig,
    DataConfig,
    DistributedConfig,
    MemoryConfig,
    OptimizationConfig,
    ProfileConfig,
    StreamConfig,
)
from fairseq.config.unused_flags import add_unread
from fairseq.errors import UserError

ONLY_IN_TRAINING = (  # of the settings that evaluation shares with training
    *("fp16_init_scale", "fp16_scale_window", "fp16_scale_tolerance", "min_loss_scale", "threshold_loss_scale"),
    *("ddp_backend", "bucket_cap_mb", "find_unused_parameters", "shard_group_size", "cpu_offload"),
    "checkpoint_activations",
    *("tensorboard_logdir", "metrics_file", "log_file", "wandb_project", "curriculum", "dataset_impl"),
    *("max_valid_steps",),
)
SOURCE_FORMATS = ("transformer-xl", "hf-transfo-xl", "hf")  # of fairseq-import


# Flags that fairseq's parser of this command takes and its preprocessing of one language does not read.
PREPROCESSING_SWITCHES = (
    "no-progress-bar cpu tpu fp16 bf16 memory-efficient-fp16 memory-efficient-bf16 fp16-no-flatten-grads profile"
)
PREPROCESSING_VALUES = (
    "seed log-interval log-format tensorboard-logdir task criterion optimizer lr-scheduler fp16-init-scale "
    "fp16-scale-window fp16-scale-tolerance min-loss-scale threshold-loss-scale empty-cache-freq all-gather-list-size "
    "model-parallel-size quantization-config-path scoring target-lang tgtdict nwordstgt thresholdtgt alignfile "
    "align-suffix"
)


def get_preprocessing_parser(default_task: str = "language_modeling") -> Parser:
    """The flags of ``fairseq-preprocess``."""
    examples = [
        "fairseq-preprocess --only-source --trainpref train.txt --validpref valid.txt --destdir data-bin",
        "fairseq-preprocess --only-source --srcdict data-bin/dict.txt --testpref test.txt --destdir test-bin",
    ]
    parser = Parser("Build a dictionary from text and binarize the text.", [PreprocessConfig], examples=examples)
    parser.add_argument("--user-dir", metavar="DIR", default=argparse.SUPPRESS, help="plug-in folder, a Python package")
    add_unread(parser, PREPROCESSING_SWITCHES.split(), PREPROCESSING_VALUES.split(), {"target-lang": "-t"})
    return parser


def get_tokenize_parser() -> Parser:
    """The flags of ``fairseq-tokenize``."""
    examples = [
        "fairseq-tokenize book.txt.gz --tokenizer moses --workers 4 --output book.tokens",
        "fairseq-tokenize generated.tokens --data data-bin --undo",
    ]
    parser = Parser("Turn text into symbols, or symbols into text.", [TokenizeConfig], examples=examples)
    parser.add_argument("text", metavar="TEXT", nargs="?", default="-", help="text file (default: -, stdin)")
    parser.add_argument("--user-dir", metavar="DIR", default=argparse.SUPPRESS, help="plug-in folder, a Python package")
    return parser


def get_symbols_parser() -> Parser:
    """The flags of ``fairseq-symbols``."""
    examples = ["fairseq-symbols enwik8 data --kind bytes", "fairseq-symbols text8 data --kind letters"]
    description = "Write the bytes or letters of a text as symbols, in three splits."
    parser = Parser(description, examples=examples, settings_file=False)
    parser.add_argument("source", metavar="TEXT", help="text, one file")
    parser.add_argument("destdir", metavar="DIR", help="folder for the three splits and dict.txt")
    parser.add_argument(
        "--kind", choices=("bytes", "letters"), required=True, help="bytes as numbers, or a to z and spaces"
    )
    return parser


def get_training_parser(default_task: str = "language_modeling") -> Parser:
    """The flags of ``fairseq-train``; those of the chosen parts join when a command line is parsed."""
    parser = Parser(
        "Train a model on data from fairseq-preprocess. --arch NAME --help lists the flags of that architecture.",
        [CommonConfig, DataConfig, DistributedConfig, OptimizationConfig, CheckpointConfig, ProfileConfig],
        ["task", "arch", "criterion", "optimizer", "lr_scheduler"],
        examples=[
            "fairseq-train data-bin --arch transformer_lm_demo --max-tokens 4096 --max-update 1000",
            "fairseq-train data-bin --arch transformer_xl_enwik8_base --optimizer adam --lr 0.00025 --batch-size 22",
        ],
        hidden=("gen_subset", "dataset_impl"),
        takes_unused=True,
    )
    parser.add_argument("data", metavar="DATA", help="folder made by fairseq-preprocess")
    return parser


def get_eval_lm_parser(default_task: str = "language_modeling") -> Parser:
    """The flags of ``fairseq-eval-lm``."""
    examples = [
        "fairseq-eval-lm checkpoints --text test.txt",
        "fairseq-eval-lm data-bin --path checkpoints/checkpoint_best.pt --context-window 400 --bf16",
    ]
    hidden = ("train_subset", "valid_subset", "max_tokens_valid", "batch_size_valid", "num_workers", "seed")
    return _evaluation_parser(
        "Compute the perplexity of a language model.", examples, [EvalLMConfig, DistributedConfig], hidden=hidden
    )


def get_validation_parser(default_task: str | None = None) -> Parser:
    """The flags of ``fairseq-validate``."""
    examples = [
        "fairseq-validate data-bin --path checkpoints/checkpoint_best.pt",
        "fairseq-validate data-bin --path checkpoints/checkpoint_best.pt --valid-subset valid,test",
    ]
    hidden = ("train_subset", "gen_subset", "seed")
    return _evaluation_parser(
        "Compute the validation loss of a checkpoint.", examples, [ValidateConfig, DistributedConfig], hidden=hidden
    )


def get_recl_parser() -> Parser:
    """The flags of ``fairseq-recl``."""
    examples = [
        "fairseq-recl data-bin --path xl/checkpoint_best.pt:base/checkpoint_best.pt --results-path recl",
        "fairseq-recl data-bin --path xl/checkpoint_best.pt --max-context 300 --positions 200",
    ]
    description = "Measure the relative effective context length (RECL) of language models."
    return _evaluation_parser(description, examples, [ReclConfig], [StreamConfig])


def get_attention_parser() -> Parser:
    """The flags of ``fairseq-attention``."""
    examples = [
        "fairseq-attention data-bin --path checkpoints/checkpoint_best.pt --results-path attention",
        "fairseq-attention data-bin --path xl/checkpoint_best.pt --results-path attention --heads 0:3,15:0",
    ]
    description = "Plot the distances over which a language model's heads attend."
    return _evaluation_parser(description, examples, [AttentionConfig], [StreamConfig], hidden=("compile",))


def get_interactive_generation_parser(default_task: str = "language_modeling") -> Parser:
    """The flags of ``fairseq-interactive``."""
    examples = [
        "fairseq-interactive checkpoints --sampling --sampling-topk 40",
        "fairseq-interactive checkpoints/checkpoint_last.pt --input prompts.txt --beam 4",
    ]
    description = "Continue prompts from a terminal, a pipe or a file."
    return _evaluation_parser(description, examples, [InteractiveConfig], [], hidden=("compile",))


def get_generation_parser(interactive: bool = False, default_task: str = "language_modeling") -> Parser:
    """The flags of ``fairseq-generate``."""
    if interactive:
        return get_interactive_generation_parser(default_task)
    examples = [
        "fairseq-generate data-bin --path checkpoints/checkpoint_best.pt --sampling --results-path out",
        "fairseq-generate data-bin --path checkpoints/checkpoint_best.pt --context-tokens 64 --beam 4",
    ]
    description = "Continue passages of a corpus and show the results beside the original text."
    return _evaluation_parser(description, examples, [GenerateConfig, DistributedConfig], [], hidden=("compile",))


def get_import_parser() -> Parser:
    """The flags of ``fairseq-import``."""
    examples = [
        "fairseq-import model.pt --from transformer-xl --out imported",
        "fairseq-import bert-base-uncased --from hf --out imported",
    ]
    description = "Import a model from elsewhere into a folder that all commands read."
    parser = Parser(description, examples=examples, settings_file=False)
    parser.add_argument("source", metavar="IN", help="the authors' state dict or model.pt, or a folder")
    parser.add_argument(
        "--from",
        dest="source_format",
        required=True,
        type=_source_format,
        choices=SOURCE_FORMATS,
        help="transformer-xl: the authors' files; others: a Hugging Face folder",
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="output folder for checkpoint.pt and dict.txt")
    parser.add_argument(
        "--config",
        dest="config_file",
        metavar="FILE.json",
        help="the authors' model settings; required for a state dict",
    )
    return parser


def get_export_parser() -> Parser:
    """The flags of ``fairseq-export``."""
    examples = [
        "fairseq-export checkpoints/checkpoint_best.pt --to hf --out exported --data data-bin --results results.json",
        "fairseq-export electra/checkpoint_best.pt --to hf --out generator --half generator",
    ]
    description = "Export a model to a folder for Hugging Face transformers, or a language model to fairseq."
    parser = Parser(description, examples=examples)
    parser.add_argument("--user-dir", metavar="DIR", default=argparse.SUPPRESS, help="plug-in folder, a Python package")
    parser.add_argument("source", metavar="CHECKPOINT", help="checkpoint of a language model or an encoder")
    parser.add_argument("--to", dest="target_format", required=True, choices=("hf", "fairseq"), help="format to write")
    parser.add_argument("--out", metavar="DIR", required=True, help="new output folder; with --to fairseq the file")
    parser.add_argument("--data", metavar="DATA", help="data folder or dict.txt (default: beside the checkpoint)")
    parser.add_argument(
        "--half", choices=("discriminator", "generator"), default="discriminator", help="ELECTRA network to write"
    )
    parser.add_argument("--results", metavar="FILE", help="results.json of an evaluation, for the model card")
    return parser


def get_average_parser() -> Parser:
    """The flags of ``fairseq-average-checkpoints``."""
    examples = [
        "fairseq-average-checkpoints --inputs checkpoints --num-epoch-checkpoints 5 --output average.pt",
        "fairseq-average-checkpoints --inputs run/checkpoint8.pt run/checkpoint9.pt --output average.pt",
    ]
    parser = Parser("Average the parameters of checkpoints.", examples=examples, settings_file=False)
    parser.add_argument("--inputs", metavar="FILE", nargs="+", required=True, help="checkpoints, or their folder")
    parser.add_argument("--output", metavar="FILE", required=True, help="checkpoint to write")
    for kind in ("epoch", "update", "best"):
        text = f"number of newest {kind} checkpoints of a folder" if kind != "best" else "number of best checkpoints"
        parser.add_argument(f"--num-{kind}-checkpoints", metavar="N", type=_count, help=text)
    parser.add_argument("--checkpoint-upper-bound", metavar="N", type=_count, help="highest epoch or update to take")
    return parser


def get_merge_parser() -> Parser:
    """The flags of ``fairseq-merge-checkpoint``."""
    examples = [
        "fairseq-merge-checkpoint checkpoints/checkpoint_best.pt best.pt",
        "fairseq-merge-checkpoint checkpoints/checkpoint_last.pt weights.pt --no-save-optimizer-state",
    ]
    description = "Write a checkpoint of sharded training, a folder, as one file."
    parser = Parser(description, examples=examples, settings_file=False)
    parser.add_argument("source", metavar="CHECKPOINT", help="checkpoint of --ddp-backend fully_sharded")
    parser.add_argument("target", metavar="FILE", help="file to write")
    parser.add_argument("--no-save-optimizer-state", action="store_true", help="leave out the optimizer state")
    return parser


def get_finetune_parser() -> Parser:
    """The flags of ``fairseq-finetune``."""
    from fairseq.tasks.sentence_prediction import SentencePredictionConfig

    examples = [
        "fairseq-finetune glue/CoLA --glue-task CoLA --path bert/checkpoint_best.pt --data-bin data-bin",
        "fairseq-finetune glue/RTE --glue-task RTE --path bert/checkpoint_best.pt --data-bin data-bin --seeds 1,2",
    ]
    parser = Parser(
        "Fine-tune an encoder with several seeds and learning rates.",
        [FinetuneConfig, SentencePredictionConfig, CommonConfig, DistributedConfig],
        examples=examples,
    )
    parser.add_argument("data", metavar="DATA", help="folder with train.tsv and dev.tsv")
    return parser


def get_classify_parser() -> Parser:
    """The flags of ``fairseq-classify``."""
    examples = [
        "fairseq-classify finetuned/lr3e-05-seed1/checkpoint_best.pt reviews.txt",
        "fairseq-classify finetuned/lr3e-05-seed1/checkpoint_best.pt pairs.tsv --format tsv",
    ]
    parser = Parser("Classify text with a fine-tuned encoder.", [ClassifyConfig], examples=examples)
    parser.add_argument("--user-dir", metavar="DIR", default=argparse.SUPPRESS, help="plug-in folder, a Python package")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint of fairseq-finetune")
    text = "a text per line, a pair with a tab between, or a table (default: -, stdin)"
    parser.add_argument("text", metavar="TEXT", nargs="?", default="-", help=text)
    return parser


def get_notes_parser() -> Parser:
    """The flags of ``fairseq-notes``."""
    examples = [
        "fairseq-notes tnf/checkpoint_best.pt --words 'photosynthesis quasar'",
        "fairseq-notes tnf/checkpoint_best.pt data-bin --results-path notes",
    ]
    parser = Parser("Show the notes of rare words in a checkpoint.", [NotesConfig], examples=examples)
    parser.add_argument("--user-dir", metavar="DIR", default=argparse.SUPPRESS, help="plug-in folder, a Python package")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint of a model trained with notes")
    parser.add_argument("data", metavar="DATA", nargs="?", help="its data folder (default: the one it was trained on)")
    return parser


def get_plot_parser() -> Parser:
    """The flags of ``fairseq-plot``."""
    examples = [
        "fairseq-plot checkpoints/metrics.jsonl --results-path loss.png",
        "fairseq-plot BERT=b1.jsonl,b2.jsonl notes=n1.jsonl,n2.jsonl --over hours --reach 7.5",
    ]
    parser = Parser(
        "Draw figures of training runs and compare them.", [PlotConfig], examples=examples, settings_file=False
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="FILE of --metrics-file, or NAME=FILE,FILE,… with one per seed"
    )
    return parser


def get_harness_parser() -> Parser:
    """The flags of ``fairseq-harness``."""
    examples = [
        "fairseq-harness checkpoints --tasks lambada_openai,hellaswag",
        "fairseq-harness checkpoints/checkpoint_last.pt --data data-bin --include-path tasks --tasks mine",
    ]
    description = "Evaluate a language model on tasks of EleutherAI's lm-evaluation-harness."
    parser = Parser(description, [HarnessConfig], examples=examples)
    parser.add_argument("--user-dir", metavar="DIR", default=argparse.SUPPRESS, help="plug-in folder, a Python package")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint of a language model, or its folder")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text}")
    return int(text)


def _source_format(name: str) -> str:
    if name not in SOURCE_FORMATS:
        raise UserError(f"--from {name}: choose from {', '.join(SOURCE_FORMATS)}")
    return name


def _evaluation_parser(
    description: str,
    examples: Sequence[str],
    configs: Sequence[type],
    reading: Sequence[type] = (DataConfig,),
    hidden: Sequence[str] = (),
) -> Parser:
    def task_config() -> type:
        from fairseq.tasks.language_modeling import LanguageModelingConfig

        return LanguageModelingConfig

    optional = [
        (task_config, ("tokens_per_sample", "sample_break_mode", "add_bos_token")),
        (lambda: MemoryConfig, tuple(fields.defaults(MemoryConfig))),
    ]
    hidden = (*hidden, *ONLY_IN_TRAINING)
    parser = Parser(
        description,
        [*configs, *reading, CommonConfig],
        ["task"],
        optional,
        examples=examples,
        hidden=hidden,
        takes_unused=True,
    )
    parser.add_argument("data", metavar="DATA", help="data folder; without --path a model: a checkpoint or its folder")
    return parser
