"""Layers that are not implemented, which files of plug-ins import."""

from torch import nn

from fairseq.system.refused import refused

BaseLayer = refused("BaseLayer", nn.Module, "mixtures of experts are not implemented", __name__)
CharacterTokenEmbedder = refused(
    "CharacterTokenEmbedder", nn.Module, "`character_embeddings`: not implemented; leave it out", __name__
)
