"""Training from Python, with the settings of ``fairseq-train``."""

from __future__ import annotations

import signal
from pathlib import Path

from fairseq import distributed
from fairseq.config.fields import flag_name
from fairseq.config.options import parse_args_and_arch
from fairseq.config.settings import training_settings
from fairseq.errors import UserError
from fairseq.hub import LanguageModel, MaskedLanguageModel, load_scorer
from fairseq.training import training_job
from fairseq_cli.common import get_training_parser


def train(data: str | Path, **settings: object) -> LanguageModel | MaskedLanguageModel:
    """Train a model as ``fairseq-train`` does, and return the best one of the run.

    The same call goes on with a run that was interrupted, and trains no further if it is complete.
    A script that trains in several processes needs ``if __name__ == "__main__":``.

    Args:
        data: folder made by ``fairseq-preprocess``.
        settings: flags by name: ``arch="transformer_lm_fast_demo"``, ``lr=[0.002]``, ``bf16=True``,
            ``save_dir="own"``. The recipe of the architecture has the others.

    Raises:
        UserError: a setting or the data are invalid, or another process of the run failed.
        KeyboardInterrupt: on Ctrl-C, once the run has saved its checkpoint.
    """
    args = parse_args_and_arch(get_training_parser(), [str(data), *_words(settings)])
    if args.no_save:
        raise UserError("`no_save`: the model is loaded from its checkpoint; leave it out")
    try:
        distributed.run(training_job(training_settings(args)))
    except SystemExit as end:
        if end.code == 128 + signal.SIGINT:
            raise KeyboardInterrupt from None
        raise UserError(f"a process of the run ended with exit code {end.code}; the log says why") from None
    return load_scorer(args.save_dir, device="cpu" if args.cpu else "auto")


def _words(settings: dict[str, object]) -> list[str]:
    """The words of a command line with *settings*; None leaves one out."""
    words = []
    for name, value in settings.items():
        if isinstance(value, list | tuple):
            value = ",".join(map(str, value))
        elif isinstance(value, bool):
            value = str(value).lower()
        words += [] if value is None else [f"{flag_name(name)}={value}"]
    return words
