"""What adapts plug-ins written for fairseq, imported for the first one, and with it torch."""

from __future__ import annotations

import contextlib
import logging
from typing import Any


def before_import() -> None:
    """See :func:`fairseq.dataclass.omegaconf.stand_in`."""
    from fairseq.dataclass import omegaconf

    omegaconf.stand_in()


def add_flags(choice: str, parser: Any) -> None:
    """Add the flags that all tasks and all models of fairseq have."""
    from fairseq.config import fields
    from fairseq.config.shared import BlockModelConfig
    from fairseq.data import encoders

    if choice == "task":
        encoders.add_flags(parser)
    elif choice == "arch":
        fields.add_flags(parser, BlockModelConfig, ["max_target_positions"])


def complete(args: Any) -> None:
    """See :func:`fairseq.dataclass.defaults.complete_script`."""
    from fairseq.dataclass import defaults

    defaults.complete_script(args)


def set_up(task: Any, settings: Any, dictionary: Any) -> Any:
    """See :mod:`fairseq.interop.fairseq.protocol`."""
    from fairseq.interop.fairseq import protocol

    return protocol.set_up(task, settings, dictionary)


def build_generator(task: Any, *args: Any) -> Any:
    """See :func:`fairseq.sequence_generator.build_generator`."""
    from fairseq.sequence_generator import build_generator

    return build_generator(task, *args)


def from_pretrained(model: Any, *args: Any, **options: Any) -> Any:
    """See :func:`fairseq.hub_utils.from_pretrained`, and for encoders
    :func:`fairseq.interop.fairseq.roberta_hub.from_pretrained`."""
    from fairseq import hub_utils
    from fairseq.interop.fairseq import roberta_hub
    from fairseq.models.roberta import RobertaModel

    return (roberta_hub if issubclass(model, RobertaModel) else hub_utils).from_pretrained(*args, **options)


def call_main(cfg: Any, main: Any, **options: Any) -> None:
    """See :func:`fairseq.distributed.utils.call_main`."""
    from fairseq.logging.progress import through_logging

    is_command = str(main.__module__).startswith("fairseq_cli.")
    with through_logging() if logging.getLogger().handlers else contextlib.nullcontext():
        main(cfg.flattened() if is_command and hasattr(cfg, "flattened") else cfg, **options)
