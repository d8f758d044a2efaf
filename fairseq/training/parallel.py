"""What is applied to a model from outside before it is trained.

In this order: device and precision, recomputed activations, compiled layers, then one execution of
the loss, a ``DataParallel``: ``GradientReducer`` keeps the model whole on every process,
``ShardedReducer`` keeps parts.
"""

from __future__ import annotations

from fairseq.config.registry import OPTIMIZERS
from fairseq.config.settings import DistributedConfig, TrainingSettings
from fairseq.distributed import DataParallel, GradientReducer, World
from fairseq.distributed.sharding import BACKEND, ShardedReducer, is_sharded
from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel
from fairseq.models.layerwise import checkpoint_activations, compile_model, layers_of, separate_embeddings
from fairseq.modules.ngram_notes import is_sparse
from fairseq.modules.precision import Precision
from fairseq.optim.fairseq_optimizer import FairseqOptimizer, build_optimizer
from fairseq.optim.groups import hidden_matrices, parameter_groups
from fairseq.tasks.fairseq_task import LossGraph


def data_parallel(
    graph: LossGraph, precision: Precision, cfg: DistributedConfig, compiled: bool, world: World
) -> DataParallel:
    """Place *graph* on the device of *world*,
    and return its execution on the data of all processes.

    Settings that contradict each other are a UserError.
    """
    for name in ("cpu_offload", "shard_group_size"):
        if cfg.ddp_backend != BACKEND and getattr(cfg, name):
            raise UserError(f"`{name}`: needs `ddp_backend` {BACKEND}; add it or leave this out")
    if cfg.checkpoint_policy != "full" and not cfg.checkpoint_activations:
        raise UserError("`checkpoint_policy`: needs `checkpoint_activations`; add it or leave this out")
    model = graph.model
    sharded = is_sharded(cfg, world)
    # Sharded, it may never be whole on a device.
    precision.move(model, None if sharded else world.device)
    if not sharded:
        graph.criterion.to(world.device)
    if cfg.checkpoint_activations:
        checkpoint_activations(model, selective=cfg.checkpoint_policy == "selective")
    if compiled:
        compile_model(model, world.device)
    if sharded:
        # Processes would wait for one another at different layers.
        if model.skips_parameters:
            setting = "decoder_layerdrop" if model.predicts_next_token else "encoder_layerdrop"
            raise UserError(f"`{setting}`: leaves out layers, which `ddp_backend` {BACKEND} cannot; leave it out")
        groups = layers_of(model), separate_embeddings(model)
        return ShardedReducer(graph, *groups, world, cfg, precision.on(world.device))
    find_unused = cfg.find_unused_parameters or model.skips_parameters
    return GradientReducer(graph, world, cfg.ddp_backend, cfg.bucket_cap_mb, find_unused)


def check_optimizer(optimizer: FairseqOptimizer, cfg: DistributedConfig, world: World) -> None:
    """Raise UserError if *optimizer* needs full parameters, and a process has parts of them."""
    if is_sharded(cfg, world) and not optimizer.updates_parts:
        raise UserError(
            f"`ddp_backend` {BACKEND}: {type(optimizer).__name__} needs whole parameters; "
            "use `optimizer` adam, nag, sgd or adagrad, or another backend"
        )


def optimizer_of(
    reducer: DataParallel, model: BaseFairseqModel, settings: TrainingSettings, world: World
) -> FairseqOptimizer:
    """Return the optimizer that *settings* choose, of the parameters of *model* that *reducer* has
    on this process.

    UserError if it needs full parameters or a state
    in float32, which the other settings do not give it.
    """
    parameters, common = list(reducer.named_parameters()), settings.common
    # Roles are found by identity in the model; the optimizer has this process's shards of it.
    hidden = {id(p) for p in hidden_matrices(layers_of(model))}
    groups = parameter_groups(
        [(name.removeprefix("model."), p) for name, p in parameters],
        settings.optimization.no_decay_on_norms_and_biases,
        [p for _, p in parameters if id(reducer.full_parameter(p)) in hidden],
        OPTIMIZERS[settings.chosen.optimizer].group_of,
    )
    optimizer = build_optimizer(settings, groups)
    for method in ("backward", "clip_grad_norm", "multiply_grads"):  # of fairseq's, which plug-ins may override
        if hasattr(optimizer, method):
            name = f"`optimizer` {settings.chosen.optimizer}"
            raise UserError(f"{name}: its {method} is not called; do in step what it does")
    check_optimizer(optimizer, settings.distributed, world)
    if any(map(is_sparse, model.modules())) and not optimizer.updates_rows:
        raise UserError(
            f"`ngram_notes`, `word_notes`: {type(optimizer.optimizer).__name__} updates no single rows; "
            "use `optimizer` adam, with `no_apex`, or muon; or give 0"
        )
    if Precision(common).half_parameters and not optimizer.supports_half_parameters:
        raise UserError(
            f"`memory_efficient_fp16`: the state of {type(optimizer).__name__} would be float16, too; "
            "use `fp16` or another `optimizer`"
        )
    return optimizer
