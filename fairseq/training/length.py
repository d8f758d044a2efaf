"""The number of updates of a run that leaves it open, from its data."""

from __future__ import annotations

import math

from fairseq.config.settings import TrainingSettings
from fairseq.data.folders import check_split, corpus_prefixes, data_folders
from fairseq.data.indexed_dataset import token_count
from fairseq.data.samplers import rows_per_batch


def with_max_update(settings: TrainingSettings, processes: int) -> TrainingSettings:
    """*settings* with a ``max_update`` if their schedule needs one: the updates of ``max_epoch``
    epochs, or of one.

    Every row is taken to be a full block of ``tokens_per_sample`` tokens, but for the last. Tasks
    without such blocks are left as they are.

    Raises:
        UserError: the training split is missing, or a block does not fit into a batch.
    """
    cfg = settings.optimization
    length = getattr(settings.task, "tokens_per_sample", None)
    if cfg.stages or length is None or not getattr(settings.lr_scheduler, "needs_max_update", False):
        return settings
    data, updates = settings.data, 0
    rows = rows_per_batch(data.max_tokens, data.batch_size, length, data.required_batch_size_multiple)
    folders, epochs = data_folders(settings.data_path), cfg.max_epoch or 1
    for epoch in range(1, epochs + 1):
        folder, split = folders[(epoch - 1) % len(folders)], data.train_subset
        check_split(folder, split)
        tokens = sum(map(token_count, corpus_prefixes(folder, split, combine=True)))
        batches = processes * cfg.update_freq[min(epoch, len(cfg.update_freq)) - 1]
        updates += math.ceil(tokens / (length * rows * batches))
    return settings.changed(max_update=max(updates, 1))
