"""lm-evaluation-harness as a library: whether it is installed, its failures to load data, its class
for our models."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from fairseq.errors import UserError

PACKAGES = ("datasets", "huggingface_hub", "httpx", "requests", "aiohttp", "urllib3")  # that load data of tasks
EXTRA = "pip install lm-eval"


def require_harness() -> None:
    """Raise UserError unless the harness is installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(f"needs lm-eval, which is not installed; {EXTRA}")


@contextlib.contextmanager
def task_data() -> Iterator[None]:
    """Turn a failure to load or download the data of tasks
    into a UserError: their libraries raise many kinds."""
    try:
        yield
    except Exception as error:
        package = type(error).__module__.partition(".")[0]
        unreachable = isinstance(error, ConnectionError | FileNotFoundError | TimeoutError)
        # A closed pipe is a `ConnectionError`, too, but means that the reader of the output ended.
        if isinstance(error, BrokenPipeError) or not (unreachable or package in PACKAGES):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(
            f"`tasks`: their data cannot be loaded ({reason}); connect to the network once, or give tasks of local "
            "files with `include_path`"
        ) from error


def harness_model() -> Any:
    """Return the model class of the harness, registered there
    as ``fairseq``; UserError if that is not installed."""
    require_harness()
    from fairseq.interop.harness.model import FairseqLM

    return FairseqLM
