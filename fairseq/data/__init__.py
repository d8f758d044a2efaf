"""From text to batches: dictionary, binarizer, indexed corpus, token blocks, samplers, epoch iterator.

The names below are imported when first used: worker processes that only count words need not load torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Dictionary": "dictionary",
    "IndexedCorpus": "indexed_dataset",
    "IndexedWriter": "indexed_dataset",
    "TokenBlocks": "token_blocks",
    "BlockSampler": "samplers",
    "StreamSampler": "samplers",
    "Dataset": "dataset",
    "EpochIterator": "iterator",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
