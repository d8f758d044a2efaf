"""Models that are not implemented, which files of plug-ins import."""

from torch import nn

from fairseq.models.base import BaseFairseqModel
from fairseq.system.refused import TRANSLATION, refused

FairseqMultiModel = refused("FairseqMultiModel", BaseFairseqModel, TRANSLATION, __name__)
TransformerModel = refused("TransformerModel", BaseFairseqModel, TRANSLATION, __name__)
TransformerModelBase = refused("TransformerModelBase", BaseFairseqModel, TRANSLATION, __name__)
LSTMModel = refused("LSTMModel", BaseFairseqModel, TRANSLATION, __name__)
BARTModel = refused("BARTModel", BaseFairseqModel, TRANSLATION, __name__)
FConvModel = refused("FConvModel", BaseFairseqModel, TRANSLATION, __name__)
CompositeEncoder = refused("CompositeEncoder", nn.Module, TRANSLATION, __name__)
FConvEncoder = refused("FConvEncoder", nn.Module, TRANSLATION, __name__)
FConvDecoder = refused("FConvDecoder", nn.Module, TRANSLATION, __name__)
SQuADHead = refused("SQuADHead", nn.Module, "questions about spans of text are not implemented", __name__)
