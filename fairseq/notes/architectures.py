"""The architectures of encoders with notes: ``tnf_`` before their names."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from fairseq.config.registry import ARCHITECTURES, register_model_architecture
from fairseq.notes.tnf import PREFIX

SIZES = ("bert", "bert_base", "bert_small", "bert_tiny", "electra", "electra_base", "electra_small", "electra_tiny")


def _same_as(name: str) -> Callable[[argparse.Namespace], None]:
    def fill(args: argparse.Namespace) -> None:
        ARCHITECTURES[name].fill(args)

    fill.__name__ = fill.__qualname__ = PREFIX + name
    fill.__doc__ = f"{name} with notes."
    return fill


for _name in SIZES:
    register_model_architecture(f"{PREFIX}{_name.split('_')[0]}", PREFIX + _name)(_same_as(_name))
