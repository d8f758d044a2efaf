"""Settings of fairseq 0.12 that this package does not have, with fairseq's defaults: plug-ins read
any of them."""

from __future__ import annotations

import argparse

_SWITCHES = """
    iter_decode_force_max_iter iter_decode_with_external_reranker match_source_len no_beamable_mm no_early_stop
    no_seed_provided print_step retain_dropout retain_iter_history sacrebleu score_reference unnormalized
"""
_WITHOUT_VALUE = "constraints decoding_format eos_token lm_path print_alignment replace_unk retain_dropout_modules"
OF_SEARCHES: dict[str, object] = {  # of generation
    **dict.fromkeys(_SWITCHES.split(), False),
    **dict.fromkeys(_WITHOUT_VALUE.split()),
    "diverse_beam_groups": -1,
    "diverse_beam_strength": 0.5,
    "diversity_rate": -1.0,
    "iter_decode_eos_penalty": 0.0,
    "iter_decode_max_iter": 10,
    "iter_decode_with_beam": 1,
    "lm_weight": 0.0,
    "unkpen": 0,
}
MISSING: dict[str, object] = {  # settings that this package has are not here
    # common
    "aim_repo": None,
    "aim_run_hash": None,
    "all_gather_list_size": 16384,
    "amp": False,
    "amp_batch_retries": 2,
    "amp_init_scale": 128,
    "amp_scale_window": None,
    "azureml_logging": False,
    "empty_cache_freq": 0,
    "fp16_no_flatten_grads": False,
    "memory_efficient_bf16": False,
    "model_parallel_size": 1,
    "on_cpu_convert_precision": False,
    "plasma_path": "/tmp/plasma",
    "profile": False,
    "quantization_config_path": None,
    "reset_logging": False,
    "suppress_crashes": False,
    "tpu": False,
    "use_plasma_view": False,
    # distributed_training
    "broadcast_buffers": False,
    "ddp_comm_hook": "none",
    "device_id": 0,
    "distributed_num_procs": 1,
    "fast_stat_sync": False,
    "fix_batches_to_gpus": False,
    "fp32_reduce_scatter": False,
    "gradient_as_bucket_view": False,
    "heartbeat_timeout": -1,
    "localsgd_frequency": 3,
    "no_reshard_after_forward": False,
    "not_fsdp_flatten_parameters": False,
    "pipeline_model_parallel": False,
    "slowmo_base_algorithm": "localsgd",
    "slowmo_momentum": None,
    "use_sharded_state": False,
    "zero_sharding": "none",
    # dataset
    "data_buffer_size": 10,
    "dataset_impl": None,
    "fixed_validation_seed": None,
    "grouped_shuffling": False,
    "num_shards": 1,
    "required_seq_len_multiple": 1,
    "shard_id": 0,
    "update_epoch_batch_itr": False,
    "update_ordered_indices_seed": False,
    # optimization and checkpoint
    "checkpoint_shard_count": 1,
    "checkpoint_suffix": "",
    "load_checkpoint_on_all_dp_ranks": False,
    "sentence_avg": False,
    "skip_remainder_batch": False,
    "store_ema": False,
    "use_bmuf": False,
    "write_checkpoints_asynchronously": False,
    # criterion
    "classification_head_name": "sentence_classification_head",
    "regression_target": False,
    # tasks of language models and encoders
    "add_bos_token": False,
    "freq_weighted_replacement": False,
    "future_target": False,
    "include_target_tokens": False,
    "mask_multiple_length": 1,
    "mask_stdev": 0.0,
    "mask_whole_words": False,
    "max_source_positions": None,
    "output_dictionary_size": -1,
    "pad_to_fixed_bsz": False,
    "pad_to_fixed_length": False,
    "past_target": False,
    "self_target": False,
    "shorten_data_split_list": "",
    "shorten_method": "none",
    # models
    "character_embeddings": False,
    "no_cross_attention": False,
    "quant_noise_pq": 0.0,
    "quant_noise_pq_block_size": 8,
    "quant_noise_scalar": 0.0,
    **OF_SEARCHES,
}
FORMER = {"max_sentences": "batch_size", "max_sentences_valid": "batch_size_valid"}  # names before fairseq 0.10


def complete(args: argparse.Namespace) -> None:
    """Set on *args* the settings of :data:`MISSING` that it lacks."""
    for name, value in MISSING.items():
        if name not in vars(args):
            setattr(args, name, value)


def complete_script(args: argparse.Namespace) -> None:
    """Set on *args*, which a script has parsed, what :func:`complete` sets, and former names."""
    complete(args)
    for name, present in FORMER.items():
        if name not in vars(args) and present in vars(args):
            setattr(args, name, vars(args)[present])
