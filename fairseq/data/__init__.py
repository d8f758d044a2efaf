"""From symbols to batches: binarizer, indexed corpus, token blocks, samplers, epoch iterator.

The names below are imported when first used: worker processes that only binarise need not load torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Dictionary": "fairseq.text.dictionary",
    "IndexedCorpus": "fairseq.data.indexed_dataset",
    "IndexedWriter": "fairseq.data.indexed_dataset",
    "TokenBlocks": "fairseq.data.token_blocks",
    "BlockSampler": "fairseq.data.samplers",
    "StreamSampler": "fairseq.data.samplers",
    "Dataset": "fairseq.data.dataset",
    "EpochIterator": "fairseq.data.iterator",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
