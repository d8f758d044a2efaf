"""The number of updates of a run that leaves it open, from its data."""

from __future__ import annotations

import math

from fairseq.config.settings import TrainingSettings
from fairseq.data.folders import check_split, corpus_prefixes, data_folders
from fairseq.data.indexed_dataset import token_count


def with_max_update(settings: TrainingSettings, processes: int) -> TrainingSettings:
    """*settings* with a ``max_update`` if their schedule needs one: the updates of ``max_epoch``
    epochs, or of one.

    Counted in tokens, so that blocks and batches that are not full do not count. Tasks without
    blocks of ``tokens_per_sample`` are left as they are.

    Raises:
        UserError: the training split is missing.
    """
    cfg = settings.optimization
    length = getattr(settings.task, "tokens_per_sample", None)
    if cfg.stages or length is None or not getattr(settings.lr_scheduler, "needs_max_update", False):
        return settings
    rows = settings.data.batch_size
    batch = min(filter(None, (settings.data.max_tokens, rows and rows * length)))
    updates = 0.0
    folders, epochs = data_folders(settings.data_path), cfg.max_epoch or 1
    for epoch in range(1, epochs + 1):
        folder, split = folders[(epoch - 1) % len(folders)], settings.data.train_subset
        check_split(folder, split)
        tokens = sum(map(token_count, corpus_prefixes(folder, split, combine=True)))
        updates += tokens / (batch * processes * cfg.update_freq[min(epoch, len(cfg.update_freq)) - 1])
    return settings.changed(max_update=max(math.ceil(updates), 1))
