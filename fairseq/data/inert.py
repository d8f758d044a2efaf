"""Data sets that are not implemented, which files of plug-ins import."""

from fairseq.data.datasets import FairseqDataset
from fairseq.system.refused import TRANSLATION, refused

BacktranslationDataset = refused("BacktranslationDataset", FairseqDataset, TRANSLATION, __name__)
TransformEosDataset = refused("TransformEosDataset", FairseqDataset, TRANSLATION, __name__)
FairseqIterableDataset = refused(
    "FairseqIterableDataset", FairseqDataset, "data sets without a length are not implemented", __name__
)
IndexedRawTextDataset = refused(
    "IndexedRawTextDataset", FairseqDataset, "raw text is not read in training; use fairseq-preprocess", __name__
)
