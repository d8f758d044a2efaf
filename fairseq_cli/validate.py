"""Compute the validation loss of checkpoints, as in training."""

from __future__ import annotations

import argparse
import functools

from fairseq.config.command_settings import ValidateConfig
from fairseq.config.fields import typed
from fairseq.config.parser import Parser
from fairseq.config.settings import CommonConfig, DataConfig, DistributedConfig
from fairseq_cli import command
from fairseq_cli.common import evaluation_parser


def get_validation_parser(default_task: str | None = None) -> Parser:
    examples = [
        "fairseq-validate data-bin --path checkpoints/checkpoint_best.pt",
        "fairseq-validate data-bin --path bert --valid-subset valid,test",
        "fairseq-validate data-bin --check-data",
    ]
    parser = evaluation_parser(
        "Compute the validation loss of a checkpoint.",
        examples,
        [ValidateConfig, DistributedConfig],
        without=("train_subset", "gen_subset"),
    )
    parser.left_open = {"seed", "task"}
    parser.show_defaults(dict.fromkeys((*parser.left_open, "sample_break_mode"), "the checkpoint's"))
    help = "loss function; its settings are the checkpoint's or the defaults (default: the checkpoint's)"
    parser.add_argument("--criterion", metavar="NAME", default=argparse.SUPPRESS, help=help)
    return parser


def main(args: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]] | None:
    """Validate each checkpoint of ``--path`` on every split
    of ``--valid-subset``, and print a line for each.

    With ``--check-data`` every data file is read and checked first; without ``--path`` that is all.

    Returns:
        For each checkpoint and split: loss and nll_loss in bits, ppl, …; None if the work was done
            in other processes.
    """
    from fairseq.data.folders import check_data, data_folders
    from fairseq.distributed import run_on_processes
    from fairseq.evaluation.validation import validate_models
    from fairseq.system.files import results_folder

    cfg, common = typed(ValidateConfig, args), typed(CommonConfig, args)
    if cfg.check_data:
        for folder in data_folders(args.data):
            print(f"{folder}: {', '.join(check_data(folder))} are sound")
        if not cfg.path:
            return {}
    with results_folder(cfg.results_path):
        work = functools.partial(validate_models, args.data, cfg, common, typed(DataConfig, args), vars(args))
        return run_on_processes(work, common, typed(DistributedConfig, args))


cli_main = command(main, get_validation_parser)

if __name__ == "__main__":
    cli_main()
