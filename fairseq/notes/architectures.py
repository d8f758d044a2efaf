"""The architectures of encoders with notes: ``tnf_`` before their names."""

from __future__ import annotations

from fairseq.config.registry import ARCHITECTURES, Architecture
from fairseq.notes.tnf import PREFIX

SIZES = ("bert", "bert_base", "bert_small", "bert_tiny", "electra", "electra_base", "electra_small", "electra_tiny")

for _name in SIZES:
    _model = f"{PREFIX}{_name.split('_')[0]}"
    ARCHITECTURES.register(PREFIX + _name)(Architecture(_model, ARCHITECTURES[_name].complete))
