"""The architectures of encoders with notes, with the recipes of encoders without: ``tnf_`` before their names."""

from __future__ import annotations

from fairseq.config.registry import ARCHITECTURES, Architecture
from fairseq.models.recipes import OBJECTIVES, RECIPES
from fairseq.notes.tnf import PREFIX

SIZES = ("bert", "bert_base", "bert_small", "bert_tiny", "electra", "electra_base", "electra_small", "electra_tiny")

for _name in SIZES:
    _model = f"{PREFIX}{_name.split('_')[0]}"
    ARCHITECTURES.register(PREFIX + _name)(Architecture(_model, ARCHITECTURES[_name].complete))

for _name in ("bert", "electra"):
    RECIPES[PREFIX + _name] = RECIPES[_name]
    OBJECTIVES[PREFIX + _name] = (PREFIX + OBJECTIVES[_name][0], OBJECTIVES[_name][1])
