"""``fairseq-hydra-train``: fairseq-train with a command line and nested YAML files in Hydra's
form."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from fairseq.config.parser import Parser
from fairseq.errors import UserError
from fairseq.interop.fairseq.hydra import training_flags
from fairseq.system.program import as_program
from fairseq_cli import train

DESCRIPTION = "Train a model with settings in groups: group.name=value on the command line, and nested YAML files."
EXAMPLE = "fairseq-hydra-train -cd config -cn base task.data=data-bin hydra.run.dir=run"


def translate() -> None:
    """Turn the process's command line into one of ``fairseq-train``, and show it."""
    parser = Parser(DESCRIPTION, examples=[EXAMPLE])
    parser.add_argument("--config-dir", "-cd", "--config-path", "-cp", metavar="DIR", help="folder of YAML files")
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="the file NAME.yaml in it")
    parser.add_argument("--multirun", "-m", action="store_true", help="rejected: start one run for each value")
    help = "settings, which replace the file's; group=option takes DIR/group/option.yaml"
    parser.add_argument("overrides", nargs="*", metavar="group.name=value", help=help)
    args = parser.parse_intermixed_args()
    if args.multirun:
        raise UserError("--multirun: sweeps are not supported; start one run for each value")
    if (args.config_dir is None) != (args.config_name is None):
        raise UserError("--config-dir and --config-name: give both, or only group.name=value")
    config = args.config_name and Path(args.config_dir, f"{args.config_name.removesuffix('.yaml')}.yaml")
    # In place of the process's arguments: workers and messages are then `fairseq-train`'s.
    sys.argv[1:] = training_flags(config, args.overrides)
    print(f"fairseq-train {shlex.join(sys.argv[1:])}", file=sys.stderr)


def cli_main() -> None:
    # Two programs in a row: an error of the translation is reported in Hydra's terms, one of
    # training in its flags.
    with as_program():
        translate()
    train.cli_main()


if __name__ == "__main__":
    cli_main()
