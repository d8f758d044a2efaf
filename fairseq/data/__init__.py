"""From symbols to batches: binarizer, indexed corpus, token blocks, samplers, epoch iterator.

The names below are imported when first used:
worker processes that only binarise need not load torch.
"""

from fairseq.system.deferred import names_of

__getattr__, __all__ = names_of(
    __name__,
    {
        "fairseq.text.dictionary": "Dictionary",
        "fairseq.data.indexed_dataset": "IndexedCorpus IndexedWriter",
        "fairseq.data.token_blocks": "TokenBlocks",
        "fairseq.data.samplers": "BlockSampler StreamSampler",
        "fairseq.data.dataset": "Dataset",
        "fairseq.data.iterator": "EpochIterator",
    },
)
