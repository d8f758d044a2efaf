"""A stand-in for EleutherAI's lm-eval with one task, ``standin``: requests of each kind, and no
data to download."""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

NAMES = ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry", "lm_eval.tasks", "lm_eval.__main__")
MODEL = "fairseq.interop.harness.model"
TASK = "standin"


def install() -> None:
    """Put it in the place of the package, installed or not."""
    for name in NAMES:
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
    modules: dict[str, Any] = dict(sys.modules)
    modules["lm_eval"].simple_evaluate = evaluate
    modules["lm_eval.api.model"].LM = object
    modules["lm_eval.api.registry"].register_model = lambda name: lambda cls: cls
    modules["lm_eval.tasks"].TaskManager = Tasks
    modules["lm_eval.__main__"].cli_evaluate = cli_evaluate


class Tasks:
    """The tasks."""

    def __init__(self, **settings: Any) -> None:
        pass

    def match_tasks(self, names: list[str]) -> list[str]:
        """Those of *names* that there are."""
        return [name for name in names if name == TASK]


def evaluate(model: Any, tasks: list[str], **settings: Any) -> dict[str, Any]:
    """The metrics of *model*."""

    def requests(*args: Any) -> list[Any]:
        return [types.SimpleNamespace(args=args)]

    [(lprob, _)] = model.loglikelihood(requests("ax by", " cz"))
    model.loglikelihood_rolling(requests("ax by\ncz"))
    model.generate_until(requests("ax", {"until": ["by"], "max_gen_toks": 2}))
    return {"results": {TASK: {"lprob,none": lprob}}}


def cli_evaluate() -> None:
    """``lm_eval`` on the process's command line."""
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--model_args", "--tasks"):
        parser.add_argument(flag, default="")
    args = parser.parse_args()
    pairs = [pair.partition("=") for pair in args.model_args.split(",") if pair]
    model = importlib.import_module(MODEL).FairseqLM(**{name: value for name, _, value in pairs})
    print(evaluate(model, args.tasks.split(",")))
