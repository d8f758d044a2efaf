"""Data sets that are not implemented, which files of plug-ins import."""

from fairseq.data.datasets import FairseqDataset
from fairseq.system.refused import TRANSLATION, refused

TransformEosDataset = refused("TransformEosDataset", FairseqDataset, TRANSLATION, __name__)
