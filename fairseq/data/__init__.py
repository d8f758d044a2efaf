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
        "fairseq.data.datasets": """
            FairseqDataset BaseWrapperDataset NestedDictionaryDataset IdDataset NumSamplesDataset NumelDataset
            PadDataset LeftPadDataset RightPadDataset PrependTokenDataset AppendTokenDataset TruncateDataset
            StripTokenDataset OffsetTokensDataset SortDataset RawLabelDataset ListDataset ConcatDataset
            LRUCacheDataset ConcatSentencesDataset RollDataset RandomCropDataset
        """,
        "fairseq.data.block_datasets": """
            TokenBlockDataset MonolingualDataset MaskTokensDataset LMContextWindowDataset TruncatedDictionary
            IndexedDataset MMapIndexedDataset=IndexedDataset IndexedCachedDataset=IndexedDataset
        """,
        "fairseq.data.iterators": """
            BufferedIterator CountingIterator EpochBatchIterator GroupedIterator ShardedIterator
        """,
        "fairseq.data.language_pair_dataset": "LanguagePairDataset",
        "fairseq.data.round_robin_zip_datasets": "RoundRobinZipDatasets",
        "fairseq.data.inert": "TransformEosDataset",
    },
)
