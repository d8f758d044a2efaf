"""Flags of fairseq 0.12.2 that commands take without reading them, and flags and parts that they
refuse by name.

A flag is refused where fairseq's model, loss or updates would be others with it.
``docs/compatibility.md`` lists them all.
"""

from __future__ import annotations

import argparse
from typing import Any

from fairseq.errors import UserError

_COMMON_SWITCHES = """
azureml-logging fp16-no-flatten-grads on-cpu-convert-precision reset-logging suppress-crashes use-plasma-view
"""
_COMMON_VALUES = """
aim-repo aim-run-hash all-gather-list-size amp-batch-retries amp-init-scale amp-scale-window empty-cache-freq
plasma-path scoring
"""
SWITCHES = f"""{_COMMON_SWITCHES}
average-sync broadcast-buffers checkpoint-activations cpu-offload
fast-stat-sync fix-batches-to-gpus fp32-reduce-scatter future-target gradient-as-bucket-view
grouped-shuffling iter-decode-force-max-iter iter-decode-with-external-reranker
layernorm-embedding lazy-load load-checkpoint-heads load-checkpoint-on-all-dp-ranks no-beamable-mm no-early-stop
no-reshard-after-forward no-seed-provided no-shuffle not-fsdp-flatten-parameters offload-activations
pad-to-fixed-bsz pad-to-fixed-length print-step quiet report-accuracy
retain-iter-history save-async tbmf-wrapper truncate-sequence
update-ordered-indices-seed use-nbm use-old-adam use-sharded-state write-checkpoints-asynchronously
"""
VALUES = f"""{_COMMON_VALUES}
base-shuffle base-sublayers block-lr block-momentum bpe buffer-size char-embedder-highway-layers
character-embedding-dim character-filters data-buffer-size ddp-comm-hook diverse-beam-strength
ema-update-freq eos-token global-sync-iter heartbeat-timeout
iter-decode-eos-penalty iter-decode-max-iter iter-decode-with-beam localsgd-frequency min-params-to-wrap
pipeline-balance pipeline-checkpoint pipeline-chunks pipeline-decoder-balance pipeline-decoder-devices pipeline-devices
pipeline-encoder-balance pipeline-encoder-devices pooler-activation-fn pooler-dropout quant-noise-pq-block-size
retain-dropout-modules shorten-data-split-list slowmo-base-algorithm slowmo-momentum
tokenizer update-epoch-batch-itr warmup-iterations
"""
# Commands other than training take these where they do not read them.
OF_EVALUATION_SWITCHES = """
bpe-add-prefix-space bpe-cased disable-validation moses-no-dash-splits moses-no-escape profile
skip-invalid-size-inputs-valid-test
"""
OF_EVALUATION = """
batch-size-valid bpe-codes bpe-merges bpe-separator bpe-vocab bpe-vocab-file criterion dataset-impl gen-subset
gpt2-encoder-json gpt2-vocab-bpe lr-scheduler max-target-positions max-tokens moses-source-lang moses-target-lang
num-workers optimizer post-process remove-bpe required-batch-size-multiple sentencepiece-model train-subset
valid-subset validate-after-updates validate-interval validate-interval-updates
"""
# Commands that generate text also take the ones of checkpoints and processes.
OF_GENERATION_SWITCHES = """
combine-val combine-valid-subsets distributed-no-spawn find-unused-parameters ignore-unused-valid-subsets
maximize-best-checkpoint-metric no-epoch-checkpoints no-last-checkpoints
no-save no-save-optimizer-state reset-dataloader reset-lr-scheduler reset-meters reset-optimizer
"""
OF_GENERATION = """
arch best-checkpoint-metric bucket-cap-mb continue-once curriculum ddp-backend device-id distributed-backend
distributed-init-method distributed-num-procs distributed-port distributed-rank distributed-world-size
finetune-from-model keep-best-checkpoints keep-interval-updates keep-interval-updates-pattern keep-last-epochs
local_rank max-sentences-valid max-tokens-valid max-valid-steps nprocs-per-node nval optimizer-overrides patience
restore-file results-path save-dir save-interval save-interval-updates
"""
PREPROCESSING_SWITCHES = f"""{_COMMON_SWITCHES}
amp bf16 cpu fp16 memory-efficient-bf16 memory-efficient-fp16 no-progress-bar profile tbmf-wrapper tpu
"""  # of the preprocessing of one language
PREPROCESSING_VALUES = f"""{_COMMON_VALUES}
align-suffix alignfile criterion fp16-init-scale fp16-scale-tolerance fp16-scale-window log-file log-format log-interval
lr-scheduler min-loss-scale model-parallel-size nwordstgt optimizer quantization-config-path seed target-lang task
tensorboard-logdir tgtdict threshold-loss-scale thresholdtgt wandb-project
"""
_OPTIONAL = ("post-process", "remove-bpe", "update-epoch-batch-itr")  # values that may be left out
_SHORT = {"arch": "-a", "target-lang": "-t"}

_NOT_IMPLEMENTED = """
decoder-embed-path fp16-adam-stats retain-dropout scale-attn scale-fc scale-heads scale-resids
spectral-norm-classification-head
"""
_INSTEAD = {  # flag: (values that change nothing, what to do)
    **dict.fromkeys(_NOT_IMPLEMENTED.split(), ((), "not implemented; leave it out")),
    **dict.fromkeys(("quant-noise-pq", "quant-noise-scalar", "unkpen"), (("0", "0.0"), "not implemented; use 0")),
    **dict.fromkeys(("base-layers", "ignore-prefix-size"), (("0",), "not implemented; use 0")),
    "constraints": (("",), "not implemented; leave it out"),
    "decoder-xformers-att-config": (("",), "not implemented; leave it out"),
    "decoding-format": (("",), "not implemented; leave it out"),
    **dict.fromkeys(("self-target", "past-target"), ((), "targets are the next tokens; leave it out")),
    "tpu": ((), "there are no TPUs; leave it out"),
    "amp": ((), "use --fp16, which keeps float32 parameters"),
    "memory-efficient-bf16": ((), "use --bf16"),
    "use-bmuf": ((), "processes average gradients in every update; leave it out"),
    "store-ema": ((), "use --ema-decay alone, which validates and saves the average"),
    "ema-seed-model": (("",), "the average begins with the first update; leave it out"),
    "ema-start-update": (("0",), "the average begins with the first update; use 0"),
    "fixed-validation-seed": (("",), "validations mask the same tokens in every epoch; leave it out"),
    "required-seq-len-multiple": (("1",), "rows are not padded to a multiple; use 1"),
    "skip-remainder-batch": ((), "every batch is trained on; leave it out"),
    "ema-fp32": ((), "the average of --ema-decay is float32; leave it out"),
    "pipeline-model-parallel": ((), "pipelines are not implemented; leave it out"),
    "distributed-wrapper": (("DDP",), "not implemented; use DDP"),
    "distributed-rank": (("0",), "start processes of several nodes by torchrun or srun"),
    "distributed-init-method": (("env://",), "start processes of several nodes by torchrun or srun"),
    "distributed-no-spawn": ((), "start the processes by torchrun or srun"),
    "raw-text": ((), "not supported; make binarised data with fairseq-preprocess"),
    "model-parallel-size": (("1",), "layers are not split; use 1"),
    "zero-sharding": (("none",), "not implemented; use none"),
    "num-shards": (("1",), "a split is read whole; use 1"),
    "shard-id": (("0",), "a split is read whole; use 0"),
    "checkpoint-suffix": (("",), "checkpoints are one file; give each run a `save_dir`"),
    "checkpoint-shard-count": (("1",), "checkpoints are one file; use 1"),
    "quantization-config-path": (("",), "not implemented; fairseq-eval-lm --int8 casts weights"),
    "output-dictionary-size": (("-1",), "output and input have one dictionary; use -1"),
    "shorten-method": (("none",), "lines are not shortened; use none"),
    "mask-multiple-length": (("1",), "spans are not masked; use 1, or --mask-whole-words"),
    "mask-stdev": (("0", "0.0"), "spans are not masked; use 0, or --mask-whole-words"),
    "skip-masking": ((), "rows are always masked; leave it out"),
    "encoder-normalize-before": ((), "encoders have post-norm layers; leave it out"),
    "encoder-layers-to-keep": (("",), "encoders are not pruned; leave it out"),
    "add-prev-output-tokens": ((), "there is no decoder; leave it out"),
    "decoder-attention": (("0", "False"), "there is no encoder; use 0"),
    "match-source-len": ((), "not implemented; use --max-len-b"),
    "unnormalized": ((), "use --lenpen 0"),
    "sacrebleu": ((), "there are no translations to compare; leave it out"),
    "score-reference": ((), "use fairseq-eval-lm"),
    "replace-unk": (("",), "there is no source text; leave it out"),
    "diverse-beam-groups": (("-1",), "not implemented; use -1"),
    "diversity-rate": (("-1", "-1.0"), "not implemented; use -1"),
    "print-alignment": (("",), "there is no source text; leave it out"),
    "lm-path": (("",), "give several models to --path"),
    "lm-weight": (("0", "0.0"), "give several models to --path"),
}
_LANGUAGE_MODELS = "transformer_lm, transformer_xl or lstm_lm"
_TRANSLATION = """
bart bart_base bart_large cmlm_transformer cmlm_transformer_wmt_en_de fconv fconv_iwslt_de_en fconv_self_att
fconv_self_att_wp fconv_wmt_en_de fconv_wmt_en_fr fconv_wmt_en_ro insertion_transformer
iterative_nonautoregressive_transformer iterative_nonautoregressive_transformer_wmt_en_de
levenshtein_transformer levenshtein_transformer_vaswani_wmt_en_de_big levenshtein_transformer_wmt_en_de
levenshtein_transformer_wmt_en_de_big lightconv lightconv_iwslt_de_en lightconv_wmt_en_de
lightconv_wmt_en_de_big lightconv_wmt_en_fr_big lightconv_wmt_zh_en_big lstm lstm_luong_wmt_en_de
lstm_wiseman_iwslt_de_en mbart_base mbart_base_wmt20 mbart_large model_parallel_transformer
multilingual_transformer multilingual_transformer_iwslt_de_en nacrf_transformer nonautoregressive_transformer
nonautoregressive_transformer_wmt_en_de pipeline_parallel_transformer transformer transformer_align
transformer_from_pretrained_xlm transformer_iwslt_de_en transformer_iwslt_de_en_pipeline_parallel
transformer_tiny transformer_vaswani_wmt_en_de_big transformer_vaswani_wmt_en_fr_big transformer_wmt_en_de
transformer_wmt_en_de_big transformer_wmt_en_de_big_align transformer_wmt_en_de_big_pipeline_parallel
transformer_wmt_en_de_big_t2t
"""
_SPEECH = """
convtransformer convtransformer_espnet data2vec data2vec_audio data2vec_multi fastspeech2 hubert hubert_ctc
s2spect_transformer s2spect_transformer_fisher s2t_berard s2t_conformer s2t_transformer s2t_transformer_l
s2t_transformer_lp s2t_transformer_m s2t_transformer_mp s2t_transformer_s s2t_transformer_sp
s2t_transformer_xs s2ut_conformer s2ut_transformer s2ut_transformer_fisher tacotron_2 tts_transformer wav2vec
wav2vec2 wav2vec2_ctc wav2vec_ctc wav2vec_seq2seq xm_transformer
"""
_CONVOLUTIONAL = "fconv_lm fconv_lm_dauphin_gbw fconv_lm_dauphin_wikitext103 lightconv_lm lightconv_lm_gbw"
_KINDS = (  # fairseq 0.12's architectures of a kind that is refused, and what to choose
    (_CONVOLUTIONAL, "convolutional language models", _LANGUAGE_MODELS),
    ("hf_gpt2 hf_gpt2_medium hf_gpt2_large hf_gpt2_xl", "Hugging Face's models inside fairseq", _LANGUAGE_MODELS),
    ("transformer_ulm transformer_ulm_big transformer_ulm_tiny", "models of speech units", _LANGUAGE_MODELS),
    ("roberta_prenorm xmod_large_prenorm", "encoders with pre-norm", "roberta_base"),
    ("roberta_enc_dec", "encoders with decoders", "roberta_base"),
    (
        "xlm_roberta xlm_roberta_base xlm_roberta_large",
        "names of XLM-R's sizes, which are RoBERTa's,",
        "roberta_base or roberta_large",
    ),
    (_TRANSLATION, "models of translation", _LANGUAGE_MODELS),
    (_SPEECH, "models of speech", _LANGUAGE_MODELS),
)
_REFUSED = {name: (kind, instead) for names, kind, instead in _KINDS for name in names.split()}


class Unread(argparse.Action):
    """Takes a flag that nothing reads, and has the parser mention it."""

    def __call__(self, parser: Any, namespace: object, values: object, option_string: str | None = None) -> None:
        parser.unread.append(option_string)


class Refused(argparse.Action):
    """Refuses a flag, unless its value changes nothing."""

    def __call__(self, parser: object, namespace: object, values: object, option_string: str | None = None) -> None:
        neutral, advice = _INSTEAD[str(option_string).lstrip("-")]
        if values not in neutral:
            value = f" {values}" if isinstance(values, str) else ""
            raise UserError(f"{option_string}{value}: {advice}")


def advice_of(flag: str) -> str:
    """What to do instead of *flag*, which is refused."""
    return _INSTEAD[flag.lstrip("-")][1]


def add_unread(parser: argparse.ArgumentParser, switches: str, values: str) -> None:
    """Let *parser* take flags that nothing reads,
    without showing them; those that it has already stay."""
    for nargs, names in ((0, switches), (None, values)):
        for name in names.split():
            _add(parser, name, "?" if name in _OPTIONAL else nargs, Unread)


def add_unused_flags(parser: argparse.ArgumentParser) -> None:
    """Let *parser* take fairseq's flags without meaning here,
    and refuse those that change a result."""
    add_unread(parser, SWITCHES, VALUES)
    if "arch" not in getattr(parser, "choices", []):
        add_unread(parser, OF_EVALUATION_SWITCHES, OF_EVALUATION)
    if "--beam" in getattr(parser, "by_flag", {}):
        add_unread(parser, OF_GENERATION_SWITCHES, OF_GENERATION)
    for name, (neutral, _) in _INSTEAD.items():
        _add(parser, name, "?" if neutral else 0, Refused)


def check_architecture(name: str) -> None:
    """Raise UserError for an architecture of fairseq's whose kind of model is not implemented."""
    if name in _REFUSED:
        kind, instead = _REFUSED[name]
        raise UserError(f"--arch {name}: {kind} are not implemented; choose {instead}")


def _add(parser: argparse.ArgumentParser, name: str, nargs: int | str | None, action: type[argparse.Action]) -> None:
    if f"--{name}" not in getattr(parser, "by_flag", {}):
        names = [*filter(None, [_SHORT.get(name)]), f"--{name}"]
        options: dict[str, Any] = {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        parser.add_argument(*names, nargs=nargs, action=action, **options)
