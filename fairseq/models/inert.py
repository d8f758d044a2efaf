"""Models that are not implemented, which files of plug-ins import."""

from torch import nn

from fairseq.models.base import BaseFairseqModel
from fairseq.system.refused import TRANSLATION, refused

TransformerModel = refused("TransformerModel", BaseFairseqModel, TRANSLATION, __name__)
SQuADHead = refused("SQuADHead", nn.Module, "questions about spans of text are not implemented", __name__)
